"""`cunorm bench` without a GPU: states of contenders, order of samples, statistics, rehearsals without times."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cunorm.tuning.bench import bench, command, figure
from cunorm.tuning.bench import result as report
from cunorm.tuning.bench.arrays import Sets, public_call
from cunorm.tuning.bench.bench import WRONG, bench_problem
from cunorm.tuning.bench.clock import RehearsalClock
from cunorm.tuning.bench.peers import PEERS, NotOffered, Peer
from cunorm.tuning.bench.result import DEFAULT, TABLE, Contender, DeviceLostError, Outcome, Spread
from cunorm.tuning.problems import workloads
from cunorm.tuning.verify.inputs import inputs_of
from cunorm.tuning.verify.oracle import expected

from cunorm.cli import main as cli
from cunorm.cli import parser as cli_parser
from cunorm.core.arrays import DTYPES
from cunorm.core.devices import KNOWN, Device
from cunorm.core.problem import Problem, laid_out
from cunorm.ops.registry import OPS
from cunorm.runtime import specialised
from cunorm.runtime.plans import Target
from cunorm.tiling import choose_tile, costmodel

PLACE = Target("cpu", 0, KNOWN["H200"])
PROBLEM = Problem(
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
    outputs=("y", "mean", "rstd"),
)


def arrays_of(problem: Problem, flat: Mapping[str, Any]) -> dict[str, Any]:
    return {name: one.view(DTYPES[problem.dtype_of(name)]) for name, one in flat.items()}


def right(problem: Problem, arrays: Mapping[str, Any]) -> Callable[[], Mapping[str, Any]]:
    x = arrays["x"].reshape(problem.N, problem.C)

    def run() -> Mapping[str, Any]:
        mean, var = x.mean(1, keepdims=True), x.var(1, keepdims=True)
        return {"y": ((x - mean) / np.sqrt(var + 1e-5) * arrays["gamma"] + arrays["beta"]).astype(np.float32)}

    return run


def wrong(problem: Problem, arrays: Mapping[str, Any]) -> Callable[[], Mapping[str, Any]]:
    made = right(problem, arrays)
    return lambda: {"y": made()["y"] * np.float32(1.01)}


def nan(problem: Problem, arrays: Mapping[str, Any]) -> Callable[[], Mapping[str, Any]]:
    made = right(problem, arrays)
    return lambda: {"y": made()["y"] * np.float32(np.nan)}


def fails(problem: Problem, arrays: Mapping[str, Any]) -> Callable[[], Mapping[str, Any]]:
    raise RuntimeError("no kernel image\nis available")


def lacks(problem: Problem, arrays: Mapping[str, Any]) -> Callable[[], Mapping[str, Any]]:
    raise NotOffered("no LayerNorm")


def fails_later(problem: Problem, arrays: Mapping[str, Any]) -> Callable[[], Mapping[str, Any]]:
    made, calls = right(problem, arrays), iter(range(1000))

    def run() -> Mapping[str, Any]:
        if next(calls) > 8:
            raise MemoryError("out of memory")
        return made()

    return run


def other_dtype(problem: Problem, arrays: Mapping[str, Any]) -> Callable[[], Mapping[str, Any]]:
    made = right(problem, arrays)
    return lambda: {"y": made()["y"].astype(np.float64)}


def in_place(problem: Problem, arrays: Mapping[str, Any]) -> Callable[[], Mapping[str, Any]]:
    own = dict(arrays, x=arrays["x"].copy())
    made = right(problem, own)

    def run() -> Mapping[str, Any]:
        own["x"][:] = made()["y"].reshape(-1)
        return {"y": own["x"]}

    return run


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def planted(**makers: Any) -> None:
        for name, maker in makers.items():
            module = "no_such_module" if maker is None else "numpy"
            flat = lambda _, __, array: array.reshape(-1).view(np.uint8)  # noqa: E731
            peer = Peer(name, module, "numpy", maker, "pip install it", arrays=arrays_of, flat=flat)
            monkeypatch.setitem(PEERS, name, peer)

    return planted


class Planted(RehearsalClock):
    """A clock with planted samples. It numbers the contenders in the order in which they are passed to `kernels`."""

    measures = True

    def __init__(self, seconds: Callable[[int, int], float] = lambda index, sample: 1e-5 * (index + 1)) -> None:
        self.seconds, self.count, self.order, self.walls = seconds, 0, [], 0
        self.working = True

    def kernels(self, run: Callable[[int], Any], sets: int, by_torch: bool) -> tuple[str, Callable[[], float]]:
        index, self.count = self.count, self.count + 1
        taken = 0

        def sample() -> float:
            nonlocal taken
            self.order.append(index)
            for at in range(sets):
                run(at)
            taken += 1
            return self.seconds(index, taken)

        return "planted", sample

    def wall(self, call: Callable[[], Any]) -> float:
        call()
        self.walls += 1
        return 1e-3

    def copies(self) -> dict[str, float]:
        return {"driver": 3.9e12, "kernel": 4e12}

    def sound(self) -> bool:
        return self.working

    def beside(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()


def by_name(found: Outcome) -> dict[str, Contender]:
    return {one.name: one for one in found.contenders}


# ---- states of contenders -------------------------------------------------------------------------------------------


def test_every_contender_is_in_the_results_with_its_state(plant: Callable[..., None]) -> None:
    makers = {"good": right, "bad": wrong, "nan": nan, "broken": fails, "lacking": lacks, "absent": None,
              "late": fails_later, "wide": other_dtype}  # fmt: skip
    plant(**makers)
    found = bench_problem(PROBLEM, PLACE, Planted(), list(makers), rounds=9).contenders
    assert [one.name for one in found] == [DEFAULT, TABLE, *makers]
    states = {one.name: (one.state, one.sentence) for one in found}
    assert states[DEFAULT][0] == states["good"][0] == "timed"
    assert states[TABLE] == ("missing", "no tiling table has an entry for this problem; see `cunorm tune`")
    assert states["bad"][0] == "wrong" and "y is off by 0.01 of its largest value" in states["bad"][1]
    assert states["nan"][0] == "wrong" and "y is off by nan" in states["nan"][1]
    assert states["broken"] == ("failed", "RuntimeError: no kernel image")
    assert states["lacking"] == ("not offered", "no LayerNorm")
    assert states["absent"] == ("missing", "no module no_such_module; pip install it")
    assert states["late"] == ("failed", "MemoryError: out of memory")
    assert states["wide"][0] == "wrong" and "expected the bytes of its shape in float32" in states["wide"][1]
    for one in found:
        assert (one.kernels is not None) == (one.wall is not None) == (one.state == "timed")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("op", ["layer_norm", "layer_norm_backward", "group_norm_backward"])
def test_a_formula_with_a_term_left_out_is_wrong(op: str, dtype: str) -> None:
    """Its error exceeds 1.5 times the limit. That margin separates missing terms from rounding errors."""
    layer = op.startswith("layer")
    sizes = (64, 4096, 1, 1) if layer else (2, 64, 512, 4)
    outputs = ("dx", "dgamma", "dbeta") if "backward" in op else ("y",)
    problem = Problem(
        op=op,
        dtype=dtype,
        gamma_dtype=dtype,
        beta_dtype=None if "backward" in op else dtype,
        stats_dtype="float32",
        **laid_out("NCHW", *sizes),
        outputs=outputs,
    )
    given = inputs_of(problem, 0, hostile=False)
    N, C, HxW, group = sizes
    each = {name: values.astype(np.float64) for name, values in given.items()}
    x, gamma = each["x"].reshape(N, C, HxW), each["gamma"][:, None]
    if "backward" in op:
        dy = each["dy"].reshape(N, C, HxW)
        mean, rstd = (np.repeat(each[name].reshape(N, group), C // group, 1)[:, :, None] for name in ("mean", "rstd"))
        left_out = [
            ("dx", dy * gamma * rstd),  # without the mean of dy and the mean of dy times the normalised x
            ("dx", dy * gamma),
            ("dx", (x - mean) * gamma * rstd),
            ("dgamma", (dy * x * rstd).sum((0, 2))),
            ("dgamma", (dy * (x - mean)).sum((0, 2))),
            ("dbeta", dy[-(-N // 4) :].sum((0, 2))),
        ]
    else:
        beta, mean, rstd = each["beta"][:, None], x.mean(1)[:, None], 1 / np.sqrt(x.var(1))[:, None]
        left_out = [("y", x * gamma + beta), ("y", (x - mean) * rstd * gamma), ("y", (x - mean) * gamma + beta),
                    ("y", x * rstd * gamma + beta)]  # fmt: skip
    wanted = {one.name: one for one in expected(problem, given)}
    for name, values in left_out:
        assert wanted[name].off(values.astype(DTYPES[dtype])) > 1.5 * WRONG[dtype], name


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("op", ["rms_norm", "rms_norm_backward"])
def test_an_rms_norm_with_a_term_left_out_is_wrong(op: str, dtype: str) -> None:
    """The error exceeds 1.5 times the limit, as it does for the other ops."""
    backward = op.endswith("backward")
    problem = Problem(
        op=op,
        dtype=dtype,
        gamma_dtype=dtype,
        beta_dtype=None,
        stats_dtype="float32",
        **laid_out("NCHW", 64, 4096, 1, 1),
        outputs=("dx", "dgamma") if backward else ("y", "rstd", "h"),
        extras=("dh",) if backward else ("residual",),
    )
    given = inputs_of(problem, 0, hostile=False)
    each = {name: values.astype(np.float64) for name, values in given.items()}
    x, gamma = (each[name].reshape(-1, 4096) for name in ("x", "gamma"))
    if backward:
        dy, dh, rstd = (each[name].reshape(64, -1) for name in ("dy", "dh", "rstd"))
        xhat = x * rstd
        part = gamma * dy - xhat * (gamma * dy * xhat).mean(1, keepdims=True)
        left_out = [("dx", rstd * part), ("dx", rstd * gamma * dy + dh), ("dx", part + dh), ("dx", rstd * part - dh),
                    ("dgamma", (dy * x).sum(0)), ("dgamma", (dy * xhat)[16:].sum(0))]  # fmt: skip
    else:
        h = x + each["residual"].reshape(64, -1)
        rstd = 1 / np.sqrt((h**2).mean(1, keepdims=True))
        centred = (h - h.mean(1, keepdims=True)) / h.std(1, keepdims=True)
        left_out = [("y", h * gamma), ("y", h * rstd), ("y", centred * gamma), ("y", x * rstd * gamma), ("h", x)]
    wanted = {one.name: one for one in expected(problem, given)}
    for name, values in left_out:
        assert wanted[name].off(values.astype(DTYPES[dtype])) > 1.5 * WRONG[dtype], name


def test_a_missing_result_is_wrong(plant: Callable[..., None]) -> None:
    plant(empty=lambda problem, arrays: lambda: {})
    found = by_name(bench_problem(PROBLEM, PLACE, Planted(), ["empty"], rounds=1))
    assert (found["empty"].state, found["empty"].sentence) == ("wrong", "y was not returned")


def test_a_peer_that_overwrites_its_inputs_is_judged_by_its_first_run(plant: Callable[..., None]) -> None:
    """A later run starts from the results of the one before."""
    plant(inside=in_place)
    found = by_name(bench_problem(PROBLEM, PLACE, Planted(), ["inside"], rounds=3))
    assert found["inside"].state == "timed" and (found["inside"].error or 0) < 1e-5


def test_results_that_another_contender_wrote_are_not_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two contenders of cunorm write to the same arrays."""
    strategies = OPS["layer_norm"].strategies
    tile = next(t for t in strategies["split"].tiles() if strategies["split"].refuses(PROBLEM, t, PLACE.device) is None)
    monkeypatch.setattr(choose_tile, "exact", lambda *_: type("Found", (), {"tile": tile}))
    own = bench._own

    def idle(name: str, *given: Any) -> Any:
        made = own(name, *given)
        return replace(made, run=lambda index: None) if name == TABLE else made

    monkeypatch.setattr(bench, "_own", idle)
    found = by_name(bench_problem(PROBLEM, PLACE, Planted(), [], rounds=1))
    assert (found[DEFAULT].state, found[TABLE].state) == ("timed", "wrong")
    assert "y is off by nan" in found[TABLE].sentence and found[TABLE].error is None


