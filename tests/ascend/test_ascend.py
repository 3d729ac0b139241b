"""The two-phase flow on both executors: results compared with the oracle, for all shapes, strides and dtypes."""

from __future__ import annotations

import gc
import itertools
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cunorm
from cunorm.ascend import aclGetRecentErrMsg
from cunorm.core.arrays import DTYPES
from tests.ascend.ascend_calls import BATCH, FACES, GROUP, INVALID, SUCCESS, Arguments, Face, batch_call, group_call
from tests.conftest import Executor
from tests.support.problems import LAYOUTS, SENTINEL, BatchArrays, batch_arrays, group_arrays, laid_out

SHAPE = (2, 8, 3, 3)
CPU = Executor("cpu")
HALF, SINGLE = EITHER = "float16", "float32"


def there(executor: Executor, given: Arguments) -> Arguments:
    """The same call with its arrays copied to the executor."""
    return {name: executor.put(value) if isinstance(value, np.ndarray) else value for name, value in given.items()}


def back(executor: Executor, results: Any) -> list[Any]:
    return [executor.get(array) for array in results]


def check(face: Face, executor: Executor, given: Arguments, made: Any) -> None:
    """Run both phases and compare the outputs with the oracle. ``made`` are the arrays of the call."""
    face.compare(made, back(executor, face.walk(given, executor.xp)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("face", FACES, ids=lambda face: face.name)
def test_the_documented_flow(face: Face, dtype: str, executor: Executor) -> None:
    made = face.made(dtype)
    check(face, executor, there(executor, face.call(made)), made)


def test_the_documented_example_of_batch_norm(executor: Executor) -> None:
    vectors = {name: np.empty(2, np.float32) for name in BATCH.outputs}
    one = np.ones(2, np.float32)
    given = {
        "gradOut": np.array([[1, 1], [1, 2], [2, 2], [3, 3]], np.float32),
        "input": np.arange(8, dtype=np.float32).reshape(4, 2),
        **{name: one.copy() for name in ("mean", "invstd", "weight")},
        **dict.fromkeys(("inputG", "weightG", "biasG"), True),
        **vectors,
    }
    sums = back(executor, BATCH.walk(there(executor, given), executor.xp))
    assert [vector.tolist() for vector in sums] == [[7, 8], [21, 30], [21, 30], [7, 8]]


# ---- shapes and strides ---------------------------------------------------------------------------------------------

#: Shapes: gradOut, input and gradInput have N * C * HxW = 144 elements, mean and rstd 4, gamma and its gradients 8.
SHAPES = [
    ((144,), SHAPE, (4,), (2, 1, 2), (8,)),
    ((2, 8, 9), (2, 8, 9), (2, 2), (2, 2), (8, 1)),
    ((12, 12), (144,), (1, 4), (4, 1), (1, 8)),
    ((1,) * 6 + (2, 72), (2, 2, 2, 2, 3, 3), (1,) * 7 + (4,), (2, 2), (2, 2, 2)),
    (SHAPE, (9, 16), (2, 2), (2, 2), (4, 2)),
]


@pytest.mark.parametrize(("grad", "input", "mean", "rstd", "gamma"), SHAPES)
def test_group_norm_arrays_may_have_any_shape_of_the_right_size(
    grad: Any, input: Any, mean: Any, rstd: Any, gamma: Any, executor: Executor
) -> None:
    made = group_arrays(SHAPE)
    given = there(executor, group_call(made))
    shapes = {"gradOut": grad, "input": input, "gradInput": input, "mean": mean, "rstd": rstd}
    shapes |= dict.fromkeys(("gamma", "gradGammaOut", "gradBetaOut"), gamma)
    given |= {name: given[name].reshape(shape) for name, shape in shapes.items()}
    assert "copied" not in GROUP.first(given)[2].explain()
    check(GROUP, executor, given, made)


def test_arrays_of_one_element_may_have_no_dimensions(executor: Executor) -> None:
    made = group_arrays((1, 1, 1), 1)
    given = there(executor, group_call(made))
    given |= {name: value.reshape(()) for name, value in given.items() if hasattr(value, "reshape")}
    check(GROUP, executor, given, made)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["gradOut", "input", "gradInput"])
def test_strided_tensors_of_group_norm(name: str, layout: str, executor: Executor) -> None:
    made = group_arrays(SHAPE)
    given = there(executor, group_call(made))
    given[name] = laid_out(executor.xp, given[name], layout)
    check(GROUP, executor, given, made)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["gradOut", "input"])
