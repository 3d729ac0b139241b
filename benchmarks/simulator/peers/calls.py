"""Calls of PyTorch and Liger on the simulator: what they launch, whether their results are right, how long they take.

The calls are those that a user's training step makes, without autograd around them: gradients of all inputs and
parameters.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.simulator import clock, machine
from benchmarks.simulator.clock import Gpu, Timing
from benchmarks.simulator.machine import Launch
from benchmarks.simulator.peers import runtime, triton_driver
from benchmarks.simulator.peers.runtime import Fill, Step

EPS = 1e-5
#: The largest error of a result, in units of the largest magnitude of that result. A wrong index or a wrong instruction
#: gives errors near 1. Statistics that Liger stores in bfloat16, and gradients of parameters that it adds up in
#: bfloat16, are the least accurate.
TOLERANCES = {"float32": 1e-4, "bfloat16": 0.05}


@dataclass(frozen=True)
class Call:
    """A call of a library.

    Attributes
    ----------
    library : str
        ``"ATen"`` or ``"Liger"``.
    op : str
        A name of `MAKERS`.
    shape : tuple of int
        Rows and columns, or N, C, H and W.
    dtype : str
        ``"float32"`` or ``"bfloat16"``.
    groups : int
        Of GroupNorm.
    channels_last : bool
    """

    library: str
    op: str
    shape: tuple[int, ...]
    dtype: str
    groups: int = 0
    channels_last: bool = False


@dataclass(frozen=True)
class Recorded:
    """What a call did.

    Attributes
    ----------
    call : Call
    steps : list of Launch or Fill
    errors : dict of str to float
        The largest error of each result, in units of its largest magnitude.
    kept : object
        The tensors whose memory the launches access.
    """

    call: Call
    steps: list[Step]
    errors: dict[str, float]
    kept: object = field(repr=False)


@dataclass(frozen=True)
class Made:
    """The tensors of a call: what to run, its results by name, and float64 results to compare with."""

    run: Callable[[], Sequence[Any]]
    names: tuple[str, ...]
    expected: Callable[[], Sequence[Any]]


class Session:
    """PyTorch with the simulator as its GPU. A process has at most one."""

    def __init__(self, gpu: Gpu) -> None:
        self._recording: list[Step] | None = None
        self.runtime = runtime.load(gpu, self._seen)
        triton_driver.activate(self.runtime)

    def _seen(self, step: Step) -> None:
        if isinstance(step, Launch):
            machine.run(step)
        if self._recording is not None:
            self._recording.append(step)

    def record(self, call: Call) -> Recorded:
        """Make a call, and check its results.

        Raises
        ------
        ValueError
            If a result is wrong.
        """
        made = MAKERS[call.op](call)
        self._recording = []
        try:
            with self.runtime.seen_by(self._seen):
                results = made.run()
            steps = self._recording
        finally:
            self._recording = None
        errors = {}
        for name, result, expected in zip(made.names, results, made.expected(), strict=True):
            exact = expected.detach().double()
            apart = (result.detach().cpu().double().reshape(exact.shape) - exact).abs().max()
            errors[name] = (apart / exact.abs().max()).item()
        bad = {name: error for name, error in errors.items() if not error <= TOLERANCES[call.dtype]}
        if bad:
            raise ValueError(f"{call}: results differ from float64 by {bad}, expected at most {TOLERANCES[call.dtype]}")
        return Recorded(call, steps, errors, (made, results))


def timed(recorded: Recorded, gpu: Gpu) -> list[Timing | float]:
    """The time of each step: a launch's, or the seconds of a fill. Before the call, the L2 cache was flushed."""
    found: list[Timing | float] = []
    cache = clock.flushed(gpu)
    for step in recorded.steps:
        if isinstance(step, Fill):
            ctypes.memset(step.address, step.value, step.nbytes)
            found.append(gpu.cycles["launch_latency"] / gpu.clock + step.nbytes / gpu.copy)
        else:
            found.append(clock.timed(step, gpu, cache))
    return found


def seconds(times: Sequence[Timing | float]) -> float:
    """The sum of the times of steps."""
    return math.fsum(one if isinstance(one, float) else one.seconds for one in times)


# ---- what the calls are ---------------------------------------------------------------------------------------------


def _tensor(call: Call, *shape: int, dtype: str = "", offset: float = 0.0) -> Any:
    """Normally distributed values. They are made on the CPU: nothing but the call itself runs on the simulator."""
    import torch

    made = (torch.randn(*shape, dtype=torch.float32) + offset).to(getattr(torch, dtype or call.dtype))
    if call.channels_last and len(shape) == 4:
        made = made.to(memory_format=torch.channels_last)
    return made.to("cuda")


def _exact(*tensors: Any) -> list[Any]:
    return [one.detach().cpu().double().requires_grad_() for one in tensors]


