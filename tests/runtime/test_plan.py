"""`cunorm.plan`, calls of plans, and the sources of a plan's tile."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import itertools
import pickle
import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cunorm
from cunorm import Tile
from cunorm.core.devices import KNOWN, known
from cunorm.ops import registry
from cunorm.ops.registry import OPS as ALL_OPS
from cunorm.runtime.op import Op
from tests.conftest import Executor
from tests.support.problems import TILES, GroupArrays, fake_cupy, forget_calls, group_arrays, norm_problem

OPS = ("group_norm", "group_norm_backward")
MASKED = (False, True, True)
CUPY = importlib.util.find_spec("cupy") is not None


def plan(op: str = OPS[1], **changes: Any) -> cunorm.Plan:
    options = {"shape": (2, 8, 3, 3), "dtype": "float32", "num_groups": 2, "device": "cpu", **changes}
    return cunorm.plan(op, **options)


def call(plan: cunorm.Plan, a: GroupArrays, executor: Executor, **options: Any) -> tuple[Any, ...]:
    put = executor.put
    if plan.problem.op == OPS[0]:
        return plan(put(a.x), put(a.gamma), put(a.beta), **options)
    return plan(put(a.dy), put(a.x), put(a.mean), put(a.rstd), put(a.gamma), **options)


def check(plan: cunorm.Plan, a: GroupArrays, found: tuple[Any, ...], executor: Executor) -> None:
    (a.check_forward if plan.problem.op == OPS[0] else a.check_backward)(*map(executor.get, found))


# ---- the description of a plan --------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
def test_explain_names_problem_device_tile_and_launches(op: str) -> None:
    made = plan(op, device="A100", dtype="bfloat16", shape=(2, 320, 64, 64), num_groups=32, gamma_dtype="bfloat16")
    text = made.explain()
    assert made.strategy is not None
    assert made.tile is not None
    for part in (
        op,
        "bfloat16",
        "NCHW",
        "N=2",
        "C=320",
        "HxW=4096",
        "group=32",
        made.strategy.name,
        KNOWN["A100"].name,
    ):
        assert part in text
    for name, value in made.tile.as_dict().items():
        assert f"{name}={value}" in text
    assert "cost model" in text
    assert "cpu executor: exact, not fast" in text
    assert f"{made.workspace_nbytes} bytes" in text
    for launch in made.launches:
        assert f"{launch.entry}: {launch.grid} blocks of {launch.threads} threads" in text


def test_explain_of_a_plan_with_nothing_to_do() -> None:
    for made in (plan(shape=(0, 8, 3)), plan(shape=(2, 8, 0)), plan(output_mask=(False, False, False))):
        assert made.launches == ()
        assert made.workspace_nbytes == 0
        assert made.strategy is None
        assert "none" in made.explain()


def test_an_explicit_tile_replaces_the_default() -> None:
    default = plan()
    for tile in (TILES["block"], TILES["split"], TILES["block"].as_dict() | {"strategy": "block"}):
        made = plan(tile=tile)
        assert made.tile == Tile.of(tile)
        assert "the tile= argument" in made.explain()
        assert "cost model" not in made.explain()
    assert default.tile is not None
    assert default.tile != TILES["block"]
    with pytest.raises(cunorm.UnsupportedTile, match=r"^tile: warp"):
        plan(tile=Tile("warp", threads=128, lanes=1, packs_per_thread=1, samples_per_team=1))


def test_workspace_is_two_accumulators_for_each_partial_sum() -> None:
    assert plan(tile=TILES["block"]).workspace_nbytes == 2 * 8 * 2 * 4
    assert plan(tile=TILES["block"], dtype="float64").workspace_nbytes == 2 * 8 * 2 * 8
    assert plan(tile=TILES["block"], output_mask=(True, False, False)).workspace_nbytes == 0
    assert plan(tile=TILES["split"], shape=(2, 8, 9, 9)).workspace_nbytes == 2 * 8 * 6 * 2 * 4
    assert plan(OPS[0], tile=TILES["block"]).workspace_nbytes == 0


@pytest.mark.parametrize("device", KNOWN)
def test_upper_bound_of_the_workspace(device: str) -> None:
    for op in OPS:
        for dtype, layout in (("bfloat16", "NCHW"), ("float64", "NHWC"), ("float32", "NHWC")):
            for N, C, HxW, group in ((3, 12, 50, 4), (64, 64, 1, 8), (1, 33, 3000, 1)):
                problem = norm_problem(op, dtype, layout, N, C, HxW, group, dtype)
                for strategy in ALL_OPS[problem.op].strategies.values():
                    for tile in strategy.tiles():
                        if strategy.refuses(problem, tile, known(device)) is None:
                            chunks = -(-HxW // tile.chunk) if "chunk" in tile.as_dict() else 1
                            moments = 1 if "backward" in op else 2  # pairs of sums per part
                            most = N * C * chunks * moments * 2 * problem.sum_itemsize
                            if strategy.name == "grid":  # rows of sums; counters in cache lines of their own
                                kept = tile.as_dict()["keep"] == "shared"  # sums of groups instead of the rows
                                rows = N * group * chunks if kept else N * C
                                most += rows * 2 * problem.sum_itemsize + 2 * 128 + 4 * N * group + 16
                            assert strategy.of(problem, tile).workspace <= most


# ---- wrong arguments of plan ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "errors"),
    [
        ("op", "weight_norm", ValueError),
        ("op", None, (TypeError, ValueError)),
        ("op", ["group_norm"], (TypeError, ValueError)),
        ("shape", 5, TypeError),
        ("shape", None, TypeError),
        ("shape", "abc", TypeError),
        ("shape", (2, 8.0), TypeError),
        ("shape", (2, True), TypeError),
        ("shape", (2, -8), ValueError),
        ("shape", (8,), ValueError),
        ("shape", (), ValueError),
        ("shape", (2, 8, 1, 1, 1, 1, 1, 1, 1), ValueError),
        ("dtype", "int8", TypeError),
        ("dtype", "float33", TypeError),
        ("dtype", None, TypeError),
        ("dtype", {}, TypeError),
        ("dtype", np.int32, TypeError),
        ("dtype", ">f4", TypeError),
        ("num_groups", 3, ValueError),
        ("num_groups", 0, ValueError),
        ("num_groups", 2.0, TypeError),
        ("num_groups", True, TypeError),
        ("num_groups", None, TypeError),
        ("normalized_shape", 3, ValueError),
        ("gamma_dtype", "int8", TypeError),
        ("gamma_dtype", "float64", TypeError),
        ("beta_dtype", "float64", TypeError),
        ("output_mask", (True, True), ValueError),
        ("output_mask", (1, 1, 1), (TypeError, ValueError)),
        ("output_mask", None, (TypeError, ValueError)),
        ("data_format", "NC", ValueError),
        ("data_format", None, (TypeError, ValueError)),
        ("activation", "relu", ValueError),
        ("device", "B9000", ValueError),
        ("device", "", ValueError),
        ("device", 1.5, TypeError),
        ("device", True, TypeError),
        ("device", ["cpu"], TypeError),
        ("tile", "block", TypeError),
        ("tile", {}, ValueError),
        ("tile", {"strategy": "nope", "threads": 32}, ValueError),
        ("tile", {"strategy": "block", "threads": 64}, ValueError),
        (
            "tile",
            {"strategy": "block", "threads": 33, "groups": 1, "stages": 2, "load": "cp_async", "packs_per_thread": 1},
            cunorm.UnsupportedTile,
        ),
        ("tile", {"strategy": "block", 3: 4}, (TypeError, ValueError)),
    ],
)
def test_wrong_arguments_of_plan_are_refused(name: str, value: object, errors: Any) -> None:
    options = {"op": OPS[1], name: value}
    with pytest.raises(errors, match=rf"^{name}\b"):
        plan(**options)


def test_a_gpu_ordinal_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cunorm.ops.registry.gpu_present", lambda: False)
    for ordinal in (0, 3, -1):
        with pytest.raises(ValueError, match=rf"^device: GPU {ordinal}\b.*cunorm doctor"):
            plan(device=ordinal)
    assert plan(device=None).place.kind == "cpu"  # without a GPU the CPU executor is used


def test_a_missing_cupy_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    real = registry.executor

    def executor(kind: str) -> Any:
        if kind == "gpu":
            raise ImportError("no CuPy")
        return real(kind)

    monkeypatch.setattr(registry, "executor", executor)
    assert registry.gpu_present() is False
    assert plan(device=None).place.kind == "cpu"


def test_devices_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("A100", "a100", "H200"):
        assert plan(device=name).place.device is known(name)
    assert plan(device="cpu").place.device is known("H200")
    monkeypatch.setenv("CUNORM_CPU_DEVICE", "A100")
    assert plan(device="cpu").place.device is known("A100")
    # Shared memory per block is one limit of the device that a legal tile respects: 227 KB (H200), 163 KB (A100).
    large = {
        "shape": (1, 1, 45000),
        "num_groups": 1,
        "tile": Tile("block", threads=64, groups=1, stages=2, load="cp_async", packs_per_thread=1),
        "dtype": "float32",
    }
    assert plan(OPS[0], **large, device="H200").launches
    with pytest.raises(cunorm.UnsupportedTile, match="A100"):
        plan(OPS[0], **large, device="A100")


def test_the_simulated_device_is_not_cached_with_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    x, tile = (
        np.ones((1, 1, 45000), np.float32),
        Tile("block", threads=64, groups=1, stages=2, load="cp_async", packs_per_thread=1),
    )
    cunorm.group_norm(x, 1, tile=tile)
    monkeypatch.setenv("CUNORM_CPU_DEVICE", "A100")
    with pytest.raises(cunorm.UnsupportedTile, match="A100"):
        cunorm.group_norm(x, 1, tile=tile)
    monkeypatch.setenv("CUNORM_CPU_DEVICE", "B9000")
    with pytest.raises(ValueError, match="B9000"):
        cunorm.group_norm(x, 1, tile=tile)


# ---- calling a plan -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("data_format", ["NCHW", "NHWC"])
def test_a_plan_runs(op: str, data_format: str, executor: Executor) -> None:
    shape = (2, 8, 3, 3) if data_format == "NCHW" else (2, 3, 3, 8)
    a = group_arrays(shape, data_format=data_format)
    device = "cpu" if executor.name == "cpu" else 0
    for gamma_dtype in (None, "float32"):
        options = {"beta_dtype": gamma_dtype} if op == OPS[0] else {}
        made = plan(
            op,
            shape=shape,
            data_format=data_format,
            gamma_dtype=gamma_dtype,
            tile=TILES["block"],
            device=device,
            **options,
        )
        for _ in range(2):
            found = call(made, a, executor)
            check(made, a, found, executor)
        workspace = executor.xp.full(max(1, made.workspace_nbytes), 0xFF, np.uint8)
        again = call(made, a, executor, out=found, workspace=workspace)
        assert all(came is given for came, given in zip(again, found, strict=True))
        check(made, a, again, executor)


def test_a_plan_with_a_mask(executor: Executor) -> None:
    made = plan(output_mask=MASKED, tile=TILES["block"], device="cpu" if executor.name == "cpu" else 0)
    a = group_arrays()
    dx, *others = call(made, a, executor)
    assert dx is None
    a.check_backward(None, *map(executor.get, others))


def test_a_plan_takes_statistics_of_the_dtype_of_x() -> None:
    a = group_arrays(dtype="float16")
    a.mean, a.rstd = a.mean.astype(np.float16), a.rstd.astype(np.float16)
    made = plan(dtype="float16", gamma_dtype="float16", tile=TILES["block"])
    made(a.dy, a.x, a.mean, a.rstd, a.gamma)


@pytest.mark.parametrize("state", ["cold", "warm"])
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("x", lambda a: a.x.reshape(2, 8, 9, 1).repeat(2, axis=3)),
        ("x", lambda a: a.x[:1]),
        ("x", lambda a: a.x[:, :4]),
        ("x", lambda a: a.x.astype(np.float64)),
        ("x", lambda a: a.x.astype(np.float16)),
        ("x", lambda a: a.x.transpose(0, 2, 3, 1).copy().transpose(0, 3, 1, 2)),  # channels last in memory
        ("x", lambda a: a.x.tolist()),
        ("x", lambda a: None),
        ("gamma", lambda a: a.gamma[:4]),
        ("gamma", lambda a: a.gamma.astype(np.float64)),
        ("gamma", lambda a: [1.0] * 8),
    ],
)
@pytest.mark.parametrize("op", OPS)
def test_arrays_that_do_not_match_a_plan_are_refused(
    op: str, name: str, change: Callable[[GroupArrays], Any], state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, a = plan(op, tile=TILES["block"]), group_arrays()
    forget_calls()
    if state == "warm":
        call(made, a, Executor("cpu"))
    setattr(a, name, value := change(a))
    if name == "x" and isinstance(value, np.ndarray) and op == OPS[1]:
        a.dy = value
        rest = (2, value.shape[1]) if value.ndim > 1 else (2, 2)
        a.gamma = np.ones(rest[1], np.float32 if value.dtype == np.float16 else value.dtype)
        a.mean = a.rstd = np.ones((value.shape[0], 2), np.float64 if value.dtype == np.float64 else np.float32)
    monkeypatch.setattr("cunorm.executors.cpu.executor.launch", lambda *_: pytest.fail("launched"))
    given = (a.x, a.gamma) if op == OPS[0] else (a.dy, a.x, a.mean, a.rstd, a.gamma)
    with pytest.raises((TypeError, ValueError), match=r"^(x|gamma|dy)\b"):
        made(*given)


def test_the_refusal_of_arrays_shows_the_difference_to_the_plan() -> None:
    """The message describes the plan and the arrays. The two descriptions must differ."""
    a = group_arrays(dtype="float16", gamma_dtype="float32")
    made = plan(dtype="float16", gamma_dtype="float16")
    with pytest.raises(ValueError, match="the plan is for") as caught:
        made(a.dy, a.x, a.mean, a.rstd, a.gamma)
    found = re.search(r"the plan is for (.*), the arrays are (.*)$", str(caught.value))
    assert found
    assert found[1] != found[2]


@pytest.mark.parametrize(("dtype", "other"), [("float16", "float64"), ("float64", "float32")])
def test_the_refusal_of_another_dtype_describes_the_plan_alone(dtype: str, other: str) -> None:
    """No dtype of the arrays is in the description of the plan."""
    made = cunorm.plan("group_norm", shape=(2, 4, 6), dtype=dtype, num_groups=2, device="cpu")
    with pytest.raises(ValueError, match="the plan is for") as caught:
        made(np.ones((2, 4, 6), other))
    found = re.search(r"the plan is for (.*), the arrays are (.*)$", str(caught.value))
    assert found
    assert found[1] == made.problem.describe()
    assert other in found[2]


@pytest.mark.skipif(not CUPY, reason="CuPy is not installed")
def test_arrays_on_another_device_than_the_plan_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made = plan(OPS[0])
    x = fake_cupy((2, 8, 3, 3), np.float32)
    with pytest.raises(TypeError, match=r"^x: a cupy.ndarray, but the plan is for the CPU executor"):
        made(x)


def test_options_of_a_call_of_a_plan() -> None:
    a = group_arrays()
    made = plan(OPS[0], tile=TILES["block"])
    with pytest.raises(TypeError):
        made()
    with pytest.raises(TypeError):
        made(a.x, nonsense=1)
    with pytest.raises(ValueError, match=r"^eps"):
        made(a.x, eps=-1)
    _, _, rstd = made(a.x, eps=0.5)
    _, _, other = cunorm.group_norm(a.x, 2, eps=0.5, tile=TILES["block"])
    assert rstd.tobytes() == other.tobytes()


def test_plans_of_the_same_arrays_do_not_share_calls() -> None:
    first, second = plan(tile=TILES["block"]), plan(tile=TILES["block"], output_mask=MASKED)
    a = group_arrays()
    given = (a.dy, a.x, a.mean, a.rstd, a.gamma)
    for _ in range(2):
        assert first(*given)[0] is not None
        assert second(*given)[0] is None


# ---- first use from several threads ---------------------------------------------------------------------------------


def test_first_use_from_several_threads_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caches of calls and kernels are empty, and the kernels of the plan are not compiled yet."""
    count = 8
    a = group_arrays((2, 8, 3, 5))
    results: list[Any] = [None] * count
    for tile in (TILES["block"], TILES["split"]):
        forget_calls()
        monkeypatch.setattr("cunorm.runtime.plans._plans", {})
        monkeypatch.setattr("cunorm.executors.cpu.kernel._kernels", {})
        shared = plan(shape=(2, 8, 3, 5), tile=tile)
        barrier = threading.Barrier(count)

        def work(index: int, tile: Tile = tile, shared: Any = shared, barrier: Any = barrier) -> None:
            given = (a.dy, a.x, a.mean, a.rstd, a.gamma)
            barrier.wait()
            try:
                for _ in range(5):
                    found = shared(*given) if index % 2 else cunorm.group_norm_backward(*given, num_groups=2, tile=tile)
                results[index] = found
            except BaseException as error:
                results[index] = error

        threads = [threading.Thread(target=work, args=(index,)) for index in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        for found in results:
            assert isinstance(found, tuple), found
            a.check_backward(*found)
            assert [array.tobytes() for array in found] == [array.tobytes() for array in results[0]]


# ---- tiles ----------------------------------------------------------------------------------------------------------


def test_tiles_are_compared_by_value() -> None:
    tile = Tile("block", threads=64, groups=2, stages=2, load="cp_async", packs_per_thread=1)
    assert tile == Tile("block", load="cp_async", packs_per_thread=1, groups=2, threads=64, stages=2)
    assert hash(tile) == hash(Tile("block", load="cp_async", packs_per_thread=1, groups=2, threads=64, stages=2))
    assert tile != Tile("block", load="cp_async", packs_per_thread=1, groups=2, threads=128, stages=2)
    assert tile != Tile("split", load="cp_async", packs_per_thread=1, groups=2, threads=64, stages=2)
    assert Tile.of({"strategy": "block", **tile.as_dict()}) == tile
    assert eval(repr(tile), {"Tile": Tile}) == tile
    assert (tile.threads, tile.groups) == (64, 2)
    with pytest.raises(AttributeError, match="prefetch_tiles"):
        _ = tile.prefetch_tiles
    for value in (0, -1, True, 1.0, "1", None):
        with pytest.raises((TypeError, ValueError), match=r"^tile"):
            Tile("block", threads=value)  # type: ignore[arg-type]


def test_tiles_can_be_copied_and_pickled() -> None:
    tile = Tile("block", threads=64, groups=2, stages=2, load="cp_async", packs_per_thread=1)
    assert copy.copy(tile) == copy.deepcopy(tile) == tile
    assert pickle.loads(pickle.dumps(tile)) == tile
    assert {tile: 1}[pickle.loads(pickle.dumps(tile))] == 1


def test_a_tile_cannot_be_changed() -> None:
    """Plans and caches share it, and its hash is that of its first fields."""
    tile = Tile("block", threads=64)
    with pytest.raises(AttributeError, match=r"^threads: a tile cannot be changed"):
        tile.threads = 128
    with pytest.raises(AttributeError, match=r"^threads: a tile cannot be changed"):
        del tile.threads
    assert (tile.threads, tile.as_dict()) == (64, {"threads": 64})


@pytest.mark.parametrize("name", ["fields", "as_dict", "of", "__dict__", "_hash"])
def test_a_field_cannot_have_the_name_of_an_attribute(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^tile: {name}=3: no strategy has a field of this name"):
        Tile("warp", **{name: 3})
    assert Tile.of({"strategy": "warp", "self": 3}).as_dict() == {"self": 3}


# ---- plans are shared -----------------------------------------------------------------------------------------------


def test_a_plan_cannot_be_changed_or_pickled_and_a_copy_is_the_plan() -> None:
    plan = cunorm.plan("layer_norm", shape=(4, 8), dtype="float32", normalized_shape=8, device="cpu")
    launches = plan.launches
    for name in ("launches", "tile", "reason", "workspace_nbytes"):
        with pytest.raises(AttributeError, match=rf"^{name}: a plan cannot be changed"):
            setattr(plan, name, None)
    assert plan.launches is launches
    assert copy.copy(plan) is copy.deepcopy({"plan": plan})["plan"] is plan
    with pytest.raises(TypeError, match="a plan cannot be pickled"):
        pickle.dumps(plan)


def test_a_workspace_of_objects_is_refused() -> None:
    """Kernels would overwrite the pointers."""
    x, tile = np.ones((4, 8, 6), np.float32), {"strategy": "split", "chunk": 64, "threads": 128}
    workspace = np.full(1000, "text", object)
    with pytest.raises(TypeError, match=r"^workspace: an array of objects, expected an array of numbers"):
        cunorm.group_norm(x, 2, tile=tile, workspace=workspace)
    assert workspace[0] == "text"
    for wrong, sentence in ((np.empty(2000)[::2], "not contiguous"), (np.broadcast_to(0.0, 1000), "not contiguous")):
        with pytest.raises(ValueError, match=f"^workspace: {sentence}, expected"):
            cunorm.group_norm(x, 2, tile=tile, workspace=wrong)
    read_only = np.empty(1000)
    read_only.flags.writeable = False
    with pytest.raises(ValueError, match=r"^workspace: read-only, expected"):
        cunorm.group_norm(x, 2, tile=tile, workspace=read_only)


def test_output_mask_is_refused_for_a_forward_op() -> None:
    with pytest.raises(ValueError, match=r"^output_mask"):
        cunorm.plan("group_norm", shape=(2, 8), dtype="float32", num_groups=2, output_mask=(True, False, True))


def test_an_option_that_the_op_does_not_take_may_be_an_array() -> None:
    for name, value in (("output_mask", np.array([True] * 3)), ("normalized_shape", np.array([4, 6]))):
        with pytest.raises(
            ValueError, match=rf"^{name}: ndarray, expected .* for group_norm, which does not take one$"
        ):
            cunorm.plan("group_norm", shape=(2, 8), dtype="float32", num_groups=2, **{name: value})


@pytest.mark.parametrize("value", ["f,,", "(1,", np, np.float32(7), np.zeros(2, np.float32), "int32", 5])
def test_what_is_no_dtype_is_a_type_error_that_names_the_argument(value: Any) -> None:
    with pytest.raises(TypeError, match=r"^dtype: .*, expected float16 or "):
        cunorm.plan("group_norm", shape=(2, 8), dtype=value, num_groups=2)
    with pytest.raises(TypeError, match=r"^y_dtype: .*, expected float32"):
        cunorm.plan("group_norm", shape=(2, 8), dtype="float32", num_groups=2, y_dtype=value)


def test_a_mask_that_is_an_activation_is_refused_before_it_is_read() -> None:
    """A broadcast array has more elements than any memory."""
    shape = {"shape": (2, 8), "dtype": "float32", "num_groups": 2}
    with pytest.raises(ValueError, match=r"^output_mask: 36028797018963968 flags, expected 3 for dx, dgamma, dbeta$"):
        cunorm.plan("group_norm_backward", **shape, output_mask=np.broadcast_to(np.True_, (2**55,)))
    with pytest.raises(TypeError, match=r"^output_mask: ndarray, expected a tuple of 3 bools"):
        cunorm.plan("group_norm_backward", **shape, output_mask=np.ones((3, 3), bool))
    plan = cunorm.plan("group_norm_backward", **shape, output_mask=np.array([True, False, True]))
    assert plan.problem.outputs == ("dx", "dbeta")


@pytest.mark.parametrize("op", [op for op in ALL_OPS.values() if op.flags], ids=lambda op: op.name)
def test_a_mask_of_a_plan_is_a_sequence_or_an_array_of_flags(op: Op) -> None:
    options: dict[str, Any] = {"shape": (2, 8), "dtype": "float32", "device": "cpu"}
    if "num_groups" in op.takes:
        options["num_groups"] = 2
    if "normalized_shape" in op.takes:
        options["normalized_shape"] = 8
    for wanted in itertools.product([True, False], repeat=len(op.flags)):
        named = tuple(
            name for names, flag in zip(op.flags.values(), wanted, strict=True) for name in (names if flag else ())
        )
        for mask in (wanted, list(wanted), np.array(wanted)):
            assert set(cunorm.plan(op.name, **options, output_mask=mask).problem.outputs) == set(named)
    for mask in ((True,) * (len(op.flags) + 1), np.ones(len(op.flags) + 1, bool)):
        with pytest.raises(ValueError, match=rf"^output_mask: {len(mask)} flags, expected {len(op.flags)} for "):
            cunorm.plan(op.name, **options, output_mask=mask)


def test_options_and_their_defaults_are_those_of_a_request() -> None:
    """`problem_of` and the readers of traces take these defaults."""
    options = inspect.signature(cunorm.plan).parameters
    own = {name: one.default for name, one in options.items() if name not in ("op", "shape", "dtype", "device", "tile")}
    assert own == registry.UNASKED
    assert options["output_mask"].default is registry.UNASKED["output_mask"]  # it is compared by identity


def test_sizes_of_more_than_64_bits_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^shape"):
        cunorm.plan("group_norm", shape=(10**30, 8), dtype="float32", num_groups=2)
