"""Launches on tensors: layouts, and the way to a GPU, with stubs in place of one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from cunorm.torch import launches
from tests.torch.cases import random


def test_layouts() -> None:
    x = random((2, 8, 3, 5))
    assert launches.data_format(x) == "NCHW"
    assert launches.data_format(x.to(memory_format=torch.channels_last)) == "NHWC"
    assert launches.data_format(random((2, 3, 4, 5, 6)).to(memory_format=torch.channels_last_3d)) == "NHWC"
    assert launches.data_format(random((2, 5, 8)).transpose(1, 2)) == "NHWC"
    assert launches.data_format(x.transpose(2, 3)) is None
    assert launches.data_format(x[:, ::2]) is None
    assert launches.data_format(random((4, 3)).t()) is None
    assert launches.data_format(x.new_empty(0, 8, 3, 5)) == "NCHW"


def test_a_gradient_gets_the_layout_of_x() -> None:
    x = random((2, 8, 3, 5)).to(memory_format=torch.channels_last)
    same = torch.randn_like(x)
    assert launches.laid_like(same, x) is same
    for dy in (random((2, 8, 3, 5)), torch.ones(()).expand(2, 8, 3, 5), random((2, 8, 5, 3)).transpose(2, 3)):
        laid = launches.laid_like(dy, x)
        assert laid.stride() == x.stride() and torch.equal(laid, dy)
    one = random((2, 1, 3, 5))
    odd = one.as_strided(one.shape, (15, 99, 5, 1))  # another stride of a size of 1
    assert launches.laid_like(odd, one) is odd


class FakePlan:
    """A plan on GPU 1 that records what it is launched with."""

    place = SimpleNamespace(kind="gpu", ordinal=1)
    names = ("x", "residual", "gamma", "y", "workspace", "eps", "gamma_offset")

    def __init__(self, workspace: int) -> None:
        self.workspace_nbytes = workspace
        self.launched: list[Any] = []

    def launch(self, pointers: Any, *, stream: Any = None) -> None:
        self.launched.append((pointers, stream))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The devices whose current stream was asked for. Synchronisations fail."""
    devices: list[Any] = []

    def current_stream(device: Any = None) -> Any:
        devices.append(device)
        return SimpleNamespace(cuda_stream=0xABC + len(devices))

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    for name in ("synchronize", "set_stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: pytest.fail("touches streams"))
    return devices


def test_a_gpu_launches_on_torchs_current_stream(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks for the stream at every launch: it differs between threads, and in a capture."""
    plan, made = FakePlan(64), []
    plain = torch.empty

    def empty(size: int, *, dtype: Any, device: Any) -> Any:
        made.append(device)
        return plain(size, dtype=dtype)

    monkeypatch.setattr(torch, "empty", empty)
    launch = launches.Launch(plan, ("x", "gamma", "y"), ("eps",))  # type: ignore[arg-type]
    x, y = random((2, 4)), random((2, 4))
    launch((x, None, y), (0.5,))
    launch((x, None, y), (0.25,))
    (first, stream), (second, other) = plan.launched
    workspace = first[4]
    assert first == (x.data_ptr(), 0, 0, y.data_ptr(), workspace, 0.5, 0) and workspace
    assert second[5] == 0.25
    assert (stream, other) == (0xABD, 0xABE) and asked == [1, 1]
    assert made == [torch.device("cuda", 1)] * 2


def test_no_workspace_is_no_allocation(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    plan = FakePlan(0)
    launch = launches.Launch(plan, ("x", "y"))  # type: ignore[arg-type]
    x = random((2, 4))
    monkeypatch.setattr(torch, "empty", lambda *_, **__: pytest.fail("allocates"))
    launch((x, x))
    assert plan.launched[0][0][4] == 0


def test_a_plan_for_a_gpu_is_asked_with_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}

    def plan(op: str, **options: Any) -> Any:
        seen.update(options, op=op)
        return FakePlan(0)

    monkeypatch.setattr(launches, "plan", plan)
    options = (("data_format", "NHWC"), ("gamma_dtype", torch.bfloat16), ("num_groups", 2))
    launches.launch_of("group_norm", (2, 8, 3, 5), torch.float16, torch.device("cuda", 3), ("x",), (), options)
    assert seen == {
        "op": "group_norm",
        "shape": (2, 3, 5, 8),
        "dtype": "float16",
        "device": 3,
        "data_format": "NHWC",
        "gamma_dtype": "bfloat16",
        "num_groups": 2,
    }
    launches.launch_of.cache_clear()