def _gradients(forward: Callable[..., Any], inputs: Sequence[Any], dy: Any) -> list[Any]:
    """The gradients of inputs in float64, by PyTorch on the CPU."""
    import torch

    given = _exact(*inputs)
    return list(torch.autograd.grad(forward(*given), given, dy.detach().cpu().double()))


def _layer_norm(call: Call) -> Made:
    import torch

    rows, columns = call.shape
    x, gamma, beta = _tensor(call, rows, columns), _tensor(call, columns), _tensor(call, columns)

    def run() -> Sequence[Any]:
        if call.library == "ATen":
            return torch.ops.aten.native_layer_norm(x, [columns], gamma, beta, EPS)[:1]
        from liger_kernel.ops.layer_norm import layer_norm_forward

        return layer_norm_forward(x, gamma, beta, EPS)[:1]

    def expected() -> Sequence[Any]:
        return [torch.nn.functional.layer_norm(*_exact(x), (columns,), *_exact(gamma, beta), EPS)]

    return Made(run, ("y",), expected)


def _layer_norm_backward(call: Call) -> Made:
    import torch

    rows, columns = call.shape
    x, gamma, beta, dy = (_tensor(call, *shape) for shape in ((rows, columns), (columns,), (columns,), (rows, columns)))
    exact = x.cpu().double()
    mean = exact.mean(1, keepdim=True).float().cuda()
    rstd = (exact.var(1, unbiased=False, keepdim=True) + EPS).rsqrt().float().cuda()

    def run() -> Sequence[Any]:
        if call.library == "ATen":
            arguments = (dy, x, [columns], mean, rstd, gamma, beta, [True, True, True])
            return list(torch.ops.aten.native_layer_norm_backward(*arguments))
        from liger_kernel.ops.layer_norm import layer_norm_backward

        return list(layer_norm_backward(dy, x, gamma, beta, mean.view(-1), rstd.view(-1)))

    def expected() -> Sequence[Any]:
        def forward(x: Any, gamma: Any, beta: Any) -> Any:
            return torch.nn.functional.layer_norm(x, (columns,), gamma, beta, EPS)

        return _gradients(forward, (x, gamma, beta), dy)

    return Made(run, ("dx", "dgamma", "dbeta"), expected)


def _rms_norm(call: Call) -> Made:
    import torch

    rows, columns = call.shape
    x, gamma = _tensor(call, rows, columns), _tensor(call, columns)

    def run() -> Sequence[Any]:
        if call.library == "ATen":
            return torch.ops.aten._fused_rms_norm(x, [columns], gamma, EPS)[:1]
        from liger_kernel.ops.rms_norm import rms_norm_forward

        return rms_norm_forward(x, gamma, EPS, 0.0, "llama", None)[:1]

    def expected() -> Sequence[Any]:
        return [torch.nn.functional.rms_norm(*_exact(x), (columns,), *_exact(gamma), EPS)]

    return Made(run, ("y",), expected)


def _rms_norm_backward(call: Call) -> Made:
    import torch

    rows, columns = call.shape
    x, gamma, dy = (_tensor(call, *shape) for shape in ((rows, columns), (columns,), (rows, columns)))
    rstd = (x.cpu().double().square().mean(1, keepdim=True) + EPS).rsqrt().float().cuda()

    def run() -> Sequence[Any]:
        if call.library == "ATen":
            return list(torch.ops.aten._fused_rms_norm_backward(dy, x, [columns], rstd, gamma, [True, True]))
        from liger_kernel.ops.rms_norm import rms_norm_backward
        from liger_kernel.ops.utils import calculate_settings

        arguments = (dy, x, gamma, rstd.view(-1), 0.0, 0, *calculate_settings(columns), False, None)
        return list(rms_norm_backward(*arguments))

    def expected() -> Sequence[Any]:
        def forward(x: Any, gamma: Any) -> Any:
            return torch.nn.functional.rms_norm(x, (columns,), gamma, EPS)

        return _gradients(forward, (x, gamma), dy)

    return Made(run, ("dx", "dgamma"), expected)


def _group_norm(call: Call) -> Made:
    import torch

    N, C, H, W = call.shape
    x, gamma, beta = _tensor(call, N, C, H, W), _tensor(call, C), _tensor(call, C)

    def run() -> Sequence[Any]:
        if call.library == "ATen":
            return torch.ops.aten.native_group_norm(x, gamma, beta, N, C, H * W, call.groups, EPS)[:1]
        from liger_kernel.ops.group_norm import group_norm_forward

        return group_norm_forward(x, C, call.groups, gamma, beta, EPS)[:1]

    def expected() -> Sequence[Any]:
        return [torch.nn.functional.group_norm(*_exact(x), call.groups, *_exact(gamma, beta), EPS)]

    return Made(run, ("y",), expected)