def test_the_results_contain_the_error_of_each_contender(plant: Callable[..., None]) -> None:
    plant(good=right, bad=wrong)
    found = by_name(bench_problem(PROBLEM, PLACE, Planted(), ["good", "bad"], rounds=1))
    assert 0 <= (found[DEFAULT].error or 0) < 1e-5
    assert 0 < (found["good"].error or 0) < 1e-5
    assert found["bad"].error == pytest.approx(0.01, rel=0.01)


def test_the_tile_of_the_table_is_a_separate_contender(monkeypatch: pytest.MonkeyPatch) -> None:
    strategies = OPS["layer_norm"].strategies
    tile = next(t for t in strategies["split"].tiles() if strategies["split"].refuses(PROBLEM, t, PLACE.device) is None)
    entry: Any = type("Found", (), {"tile": tile})
    monkeypatch.setattr(choose_tile, "exact", lambda *_: entry)
    found = by_name(bench_problem(PROBLEM, PLACE, Planted(), [], rounds=1))
    assert found[TABLE].state == "timed" and found[TABLE].sentence.startswith("split (")
    default = costmodel.choose(PROBLEM, strategies.values(), PLACE.device)
    assert default.strategy.name != "split" and found[DEFAULT].sentence.startswith(f"{default.strategy.name} (")