def test_strided_tensors_of_batch_norm(name: str, layout: str, executor: Executor) -> None:
    made = batch_arrays()
    given = there(executor, batch_call(made))
    given[name] = laid_out(executor.xp, given[name], layout)
    check(BATCH, executor, given, made)


@pytest.mark.parametrize("face", FACES, ids=lambda face: face.name)
@pytest.mark.parametrize("layout", ["reversed", "every other", "misaligned", "Fortran"])
def test_all_arrays_may_be_strided(face: Face, layout: str, executor: Executor) -> None:
    """All arrays are strided. The memory between the elements of outputs is not written."""
    made = face.made()
    given = there(executor, face.call(made))
    given |= {n: laid_out(executor.xp, v, layout) for n, v in given.items() if hasattr(v, "strides")}
    check(face, executor, given, made)
    if layout == "every other":
        for name in face.outputs:
            base = given[name] if given[name].base is None else given[name].base
            assert np.isnan(executor.get(base[..., 1::2])).all()


def test_channels_last_arrays_are_not_copied(executor: Executor) -> None:
    """Arrays of NCHW shape in channels-last memory order are planned as NHWC, and are not copied."""
    made, batch = group_arrays(SHAPE), batch_arrays()
    given, other = there(executor, group_call(made)), there(executor, batch_call(batch))
    for call, names in ((given, ("gradOut", "input", "gradInput")), (other, ("gradOut", "input"))):
        call |= {name: laid_out(executor.xp, call[name], "channels last") for name in names}
    for face, call, what in ((GROUP, given, made), (BATCH, other, batch)):
        text = face.first(call)[2].explain()
        assert " NHWC " in text.splitlines()[0]
        assert "copied" not in text
        check(face, executor, call, what)


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
def test_subclasses_of_numpy_arrays_are_accepted(tmp_path: Path) -> None:
    """The memory of a subclass is used as a plain array, because a matrix always has two dimensions."""
    made = group_arrays(SHAPE)
    given = group_call(made)
    given |= {name: np.asmatrix(given[name]) for name in ("mean", "rstd", "gamma", "gradGammaOut", "gradBetaOut")}
    given["gamma"] = np.asmatrix(np.repeat(given["gamma"], 2))[:, ::2]
    given["gradGammaOut"] = np.asmatrix(np.zeros((1, 16), np.float32))[:, ::2]
    given["gradInput"] = np.memmap(tmp_path / "array", np.float32, "w+", shape=SHAPE)
    check(GROUP, CPU, given, made)


def test_explain_lists_the_copied_arrays() -> None:
    """Explain lists each copied array with the reason, and the workspace size that the first phase returns."""
    given = group_call(group_arrays(SHAPE, dtype=HALF))
    given["input"] = laid_out(np, given["input"], "channels last")
    given["gradInput"] = np.empty(SHAPE, HALF)
    given["mean"], given["rstd"] = np.asfortranarray(given["mean"]), laid_out(np, given["rstd"], "every other")
    given["gradGammaOut"], given["gradBetaOut"] = np.empty(8, SINGLE), np.zeros(33, np.uint8)[1:].view(SINGLE)
    _, size, prepared = GROUP.first(given)
    text = prepared.explain()
    assert f"requested  {size} bytes" in text
    elsewhere = "strides (144, 18, 6, 2), needed without gaps in the order of axes (0, 2, 3, 1), input's memory order"
    assert re.findall(r"^copied     (\w+), in each run: (.*)$", text, re.MULTILINE) == [
        ("gradOut", elsewhere),
        ("mean", "strides (4, 8), which allow no view of shape (4,)"),
        ("rstd", "strides (16, 8), needed without gaps"),
        ("gamma", "float16, needed as float32"),
        ("gradInput", elsewhere),
        ("gradBetaOut", "at an address that is not a multiple of 4"),
    ]
    nothing = GROUP.first(given | {"outputMask": (False, False, False)})[2]
    assert "copied" not in nothing.explain()  # nothing is computed either


# ---- dtypes ---------------------------------------------------------------------------------------------------------

MIXTURES = list(itertools.product(EITHER, EITHER, (None, *EITHER), EITHER, EITHER))