def _group_norm_backward(call: Call) -> Made:
    import torch

    N, C, H, W = call.shape
    x, gamma, beta, dy = (_tensor(call, *shape) for shape in ((N, C, H, W), (C,), (C,), (N, C, H, W)))
    exact = x.cpu().double().reshape(N, call.groups, -1)
    mean = exact.mean(2).to(x.dtype).cuda()
    rstd = (exact.var(2, unbiased=False) + EPS).rsqrt().to(x.dtype).cuda()

    def run() -> Sequence[Any]:
        if call.library == "ATen":
            arguments = (dy, x, mean, rstd, gamma, N, C, H * W, call.groups, [True, True, True])
            return list(torch.ops.aten.native_group_norm_backward(*arguments))
        from liger_kernel.ops.group_norm import group_norm_backward

        return list(group_norm_backward(dy, x, gamma, beta, mean, rstd, C, call.groups))

    def expected() -> Sequence[Any]:
        def forward(x: Any, gamma: Any, beta: Any) -> Any:
            return torch.nn.functional.group_norm(x, call.groups, gamma, beta, EPS)

        return _gradients(forward, (x, gamma, beta), dy)

    return Made(run, ("dx", "dgamma", "dbeta"), expected)


def _moments(x: Any) -> tuple[Any, Any]:
    exact = x.cpu().double()
    return exact.mean((0, 2, 3)), (exact.var((0, 2, 3), unbiased=False) + EPS).rsqrt()


def _batch_norm_stats(call: Call) -> Made:
    import torch

    x = _tensor(call, *call.shape)
    return Made(lambda: torch.batch_norm_stats(x, EPS), ("mean", "invstd"), lambda: _moments(x))


def _sums(call: Call) -> tuple[Any, Any, Any, Any, Any, Callable[[], tuple[Any, Any]]]:
    """The tensors of the backward of BatchNorm, and the exact sums per channel."""
    C = call.shape[1]
    x, dy = _tensor(call, *call.shape), _tensor(call, *call.shape)
    gamma = _tensor(call, C, dtype="float32")
    mean, invstd = (one.float().cuda() for one in _moments(x))

    def exact() -> tuple[Any, Any]:
        centred = x.cpu().double() - mean.cpu().double().view(1, -1, 1, 1)
        return dy.cpu().double().sum((0, 2, 3)), (dy.cpu().double() * centred).sum((0, 2, 3))

    return x, dy, gamma, mean, invstd, exact


def _batch_norm_backward_reduce(call: Call) -> Made:
    import torch

    x, dy, gamma, mean, invstd, exact = _sums(call)

    def run() -> Sequence[Any]:
        return list(torch.batch_norm_backward_reduce(dy, x, mean, invstd, gamma, True, True, True))

    def expected() -> Sequence[Any]:
        sum_dy, sum_dy_xmu = exact()
        return [sum_dy, sum_dy_xmu, sum_dy_xmu * invstd.cpu().double(), sum_dy]

    return Made(run, ("sum_dy", "sum_dy_xmu", "dgamma", "dbeta"), expected)


def _batch_norm_backward_elemt(call: Call) -> Made:
    import torch

    N, _, H, W = call.shape
    x, dy, gamma, mean, invstd, exact = _sums(call)
    sum_dy, sum_dy_xmu = (one.float().cuda() for one in exact())
    count = torch.tensor([N * H * W], dtype=torch.int32).cuda()

    def run() -> Sequence[Any]:
        return [torch.batch_norm_backward_elemt(dy, x, mean, invstd, gamma, sum_dy, sum_dy_xmu, count)]

    def expected() -> Sequence[Any]:
        def wide(one: Any) -> Any:
            return one.cpu().double().view(1, -1, 1, 1)

        total = N * H * W
        centred = (x.cpu().double() - wide(mean)) * wide(invstd) ** 2 * wide(sum_dy_xmu) / total
        return [(dy.cpu().double() - wide(sum_dy) / total - centred) * wide(invstd) * wide(gamma)]

    return Made(run, ("dx",), expected)


def _sum(call: Call) -> Made:
    x = _tensor(call, *call.shape, offset=1.0)
    return Made(lambda: [x.sum()], ("sum",), lambda: [x.cpu().double().sum()])


MAKERS: dict[str, Callable[[Call], Made]] = {
    "layer_norm": _layer_norm,
    "layer_norm_backward": _layer_norm_backward,
    "rms_norm": _rms_norm,
    "rms_norm_backward": _rms_norm_backward,
    "group_norm": _group_norm,
    "group_norm_backward": _group_norm_backward,
    "batch_norm_stats": _batch_norm_stats,
    "batch_norm_backward_reduce": _batch_norm_backward_reduce,
    "batch_norm_backward_elemt": _batch_norm_backward_elemt,
    "sum": _sum,
}