def test_a_lost_device_ends_the_run(plant: Callable[..., None]) -> None:
    plant(broken=fails)
    clock = Planted()
    clock.working = False
    with pytest.raises(DeviceLostError, match="broken left the GPU unusable: RuntimeError: no kernel image") as caught:
        bench_problem(PROBLEM, PLACE, clock, ["broken", "next"], rounds=1)
    assert caught.value.outcome is not None
    found = by_name(caught.value.outcome)
    assert {found[name].state for name in (DEFAULT, "broken", "next")} == {"failed"}
    assert all("broken left the GPU unusable" in found[name].sentence for name in (DEFAULT, "next"))


def test_times_from_before_the_loss_of_the_device_are_kept(plant: Callable[..., None]) -> None:
    plant(late=fails_later)
    clock = Planted()
    clock.working = False
    with pytest.raises(DeviceLostError) as caught:
        bench_problem(PROBLEM, PLACE, clock, ["late"], rounds=9)
    assert caught.value.outcome is not None
    found = by_name(caught.value.outcome)
    assert found["late"].state == "failed" and "MemoryError: out of memory" in found["late"].sentence
    assert found[DEFAULT].state == "timed" and found[DEFAULT].kernels is not None


@pytest.mark.parametrize("op", [name for name in OPS if name != "batch_norm_gather_stats"])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_every_op_runs_and_has_right_results(op: str, layout: str) -> None:
    """The bench runs the launches on every set of arrays, and the public call."""
    rows = len(OPS[op].layouts) == 1
    shape = "6,40" if rows else "2,12,15,3" if op.startswith("group") else "3,12,15"
    given = ["bench", op, "--shape", shape, "--dtype", "bfloat16", "--rehearse", "--peers", "", "--rounds", "1"]
    if not rows:
        given += ["--layout", layout]
    elif layout == "NHWC":
        given += ["--with", *OPS[op].extras]  # rows have one layout
    assert cli.main(given) == 0