@pytest.mark.parametrize(("mean", "rstd", "gamma", "dgamma", "dbeta"), MIXTURES)
def test_group_norm_arrays_may_differ_in_dtype(
    mean: str, rstd: str, gamma: str | None, dgamma: str, dbeta: str, executor: Executor
) -> None:
    """The parameters and statistics of 16-bit data may be float32. A result is rounded once, to its array's dtype."""
    made = group_arrays(SHAPE, dtype=HALF, gamma_dtype=gamma)
    made.mean, made.rstd = made.mean.astype(mean), made.rstd.astype(rstd)
    given = group_call(made)
    given |= {"gradGammaOut": np.empty(8, dgamma), "gradBetaOut": np.empty(8, dbeta)}
    check(GROUP, executor, there(executor, given), made)


@pytest.mark.parametrize("data", ["float16", "bfloat16", "float32"])
def test_batch_norm_arrays_may_differ_in_dtype(data: str, executor: Executor) -> None:
    """Statistics, sums and parameters may have any of the three dtypes, whatever the dtype of the data."""
    plain = batch_arrays(dtype=data)
    bfloat16 = DTYPES["bfloat16"]
    for mean, invstd in itertools.product(("float16", "bfloat16", "float32"), repeat=2):
        made = BatchArrays(**vars(plain))
        made.mean, made.invstd = plain.mean.astype(DTYPES[mean]), plain.invstd.astype(DTYPES[invstd])
        given = batch_call(made)
        given |= {"weight": np.ones(8, bfloat16), "gradWeight": np.empty(8, bfloat16)}
        given |= {"sumDy": np.empty(8, np.float16), "sumDyXmu": np.empty(8, bfloat16), "gradBias": np.empty(8, "f4")}
        check(BATCH, executor, there(executor, given), made)


@pytest.mark.parametrize("layout", ["every other", "reversed", "misaligned"])
@pytest.mark.parametrize("data", ["float16", "bfloat16"])
@pytest.mark.parametrize("face", FACES, ids=lambda face: face.name)
def test_strided_outputs_are_rounded_once(face: Face, data: str, layout: str, executor: Executor) -> None:
    """Kernels cannot write the float32 outputs in place, because of strides or addresses. All inputs have 16 bits."""
    made = face.made(data)
    names = ("mean", "rstd") if face is GROUP else ("mean", "invstd")
    for name in names:
        setattr(made, name, getattr(made, name).astype(DTYPES[data]))
    given = face.call(made)
    outputs = [name for name in face.outputs if name not in ("gradInput", "gradWeight")]
    given |= {name: np.zeros(8, np.float32) for name in outputs}
    given = there(executor, given)
    given |= {name: laid_out(executor.xp, given[name], layout) for name in outputs}
    check(face, executor, given, made)


def test_strided_sums_beyond_float16_are_finite_in_float32(executor: Executor) -> None:
    made = batch_arrays((64, 8, 64), dtype=HALF)
    made.mean, made.invstd = np.zeros(8, HALF), np.ones(8, HALF)
    made.dy[...], made.x[...] = 30, 1
    given = there(executor, batch_call(made))
    for name in ("sumDy", "sumDyXmu", "gradBias"):
        given[name] = laid_out(executor.xp, executor.xp.zeros(8, np.float32), "every other")
    sums = back(executor, BATCH.walk(given, executor.xp))
    for name, total in zip(BATCH.outputs, sums, strict=True):
        assert (total == (np.inf if name == "gradWeight" else 64 * 64 * 30)).all(), name


def test_without_weight_its_gradient_has_the_dtype_of_mean(executor: Executor) -> None:
    made = batch_arrays(dtype=HALF)
    given = batch_call(made) | {"weight": None, "gradWeight": np.empty(8, np.float32)}
    check(BATCH, executor, there(executor, given), made)


@pytest.mark.parametrize(("mean", "invstd"), [(HALF, SINGLE), (SINGLE, HALF)])
def test_neither_statistic_is_rounded_to_the_dtype_of_the_other(mean: str, invstd: str, executor: Executor) -> None:
    """Results in float32 are as exact as the statistics."""
    made = batch_arrays(dtype=HALF)
    made.mean, made.invstd = made.mean.astype(mean), made.invstd.astype(invstd)
    given = batch_call(made) | {"weight": np.ones(8, np.float32)}
    given |= {name: np.zeros(8, np.float32) for name in BATCH.outputs}
    check(BATCH, executor, there(executor, given), made)


