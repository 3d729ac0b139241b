"""Options and fixtures that every test shares: --gpu, --long, --sanitise, and the two executors as array kinds."""

from __future__ import annotations

import functools
import importlib.util
import signal
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from cunorm.core import settings
from cunorm.tiling import choose_tile


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu", action="store_true", help="run the tests that need a GPU")
    parser.addoption("--long", action="store_true", help="run the long tests too")
    parser.addoption("--sanitise", action="store_true", help="run the kernels under the compiler's sanitisers too")


@functools.cache
def gpu_missing() -> str | None:
    """Why no GPU test can run here, or None."""
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed"
    import cupy

    return None if cupy.cuda.is_available() else "CuPy sees no GPU"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu"):
            if not config.getoption("--gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU: run with --gpu"))
            elif (reason := gpu_missing()) is not None:
                item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {reason}"))
        if item.get_closest_marker("long") and not config.getoption("--long"):
            item.add_marker(pytest.mark.skip(reason="long: run with --long"))
        if item.get_closest_marker("sanitise") and not config.getoption("--sanitise"):
            item.add_marker(pytest.mark.skip(reason="the kernels under sanitisers: run with --sanitise"))


@pytest.fixture(autouse=True)
def _no_tables(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tiling table of whoever runs the tests takes part in them."""
    monkeypatch.delenv("CUNORM_TILING_TABLE", raising=False)
    nowhere = tmp_path_factory.getbasetemp() / "no table"
    monkeypatch.setattr(choose_tile, "user_table", lambda device: nowhere)


@pytest.fixture(autouse=True)
def _no_earlier_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tile is taken over from what another test planned."""
    monkeypatch.setattr(choose_tile, "_chosen", {})


class Executor:
    """Arrays of one kind: to put NumPy data there and to bring results back."""

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def xp(self) -> ModuleType:
        if self.name == "cpu":
            return np
        import cupy

        return cupy

    def put(self, array: Any) -> Any:
        """A copy there, with the same memory order; None stays None."""
        if array is None:
            return None
        return array.copy(order="K") if self.name == "cpu" else self.xp.array(array, order="K")

    def get(self, array: Any) -> Any:
        """The array on the CPU; None stays None."""
        return None if array is None else array if self.name == "cpu" else self.xp.asnumpy(array)


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def executor(request: pytest.FixtureRequest) -> Executor:
    """Each executor in turn; the GPU's only with --gpu."""
    return Executor(request.param)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """CuPy with a driver below it that takes notes and does nothing."""
    pytest.importorskip("cupy", reason="CuPy is not installed")
    from tests.support.fake_gpu import pretended

    with pretended(monkeypatch) as notes:
        yield notes


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's CUNORM_ settings must not steer a test, but for the cache and the compiler."""
    for name in {*settings.VARIABLES} - {"CUNORM_CACHE_DIR", "CUNORM_CXX"}:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C arrives, here and in the processes started from here: a shell has what it runs behind it ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
