"""Options and fixtures of all tests: --gpu, --long, --sanitise, the two executors and a fake CUDA driver."""

from __future__ import annotations

import functools
import importlib.util
import signal
from collections import Counter
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
    """Return the reason why no GPU test can run here, or None."""
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed"
    import cupy

    return None if cupy.cuda.is_available() else "CuPy sees no GPU"


#: Why tests were left out, and how many for each reason.
LEFT_OUT = pytest.StashKey[Counter[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEFT_OUT] = Counter()


def reason_to_leave_out(item: pytest.Item) -> str | None:
    """Return why the options exclude a test, or None."""
    option = item.config.getoption
    if item.get_closest_marker("gpu"):
        missing = gpu_missing() if option("--gpu") else "run with --gpu"
        if missing is not None:
            return f"needs a GPU: {missing}"
    if item.get_closest_marker("long") and not option("--long"):
        return "takes long: run with --long"
    if item.get_closest_marker("sanitise") and not option("--sanitise"):
        return "runs kernels under sanitisers: run with --sanitise"
    return None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that the options exclude: there are thousands, and to skip each takes several seconds."""
    reasons = {item: reason for item in items if (reason := reason_to_leave_out(item)) is not None}
    config.stash[LEFT_OUT].update(reasons.values())
    items[:] = [item for item in items if item not in reasons]
    if reasons:
        config.hook.pytest_deselected(items=[*reasons])


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send the counts from a worker of pytest-xdist to the process that prints them."""
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["left out"] = dict(session.config.stash[LEFT_OUT])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take the counts of a worker. All workers collect the same tests."""
    counts = getattr(node, "workeroutput", {}).get("left out", {})
    node.config.stash[LEFT_OUT] = Counter(counts) | node.config.stash[LEFT_OUT]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print why tests were left out."""
    for reason, count in config.stash[LEFT_OUT].most_common():
        terminalreporter.write_line(f"LEFT OUT [{count}] {reason}")


@pytest.fixture(autouse=True)
def _no_tables(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the tiling tables of the user who runs the tests."""
    monkeypatch.delenv("CUNORM_TILING_TABLE", raising=False)
    nowhere = tmp_path_factory.getbasetemp() / "no table"
    monkeypatch.setattr(choose_tile, "user_table", lambda device: nowhere)


@pytest.fixture(autouse=True)
def _no_earlier_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevent the reuse of a tile from a plan of another test."""
    monkeypatch.setattr(choose_tile, "_chosen", {})


class Executor:
    """The array type of an executor, with copies from and to NumPy."""

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def xp(self) -> ModuleType:
        if self.name == "cpu":
            return np
        import cupy

        return cupy

    def put(self, array: Any) -> Any:
        """Copy a NumPy array to the executor, in the same memory order. Return None for None."""
        if array is None:
            return None
        if self.name == "cpu":
            return array.copy(order="K")
        # CuPy copies a NumPy array to the order of its axes, so sort them by their strides first.
        axes = sorted(range(array.ndim), key=lambda axis: -abs(array.strides[axis]))
        return self.xp.array(array.transpose(axes)).transpose(np.argsort(axes))

    def get(self, array: Any) -> Any:
        """Return the array as a NumPy array, or None for None."""
        return None if array is None else array if self.name == "cpu" else self.xp.asnumpy(array)


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def executor(request: pytest.FixtureRequest) -> Executor:
    """Each executor in turn. The GPU executor runs only with --gpu."""
    return Executor(request.param)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """CuPy on a fake driver, which records calls and does nothing."""
    pytest.importorskip("cupy", reason="CuPy is not installed")
    from tests.support.fake_gpu import pretended

    with pretended(monkeypatch) as notes:
        yield notes


@pytest.fixture(autouse=True)
def _plain_environment(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the CUNORM_ variables, except those of the cache folder and the compiler, so that tests ignore them.

    Tests on a GPU keep ``CUNORM_SPECIALISE``, so that all of them can run specialised kernels.
    """
    kept = {"CUNORM_CACHE_DIR", "CUNORM_CXX"}
    if request.node.get_closest_marker("gpu"):
        kept.add("CUNORM_SPECIALISE")
    for name in {*settings.VARIABLES} - kept:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Handle SIGINT here and in child processes. A shell starts its background processes with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
