"""Plan.launch: a plan on addresses, as other libraries call it; and the dtypes that only such a call needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import cunorm
from cunorm.core.arrays import DTYPES
from cunorm.ops.registry import OPS
from tests.ops.test_plan_ops import arguments_of, options_for
from tests.support.problems import TILES, tupled

if TYPE_CHECKING:
    from tests.support.fake_gpu import Driver

#: Values that a launch must overwrite.
OLD = 77


def memory_of(plan: cunorm.Plan, arrays: dict[str, Any]) -> dict[str, Any]:
    """The arrays of a launch by name: the inputs that are given, the results full of `OLD`, and the workspace."""
    problem = plan.problem
    made: dict[str, Any] = dict(arrays)
    for name in problem.outputs:
        if name not in problem.spec.updated:
            shape = problem.spec.arrays[name].shape_of(problem)
            made[name] = np.full(shape, OLD, DTYPES[problem.dtype_of(name)])
    made["workspace"] = np.full(plan.workspace_nbytes, 0xFF, np.uint8)
    return made


def values_of(plan: cunorm.Plan, memory: dict[str, Any], **numbers: float) -> list[int | float]:
    """The values of a launch in the order of the plan's names."""
    numbers = plan.problem.numbers | numbers
    found: list[int | float] = []
    for name in plan.names:
        array = memory.get(name)
        absent = array is None or array.nbytes == 0
        found.append(numbers.get(name, 0 if absent else array.ctypes.data))
    return found