@pytest.mark.parametrize("extras", [(), ("residual",)])
def test_a_call_writes_into_the_arrays_of_a_set(extras: tuple[str, ...]) -> None:
    """``out=`` has an array for h only if there is a residual."""
    outputs = ("y", "rstd", "h") if extras else ("y", "rstd")
    problem = replace(PROBLEM, op="rms_norm", beta_dtype=None, outputs=outputs, extras=extras)
    sets = Sets(problem, inputs_of(problem, 0, hostile=False), "cpu", 1)
    arrays = sets.arrays(0)
    came = public_call(problem, arrays, None)()
    assert len(came) == len(outputs)
    assert all(np.shares_memory(one, arrays[name]) for name, one in zip(outputs, came, strict=True))


# ---- order and statistics -------------------------------------------------------------------------------------------


def test_each_round_samples_every_contender_in_another_order(plant: Callable[..., None]) -> None:
    plant(one=right, two=right, three=right)
    clock = Planted()
    bench_problem(PROBLEM, PLACE, clock, ["one", "two", "three"], rounds=8)
    rounds = [tuple(clock.order[at : at + 4]) for at in range(0, len(clock.order), 4)]
    assert len(rounds) == 8 and all(sorted(one) == [0, 1, 2, 3] for one in rounds)
    assert len(set(rounds)) > 3
    assert clock.walls == 8 * 4