def test_gradients_beyond_float16_are_infinite(executor: Executor) -> None:
    """Overflow gives infinity, as in the kernels. The rounding to a narrower output issues no warning."""
    made = group_arrays((2, 8, 512), dtype=HALF, gamma_dtype=SINGLE)
    made.dy[...] = 300
    given = there(executor, {**group_call(made), "gradBetaOut": np.empty(8, HALF)})
    _, dgamma, dbeta = back(executor, GROUP.walk(given, executor.xp))
    assert np.isposinf(dbeta).all()
    assert np.isfinite(dgamma).all()


# ---- masks, empties, runs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", list(itertools.product((True, False), repeat=3)))
@pytest.mark.parametrize("face", FACES, ids=lambda face: face.name)
def test_outputs_that_are_not_wanted_are_not_written(face: Face, mask: tuple[bool, ...], executor: Executor) -> None:
    """They are not checked either: they may have any shape and dtype, or be None."""
    made = face.made()
    given = face.call(made)
    wanted = dict(zip(face.outputs, mask if face is GROUP else (mask[0], *mask), strict=True))
    given |= {"outputMask": mask} if face is GROUP else dict(zip(("inputG", "weightG", "biasG"), mask, strict=True))
    spare = executor.xp.full(3, SENTINEL, np.int64)
    given = there(executor, given) | {name: spare for name in face.outputs if not wanted[name]}  # one array for all
    results = back(executor, face.walk(given, executor.xp))
    for (name, keep), result in zip(wanted.items(), results, strict=True):
        if not keep:
            assert (result == SENTINEL).all()
            given[name] = None
    face.compare(made, [result if keep else None for keep, result in zip(wanted.values(), results, strict=True)])
    face.walk(given, executor.xp)  # with None for the outputs that are not wanted


@pytest.mark.parametrize("shape", [(0, 8, 3, 3), (2, 8, 0), (2, 8, 3, 0, 3)])
@pytest.mark.parametrize("face", FACES, ids=lambda face: face.name)
def test_sums_of_empty_tensors_are_zero(face: Face, shape: tuple[int, ...], executor: Executor) -> None:
    made: Any = group_arrays(shape) if face is GROUP else batch_arrays(shape)
    if face is BATCH:
        made.mean, made.invstd = np.ones(8, np.float32), np.ones(8, np.float32)
    given = there(executor, face.call(made))
    status, size, prepared = face.first(given)
    assert (status, size) == (SUCCESS, 0), aclGetRecentErrMsg()
    assert face.second(None, 0, prepared) == SUCCESS, aclGetRecentErrMsg()
    for name in face.outputs:
        assert (executor.get(given[name]) == 0).all()


def test_group_norm_without_channels(executor: Executor) -> None:
    made = group_arrays((2, 0, 3), 1)
    results = back(executor, GROUP.walk(there(executor, group_call(made)), executor.xp))
    assert [result.size for result in results] == [0, 0, 0]


@pytest.mark.parametrize("face", FACES, ids=lambda face: face.name)
def test_an_executor_runs_again_on_new_contents(face: Face, executor: Executor) -> None:
    """Arrays that need a copy are copied in each run, with their contents at that time."""
    made = face.made()
    given = there(executor, face.call(made))
    for name in ("gradOut", "mean"):
        given[name] = laid_out(executor.xp, given[name], "reversed")
    status, size, prepared = face.first(given)
    assert status == SUCCESS
    for seed in range(3):
        made.dy = np.random.default_rng(seed).standard_normal(made.dy.shape).astype(np.float32)
        made.mean = made.mean + np.float32(0.25)
        given["gradOut"][...] = executor.put(made.dy)
        given["mean"][...] = executor.put(made.mean)
        for name in face.outputs:
            given[name].fill(SENTINEL)
        assert face.second(executor.xp.full(size, 0xFF, np.uint8), size, prepared) == SUCCESS
        face.compare(made, back(executor, [given[name] for name in face.outputs]))


def _odd(xp: Any, size: int) -> Any:
    return xp.empty(size + 1, np.uint8)[1:]