def given(op: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arrays of a call by name, and the other arguments."""
    arrays, options = arguments_of(op)
    return dict(zip(OPS[op].inputs, arrays, strict=False)), options


def plan_for(op: str, arrays: dict[str, Any]) -> cunorm.Plan:
    """The plan of a call with these arrays."""
    named = {f"{name}_dtype": arrays[name].dtype for name in ("gamma", "beta") if arrays.get(name) is not None}
    return cunorm.plan(op, **options_for(op), **{n: v for n, v in named.items() if n in OPS[op].takes})


@pytest.mark.parametrize("op", OPS)
def test_a_launch_writes_the_results_of_a_call(op: str) -> None:
    arrays, options = given(op)
    plan = plan_for(op, arrays)
    memory = memory_of(plan, arrays)
    numbers = {name: options[name] for name in plan.problem.numbers if name in options}
    plan.launch(values_of(plan, memory, **numbers))
    expected = getattr(cunorm, op)(**arrays, **options, tile=plan.tile)
    names = [name for name in OPS[op].results_with(plan.problem.extras) if name not in OPS[op].updated]
    for name, want in zip(names, tupled(expected), strict=True):
        assert memory[name].tobytes() == want.tobytes(), name


def test_masked_results_are_absent() -> None:
    arrays, _ = given("layer_norm_backward")
    options = options_for("layer_norm_backward") | {"output_mask": (False, True, False), "gamma_dtype": "float32"}
    plan = cunorm.plan("layer_norm_backward", **options)
    memory = memory_of(plan, arrays)
    assert [name for name in ("dx", "dgamma", "dbeta") if name in memory] == ["dgamma"]
    plan.launch(values_of(plan, memory))
    want = cunorm.layer_norm_backward(**arrays, normalized_shape=(3, 3), tile=plan.tile)[1]
    assert memory["dgamma"].tobytes() == want.tobytes()


@pytest.mark.parametrize("op", OPS)
def test_results_of_a_problem_without_elements_are_filled(op: str) -> None:
    options = {**options_for(op), "tile": None}
    plan = cunorm.plan(op, **{**options, "shape": (0, *options["shape"][1:])})
    assert plan.launches == ()
    memory = memory_of(plan, {name: np.full(8, OLD, np.float32) for name in OPS[op].updated})
    plan.launch(values_of(plan, memory))
    for name in plan.problem.outputs:
        if name in OPS[op].updated:
            assert (memory[name] == OLD).all()
        else:
            assert np.isnan(memory[name]).all() if "dy" not in OPS[op].inputs else (memory[name] == 0).all(), name


def test_launches_are_traced(tmp_path: Path) -> None:
    arrays, _ = given("group_norm")
    plan = plan_for("group_norm", arrays)
    values = values_of(plan, memory := memory_of(plan, arrays))
    with cunorm.trace(tmp_path / "trace.jsonl"):
        plan.launch(values)
        plan.launch(values)
    assert memory["y"].any()
    lines = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    assert [line["op"] for line in lines] == ["group_norm"] * 2
    assert sum(line["calls"] for line in lines) == 2


def wrong(plan: cunorm.Plan, memory: dict[str, Any], **changes: Any) -> list[int | float]:
    """The values of a launch with other values for some names."""
    values = values_of(plan, memory)
    for name, value in changes.items():
        values[plan.names.index(name)] = value
    return values


def test_wrong_values_are_refused() -> None:
    arrays, _ = given("group_norm_backward")
    options = {**options_for("group_norm_backward"), "tile": TILES["split"], "gamma_dtype": "float32"}
    plan = cunorm.plan("group_norm_backward", **options)
    memory = memory_of(plan, arrays)
    assert plan.workspace_nbytes > 0
    right = values_of(plan, memory)
    for values, sentence in (
        (right[:-1], rf"pointers: {len(right) - 1} values, expected {len(right)}: dy, x, "),
        ([*right, 0], rf"pointers: {len(right) + 1} values, expected {len(right)}: "),
        (wrong(plan, memory, mean=0), "pointers: mean is 0, expected its address$"),
        (wrong(plan, memory, dx=0), "pointers: dx is 0, expected its address$"),
        (wrong(plan, memory, beta=64), "pointers: beta is 64, expected 0, because the plan is for group_norm_backward"),
        (wrong(plan, memory, workspace=0), rf"pointers: workspace is 0, expected .* needs {plan.workspace_nbytes} byt"),
        (wrong(plan, memory, workspace=memory["workspace"].ctypes.data + 8), "pointers: workspace is not a multiple"),
    ):
        with pytest.raises(ValueError, match=f"^{sentence}"):
            plan.launch(values)
    for value in (memory["x"], "x", 1.5, None):
        with pytest.raises(TypeError, match=r"^pointers: x is .*, expected its address, an int$"):
            plan.launch(wrong(plan, memory, x=value))
    for values in (None, 3, iter(right), dict(enumerate(right)), {*right}, "x" * len(right)):
        with pytest.raises(TypeError, match=r"^pointers: .*, expected a sequence of dy, x, "):
            plan.launch(values)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^stream: 5, expected None: the CPU executor has no streams"):
        plan.launch(right, stream=5)
    assert (memory["dx"] == OLD).all()


@pytest.mark.parametrize("eps", [None, "1e-5", [1e-5]])
def test_a_number_that_is_none_is_named(eps: Any) -> None:
    arrays, _ = given("layer_norm")
    plan = cunorm.plan("layer_norm", **options_for("layer_norm"))
    values = wrong(plan, memory_of(plan, arrays), eps=eps)
    with pytest.raises(TypeError, match=r"^pointers: eps is .*, expected a number$"):
        plan.launch(values)


def test_the_cpu_executor_checks_the_bounds_of_a_launch() -> None:
    """The sizes follow from the plan: an array that ends too early is a fault, not a crash."""
    arrays, _ = given("layer_norm")
    plan = plan_for("layer_norm", arrays)
    values, call = values_of(plan, memory_of(plan, arrays)), plan._raw_call
    sizes = dict(zip(plan.names, call.sizes(values), strict=True))
    want = {"x": 1152, "gamma": 36, "beta": 36, "y": 1152, "mean": 128, "rstd": 128}
    assert {name: size for name, size in sizes.items() if size} == want


def test_sizes_of_strided_and_of_counted_arrays() -> None:
    gather = cunorm.plan("batch_norm_gather_stats", shape=(3, 8), dtype="float32", device="cpu")
    numbers = {"means_stride": 20, "invstds_stride": 8, "counts_stride": 5}
    values = [numbers.get(name, 16) for name in gather.names]
    sizes = dict(zip(gather.names, gather._raw_call.sizes(values), strict=True))
    assert (sizes["means"], sizes["invstds"], sizes["counts"]) == (48 * 4, 24 * 4, 11 * 8)
    plan = cunorm.plan(
        "batch_norm_backward_elemt", shape=(2, 8), dtype="float32", device="cpu", dtypes={"counts": "int32"}
    )
    values = [{"ranks": 4, "counts_stride": 3, "gamma": 0}.get(name, 16) for name in plan.names]
    assert plan._raw_call.sizes(values)[plan.names.index("counts")] == 10 * 4


# ---- dtypes of other arrays -----------------------------------------------------------------------------------------


def test_dtypes_of_sums_statistics_and_counts() -> None:
    plan = cunorm.plan(
        "batch_norm_backward_elemt",
        shape=(4, 8, 3, 3),
        dtype="bfloat16",
        device="cpu",
        dtypes={"mean": "bfloat16", "sum_dy": np.float64, "counts": np.dtype(np.int32)},
    )
    named = {name: plan.problem.dtype_of(name) for name in ("mean", "invstd", "sum_dy", "sum_dy_xmu", "counts")}
    assert named == {
        **dict.fromkeys(("mean", "invstd"), "bfloat16"),
        **dict.fromkeys(("sum_dy", "sum_dy_xmu"), "float64"),
        "counts": "int32",
    }
    assert not cunorm.plan("batch_norm_backward_elemt", shape=(2, 8), dtype="float32").problem.has("counts")
    reduce = cunorm.plan(
        "batch_norm_backward_reduce", shape=(2, 8), dtype="float32", dtypes={"dgamma": "float16", "sum_dy": "float32"}
    )
    assert dict(reduce.problem.others) == {
        "sum_dy_t": "float32", "sum_dy_xmu_t": "float32", "dgamma_t": "float16", "dbeta_t": "float32"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("dtypes", "error", "sentence"),
    [
        ({"counts": "int16"}, TypeError, r"dtypes\['counts'\]: 'int16', expected int32 or int64 or float32 or float64"),
        ({"counts": None}, TypeError, r"dtypes\['counts'\]: None, expected int32"),
        ({"mean": "float64"}, TypeError, r"dtypes\['mean'\]: 'float64', expected float32"),
        ({"x": "float32"}, ValueError, r"dtypes: 'x', expected mean or invstd or sum_dy or sum_dy_xmu or counts for"),
        ({"count": "int32"}, ValueError, "dtypes: 'count', expected mean or"),
        ([("counts", "int32")], TypeError, "dtypes: list, expected a mapping"),
        ("int32", TypeError, "dtypes: str, expected a mapping"),
    ],
)
def test_wrong_dtypes_are_refused(dtypes: Any, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=f"^{sentence}"):
        cunorm.plan("batch_norm_backward_elemt", shape=(2, 8), dtype="float32", dtypes=dtypes)


def test_dtypes_of_an_op_without_such_arrays() -> None:
    with pytest.raises(ValueError, match=r"^dtypes: 'mean', expected no name for layer_norm"):
        cunorm.plan("layer_norm", shape=(2, 8), dtype="float32", normalized_shape=8, dtypes={"mean": "float32"})


# ---- on a GPU -------------------------------------------------------------------------------------------------------


class Current:
    """A context that stands for a CuPy stream, and records the launches that were made while it was current."""

    def __init__(self, driver: Driver, address: int) -> None:
        self.driver, self.ptr, self.seen = driver, address, 0

    def __enter__(self) -> Current:
        self.before = len(self.driver.launches)
        return self

    def __exit__(self, *_: object) -> None:
        self.seen += len(self.driver.launches) - self.before


@pytest.mark.parametrize("device", [0, 1])
def test_a_launch_on_a_gpu_uses_the_stream_and_nothing_else(
    device: int, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An address of a stream becomes a CuPy stream once; nothing is allocated, nobody waits."""
    import cupy

    made: list[Current] = []

    def from_external(foreign: Any) -> Current:
        version, address = foreign.__cuda_stream__()
        assert version == 0
        made.append(Current(driver, address))
        return made[-1]

    monkeypatch.setattr(cupy.cuda, "Stream", type("Stream", (), {"from_external": from_external, "null": None}))
    plan = cunorm.plan("layer_norm", shape=(4, 8), dtype="float32", normalized_shape=8, device=device)
    values = [1e-5 if name == "eps" else 0x1000 if name in ("x", "y", "mean", "rstd") else 0 for name in plan.names]
    plan.launch(values)
    own = Current(driver, 9)
    for stream in (0x5EED, 0x5EED, own, 0):
        plan.launch(values, stream=stream)
    assert [one.ptr for one in made] == [0x5EED]
    assert (made[0].seen, own.seen, len(driver.launches)) == (2, 1, 5)
    assert all(launch["device"] == device for launch in driver.launches)
    assert driver.allocated == driver.synchronised == driver.sent == []
    for wrong_one in ("stream", True, 1.5):
        with pytest.raises(TypeError, match=r"^stream: "):
            plan.launch(values, stream=wrong_one)


def test_an_empty_problem_on_a_gpu_is_filled_on_the_stream(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    from cunorm.executors import gpu

    filled: list[tuple[int, ...]] = []
    monkeypatch.setattr(gpu.runtime, "memsetAsync", lambda *given: filled.append(given))
    plan = cunorm.plan("group_norm_backward", shape=(0, 8, 3), dtype="float32", num_groups=2, device=0)
    plan.launch([{"dgamma": 512, "dbeta": 1024}.get(name, 0) for name in plan.names])
    assert filled == [(512, 0, 32, 0), (1024, 0, 32, 0)]
    plan = cunorm.plan("batch_norm_stats", shape=(0, 8, 3), dtype="float64", device=0)
    plan.launch([{"mean": 512, "invstd": 1024}.get(name, 0) for name in plan.names])
    assert filled[2:] == [(512, 255, 64, 0), (1024, 255, 64, 0)]