def test_times_are_medians_with_quartiles(plant: Callable[..., None]) -> None:
    plant(peer=right)
    samples = {0: [3e-5, 1e-5, 2e-5, 5e-5, 4e-5], 1: [1e-4, 1e-4, 9e-4, 1e-4, 1e-4]}
    clock = Planted(lambda index, sample: samples[index][sample - 1])
    found = by_name(bench_problem(PROBLEM, PLACE, clock, ["peer"], rounds=5))
    assert found[DEFAULT].kernels == Spread(3e-5, 2e-5, 4e-5, 5)
    assert found["peer"].kernels == Spread(1e-4, 1e-4, 1e-4, 5)
    assert found["peer"].wall == Spread(1e-3, 1e-3, 1e-3, 5)


def document(results: Any, **others: Any) -> dict[str, Any]:
    copies = {"before": {"driver": 3.9e12, "kernel": 4e12}, "after": {"driver": 3.8e12, "kernel": 3.95e12}}
    facts: dict[str, Any] = {
        "source": "measured",
        "copies": copies,
        "rounds": 5,
        "workload": None,
        "problems": 3,
    } | others
    device = {"name": "NVIDIA H200", "l2_bytes": 50e6}
    made = report.document(results, device=device, software={"cunorm": "0.1.0"}, **facts)
    return {**made, "interrupted": False, "lost": None}


def timed(name: str, microseconds: float, error: float = 1e-3) -> Contender:
    spread = Spread(microseconds * 1e-6, microseconds * 0.9e-6, microseconds * 1.2e-6, 5)
    return Contender(name, "timed", "graph", error, spread, spread)


def test_fractions_are_relative_to_the_copy_of_the_same_run() -> None:
    big = Problem(
        op="layer_norm",
        dtype="bfloat16",
        gamma_dtype="bfloat16",
        beta_dtype="bfloat16",
        stats_dtype="float32",
        layout="NCHW",
        N=16384,
        C=4096,
        HxW=1,
        group=1,
        outputs=("y",),
    )
    found = document([Outcome(big, [timed(DEFAULT, 100), timed("torch", 200)], 10**9)])
    result = json.loads(json.dumps(found))["results"][0]
    assert result["floor_bytes"] == 2 * 16384 * 4096 * 2
    assert report.fraction(found, result, result["contenders"][0]) == pytest.approx(268435456 / 1e-4 / 4e12)
    assert report.speedups(found, "torch") == {"layer_norm": [2.0]}
    lines = "\n".join(report.text(found))
    assert "67.1% of copy" in lines and "kernels     100.0 (90.0 to 120.0) us" in lines
    assert "layer_norm: 2.00x torch in the geometric mean of 1 shapes, 2.00x at least" in lines


def test_a_speedup_uses_the_tile_of_the_table_if_there_is_one() -> None:
    """The faster of cunorm's two contenders is not taken: that would count noise in favour of cunorm."""
    shapes = [[timed(DEFAULT, 1), timed(TABLE, 2), timed("torch", 8)],
              [timed(DEFAULT, 4), Contender(TABLE, "missing", ""), timed("torch", 2)],
              [timed(DEFAULT, 4), Contender("torch", "failed", "")]]  # fmt: skip
    found = document([Outcome(PROBLEM, contenders, 10**9) for contenders in shapes])
    assert report.speedups(found, "torch") == {"layer_norm": [4.0, 0.5]}
    assert report.geometric_mean([4.0, 0.5]) == pytest.approx(2**0.5)


def test_a_shape_too_small_for_a_cold_cache_is_marked() -> None:
    found = document([Outcome(PROBLEM, [timed(DEFAULT, 4)], walked) for walked in (150_000_000, 149_999_999)])
    assert [report.cold(found, result) for result in found["results"]] == [True, False]
    heads = [line for line in report.text(found) if line.startswith("\nlayer_norm float32")]
    assert not heads[0].endswith("MB") and heads[1].endswith("; L2 not cold: 150 MB")


def test_an_outcome_has_the_bytes_of_the_inputs_of_all_sets() -> None:
    class Three(Planted):
        def sets(self, nbytes: int, device: Device) -> int:
            return 3

    x, parameters = (
        6 * 40 * 4,
        2 * 40 * 4,
    )  # inputs only: y may stay in the L2 cache, but its stores are not faster for that
    assert bench_problem(PROBLEM, PLACE, Three(), [], rounds=1).walked == 3 * (x + parameters)


# ---- rehearsals, arguments and interrupted runs ---------------------------------------------------------------------