#: Functions that make a workspace of at least ``size`` bytes.
WORKSPACES = {
    "bytes": lambda xp, size: xp.empty(size, np.uint8),
    "far too many": lambda xp, size: xp.empty(size + 4096, np.uint8),
    "at an odd address": _odd,
    "float64": lambda xp, size: xp.empty(-(-size // 8), np.float64),
    "bfloat16 in rows": lambda xp, size: xp.empty((-(-size // 6), 3), DTYPES["bfloat16"]),
    "bool in columns": lambda xp, size: xp.empty((size, 2), bool).T,
    "complex": lambda xp, size: xp.empty(-(-size // 16), np.complex128),
    "with its axes in another order": lambda xp, size: xp.empty((size, 2, 3), np.uint8).transpose(1, 2, 0),
    "backwards": lambda xp, size: xp.empty((size, 2), np.uint8)[::-1, ::-1],
}


@pytest.mark.parametrize("kind", WORKSPACES)
@pytest.mark.parametrize("face", FACES, ids=lambda face: face.name)
def test_any_array_of_enough_bytes_may_be_the_workspace(face: Face, kind: str, executor: Executor) -> None:
    made = face.made_with_workspace()
    given = there(executor, face.call(made))
    status, size, prepared = face.first(given)
    assert status == SUCCESS
    assert size > 0
    workspace = WORKSPACES[kind](executor.xp, size)
    assert face.second(workspace, size, prepared) == SUCCESS, aclGetRecentErrMsg()
    face.compare(made, back(executor, [given[name] for name in face.outputs]))


@pytest.mark.parametrize("other", ["as input", "channels last"])
@pytest.mark.parametrize("layout", ["contiguous", *LAYOUTS])
def test_grad_input_may_be_exactly_grad_out(layout: str, other: str, executor: Executor) -> None:
    """The call is legal for all strides of gradOut and of input."""
    made = group_arrays(SHAPE)
    given = there(executor, group_call(made))
    if layout != "contiguous":
        given["gradOut"] = laid_out(executor.xp, given["gradOut"], layout)
    if other == "channels last":
        given["input"] = laid_out(executor.xp, given["input"], other)
    given["gradInput"] = given["gradOut"]
    made.dy = made.dy.copy()  # the oracle reads it after the call has overwritten gradOut
    check(GROUP, executor, given, made)


def test_grad_input_may_be_the_memory_of_grad_out_in_another_shape(executor: Executor) -> None:
    for N in (1, 2):
        made = group_arrays((N, 8, 3, 3))
        given = there(executor, group_call(made))
        whole = executor.xp.zeros((4, 8, 3, 3), np.float32)
        whole[:N] = given["gradOut"]
        given["gradInput"] = whole[:N]
        given["gradOut"] = (
            whole[::4] if N == 1 else whole[:N].reshape(-1)
        )  # for N = 1 the stride of the first axis differs, but has no effect
        made.dy = made.dy.copy()
        check(GROUP, executor, given, made)


def test_grad_input_in_place_with_a_partial_mask_or_another_memory_order(executor: Executor) -> None:
    """Only the memory must be the same: axes of one element may differ in stride, and the arrays in shape."""
    made = group_arrays((1, 8, 3, 3))
    given = there(executor, group_call(made)) | {"outputMask": (True, False, False)}
    whole = executor.xp.zeros((4, 8, 3, 3), np.float32)
    whole[:1] = given["gradOut"]
    given["gradOut"], given["gradInput"] = whole[::4], whole[:1]
    made.check_backward(executor.get(GROUP.walk(given, executor.xp)[0]), None, None)
    made = group_arrays(SHAPE)
    given = there(executor, group_call(made))
    given["input"] = laid_out(executor.xp, given["input"], "channels last")
    given["gradOut"], given["gradInput"] = given["gradOut"].reshape(-1), given["gradOut"]
    made.dy = made.dy.copy()
    check(GROUP, executor, given, made)


def test_grad_input_in_place_without_a_view_of_shape_n_c_hxw(executor: Executor) -> None:
    made = group_arrays(SHAPE)
    given = there(executor, group_call(made))
    flat = executor.xp.zeros((16, 9), np.float32)
    given["gradOut"] = given["gradInput"] = flat.T  # shape (9, 16), the transpose of a contiguous array
    given["input"] = given["input"].reshape(9, 16)
    given["gradOut"][...] = executor.put(made.dy.reshape(9, 16))
    check(GROUP, executor, given, made)


def test_the_workspace_may_be_in_the_gaps_of_an_array(executor: Executor) -> None:
    made = GROUP.made_with_workspace()
    given = there(executor, group_call(made))
    arena = executor.xp.zeros((2, 4096), np.float32)
    given |= {name: given[name].reshape(2, 4) for name in ("gamma", "gradGammaOut")}
    given["gradBetaOut"] = arena[:, :4]
    status, size, prepared = GROUP.first(given)
    assert status == SUCCESS
    assert GROUP.second(arena[0, 64:-64], size, prepared) == SUCCESS, aclGetRecentErrMsg()
    assert GROUP.second(arena[0, 2:-64], size, prepared) == INVALID
    GROUP.compare(made, back(executor, [given[name] for name in GROUP.outputs]))


def test_the_first_phase_refuses_in_place_for_a_strategy_that_does_not_support_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def plan(*arguments: Any, **options: Any) -> Any:
        made = cunorm.plan(*arguments, **options)
        return replace(made, strategy=replace(made.strategy, in_place=False))

    monkeypatch.setattr("cunorm.ascend.first_phase.plan", plan)
    given = group_call()
    assert GROUP.first(given)[0] == SUCCESS
    assert GROUP.first(given | {"gradInput": given["gradOut"]})[0] == INVALID
    assert aclGetRecentErrMsg() == "gradInput: overlaps gradOut in memory; pass separate arrays"


def test_outputs_may_interleave(executor: Executor) -> None:
    """Overlap is decided element by element: two columns of one array do not overlap."""
    made, batch = group_arrays(SHAPE), batch_arrays()
    given, other = there(executor, group_call(made)), there(executor, batch_call(batch))
    pairs = executor.xp.zeros((8, 2), np.float32)
    check(GROUP, executor, given | {"gradGammaOut": pairs[:, 0], "gradBetaOut": pairs[:, 1]}, made)
    rows = executor.xp.zeros((2, 8), np.float32)
    check(BATCH, executor, other | {"sumDy": rows[0], "sumDyXmu": rows[1]}, batch)


@pytest.mark.parametrize("face", FACES, ids=lambda face: face.name)
def test_an_executor_keeps_references_to_its_arrays_and_runs_in_several_threads(face: Face) -> None:
    """The caller may delete its own references. Each thread passes its own workspace."""
    given = face.right()
    expected = [result.tobytes() for result in face.walk(given)]
    kept = {name: given[name] for name in face.outputs}
    status, size, prepared = face.first(given)
    del given
    gc.collect()
    with ThreadPoolExecutor(4) as pool:
        runs = [pool.submit(face.second, np.full(size, 0xFF, np.uint8), size, prepared) for _ in range(16)]
    assert [run.result() for run in runs] == [status] * 16
    assert [kept[name].tobytes() for name in face.outputs] == expected


@pytest.mark.parametrize("face", FACES, ids=lambda face: face.name)
def test_the_results_are_equal_to_those_of_the_public_function(face: Face, executor: Executor) -> None:
    """The results are bitwise equal, in each run."""
    made = face.made()
    given = there(executor, face.call(made))
    first = [result.tobytes() for result in back(executor, face.walk(given, executor.xp))]
    again = [result.tobytes() for result in back(executor, face.walk(given, executor.xp))]
    names = ("gradOut", "input", "mean", "rstd", "gamma") if face is GROUP else ("gradOut", "input", "mean", "invstd")
    inputs = [given[name] for name in names]
    if face is GROUP:
        results: Any = cunorm.group_norm_backward(*inputs, num_groups=made.groups)
    else:
        results = cunorm.batch_norm_backward_reduce(*inputs)
    assert first == again == [result.tobytes() for result in back(executor, results)]


@pytest.mark.parametrize("stream", [None, "anything", 7])
def test_the_cpu_executor_ignores_the_stream(stream: Any) -> None:
    made = group_arrays(SHAPE)
    made.check_backward(*GROUP.walk(group_call(made), stream=stream))


def test_the_repr_of_an_executor() -> None:
    prepared = GROUP.first(group_call())[2]
    assert repr(prepared) == (
        "<executor of aclnnGroupNormBackward: group_norm_backward float32 NCHW N=2 C=8 HxW=9 group=2 -> "
        "dx, dgamma, dbeta>"
    )
