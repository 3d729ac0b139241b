"""The bench's peers and its GPU clock.

A peer computes the same outputs in the same precision as cunorm, or names the feature that it lacks. Stand-ins on top
of torch replace Liger, QuACK, FlashInfer and Apex. A fake torch replaces torch in the tests of the clock.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from cunorm.tuning.bench.arrays import Sets
from cunorm.tuning.bench.bench import WRONG
from cunorm.tuning.bench.clock import CYCLES, MOST_HELD, GpuClock
from cunorm.tuning.bench.peers import PEERS, NotOffered, Peer, torch_note
from cunorm.tuning.verify.inputs import EPS, Inputs, inputs_of
from cunorm.tuning.verify.oracle import expected

from cunorm.core.arrays import DTYPES
from cunorm.core.devices import KNOWN
from cunorm.core.problem import Problem
from cunorm.ops.registry import problem_of

FORWARD, GRADIENTS = ("y", "mean", "rstd"), ("dx", "dgamma", "dbeta")
LAYER = Problem(
    op="layer_norm",
    dtype="float32",
    gamma_dtype="float32",
    beta_dtype="float32",
    stats_dtype="float32",
    layout="NCHW",
    N=6,
    C=40,
    HxW=1,
    group=1,
    outputs=FORWARD,
)
LAYER_BACKWARD = replace(LAYER, op="layer_norm_backward", beta_dtype=None, outputs=GRADIENTS)
GROUP = replace(LAYER, op="group_norm", N=2, C=12, HxW=15, group=3)
GROUP_BACKWARD = replace(GROUP, op="group_norm_backward", beta_dtype=None, outputs=GRADIENTS)
RMS = replace(LAYER, op="rms_norm", beta_dtype=None, outputs=("y", "rstd"))
RMS_BACKWARD = replace(RMS, op="rms_norm_backward", outputs=("dx", "dgamma"))
INSTANCE = replace(GROUP, op="instance_norm", group=12)
INSTANCE_BACKWARD = replace(GROUP_BACKWARD, op="instance_norm_backward", group=12)
STATS = replace(LAYER, op="batch_norm_stats", gamma_dtype=None, beta_dtype=None, outputs=("mean", "invstd"), group=40)


def added(problem: Problem) -> Problem:
    """The problem with a residual or, if it is a gradient, with dh."""
    if problem.is_backward:
        return replace(problem, extras=("dh",))
    return replace(problem, extras=("residual",), outputs=(*problem.outputs, "h"))


#: RMSNorm and its gradient, without and with an addition, and without gamma.
RMS_PROBLEMS = (RMS, RMS_BACKWARD, added(RMS), added(RMS_BACKWARD), replace(RMS, gamma_dtype=None),
                replace(RMS_BACKWARD, gamma_dtype=None, outputs=("dx",)))  # fmt: skip


def problem_id(problem: Problem) -> str:
    """What distinguishes the problems of a peer, for the names of tests."""
    absent = [] if problem.gamma_dtype else ["without gamma"]
    return "-".join([problem.op, problem.layout, str(problem.activation), *problem.extras, *absent])


def half(problem: Problem) -> Problem:
    """The problem in bfloat16."""
    return replace(problem, dtype="bfloat16", gamma_dtype="bfloat16")


@pytest.mark.parametrize(("name", "problem", "sentence"), [
    ("liger", STATS, "no batch_norm_stats"),
    ("liger", replace(GROUP, layout="NHWC"), "copies channels-last data to another layout first"),
    ("liger", replace(GROUP, activation="silu"), "no fused silu"),
    ("quack", GROUP, "no group_norm"),
    ("liger", INSTANCE, "no instance_norm"),
    ("apex", INSTANCE_BACKWARD, "no instance_norm_backward"),
    ("quack", replace(LAYER, dtype="bfloat16", gamma_dtype="bfloat16"), "offers gamma and beta in float32 only"),
    ("liger", replace(LAYER_BACKWARD, gamma_dtype=None, outputs=("dx",)), "requires gamma"),
    ("apex", STATS, "no batch_norm_stats"),
    ("apex", GROUP, "offers GroupNorm only for channels-last data and with gamma"),
    ("liger", added(LAYER), "no fused residual"),
    ("liger", replace(added(RMS), gamma_dtype=None), "requires gamma"),
    ("quack", added(LAYER_BACKWARD), "no fused dh"),
    ("quack", GROUP_BACKWARD, "no group_norm_backward"),
    ("apex", added(LAYER_BACKWARD), "no fused dh"),
    ("apex", added(RMS), "no fused residual"),
    ("apex", replace(RMS, gamma_dtype=None), "requires gamma for this kernel"),
    ("flashinfer", GROUP, "no group_norm"),
    ("flashinfer", RMS_BACKWARD, "no rms_norm_backward"),
    ("flashinfer", RMS, "offers x and gamma in the same 16-bit dtype only"),
    ("flashinfer", replace(half(RMS), gamma_dtype="float32"), "offers x and gamma in the same 16-bit dtype only"),
    ("flashinfer", LAYER, "offers LayerNorm only for x in bfloat16 with gamma and beta in float32"),
    ("flashinfer", added(LAYER), "no fused residual"),
])  # fmt: skip
def test_a_peer_names_the_feature_that_it_lacks(name: str, problem: Problem, sentence: str) -> None:
    with pytest.raises(NotOffered, match=sentence):
        PEERS[name].prepare(problem, {})


def module(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    made = ModuleType(name)
    for key, value in members.items():
        setattr(made, key, value)
    monkeypatch.setitem(sys.modules, name, made)


def rms_stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the RMSNorms of Liger, QuACK, FlashInfer and Apex."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    rms = torch.nn.functional.rms_norm

    class Rms:
        @staticmethod
        def apply(x: Any, weight: Any, eps: float, offset: float, casting_mode: str, in_place: bool) -> Any:
            assert (offset, casting_mode, in_place) == (0.0, "gemma", False)
            return rms(x, x.shape[-1:], weight, eps)

    class FusedAddRms:
        @staticmethod
        def apply(x: Any, r: Any, weight: Any, eps: float, offset: float, casting_mode: str, in_place: bool) -> Any:
            h = x + r
            return Rms.apply(h, weight, eps, offset, casting_mode, in_place), h

    module(monkeypatch, "liger_kernel.ops.rms_norm", LigerRMSNormFunction=Rms)
    module(monkeypatch, "liger_kernel.ops.fused_add_rms_norm", LigerFusedAddRMSNormFunction=FusedAddRms)

    def rmsnorm_fwd(x: Any, weight: Any, residual: Any, eps: float, store_rstd: bool) -> Any:
        assert store_rstd
        h = x if residual is None else x + residual
        rstd = (h.float().square().mean(1) + eps).rsqrt()
        return rms(h, h.shape[-1:], weight, eps), h, rstd

    def rmsnorm_bwd(x: Any, weight: Any, dout: Any, rstd: Any, dresidual_out: Any = None) -> Any:
        assert rstd.ndim == 1
        xhat = x.float() * rstd[:, None]
        scaled = dout.float() * (1.0 if weight is None else weight.float())
        dx = (scaled - xhat * (scaled * xhat).mean(1, keepdim=True)) * rstd[:, None]
        dx = dx if dresidual_out is None else dx + dresidual_out.float()
        return dx.to(x.dtype), None if weight is None else (dout.float() * xhat).sum(0).to(weight.dtype), None, None

    quack = sys.modules["quack.rmsnorm"]
    monkeypatch.setattr(quack, "rmsnorm_fwd", rmsnorm_fwd, raising=False)
    monkeypatch.setattr(quack, "rmsnorm_bwd", rmsnorm_bwd, raising=False)

    def fused_add_rmsnorm(x: Any, residual: Any, weight: Any, eps: float) -> None:
        residual += x
        x.copy_(rms(residual, residual.shape[-1:], weight, eps))

    module(
        monkeypatch,
        "flashinfer.norm",
        rmsnorm=lambda x, weight, eps: rms(x, x.shape[-1:], weight, eps),
        fused_add_rmsnorm=fused_add_rmsnorm,
        layernorm=lambda x, gamma, beta, eps: torch.nn.functional.layer_norm(
            x.float(), gamma.shape, gamma, beta, eps
        ).to(x.dtype),
    )
    apex = sys.modules["apex.normalization.fused_layer_norm"]
    affine = lambda x, weight, shape, eps: rms(x, shape, weight, eps)  # noqa: E731
    monkeypatch.setattr(apex, "fused_rms_norm_affine", affine, raising=False)


def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace Liger, QuACK, FlashInfer and Apex by functions that take the same arguments and compute with torch."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    F = torch.nn.functional

    class Layer:
        @staticmethod
        def apply(x: Any, weight: Any, bias: Any, eps: float) -> Any:
            return F.layer_norm(x, weight.shape, weight, bias, eps)

    class Group:
        @staticmethod
        def apply(x: Any, weight: Any, bias: Any, num_channels: int, num_groups: int, eps: float) -> Any:
            assert x.ndim == 3 and x.shape[1] == num_channels
            return F.group_norm(x, num_groups, weight, bias, eps)

    class GroupNorm(torch.nn.GroupNorm):  # type: ignore[misc,name-defined]
        def __init__(self, groups: int, channels: int, eps: float, device: Any, dtype: Any, act: str) -> None:
            super().__init__(groups, channels, eps=eps, device=device, dtype=dtype)
            self.act = act

        def _check_legality(self, x: Any) -> bool:
            return bool(x.is_contiguous(memory_format=torch.channels_last)) and self.num_groups == 3

        def forward(self, x: Any) -> Any:
            y = super().forward(x)
            return F.silu(y) if self.act else y

    def affine(x: Any, weight: Any, bias: Any, shape: tuple[int, ...], eps: float) -> Any:
        return F.layer_norm(x, shape, weight, bias, eps)

    module(monkeypatch, "liger_kernel.ops.layer_norm", LigerLayerNormFunction=Layer)
    module(monkeypatch, "liger_kernel.ops.group_norm", LigerGroupNormFunction=Group)

    def layernorm_bwd(x: Any, weight: Any, dout: Any, rstd: Any, mean: Any, has_bias: bool = True) -> Any:
        assert rstd.ndim == mean.ndim == 1
        mask = [True, True, has_bias]
        zero = torch.zeros_like(weight)
        return torch.ops.aten.native_layer_norm_backward(
            dout, x, weight.shape, mean[:, None], rstd[:, None], weight, zero, mask
        )

    module(
        monkeypatch,
        "quack.rmsnorm",
        layernorm_fwd=lambda x, w, b, eps: F.layer_norm(x, w.shape, w, b, eps),
        layernorm_bwd=layernorm_bwd,
    )
    module(monkeypatch, "apex.normalization.fused_layer_norm", fused_layer_norm_affine=affine)
    module(monkeypatch, "apex.contrib.group_norm", GroupNorm=GroupNorm)
    rms_stand_ins(monkeypatch)


def assert_right(peer: Peer, problem: Problem, given: Inputs, came: Mapping[str, Any]) -> None:
    """Assert that all compared results were returned, with at most a quarter of the error that the bench accepts."""
    wanted = {one.name: one for one in expected(problem, given)}
    assert set(problem.outputs) - {"mean", "rstd"} <= set(came) <= set(problem.outputs)
    for result, tensor in came.items():
        dtype = problem.dtype_of(result)
        values = np.asarray(peer.flat(problem, result, tensor)).view(DTYPES[dtype])
        assert wanted[result].off(values) <= WRONG[dtype] / 4


@pytest.mark.parametrize(("name", "problem"), [
    (name, problem)
    for name, problems in {
        "torch": (LAYER, LAYER_BACKWARD, GROUP, GROUP_BACKWARD, replace(GROUP, activation="silu"),
                  replace(GROUP_BACKWARD, beta_dtype="float32", activation="silu"), replace(GROUP, layout="NHWC"),
                  replace(GROUP_BACKWARD, layout="NHWC"), replace(GROUP_BACKWARD, outputs=("dx", "dbeta")),
                  replace(LAYER_BACKWARD, gamma_dtype=None, outputs=("dx",)), added(LAYER), added(LAYER_BACKWARD),
                  *RMS_PROBLEMS, added(replace(RMS_BACKWARD, outputs=("dx",))), INSTANCE, INSTANCE_BACKWARD,
                  replace(INSTANCE, layout="NHWC"), replace(INSTANCE_BACKWARD, layout="NHWC"),
                  replace(INSTANCE_BACKWARD, outputs=("dx", "dgamma"))),
        "liger": (LAYER, LAYER_BACKWARD, GROUP, GROUP_BACKWARD, *RMS_PROBLEMS),
        "quack": (LAYER, replace(LAYER, beta_dtype=None), LAYER_BACKWARD, *RMS_PROBLEMS),
        "flashinfer": (half(RMS), half(added(RMS)), replace(LAYER, dtype="bfloat16")),
        "apex": (RMS, RMS_BACKWARD,
                 LAYER, LAYER_BACKWARD, replace(GROUP, layout="NHWC"), replace(GROUP_BACKWARD, layout="NHWC"),
                 replace(GROUP, layout="NHWC", activation="silu")),
    }.items()
    for problem in problems
], ids=lambda value: value if isinstance(value, str) else problem_id(value))  # fmt: skip
def test_a_peer_computes_right_results_from_the_same_arrays(
    name: str, problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_ins(monkeypatch)
    given = inputs_of(problem, 0, hostile=False)
    peer, flat = PEERS[name], Sets(problem, given, "cpu", 1).bytes_of(0)
    assert_right(peer, problem, given, peer.prepare(problem, peer.arrays(problem, flat))())


@pytest.mark.parametrize("problem", [RMS, RMS_BACKWARD], ids=problem_id)
def test_the_epsilon_is_that_of_the_problem(problem: Problem) -> None:
    """A forward has the default of RMSNorm, and the rstd of a gradient that of `EPS`. Small elements show which."""
    pytest.importorskip("torch", reason="torch is not installed")
    given = inputs_of(problem, 0, hostile=False)
    given["x"] *= np.float32(1e-3)
    if problem.is_backward:
        mean_square = np.square(given["x"].reshape(problem.N, -1).astype(np.float64)).mean(1)
        given["rstd"] = (1 / np.sqrt(mean_square + EPS)).astype(np.float32).reshape(given["rstd"].shape)
    peer, flat = PEERS["torch"], Sets(problem, given, "cpu", 1).bytes_of(0)
    assert_right(peer, problem, given, peer.prepare(problem, peer.arrays(problem, flat))())


def test_the_inputs_that_a_peer_overwrites_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer writes y over x, and h over the residual. The other contenders read the same arrays."""
    stand_ins(monkeypatch)
    problem = half(added(RMS))
    given = inputs_of(problem, 0, hostile=False)
    peer, sets = PEERS["flashinfer"], Sets(problem, given, "cpu", 1)
    before = {name: array.copy() for name, array in sets.bytes_of(0).items()}
    call = peer.prepare(problem, peer.arrays(problem, sets.bytes_of(0)))
    call()
    call()
    for name in given:
        assert np.array_equal(sets.bytes_of(0)[name], before[name]), name


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_torchs_instance_norm_gets_a_volume_in_the_layout_of_the_problem(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    F, problem, seen = torch.nn.functional, replace(INSTANCE, layout=layout), []
    real = F.instance_norm
    monkeypatch.setattr(F, "instance_norm", lambda x, *given, **named: seen.append(x) or real(x, *given, **named))
    peer, given = PEERS["torch"], inputs_of(problem, 0, hostile=False)
    flat = Sets(problem, given, "cpu", 1).bytes_of(0)
    assert_right(peer, problem, given, peer.prepare(problem, peer.arrays(problem, flat))())
    (x,) = seen
    assert x.shape == (2, 12, 15, 1, 1)
    assert x.is_contiguous(memory_format=torch.channels_last_3d if layout == "NHWC" else torch.contiguous_format)
    assert x.stride()[:3] == ((180, 1, 12) if layout == "NHWC" else (180, 15, 1))
    assert x.data_ptr() == flat["x"].__array_interface__["data"][0]  # no copy


def test_apex_without_kernels_for_a_problem_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Apex's module silently calls torch for problems for which it has no kernels."""
    stand_ins(monkeypatch)
    problem = replace(GROUP, layout="NHWC", group=4)
    given = inputs_of(problem, 0, hostile=False)
    peer, flat = PEERS["apex"], Sets(problem, given, "cpu", 1).bytes_of(0)
    with pytest.raises(NotOffered, match="no kernels for 12 channels in 4 groups"):
        peer.prepare(problem, peer.arrays(problem, flat))


# ---- the clock ------------------------------------------------------------------------------------------------------


class OutOfMemory(RuntimeError):
    """A RuntimeError, as torch's class is."""


class Torch(ModuleType):
    """A fake torch with a simulated GPU time: a run takes two microseconds, in a graph or not."""

    def __init__(self, captures: bool) -> None:  # noqa: C901  # contains all of torch's classes
        super().__init__("torch")
        self.now, self.on, self.capturing, self.runs, self.emptied = 0.0, None, False, 0, 0
        self.slept: list[int] = []
        world = self

        class Stream:
            pass

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                assert isinstance(world.on, Stream)  # not the default stream
                self.at = world.now

            def synchronize(self) -> None:
                pass

            def elapsed_time(self, other: Any) -> float:
                return float(other.at - self.at) * 1e3

        class Graph:
            launches = 0

            def replay(self) -> None:
                world.now += self.launches * 2e-6

        @contextlib.contextmanager
        def stream(one: Any) -> Any:
            before, world.on = world.on, one
            yield
            world.on = before

        class Capture:
            """A capture that leaves its stream current if it fails, as torch's does."""

            def __init__(self, one: Any, stream: Any) -> None:
                assert isinstance(stream, Stream)
                self.one, self.stream = one, stream

            def __enter__(self) -> None:
                self.before, world.on = world.on, self.stream
                world.capturing, self.begun = True, world.runs

            def __exit__(self, *_: object) -> None:
                world.capturing = False
                if not captures:
                    raise RuntimeError("operation not permitted when stream is capturing\nsee the manual")
                world.on, self.one.launches = self.before, world.runs - self.begun

        def set_stream(one: Any) -> None:
            world.on = one

        def sleep(cycles: int) -> None:
            world.slept.append(cycles)

        def empty() -> None:
            world.emptied += 1

        functions: dict[str, Any] = {
            "stream": stream, "current_stream": lambda: world.on, "set_stream": set_stream, "_sleep": sleep,
            "synchronize": lambda: None, "is_initialized": lambda: True, "empty_cache": empty,
        }  # fmt: skip
        classes = {
            "Stream": Stream,
            "Event": Event,
            "CUDAGraph": Graph,
            "graph": Capture,
            "OutOfMemoryError": OutOfMemory,
        }
        self.cuda = type("cuda", (), classes | {name: staticmethod(one) for name, one in functions.items()})

    def run(self, index: int) -> None:
        self.runs += 1
        if not self.capturing:
            self.now += 2e-6


def clock_over(torch: Torch, monkeypatch: pytest.MonkeyPatch) -> GpuClock:
    monkeypatch.setitem(sys.modules, "torch", torch)
    clock = GpuClock.__new__(GpuClock)  # without CuPy and its GPU
    clock._stream, clock._failed = None, []
    return clock


@pytest.mark.parametrize(("captures", "how"), [
    (True, "graph"),
    (False, "events, because a graph cannot capture it: operation not permitted when stream is capturing"),
], ids=("graph", "events"))  # fmt: skip
def test_launches_by_torch_are_timed_with_a_graph_or_events(
    captures: bool, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = Torch(captures)
    clock = clock_over(torch, monkeypatch)
    sets: list[int] = []

    def run(index: int) -> None:
        sets.append(index)
        torch.run(index)

    named, sample = clock.kernels(run, 3, by_torch=True)
    assert named == how
    assert sample() == pytest.approx(2e-6)
    assert {sets.count(index) for index in range(3)} == {len(sets) // 3}  # each set is used equally often
    assert bool(torch.slept) == (not captures)
    assert torch.on is None  # the previously current stream is restored
    assert len(clock._failed) == (not captures)  # a failed graph is kept, because torch's allocator may still query it


@pytest.mark.parametrize("captures", [True, False])
def test_results_of_every_set_stay_allocated(captures: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each launch would write to the same memory, which the L2 cache holds."""
    torch = Torch(captures)
    clock, fewest = clock_over(torch, monkeypatch), [99]

    class Result:
        pass

    made: list[weakref.ref[Result]] = []

    def run(index: int) -> Any:
        torch.run(index)
        result = Result()
        made.append(weakref.ref(result))
        if len(made) > 20:
            fewest.append(sum(one() is not None for one in made))
        return result

    _, sample = clock.kernels(run, 5, by_torch=True)
    sample()
    assert min(fewest[1:]) >= 5


def test_out_of_memory_during_a_capture_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = clock_over(torch := Torch(captures=True), monkeypatch)

    def run(index: int) -> None:
        if torch.capturing:
            raise OutOfMemory("tried to allocate 2 GiB")

    with pytest.raises(OutOfMemory):
        clock.kernels(run, 2, by_torch=True)


def test_the_gpu_waits_for_the_host_before_calls_that_cannot_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = Torch(captures=False)
    clock = clock_over(torch, monkeypatch)

    def run(index: int) -> None:
        time.sleep(2e-4)
        torch.run(index)

    _, sample = clock.kernels(run, 4, by_torch=True)
    before = torch.runs
    sample()
    assert torch.slept[-1] >= (torch.runs - before) * 2e-4 * CYCLES  # at least the host's time for these calls
    assert max(torch.slept) <= MOST_HELD * CYCLES


def test_memory_that_torch_cached_is_freed_before_the_next_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = Torch(captures=True)
    clock = clock_over(torch, monkeypatch)
    asked: list[int] = []

    class Own:
        def sets(self, nbytes: int, device: Any) -> int:
            asked.append(torch.emptied)
            return 9

    clock._own = Own()  # type: ignore[assignment]
    assert clock.sets(100, KNOWN["H200"]) == 9
    assert asked == [1]  # torch's cache was emptied before the free memory was read


def test_torch_compiles_once_for_all_sets_of_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    compiled: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda forward, dynamic: compiled.append(forward) or forward)
    peer = PEERS["torch.compile"]
    activated = replace(GROUP_BACKWARD, beta_dtype="float32", activation="silu")
    of_rows = LAYER_BACKWARD, RMS_BACKWARD, added(RMS_BACKWARD)
    for problem in (*of_rows, activated, replace(INSTANCE_BACKWARD, layout="NHWC")):
        before, given = len(compiled), inputs_of(problem, 0, hostile=False)
        sets = Sets(problem, given, "cpu", 3)
        calls = [peer.prepare(problem, peer.arrays(problem, sets.bytes_of(index))) for index in range(3)]
        assert len(compiled) == before + 1
        assert_right(peer, problem, given, calls[2]())


@pytest.mark.long
def test_compiled_gradients_are_right_in_every_call() -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    if shutil.which("g++") is None:
        pytest.skip("no g++: torch.compile needs one")
    peer, problem = PEERS["torch.compile"], replace(GROUP_BACKWARD, beta_dtype="float32", activation="silu")
    given = inputs_of(problem, 0, hostile=False)
    call = peer.prepare(problem, peer.arrays(problem, Sets(problem, given, "cpu", 1).bytes_of(0)))
    for _ in range(3):
        assert_right(peer, problem, given, call())


def test_cunorms_launches_are_timed_by_the_clock_of_the_tuner() -> None:
    clock = GpuClock.__new__(GpuClock)
    asked: list[Any] = []

    class Own:
        def sampler(self, tile: Any, run: Callable[[int], Any], sets: int) -> Callable[[], float]:
            asked.append((tile, run, sets))
            return lambda: 7e-6

    clock._own = Own()  # type: ignore[assignment]
    how, sample = clock.kernels(print, 5, by_torch=False)
    assert (how, sample(), asked) == ("graph", 7e-6, [(None, print, 5)])


@pytest.mark.parametrize(
    ("op", "layout", "version", "copies"),
    [
        ("group_norm", "NHWC", "2.11.0", True),
        ("group_norm_backward", "NHWC", "2.14.1+cu130", True),
        ("group_norm", "NHWC", "2.15.0a0", False),
        ("group_norm", "NHWC", "unknown", True),
        ("group_norm", "NCHW", "2.11.0", False),
        ("instance_norm", "NHWC", "2.15.0", True),
        ("batch_norm_stats", "NHWC", "2.11.0", False),
    ],
)
def test_the_note_on_layouts_that_torch_copies(op: str, layout: str, version: str, copies: bool) -> None:
    options = {"num_groups": 2} if op.startswith("group") else {}
    shape = (2, 8, 3, 4) if layout == "NCHW" else (2, 3, 4, 8)
    found = problem_of(op, shape=shape, dtype="float32", data_format=layout, **options)
    assert (torch_note(found, version) != "") == copies
    assert "copies channels-last" not in PEERS["liger"].note(found, version)