def test_a_run_loads_any_number_of_specialised_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit that suits applications would make the bench time generic kernels from some problem on."""
    monkeypatch.setattr(specialised, "MOST_KERNELS", 512)
    assert cli.main(["bench", "layer_norm", "--shape", "6,40", "--rehearse", "--peers", "", "--quiet"]) == 0
    assert specialised.MOST_KERNELS > 10**6


@pytest.mark.parametrize(("kind", "text", "said"), [
    ("gpu", "generic", "; generic kernels"), ("gpu", "specialised", ""), ("cpu", "generic", ""),
])  # fmt: skip
def test_a_time_of_generic_kernels_is_marked(kind: str, text: str, said: str) -> None:
    plan: Any = SimpleNamespace(place=SimpleNamespace(kind=kind), text=text)
    assert bench._kernels(plan) == said


def test_a_file_that_cannot_be_written_does_not_hide_the_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, _: object) -> None:
        raise OSError(28, "No space left on device", str(path))

    file = tmp_path / "found.json"
    monkeypatch.setattr(command, "write_whole", full)
    given = ["bench", "layer_norm", "--shape", "6,40", "--rehearse", "--peers", "", "--json", str(file), "--quiet"]
    assert cli.main(given) == 1
    said = capsys.readouterr()
    assert "layer_norm float32 rows=6 length=40" in said.out
    assert said.err == f"cunorm: {file}: No space left on device\n" and not file.exists()


def test_a_rehearsal_has_no_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "found.json"
    given = ["bench", "layer_norm", "--shape", "6,40", "--rehearse", "--peers", "", "--json", str(file), "--quiet"]
    assert cli.main(given) == 0
    found = json.loads(file.read_text(encoding="utf-8"))
    assert found["source"] == "rehearsed" and found["copy_bandwidth"] == 0
    own = found["results"][0]["contenders"][0]
    assert own["state"] == "rehearsed" and own["kernels"] is None and own["wall"] is None
    assert own["error"] < 0.01
    told = capsys.readouterr().out
    assert "no times" in told and " us" not in told and "of copy" not in told
    assert report.refusal(found) == "it was rehearsed, not measured on a GPU: it contains no kernel times"
    with pytest.raises(ValueError, match="no figure: it was rehearsed"):
        figure.figure(found, tmp_path / "found.png")
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]


@pytest.mark.parametrize(
    ("arguments", "dtype"),
    [("layer_norm --shape 8,64", "float32"), ("--workload quick", "bfloat16"), ("", "bfloat16")],
)
def test_the_default_dtype_of_a_shape_is_that_of_tune_and_show(arguments: str, dtype: str) -> None:
    asked = cli_parser.parser().parse_args(["bench", *arguments.split()])
    assert {problem.dtype for problem in command._wanted(asked)} == {dtype}


def test_a_clock_of_the_cpu_executor_is_never_measured(tmp_path: Path) -> None:
    """The source is `rehearsed` although the clock has `measures = True`."""
    file = tmp_path / "found.json"
    given = ["bench", "layer_norm", "--shape", "6,40", "--rehearse", "--peers", "", "--json", str(file), "--quiet"]
    assert command.run(cli_parser.parser().parse_args(given), clock=Planted()) == 0
    assert json.loads(file.read_text(encoding="utf-8"))["source"] == "rehearsed"
    assert "kernels" not in "".join(report.text(json.loads(file.read_text(encoding="utf-8"))))


@pytest.mark.parametrize(("given", "sentence"), [
    (["--peers", "tensorflow"],
     "--peers: 'tensorflow', expected some of torch, torch.compile, liger, quack, flashinfer, apex"),
    (["--op", "unit_norm"], "--op: 'unit_norm', expected some of group_norm"),
    (["--op", "batch_norm_stats", "--workload", "llm"], "--op: no problem of batch_norm_stats is selected"),
    (["--workload", "huge"], "--workload: 'huge', expected one of sd15-unet"),
    (["--rounds", "0"], "--rounds: 0, expected at least 1"),
    (["--rehearse", "--plot", "a.png"], "--plot: a rehearsal has no times to draw"),
    (["--json", "/no/such/a.json"], "--json: '/no/such/a.json', expected a file in an existing folder"),
    (["--json", ""], "--json: '', expected a file in an existing folder"),
    (["--plot", "a.txt"], "--plot: 'a.txt', expected a name that ends in .png, .svg, .pdf"),
    (["--seed", "-1"], "--seed: -1, expected at least 0"),
    (["batch_norm_gather_stats", "--shape", "4,16"], "OP: batch_norm_gather_stats moves a few kilobytes"),
    (["--shape", "6,40"], "OP: missing, expected the name of a function before --shape"),
    (["--dtype", "int8"], "--dtype: 'int8', expected float16"),
    (["layer_norm", "--shape", "6,40", "--dtype", "int8"], "--dtype: 'int8', expected float16"),
    (["layer_norm", "--shape", "6,40", "--with", "dh"], "--with: 'dh', expected residual"),
    (["rms_norm_backward", "--shape", "6,40", "--with", "residual"], "--with: 'residual', expected dh"),
    (["batch_norm_stats", "--shape", "2,3,4", "--with", "dh"], "--with: 'dh', expected no --with, because"),
    (["rms_norm", "--with", "residual"], "--with: only valid with --shape"),
    (["group_norm", "--activation", "silu"], "--activation: only valid with --shape"),
    (["--workload", "llm", "--y-dtype", "float32"], "--y-dtype: only valid with --shape"),
    (["unit_norm", "--shape", "6,40"], "op: 'unit_norm', expected one of group_norm"),
], ids=lambda value: "" if isinstance(value, str) else " ".join(value))  # fmt: skip
def test_wrong_arguments(given: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", *given]) == 2
    assert f"cunorm bench: {sentence}" in capsys.readouterr().err


REHEARSAL = ("bench", "layer_norm", "--shape", "6,40", "--rehearse", "--peers", "", "--quiet", "--json")


def test_the_json_file_replaces_only_an_earlier_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipe, source, link = tmp_path / "pipe", tmp_path / "train.py", tmp_path / "link.json"
    os.mkfifo(pipe)
    source.write_text("import torch\n")
    link.symlink_to("target.json")
    assert cli.main([*REHEARSAL, str(pipe)]) == 2
    assert f"--json: {pipe}: not a regular file" in capsys.readouterr().err
    assert pipe.is_fifo()
    for text in ("import torch\n", "{}", '{"schema": "cunorm-tiling/3"}', "[]"):
        source.write_text(text)
        assert cli.main([*REHEARSAL, str(source)]) == 2
        assert f"--json: {source} has other contents than an earlier result; delete it" in capsys.readouterr().err
        assert source.read_text() == text
    for _ in range(2):  # the second one replaces the first one
        assert cli.main([*REHEARSAL, str(link)]) == 0
    assert link.is_symlink()
    assert json.loads((tmp_path / "target.json").read_text())["schema"] == report.SCHEMA


def test_without_a_gpu_the_message_names_rehearse(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "gpu_present", lambda: False)
    assert cli.main(["bench"]) == 3
    assert "sees no GPU here" in (told := capsys.readouterr().err) and "--rehearse" in told


def test_results_from_before_ctrl_c_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[Problem] = []

    def once(problem: Problem, *given: Any, **options: Any) -> Outcome:
        calls.append(problem)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return Outcome(problem, [Contender(DEFAULT, "rehearsed", "", 0.0)], 10**9)

    monkeypatch.setattr(command, "bench_problem", once)
    file = tmp_path / "found.json"
    assert cli.main(["bench", "--rehearse", "--json", str(file), "--quiet"]) == 130
    found = json.loads(file.read_text(encoding="utf-8"))
    assert found["interrupted"] and len(found["results"]) == 1


def test_the_problems_after_one_that_does_not_fit_are_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result file is written after each problem, so that a later failure does not lose earlier results."""
    file, lengths = tmp_path / "found.json", list[int]()

    def once(problem: Problem, *given: Any, **options: Any) -> Outcome:
        if file.exists():
            lengths.append(len(json.loads(file.read_text(encoding="utf-8"))["results"]))
        if len(lengths) == 1:
            raise MemoryError("3 TB")
        return Outcome(problem, [Contender(DEFAULT, "rehearsed", "", 0.0)], 10**9)

    monkeypatch.setattr(command, "bench_problem", once)
    monkeypatch.setitem(workloads.GROUP_NORM, "mlp", ((64, 32, 1, 8), (32, 64, 1, 16)))
    given = ["bench", "--workload", "mlp", "--rehearse", "--peers", "torch", "--json", str(file), "--quiet"]
    assert cli.main(given) == 1
    found = json.loads(file.read_text(encoding="utf-8"))
    assert lengths == list(range(1, found["problems"])) and len(found["results"]) == found["problems"]
    told = {one["name"]: (one["state"], one["sentence"]) for one in found["results"][1]["contenders"]}
    assert told == dict.fromkeys((DEFAULT, TABLE, "torch"), ("failed", "MemoryError: 3 TB"))
    assert found["results"][2]["contenders"][0]["state"] == "rehearsed"


