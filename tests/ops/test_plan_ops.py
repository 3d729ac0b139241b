"""cunorm.plan of every op: its description, its equality with the public function, and the calls of a GPU's driver."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import cunorm
from cunorm.core.devices import KNOWN
from cunorm.ops.registry import OPS
from tests.conftest import Executor
from tests.ops.batch_norm.test_batch_norm import tile_of as batch_tile
from tests.ops.layer_norm.test_layer_norm import tile_of as layer_tile
from tests.ops.rms_norm.test_rms_norm import tile_of as rms_tile
from tests.support.problems import (
    BATCH_OPS,
    SENTINEL,
    TILES,
    batch_arrays,
    forget_calls,
    group_arrays,
    instance_arrays,
    laid_out,
    layer_arrays,
    rms_arrays,
)

if TYPE_CHECKING:
    from tests.support.fake_gpu import Driver

STATS, ELEMT, REDUCE, INPUT = BATCH_OPS
GATHER = "batch_norm_gather_stats"
LAYER, LAYER_BACKWARD = "layer_norm", "layer_norm_backward"
RMS, RMS_BACKWARD = "rms_norm", "rms_norm_backward"
KINDS = {STATS: "stats", ELEMT: "elemt", REDUCE: "reduce", INPUT: "input"}
#: Options of cunorm.plan that are specific to each op.
TAKEN = {
    "group_norm": {"num_groups", "gamma_dtype", "beta_dtype", "data_format", "activation", "y_dtype"},
    "group_norm_backward": {"num_groups", "gamma_dtype", "beta_dtype", "output_mask", "data_format", "activation"},
    "instance_norm": {"gamma_dtype", "beta_dtype", "data_format", "y_dtype"},
    "instance_norm_backward": {"gamma_dtype", "output_mask", "data_format"},
    LAYER: {"normalized_shape", "gamma_dtype", "beta_dtype", "residual", "y_dtype"},
    LAYER_BACKWARD: {"normalized_shape", "gamma_dtype", "output_mask", "dh"},
    RMS: {"normalized_shape", "gamma_dtype", "residual", "y_dtype"},
    RMS_BACKWARD: {"normalized_shape", "gamma_dtype", "output_mask", "dh"},
    STATS: {"data_format"},
    GATHER: set(),
    ELEMT: {"gamma_dtype", "beta_dtype", "data_format", "y_dtype"},
    REDUCE: {"gamma_dtype", "output_mask", "data_format"},
    INPUT: {"gamma_dtype", "data_format"},
}
OTHERWISE = {
    "num_groups": 2,
    "normalized_shape": 8,
    "gamma_dtype": "float32",
    "beta_dtype": "float32",
    "output_mask": (True, False, True),
    "data_format": "NHWC",
    "activation": "silu",
    "residual": True,
    "dh": True,
    "y_dtype": "float32",
}
NEW = [op for op in OPS if not op.startswith("group")]


def tile_for(op: str, channels_last: bool = False) -> cunorm.Tile:
    if op.startswith(("group", "instance")):
        return TILES["block"]
    if op.startswith("layer"):
        return cunorm.Tile.of(layer_tile("block", "backward" if op == LAYER_BACKWARD else "forward"))
    if op.startswith("rms"):
        return cunorm.Tile.of(rms_tile("block", "backward" if op == RMS_BACKWARD else "forward"))
    if op == GATHER:
        return cunorm.Tile("column", threads=64)
    return cunorm.Tile.of(batch_tile(KINDS[op], "column" if channels_last else "block"))


def options_for(op: str) -> dict[str, Any]:
    """The arguments of cunorm.plan for a small problem of an op."""
    shape: tuple[int, ...] = (3, 8) if op == GATHER else (2, 8, 3, 3) if op.startswith("group") else (4, 8, 3, 3)
    own: dict[str, Any] = {"num_groups": 2} if "num_groups" in TAKEN[op] else {}
    if "normalized_shape" in TAKEN[op]:
        own = {"normalized_shape": (3, 3)}
    if op.startswith("rms"):  # with the tensor that it adds; LayerNorm is tested without one
        own |= dict.fromkeys(OPS[op].extras, True)
    return {"shape": shape, "dtype": "float32", "device": "cpu", "tile": tile_for(op), **own}


def arguments_of(op: str) -> tuple[list[Any], dict[str, Any]]:
    """The arrays of a call of that problem, and the other arguments of the public function."""
    if op.startswith("group"):
        g = group_arrays()
        given = [g.x, g.gamma, g.beta] if op == "group_norm" else [g.dy, g.x, g.mean, g.rstd, g.gamma]
        return given, {"num_groups": 2}
    if op.startswith("instance"):
        i = instance_arrays((4, 8, 3, 3))
        return [i.x, i.gamma, i.beta] if op == "instance_norm" else [i.dy, i.x, i.mean, i.rstd, i.gamma], {}
    if op.startswith("layer"):
        a = layer_arrays((4, 8, 3, 3))
        return [a.x, a.gamma, a.beta] if op == LAYER else [a.dy, a.x, a.mean, a.rstd, a.gamma], {
            "normalized_shape": (3, 3)
        }
    if op.startswith("rms"):
        r = rms_arrays((4, 8, 3, 3)).with_extras()
        return [getattr(r, name) for name in OPS[op].inputs], {"normalized_shape": (3, 3)}
    b = batch_arrays()
    if op == GATHER:
        return [np.stack([b.mean] * 3), np.stack([b.invstd] * 3), np.array([4, 0, 9])], {}
    given = b.given(op)
    count = {"count": given.pop("count")} if op == INPUT else {}
    return [*given.values()], count


def call(op: str, given: list[Any], options: dict[str, Any], **more: Any) -> Any:
    return getattr(cunorm, op)(**dict(zip(OPS[op].inputs, given, strict=False)), **options, **more)


def bits(executor: Executor, found: Any) -> list[bytes | None]:
    found = found if isinstance(found, tuple) else (found,)
    return [None if array is None else executor.get(array).tobytes() for array in found]


def named(op: str, options: dict[str, Any]) -> dict[str, Any]:
    """Those options of the public function that a plan takes when it is called."""
    return {name: value for name, value in options.items() if name == "count"}


# ---- descriptions and errors of plans -------------------------------------------------------------------------------


def test_every_op_is_in_the_table_of_options() -> None:
    assert set(TAKEN) == set(OPS)
    assert {name: set(op.takes) for name, op in OPS.items()} == TAKEN


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("device", [None, "A100"])
def test_explain_names_launches_device_and_origin_of_the_tile(op: str, device: str | None) -> None:
    for tile in (None, tile_for(op)):
        made = cunorm.plan(op, **{**options_for(op), "device": device or "cpu", "tile": tile})
        text = made.explain()
        assert made.strategy is not None
        assert made.tile is not None
        assert op in text
        assert made.strategy.name in text
        assert KNOWN[device or "H200"].name in text
        assert all(f"{name}={value}" in text for name, value in made.tile.as_dict().items())
        assert ("cost model" if tile is None else "the tile= argument") in text
        assert f"{made.workspace_nbytes} bytes" in text
        assert "cpu executor: exact, not fast" in text
        for launch in made.launches:
            assert f"{launch.entry}: {launch.grid} blocks of {launch.threads} threads" in text


@pytest.mark.parametrize("op", NEW)
def test_explain_of_a_plan_without_launches(op: str) -> None:
    made = cunorm.plan(op, **{**options_for(op), "shape": (0, *options_for(op)["shape"][1:])})
    assert (made.launches, made.workspace_nbytes, made.strategy) == ((), 0, None)
    assert "none: there are no elements" in made.explain()
    if "output_mask" in TAKEN[op]:
        made = cunorm.plan(op, **options_for(op), output_mask=(False,) * len(OPS[op].flags))
        assert made.launches == ()
        assert "none: no output is wanted" in made.explain()


@pytest.mark.parametrize("op", OPS)
def test_an_option_of_another_op_is_refused_by_name(op: str) -> None:
    for name in set(OTHERWISE) - TAKEN[op]:
        with pytest.raises(ValueError, match=rf"^{name}: .*{op}, which does not take one"):
            cunorm.plan(op, **{**options_for(op), name: OTHERWISE[name]})


@pytest.mark.parametrize(
    ("op", "name", "value", "errors"),
    [
        *[("layer_norm", "normalized_shape", value, TypeError) for value in (None, True, 3.0, "33", (3, 3.0), (True,))],
        *[("layer_norm", "normalized_shape", value, ValueError) for value in ((), 0, -3, (8, 3), 9, (3, 0), [])],
        *[("layer_norm_backward", "output_mask", value, EITHER) for value in ((1, 1, 1), None, (True,), "yes")
          for EITHER in ((TypeError, ValueError),)],
        ("layer_norm", "shape", (), ValueError),
        ("layer_norm", "shape", (1,) * 9, ValueError),
        ("layer_norm", "gamma_dtype", "float64", TypeError),
        ("layer_norm", "beta_dtype", "int8", TypeError),
        ("batch_norm_elemt", "beta_dtype", "float64", TypeError),
        ("batch_norm_backward_reduce", "gamma_dtype", "float64", TypeError),
        ("batch_norm_backward_reduce", "output_mask", (True, True, True, True), ValueError),
        ("batch_norm_backward_elemt", "gamma_dtype", "float64", TypeError),
        *[(op, "shape", value, ValueError) for op in (STATS, ELEMT, REDUCE, INPUT) for value in ((8,), (1,) * 9)],
        *[(op, "data_format", "NC", ValueError) for op in (STATS, ELEMT, REDUCE, INPUT)],
        *[(GATHER, "shape", value, ValueError) for value in ((8,), (3, 8, 1), (3, 8, 2, 2))],
        *[(op, "dtype", value, TypeError) for op in (STATS, GATHER, "layer_norm") for value in ("int8", None)],
        *[(op, "tile", {"strategy": "warp", "threads": 64}, ValueError) for op in (STATS, GATHER)],
        *[(op, "shape", (10**30, 8), ValueError) for op in (STATS, GATHER)],
    ],
)  # fmt: skip
def test_wrong_arguments_of_plan(op: str, name: str, value: Any, errors: Any) -> None:
    with pytest.raises(errors, match=rf"^{name}\b"):
        cunorm.plan(op, **{**options_for(op), "tile": None, name: value})


# ---- calling a plan -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
def test_a_plan_computes_the_same_as_the_public_function(op: str, executor: Executor) -> None:
    made = cunorm.plan(op, **{**options_for(op), "device": "cpu" if executor.name == "cpu" else 0})
    given, options = arguments_of(op)
    there = [executor.put(array) for array in given]
    alone = bits(executor, call(op, there, options, tile=tile_for(op)))
    for _ in range(2):
        found = made(*there, **named(op, options))
        assert bits(executor, found) == alone
    workspace = executor.xp.full(max(16, made.workspace_nbytes), 0xFF, np.uint8)
    for array in found if isinstance(found, tuple) else (found,):
        array.fill(SENTINEL)
    again = made(*there, **named(op, options), out=found, workspace=workspace)
    assert again is found or all(came is array for came, array in zip(again, found, strict=True))
    assert bits(executor, again) == alone
    if "gamma" in OPS[op].inputs:  # a plan without gamma_dtype accepts calls with or without gamma
        there[[*OPS[op].inputs].index("gamma")] = None
        assert bits(executor, made(*there, **named(op, options))) == bits(
            executor, call(op, there, options, tile=tile_for(op))
        )


@pytest.mark.parametrize("op", BATCH_OPS)
def test_a_plan_for_channels_last_accepts_only_such_strides(op: str, executor: Executor) -> None:
    device = "cpu" if executor.name == "cpu" else 0
    tile = tile_for(op, channels_last=True)
    made = cunorm.plan(op, shape=(4, 3, 3, 8), dtype="float32", data_format="NHWC", device=device, tile=tile)
    given, options = arguments_of(op)
    there = [
        laid_out(executor.xp, array, "channels last") if array.ndim > 1 else executor.put(array) for array in given
    ]
    found = made(*there, **named(op, options))
    assert bits(executor, found) == bits(executor, call(op, there, options, tile=tile))
    first = [executor.put(array) for array in given]
    with pytest.raises(ValueError, match=r"^x: the plan is for .*NHWC.*, the arrays are .*NCHW"):
        made(*first, **named(op, options))
    planes = cunorm.plan(op, **{**options_for(op), "device": device})
    with pytest.raises(ValueError, match=r"^x: the plan is for .*NCHW.*, the arrays are .*NHWC"):
        planes(*there, **named(op, options))


def test_numbers_in_the_call_of_a_plan(executor: Executor) -> None:
    device = "cpu" if executor.name == "cpu" else 0
    for op in (LAYER, STATS, GATHER):
        made = cunorm.plan(op, **{**options_for(op), "device": device})
        there = [executor.put(array) for array in arguments_of(op)[0]]
        options = arguments_of(op)[1]
        for eps in (0.5, 0, np.float32(0.25)):
            assert bits(executor, made(*there, eps=eps)) == bits(
                executor, call(op, there, options, eps=eps, tile=tile_for(op))
            )
        for wrong in (-1, "x", True, None, float("nan")):
            with pytest.raises((TypeError, ValueError), match=r"^eps"):
                made(*there, eps=wrong)
    made = cunorm.plan(INPUT, **{**options_for(INPUT), "device": device})
    there = [executor.put(array) for array in arguments_of(INPUT)[0]]
    for _ in range(2):
        for count in (1, 36.5, np.int64(7)):
            assert bits(executor, made(*there, count=count)) == bits(
                executor, call(INPUT, there, {"count": count}, tile=tile_for(INPUT))
            )
    with pytest.raises(TypeError, match="count"):
        made(*there)
    for wrong in (-1, True, "3", None, float("inf")):
        with pytest.raises((TypeError, ValueError), match=r"^count"):
            made(*there, count=wrong)


def test_a_gather_plan_takes_running_statistics_and_momentum(executor: Executor) -> None:
    made = cunorm.plan(GATHER, **{**options_for(GATHER), "device": "cpu" if executor.name == "cpu" else 0})
    given, _ = arguments_of(GATHER)
    there, results = [executor.put(array) for array in given], []
    for function in (made, cunorm.batch_norm_gather_stats):
        tile = {} if function is made else {"tile": tile_for(GATHER)}
        for dtype, counts in ((np.float32, there[2]), (np.float64, [4, 0, 9])):
            running = {name: executor.xp.full(8, 3, dtype) for name in ("running_mean", "running_var")}
            for _ in range(2):
                found = function(*there[:2], counts, momentum=0.5, eps=0.25, **running, **tile)  # type: ignore[operator]
                assert len(found) == 2
            results.append([*bits(executor, found), *bits(executor, tuple(running.values()))])
            alone = executor.xp.full(8, 3, dtype)
            function(*there[:2], counts, running_var=alone, momentum=0.5, eps=0.25, **tile)  # type: ignore[operator]
            results.append(bits(executor, alone))
    assert results[: len(results) // 2] == results[len(results) // 2 :]
    kept = executor.xp.full(8, 3, np.float32)
    for name, value in (
        ("momentum", 2),
        ("momentum", True),
        ("counts", [0, -1, 0]),
        ("running_var", [1.0]),
        ("out", []),
    ):
        options = {"counts": there[2], "running_mean": kept, name: value}
        with pytest.raises((TypeError, ValueError), match=rf"^{name}"):
            made(*there[:2], **options)
        assert bool((kept == 3).all())


@pytest.mark.parametrize("op", [ELEMT, INPUT])
def test_out_of_a_plan_with_one_result_is_one_array(op: str) -> None:
    made = cunorm.plan(op, **options_for(op))
    given, options = arguments_of(op)
    x = given[0].copy()
    alone = call(op, given, options, tile=tile_for(op))
    assert made(x, *given[1:], **named(op, options), out=x) is x  # in place of x in a forward, of dy in a gradient
    assert x.tobytes() == alone.tobytes()
    for wrong in ((x,), [x], "out", x[:1], x.astype(np.float64), given[-1]):
        with pytest.raises((TypeError, ValueError), match=r"^out"):
            made(*given, **named(op, options), out=wrong)


@pytest.mark.parametrize(("op", "change"), [
    (LAYER, lambda x: x.reshape(4, 4, 2, 3, 3)[:, :2]),
    *[(op, lambda x: x[:2]) for op in (LAYER, STATS, ELEMT)],
    *[(op, lambda x: x.astype(np.float64)) for op in (LAYER, STATS)],
    *[(op, lambda x: x.tolist()) for op in (LAYER, STATS, ELEMT)],
    *[(op, lambda x: None) for op in (LAYER, STATS, ELEMT)],
    (STATS, lambda x: x[:, :4]),
    (STATS, lambda x: x.reshape(4, 8, 9)[..., :4]),
])  # fmt: skip
@pytest.mark.parametrize("state", ["cold", "warm"])
def test_wrong_arrays_for_a_plan(op: str, change: Callable[[Any], Any], state: str, monkeypatch: Any) -> None:
    made, (given, _) = cunorm.plan(op, **options_for(op)), arguments_of(op)
    forget_calls()
    if state == "warm":
        made(*given)
    monkeypatch.setattr("cunorm.executors.cpu.executor.launch", lambda *_: pytest.fail("launched"))
    with pytest.raises((TypeError, ValueError), match=r"^(x|gamma)\b"):
        made(change(given[0]), *given[1:])


def test_the_sums_of_a_plan_may_be_of_any_dtype(executor: Executor) -> None:
    made = cunorm.plan(REDUCE, **{**options_for(REDUCE), "device": "cpu" if executor.name == "cpu" else 0})
    there = [executor.put(array) for array in arguments_of(REDUCE)[0]]
    packed = executor.xp.zeros((2, 8), np.float64)
    made(*there, out=(packed[0], packed[1], None, None))
    other = executor.xp.zeros((2, 8), np.float64)
    cunorm.batch_norm_backward_reduce(*there, out=(other[0], other[1], None, None), tile=tile_for(REDUCE))
    assert bits(executor, packed) == bits(executor, other)
    masked = cunorm.plan(
        REDUCE, **{**options_for(REDUCE), "device": "cpu" if executor.name == "cpu" else 0},
        output_mask=(False, True, False),
    )  # fmt: skip
    for _ in range(2):  # the same arrays with two plans
        assert [came is not None for came in masked(*there)] == [False, False, True, False]
        assert all(came is not None for came in made(*there))


# ---- a GPU's driver -------------------------------------------------------------------------------------------------


def on_gpu(driver: Driver, op: str, device: int = 0) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any], Any]:
    """Fake GPU arrays of a call: inputs by name, results by name, the options of the function, and a workspace."""
    given, options = arguments_of(op)
    inputs = {
        name: driver.array(array.shape, array.dtype, device) for name, array in zip(OPS[op].inputs, given, strict=False)
    }
    shapes = dict.fromkeys(("y", "dx", "h"), (4, 8, 3, 3))
    small = {
        **dict.fromkeys((LAYER, RMS), (4, 8, 1, 1)),
        **dict.fromkeys((LAYER_BACKWARD, RMS_BACKWARD), (3, 3)),
        "instance_norm": (4, 8),
    }.get(op, (8,))
    names = OPS[op].results_with(inputs)
    results = {name: driver.array(shapes.get(name, small), np.float32, device) for name in names}
    return inputs, results, options, driver.array((4096,), np.uint8, device)


def send(op: str, inputs: dict[str, Any], results: dict[str, Any], options: dict[str, Any], workspace: Any) -> Any:
    """Call the public function with all arrays passed."""
    results = dict(results)
    running = {name: results.pop(name) for name in OPS[op].updated}
    out = tuple(results.values())
    more = {"out": out if len(OPS[op].results) > 1 else out[0], "tile": tile_for(op), "workspace": workspace}
    return getattr(cunorm, op)(**inputs, **running, **options, **more)


@pytest.mark.parametrize("op", NEW)
def test_arguments_reach_the_kernels_in_order(op: str, driver: Driver) -> None:
    from tests.support.fake_gpu import expected

    inputs, results, options, workspace = on_gpu(driver, op, 1)
    numbers = {name: number.default for name, number in OPS[op].numbers.items()}
    numbers |= {name: float(value) for name, value in options.items() if name == "count"}
    absent = dict.fromkeys(OPS[op].arrays, 0)
    for _ in range(2):  # the second call is found in the cache
        driver.launches.clear()
        send(op, inputs, results, options, workspace)
        plan = cunorm.plan(op, **{**options_for(op), "device": 1})
        numbers |= {name: plan.problem.numbers[name] for name in OPS[op].measures}
        pointers = {name: a.data.ptr for name, a in {**inputs, **results, "workspace": workspace}.items()}
        assert [launch["args"] for launch in driver.launches] == expected(plan, {**absent, **pointers, **numbers})
        for launch, planned in zip(driver.launches, plan.launches, strict=True):
            assert all(type(value) in (int, float) for value in launch["args"])
            assert (launch["entry"], launch["device"]) == (planned.entry, 1)
            assert (launch["grid"], launch["block"]) == ((planned.grid,), (planned.threads,))
            assert launch["shared_mem"] == planned.shared_bytes
    assert driver.allocated == driver.synchronised == driver.sent == []
    first = driver.launches[0]["args"]
    read = [array.data.ptr for name, array in inputs.items() if not (op == REDUCE and name == "gamma")]
    assert first[: len(read)] == tuple(read)
    assert driver.current == 0


@pytest.mark.parametrize("op", NEW)
def test_a_call_that_allocates_is_refused_during_graph_capture(op: str, driver: Driver) -> None:
    inputs, results, options, workspace = on_gpu(driver, op)
    send(op, inputs, results, options, workspace)
    driver.capturing = True
    driver.launches.clear()
    calls: list[Callable[[], Any]] = [
        lambda: getattr(cunorm, op)(**inputs, **options, tile=tile_for(op)),
        lambda: send(op, {**inputs, name: strided}, results, options, workspace),
    ]
    name = next(iter(OPS[op].inputs))
    strided = driver.array((*inputs[name].shape[:-1], 2 * inputs[name].shape[-1]))[..., ::2]
    if cunorm.plan(op, **{**options_for(op), "device": 0}).workspace_nbytes:
        calls.append(lambda: send(op, inputs, results, options, None))
    for refused in calls:
        with pytest.raises(ValueError, match=r"^out: .*captured"):
            refused()
    assert driver.launches == driver.allocated == []
    send(op, inputs, results, options, workspace)
    assert len(driver.launches) > 0
    assert driver.allocated == []


def test_counts_on_a_gpu_are_not_read(driver: Driver) -> None:
    """Reading them would require waiting for the GPU. Here they do not even exist."""
    inputs, results, options, workspace = on_gpu(driver, GATHER)
    for dtype in (np.int32, np.int64, np.float32, np.float64):
        counts = driver.array((3,), dtype)
        driver.launches.clear()
        send(GATHER, {**inputs, "counts": counts}, results, options, workspace)
        assert driver.launches[0]["args"][2] == counts.data.ptr
    assert driver.allocated == driver.synchronised == driver.sent == []
    for wrong in (driver.array((4,), np.int64), driver.array((3,), np.float16), driver.array((3, 1), np.int64)):
        with pytest.raises((TypeError, ValueError), match=r"^counts"):
            send(GATHER, {**inputs, "counts": wrong}, results, options, workspace)


@pytest.mark.parametrize("device", [0, 1])
def test_host_counts_are_checked_and_sent(device: int, driver: Driver) -> None:
    inputs, results, _, _ = on_gpu(driver, GATHER, device)
    plan = cunorm.plan(GATHER, **{**options_for(GATHER), "device": device})
    out, running = tuple(results.values())[:2], dict(list(results.items())[2:])
    for counts in ([4, 0, 9], (4.0, 0, 9), np.array([4, 0, 9], np.int32)):
        for function in (cunorm.batch_norm_gather_stats, plan):
            driver.launches.clear()
            driver.sent.clear()
            driver.allocated.clear()
            function(inputs["means"], inputs["invstds"], counts, out=out, **running)  # type: ignore[operator]
            ((_, _, where),) = driver.allocated  # only the counts, on the GPU of the means
            assert where == device
            assert driver.sent[0].tolist() == [4, 0, 9]
            assert driver.launches[0]["args"][3:7] == tuple(array.data.ptr for array in results.values())
    assert driver.synchronised == []
    assert driver.current == 0


@pytest.mark.parametrize(("name", "value"), [
    *[("counts", value) for value in ([4, -1, 9], [4, 9], ["4", 0, 9], [True, 0, 9], [4, float("nan"), 9])],
    *[("counts", np.array(value)) for value in ([0.0, -1.0, 0.0], [[4], [0], [9]], [4 + 0j, 0, 9], [True] * 3)],
    *[("momentum", value) for value in (2, -1, None, "x", True)],
    *[("eps", value) for value in (-1, None, "x")],
    *[("invstds", value) for value in (None, [1.0], np.ones((3, 8), np.float32))],
    *[("running_mean", value) for value in ([1.0] * 8, np.ones(8, np.float32), 1.0)],
    *[("running_var", value) for value in ([1.0] * 8, np.ones(8, np.float32))],
    ("out", [None, None]),
    ("out", (None, np.ones(8, np.float32))),
    ("out", (None, None, None)),
])  # fmt: skip
def test_wrong_arguments_are_refused_before_host_counts_are_sent(name: str, value: Any, driver: Driver) -> None:
    inputs, results, _, _ = on_gpu(driver, GATHER)
    given = {**inputs, "counts": [4, 0, 9], "running_mean": results["running_mean"], "out": None, name: value}
    plan = cunorm.plan(GATHER, **{**options_for(GATHER), "device": 0})
    for function in (cunorm.batch_norm_gather_stats, plan):
        with pytest.raises((TypeError, ValueError)) as caught:
            function(**given)  # type: ignore[operator]
        assert re.match(rf"{name}\b", str(caught.value)), caught.value
    assert driver.launches == driver.sent == driver.allocated == []


def test_host_counts_are_refused_during_graph_capture(driver: Driver) -> None:
    inputs, results, options, workspace = on_gpu(driver, GATHER)
    driver.capturing = True
    with pytest.raises(ValueError, match=r"^counts: .*captured.*keep it alive"):
        send(GATHER, {**inputs, "counts": [4, 0, 9]}, results, options, workspace)
    assert driver.launches == driver.sent == []


def test_without_ranks_running_statistics_do_not_change(driver: Driver) -> None:
    """On a GPU, no ranks are equivalent to counts of 0: results are NaN, and running statistics do not change."""
    import cupy

    filled: list[tuple[int, float]] = []

    class Noted(cupy.ndarray):  # type: ignore[misc]
        def fill(self, value: float) -> None:
            filled.append((self.data.ptr, value))

    def noted(shape: tuple[int, ...]) -> Any:
        plain = driver.array(shape)
        return Noted(shape, np.float32, plain.data)

    out, running = (noted((8,)), noted((8,))), noted((8,))
    nothing = driver.array((0, 8))
    cunorm.batch_norm_gather_stats(nothing, nothing, driver.array((0,), np.int64), running_mean=running, out=out)
    assert [pointer for pointer, _ in filled] == [array.data.ptr for array in out]
    assert np.isnan([value for _, value in filled]).all()


@pytest.mark.parametrize("count", [(), (1,), (3,)])
def test_counts_on_a_gpu_are_passed_to_the_kernel_and_not_read(count: tuple[int, ...], driver: Driver) -> None:
    """Reading them would require waiting for the GPU."""
    inputs, results, _, workspace = on_gpu(driver, INPUT)
    counts = driver.array(count, np.int64)
    send(INPUT, inputs, results, {"count": counts}, workspace)
    (launch,) = driver.launches
    assert launch["args"][-4:] == (0.0, counts.data.ptr, *(count or (1,)), 1)
    assert driver.synchronised == driver.sent == driver.allocated == []


def test_counts_in_host_memory_are_added_for_a_gpu(driver: Driver) -> None:
    inputs, results, _, workspace = on_gpu(driver, INPUT)
    for counts in ([30, 6], np.array([30, 6]), np.array(36.0)):
        driver.launches.clear()
        send(INPUT, inputs, results, {"count": counts}, workspace)
        assert driver.launches[0]["args"][-4:] == (36.0, 0, 0, 0)
    assert driver.synchronised == driver.sent == driver.allocated == []
