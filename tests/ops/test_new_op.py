"""An op that is only in the registry works everywhere: plan, table, tuner, traffic counter, `show` and calls."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cunorm.tuning import command
from cunorm.tuning.bench import arrays as bench_arrays
from cunorm.tuning.verify.verifier import Verifier

import cunorm
from cunorm.cli.main import main
from cunorm.core.arrays import dtype_name, number
from cunorm.core.devices import Device, known
from cunorm.core.locks import lazy
from cunorm.core.opspec import ArraySpec, Exact, Number
from cunorm.core.problem import Problem, accumulator, laid_out
from cunorm.core.strategy import Launch, Strategy, Tiling, by_name, ceil_div, refuses_threads
from cunorm.gate import gate
from cunorm.ops.common import folds
from cunorm.ops.registry import OPS, _array_fault, fault_of
from cunorm.runtime.checks import OutputSpec
from cunorm.runtime.op import Checked, Op, Request, perform
from cunorm.tiling import costmodel, table

KERNEL = r"""
// faded[i] = strength * picture[i] for i < elements, one pack per thread and turn.
#include "common/types.cuh"

extern "C" __global__ void __launch_bounds__(Tile::threads)
    fade_block(const data_t* picture, data_t* faded, double strength, long long elements) {
    const long long packs = (elements + pack_size - 1) / pack_size;
    for (long long j = static_cast<long long>(blockIdx.x) * Tile::threads + threadIdx.x; j < packs;
         j += static_cast<long long>(gridDim.x) * Tile::threads) {
        const long long row = j * pack_size;
        const int left = static_cast<int>(elements - row < pack_size ? elements - row : pack_size);
        const Pack<data_t> held = load_pack(picture + row, 0, left);
        Pack<data_t> out = {};
        for (int i = 0; i < pack_size; ++i) {
            out.set(i, narrow<data_t>(widen(held.get(i)) * static_cast<acc_t>(strength)));
        }
        store_pack(faded + row, 0, left, out);
    }
}
"""


class Fade(Tiling):
    """One pack per thread and turn."""

    def refuses(self, device: Device) -> str | None:
        return refuses_threads(self.tile)

    @lazy
    def launches(self) -> tuple[Launch, ...]:
        problem, tile = self.problem, self.tile
        elements = problem.N * problem.HxW
        blocks = ceil_div(elements, tile.threads * problem.pack * tile.turns)
        arguments = {**by_name("picture", "faded", "strength"), "elements": elements}
        return (Launch("fade_block", "fade_block", blocks, tile.threads, arguments, traffic=2 * problem.nbytes),)


BLOCK = Strategy(
    name="block",
    op="fade",
    space={"threads": (64, 128, 256), "turns": (1, 2, 4)},
    constants=("threads",),
    of=Fade,
    example=lambda tile, pack: (8, 1, 4096, 1),
)


def _problem(dtype: str, shape: tuple[int, ...]) -> Problem:
    return Problem(
        op="fade",
        dtype=dtype,
        gamma_dtype=None,
        beta_dtype=None,
        stats_dtype=accumulator(dtype),
        **laid_out("NCHW", shape[0], 1, int(np.prod(shape[1:])), 1),
        outputs=("faded",),
    )


def _check(arrays: tuple[Any, ...], options: tuple[Any, ...], out: Any) -> Checked:
    (picture,) = arrays
    order = tuple(range(picture.ndim))
    result = OutputSpec("faded", picture.shape, picture.dtype, order)
    return Checked(_problem(dtype_name("picture", picture), picture.shape), (order,), (result,))


def _request(asked: Request) -> tuple[Problem, tuple[Any, ...]]:
    return _problem(asked.dtype, asked.shape), ()


def _oracle(problem: Problem, given: Mapping[str, Any], numbers: Mapping[str, float]) -> Iterable[Exact]:
    exact = numbers["strength"] * given["picture"].astype(np.float64)
    yield Exact("faded", exact.shape, (), exact, 1e-7 * np.abs(exact))


TENSOR = ArraySpec(("N", "HxW"), ("dtype",), tensor=True)
FADE = Op(
    name="fade",
    family="fade",
    sizes={"pictures": "N", "pixels": "HxW"},
    inputs={"picture": TENSOR},
    results={"faded": TENSOR},
    numbers={"strength": Number(0.5, lambda value: number("strength", value))},
    layouts=("NCHW",),
    oracle=_oracle,
    kernels={"fade_block": KERNEL},
    strategies={"block": BLOCK},
    check=_check,
    request=_request,
    in_place={"faded": "picture"},
)


def fade(picture: Any, *, out: Any = None, tile: Any = None, workspace: Any = None) -> Any:
    return perform(FADE, (picture,), (), None if out is None else (out,), tile, workspace, FADE.defaults or ())[0]


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(OPS, "fade", FADE)
    monkeypatch.setattr(cunorm, "fade", fade, raising=False)  # as an export in cunorm/__init__.py
    monkeypatch.setattr(command, "STUDIES", tmp_path / "studies")


def run(capsys: Any, *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    out, err = capsys.readouterr()
    return code, out, err


def test_plan_and_calls() -> None:
    made = cunorm.plan("fade", shape=(3, 1001), dtype="float32", device="cpu")
    assert made.strategy is BLOCK
    assert made.problem.describe() == "fade float32 pictures=3 pixels=1001 -> faded"
    assert "predicted" in made.explain()
    picture = np.linspace(-1, 1, 3003, dtype=np.float32).reshape(3, 1001)
    assert np.array_equal(made(picture), picture / 2)
    assert np.array_equal(made(picture, strength=0.25), picture / 4)
    assert np.array_equal(fade(picture), picture / 2)
    with pytest.raises(TypeError, match="strength: 'nothing', expected a number"):
        made(picture, strength="nothing")


def test_plan_refuses_an_option_that_the_op_does_not_take() -> None:
    with pytest.raises(ValueError, match="num_groups: 3, expected None for fade, which does not take one"):
        cunorm.plan("fade", shape=(3, 8), dtype="float32", num_groups=3)


def test_the_verifier_uses_the_oracle_of_the_op() -> None:
    """It accepts correct results and detects a wrong one."""
    made = cunorm.plan("fade", shape=(3, 1001), dtype="bfloat16", device="cpu")
    assert Verifier(made.problem, "cpu").fault(made) is None
    verifier = Verifier(made.problem, "cpu")
    verifier.cases[0][1][0].exact[0, 0] += 1
    assert "faded[0, 0]" in str(verifier.fault(made))


def test_tune_writes_a_modelled_table_entry(capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.json"
    arguments = ("fade", "--shape", "16,100x100", "--dtype", "bfloat16", "--trials", "5", "--table", str(path))
    code, out, err = run(capsys, "tune", *arguments)
    assert code == 0, err
    (entry,) = table.read(path).entries.values()
    assert (entry.problem.op, entry.source) == ("fade", "model")
    assert entry.facts["verified"].startswith("cpu executor")
    (line,) = json.loads(path.read_text())["entries"]
    assert {name: line[name] for name in ("op", "pictures", "pixels", "outputs")} == {
        "op": "fade",
        "pictures": 16,
        "pixels": 10000,
        "outputs": "faded",
    }
    assert "layout" not in line
    monkeypatch.setenv("CUNORM_TILING_TABLE", str(path))
    made = cunorm.plan("fade", shape=(16, 10000), dtype="bfloat16", device="cpu")
    assert made.tile == entry.tile
    assert f"the problem's entry in {path}: modelled, not measured" in made.explain()
    assert fault_of(made.problem) is None
    code, out, _ = run(capsys, "show")
    assert code == 0
    assert "pictures=16 pixels=10000" in out


def test_show_and_traffic(capsys: Any) -> None:
    code, out, err = run(capsys, "show", "fade", "--shape", "3,40x50", "--strategy", "all", "--traffic")
    assert code == 0, err
    assert "fade float32 pictures=3 pixels=2000 -> faded" in out
    found = cunorm.plan("fade", shape=(3, 2000), dtype="float32", device="cpu").traffic()
    assert found.floor_bytes == 2 * 3 * 2000 * 4
    assert found.tensor_ratio == 1
    code, _, err = run(capsys, "show", "fade", "--shape", "3")
    assert code == 2
    assert "'3' has 1 numbers, for fade expected PICTURES,PIXELS" in err


def test_the_compile_gate_accepts_its_tiles() -> None:
    case = gate.GateCase("fade", "block", "float16", "NCHW")
    assert {tile.threads for _, tile in gate.accepted(case, "sm_90")} == {64, 128, 256}
    assert all(problem.sizes_text == "pictures=8 pixels=4096" for problem, _ in gate.accepted(case, "sm_90"))


def test_the_bench_calls_the_public_function() -> None:
    made = cunorm.plan("fade", shape=(3, 40), dtype="float32", device="cpu")
    picture = np.ones((3, 40), np.float32)
    call = bench_arrays.public_call(made.problem, {"picture": picture}, None, into=False)
    assert np.array_equal(call(), picture / 2)


def test_the_cost_model_ranks_its_tiles() -> None:
    problem = _problem("float32", (64, 1 << 20))
    assert len(costmodel.ranked(problem, [BLOCK], known("H200"))) == 9


@pytest.fixture
def without_mean_and_dbeta(monkeypatch: pytest.MonkeyPatch) -> Problem:
    """A problem of LayerNorm's gradient without mean and dbeta, as an op has it whose norm is not centred."""
    op = OPS["layer_norm_backward"]
    inputs = {name: array for name, array in op.inputs.items() if name != "mean"}
    results = {name: array for name, array in op.results.items() if name != "dbeta"}
    monkeypatch.setitem(
        OPS, "uncentred_backward", replace(op, name="uncentred_backward", inputs=inputs, results=results)
    )
    sizes = laid_out("NCHW", 64, 256, 1, 1)
    return Problem(
        op="uncentred_backward",
        dtype="bfloat16",
        gamma_dtype="bfloat16",
        beta_dtype=None,
        stats_dtype="bfloat16",
        **sizes,
        outputs=("dx", "dgamma"),
    )


def test_the_parameter_sums_of_an_op_without_dbeta(without_mean_and_dbeta: Problem) -> None:
    *_, last = folds.parameter_launches(without_mean_and_dbeta, 3)
    assert last.entry == "gamma_sums"
    assert last.arguments["dgamma"] == "dgamma"
    assert "dbeta" not in last.arguments


def test_statistics_of_an_op_without_mean_may_have_the_dtype_of_x(without_mean_and_dbeta: Problem) -> None:
    op = OPS["uncentred_backward"]
    assert _array_fault(op, without_mean_and_dbeta) is None
    wrong = replace(without_mean_and_dbeta, stats_dtype="float16")
    assert _array_fault(op, wrong) == "stats_dtype 'float16', expected float32 or bfloat16"