@pytest.mark.parametrize(("raised", "code"), [("wrong", 1), ("failed", 1), ("timed", 0)])
def test_the_exit_code_depends_only_on_cunorms_contenders(
    raised: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    came = [Contender(DEFAULT, raised, "", 0.0), Contender("torch", "failed", "")]
    monkeypatch.setattr(command, "bench_problem", lambda problem, *_, **__: Outcome(problem, came, 10**9))
    assert cli.main(["bench", "layer_norm", "--shape", "6,40", "--rehearse", "--quiet"]) == code


def test_a_lost_device_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lost(*_: Any, **__: Any) -> Outcome:
        raise DeviceLostError("apex left the GPU unusable: an illegal memory access")

    monkeypatch.setattr(command, "bench_problem", lost)
    assert cli.main(["bench", "layer_norm", "--shape", "6,40", "--rehearse", "--quiet"]) == 1
    assert "apex left the GPU unusable: an illegal memory access; 1 problems were not run" in capsys.readouterr().err


# ---- the figure -----------------------------------------------------------------------------------------------------


def shown() -> dict[str, Any]:
    """A made-up result with the states timed, wrong, not offered and missing."""
    results = []
    for rows, length, scale in ((16384, 4096, 1.0), (8192, 8192, 1.1), (2048, 4096, 0.15)):
        ran = {DEFAULT: 75, TABLE: 71, "torch": 140, "torch.compile": 90}
        others = {"liger": "wrong", "quack": "not offered", "apex": "missing"}
        contenders = [timed(name, microseconds * scale) for name, microseconds in ran.items()]
        contenders += [Contender(name, state, "why") for name, state in others.items()]
        dtypes = dict.fromkeys(("dtype", "gamma_dtype", "beta_dtype"), "bfloat16") | {"stats_dtype": "float32"}
        problem = Problem(op="layer_norm", **dtypes, **laid_out("NCHW", rows, length, 1, 1), outputs=("y",))
        results.append(Outcome(problem, contenders, 4 * rows * length))
    return document(results)


def test_a_figure_of_measured_results_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure.figure(shown(), tmp_path / "found.png")
    assert (tmp_path / "found.png").read_bytes()[:4] == b"\x89PNG"


def test_a_figure_of_samples_without_a_spread(tmp_path: Path) -> None:
    """The share of a quartile that equals the median may differ from the median's by a rounding."""
    pytest.importorskip("matplotlib")
    found = shown()
    for number, result in enumerate(found["results"]):
        for at, one in enumerate(result["contenders"]):
            if one["kernels"] is not None:
                one["kernels"] |= dict.fromkeys(("seconds", "q25", "q75"), 1e-6 * (3 + (number * 7 + at + 1) / 100))
    figure.figure(found, tmp_path / "found.png")
    assert (tmp_path / "found.png").is_file()


def test_every_peer_has_a_colour() -> None:
    assert set(figure.COLOURS) == {DEFAULT, TABLE, *PEERS}


# ---- imports --------------------------------------------------------------------------------------------------------


def test_neither_optuna_nor_torch_is_imported() -> None:
    """The bench, the clocks and the workloads run where Optuna, torch, matplotlib and CuPy are not installed."""
    names = ["measure.clock", "problems.workloads"]
    names += [f"bench.{name}" for name in ("bench", "command", "result", "figure", "clock", "peers")]
    code = "import sys\n" + "".join(f"import cunorm.tuning.{name}\n" for name in names)
    code += "print([name for name in ('optuna', 'torch', 'matplotlib', 'cupy') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.fixture(autouse=True)
def no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiling tables of the user of this machine are not read."""
    monkeypatch.delenv("CUNORM_TILING_TABLE", raising=False)
    monkeypatch.setattr(choose_tile, "exact", lambda *_: None)
