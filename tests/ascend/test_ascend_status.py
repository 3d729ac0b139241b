"""The status codes and messages of the first phases. A failed first phase writes nothing and never raises."""

from __future__ import annotations

import copy
import inspect
import itertools
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cunorm import ascend
from cunorm.ascend import AclnnStatus, aclGetRecentErrMsg, strict_limits
from tests.ascend.ascend_calls import (
    BATCH,
    FACES,
    GROUP,
    INVALID,
    NULLPTR,
    SUCCESS,
    Arguments,
    Face,
    group_call,
    read_only,
    untouched,
)
from tests.support.contract import nothing_may_happen
from tests.support.problems import group_arrays, sparse

Change = Callable[[Arguments], Arguments]


def ones(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


def nulls(*names: str) -> list[tuple[str, Change, str]]:
    return [(f"{name} None", lambda _, name=name: {name: None}, f"{name}: None, expected an array") for name in names]


#: (label, function that returns the wrong arguments, start of the message), for x of (2, 8, 3, 3) float32, 2 groups.
GROUP_WRONG: dict[AclnnStatus, list[tuple[str, Change, str]]] = {
    NULLPTR: [
        *nulls("gradOut", "input", "mean", "rstd"),
        *[
            (
                f"{name} None",
                lambda _, name=name: {name: None},
                rf"{name}: None, .* because outputMask\[{index}\] is True",
            )
            for index, name in enumerate(GROUP.outputs)
        ],
        ("outputMask of NumPy's", lambda _: {"outputMask": np.ones(3, bool), "gradInput": None}, "gradInput: None"),
    ],
    INVALID: [
        ("gradOut float64", lambda g: {"gradOut": g["gradOut"].astype(np.float64)}, "gradOut: dtype float64, expected"),
        ("gradOut int32", lambda g: {"gradOut": g["gradOut"].astype(np.int32)}, "gradOut: dtype int32, expected"),
        ("gradOut big-endian", lambda g: {"gradOut": g["gradOut"].astype(">f4")}, "gradOut: dtype >f4, expected"),
        ("all float64", lambda g: {k: v.astype("f8") for k, v in g.items() if hasattr(v, "dtype")}, "gradOut: dtype"),
        ("input float16", lambda g: {"input": g["input"].astype(np.float16)}, "input: dtype float16, expected float32"),
        ("mean float16", lambda g: {"mean": g["mean"].astype(np.float16)}, "mean: dtype float16, expected float32 "),
        ("rstd float64", lambda g: {"rstd": g["rstd"].astype(np.float64)}, "rstd: dtype float64, expected float32 "),
        ("gamma bfloat16", lambda g: {"gamma": g["gamma"].astype(ml_dtypes.bfloat16)}, "gamma: dtype bfloat16, expe"),
        ("gradInput float16", lambda g: {"gradInput": g["gradInput"].astype("f2")}, "gradInput: dtype float16, expec"),
        ("gradGammaOut f64", lambda g: {"gradGammaOut": g["gradGammaOut"].astype("f8")}, "gradGammaOut: dtype float64"),
        ("gradBetaOut f16", lambda g: {"gradBetaOut": g["gradBetaOut"].astype("f2")}, "gradBetaOut: dtype float16"),
        ("gradOut masked", lambda g: {"gradOut": np.ma.masked_array(g["gradOut"])}, "gradOut: a numpy.ma.MaskedArray"),
        ("gradOut a list", lambda g: {"gradOut": g["gradOut"].tolist()}, "gradOut: list, expected a cupy.ndarray or a"),
        ("gamma a number", lambda _: {"gamma": 1.0}, "gamma: float, expected a cupy.ndarray or a numpy.ndarray"),
        ("gradInput a list", lambda _: {"gradInput": []}, "gradInput: list, expected a cupy.ndarray or a numpy"),
        (
            "gradInput of another shape",
            lambda _: {"gradInput": ones(2, 8, 9)},
            r"gradInput: shape \(2, 8, 9\), expecte",
        ),
        (
            "gradInput too small",
            lambda _: {"gradInput": ones(2, 8, 3, 2)},
            r"gradInput: shape \(2, 8, 3, 2\), expected",
        ),
        ("gradGammaOut too large", lambda _: {"gradGammaOut": ones(9)}, r"gradGammaOut: shape \(9,\), expected 8 elem"),
        (
            "gradGammaOut (2, 4)",
            lambda _: {"gradGammaOut": ones(2, 4)},
            r"gradGammaOut: shape \(2, 4\), expected \(8,\)",
        ),
        ("gradBetaOut (8, 1)", lambda _: {"gradBetaOut": ones(8, 1)}, r"gradBetaOut: shape \(8, 1\), expected \(8,\)"),
        ("gradBetaOut empty", lambda _: {"gradBetaOut": ones(0)}, r"gradBetaOut: shape \(0,\), expected 8 elements, C"),
        (
            "no gamma, 7 elements",
            lambda _: {"gamma": None, "gradGammaOut": ones(7)},
            r"gradGammaOut: shape \(7,\), expected 8 elements, C",
        ),
        ("group 0", lambda _: {"group": 0}, "group: 0, expected at least 1"),
        ("group -2", lambda _: {"group": -2}, "group: -2, expected at least 1"),
        ("group True", lambda _: {"group": True}, "group: True, expected an int"),
        ("group 2.0", lambda _: {"group": 2.0}, "group: 2.0, expected an int"),
        ("group None", lambda _: {"group": None}, "group: None, expected an int"),
        ("group 3", lambda _: {"group": 3}, "C: 8, expected a multiple of group, 3"),
        ("group 16", lambda _: {"group": 16}, "C: 8, expected a multiple of group, 16"),
        ("group 4", lambda _: {"group": 4}, r"mean: shape \(2, 2\), expected 8 elements, N \* group"),
        ("N -1", lambda _: {"N": -1}, "N: -1, expected at least 0"),
        ("C -8", lambda _: {"C": -8}, "C: -8, expected at least 0"),
        ("HxW -9", lambda _: {"HxW": -9}, "HxW: -9, expected at least 0"),
        ("N and C negative", lambda _: {"N": -2, "C": -8}, "N: -2, expected at least 0"),
        ("N 2.0", lambda _: {"N": 2.0}, "N: 2.0, expected an int"),
        ("C '8'", lambda _: {"C": "8"}, "C: '8', expected an int"),
        ("HxW (3, 3)", lambda _: {"HxW": (3, 3)}, r"HxW: \(3, 3\), expected an int"),
        ("N 3", lambda _: {"N": 3}, r"gradOut: shape \(2, 8, 3, 3\), expected 216 elements, N \* C \* HxW"),
        ("HxW huge", lambda _: {"HxW": 2**70}, r"HxW: 1180591620717411303424, expected at most 2\*\*63 - 1"),
        ("N beyond print", lambda _: {"N": 10**5000}, r"N: an unprintable int, expected at most 2\*\*63 - 1"),
        ("group beyond print", lambda _: {"group": -(10**5000)}, "group: an unprintable int, expected at least 1"),
        (
            "too many",
            lambda _: {"N": 2**40, "C": 2**20},
            r"N \* C \* HxW: \(1099511627776, 1048576, 9\), expected at",
        ),
        (
            "too many of none",
            lambda _: {"N": 0, "C": 2**62},
            r"N \* C \* HxW: \(0, 4611686018427387904, 9\), expected at mo",
        ),
        ("gradOut too small", lambda _: {"gradOut": ones(2, 8, 3, 2)}, r"gradOut: shape \(2, 8, 3, 2\), expected 144 "),
        (
            "input too large",
            lambda _: {"input": ones(2, 8, 3, 4)},
            r"input: shape \(2, 8, 3, 4\), expected 144 element",
        ),
        ("mean too small", lambda _: {"mean": ones(2)}, r"mean: shape \(2,\), expected 4 elements, N \* group"),
        ("rstd too large", lambda _: {"rstd": ones(2, 3)}, r"rstd: shape \(2, 3\), expected 4 elements, N \* group"),
        ("gamma too small", lambda _: {"gamma": ones(2)}, r"gamma: shape \(2,\), expected 8 elements, C"),
        *[
            (
                f"{name} of 9 dimensions",
                lambda g, name=name: {name: g[name].reshape((1,) * (9 - g[name].ndim) + g[name].shape)},
                rf"{name}: shape \(1, .*\), expected 0 to 8 dimensions",
            )
            for name in ("gradOut", "input", "mean", "rstd", "gamma")
        ],
        ("outputMask None", lambda _: {"outputMask": None}, "outputMask: None, expected a tuple of 3 bools"),
        ("outputMask True", lambda _: {"outputMask": True}, "outputMask: True, expected a tuple of 3 bools"),
        ("two flags", lambda _: {"outputMask": (True, True)}, "outputMask: 2 flags, expected 3"),
        ("four flags", lambda _: {"outputMask": (True,) * 4}, "outputMask: 4 flags, expected 3"),
        ("ints", lambda _: {"outputMask": (1, 1, 1)}, "outputMask: contains 1, expected bools"),
        ("one int", lambda _: {"outputMask": (True, True, 0)}, "outputMask: contains 0, expected bools"),
        ("NumPy ints", lambda _: {"outputMask": np.ones(3, int)}, "outputMask: contains 1, expected bools"),
        ("huge", lambda _: {"outputMask": (10**5000, True, True)}, "outputMask: contains an unprintable int, expected"),
        ("long", lambda _: {"outputMask": "T" * 1000}, "outputMask: 'TTT.{76}\\.\\.\\., expected a tuple of 3 bools"),
        ("'TTT'", lambda _: {"outputMask": "TTT"}, "outputMask: 'TTT', expected a tuple of 3 bools"),
        ("gradInput read-only", lambda g: {"gradInput": read_only(g["gradInput"])}, "gradInput: read-only, expected"),
        ("gradBetaOut read-only", lambda g: {"gradBetaOut": read_only(g["gradBetaOut"])}, "gradBetaOut: read-only"),
        (
            "gradGammaOut in one place",
            lambda _: {"gradGammaOut": np.lib.stride_tricks.as_strided(ones(1), (8,), (0,))},
            r"gradGammaOut: strides \(0,\), expected elements that do not share",
        ),
        (
            "gradInput on input",
            lambda g: {"gradInput": g["input"]},
            "gradInput: overlaps input in memory; pass separat",
        ),
        (
            "gradInput on gradOut, shifted",
            lambda g: dict(zip(("gradOut", "gradInput"), shifted_pair(g["gradOut"]), strict=True)),
            "gradInput: overlaps gradOut in memory",
        ),
        (
            "gradInput on gradOut, otherwise ordered",
            lambda _: (lambda t: {"gradOut": t, "gradInput": t.swapaxes(2, 3)})(ones(2, 8, 3, 3)),
            "gradInput: overlaps gradOut in memory",
        ),
        ("gradGammaOut on gamma", lambda g: {"gradGammaOut": g["gamma"]}, "gradGammaOut: overlaps gamma in memory"),
        (
            "gradBetaOut twice",
            lambda g: {"gradBetaOut": g["gradGammaOut"]},
            "gradBetaOut: overlaps gradGammaOut in mem",
        ),
        (
            "gradBetaOut in gradInput",
            lambda g: {"gradBetaOut": g["gradInput"].reshape(-1)[:8]},
            "gradBetaOut: overlaps",
        ),
    ],
}


def shifted_pair(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Two arrays of that shape whose memory overlaps, one element apart."""
    whole = np.zeros(array.size + 1, array.dtype)
    return whole[:-1].reshape(array.shape), whole[1:].reshape(array.shape)


#: See `GROUP_WRONG`, for x of (4, 8, 3, 3) float32.
BATCH_WRONG: dict[AclnnStatus, list[tuple[str, Change, str]]] = {
    NULLPTR: [
        *nulls("gradOut", "input", "mean", "invstd"),
        ("sumDy None", lambda _: {"sumDy": None}, "sumDy: None, expected an array because inputG is True"),
        ("sumDyXmu None", lambda _: {"sumDyXmu": None}, "sumDyXmu: None, expected an array because inputG is True"),
        (
            "gradWeight None",
            lambda _: {"gradWeight": None},
            "gradWeight: None, expected an array because weightG is True",
        ),
        ("gradBias None", lambda _: {"gradBias": None}, "gradBias: None, expected an array because biasG is True"),
    ],
    INVALID: [
        ("gradOut float64", lambda g: {"gradOut": g["gradOut"].astype(np.float64)}, "gradOut: dtype float64, expected"),
        ("input float64", lambda g: {"input": g["input"].astype(np.float64)}, "input: dtype float64, expected float32"),
        ("input float16", lambda g: {"input": g["input"].astype(np.float16)}, "input: dtype float16, expected float32"),
        *[
            (
                f"{name} float64",
                lambda g, name=name: {name: g[name].astype(np.float64)},
                f"{name}: dtype float64, expected float16 or bfloat16 or float32",
            )
            for name in ("mean", "invstd", "weight", *BATCH.outputs)
        ],
        ("mean int64", lambda g: {"mean": g["mean"].astype(int)}, "mean: dtype int64, expected float16 or bfloat16 or"),
        (
            "gradWeight f16",
            lambda g: {"gradWeight": g["gradWeight"].astype("f2")},
            ".*expected float32, the dtype of w",
        ),
        (
            "gradWeight f16, no weight",
            lambda g: {"gradWeight": g["gradWeight"].astype("f2"), "weight": None},
            "gradWeight: dtype float16, expected float32, the dtype of mean",
        ),
        ("input a list", lambda g: {"input": g["input"].tolist()}, "input: list, expected a cupy.ndarray or a numpy"),
        (
            "gradOut of another shape",
            lambda _: {"gradOut": ones(4, 8, 9)},
            r"gradOut: shape \(4, 8, 9\), expected \(4, ",
        ),
        (
            "gradOut too small",
            lambda _: {"gradOut": ones(4, 8, 3, 2)},
            r"gradOut: shape \(4, 8, 3, 2\), expected \(4, ",
        ),
        (
            "1 dimension",
            lambda _: {"gradOut": ones(8), "input": ones(8)},
            r"input: shape \(8,\), expected 2 to 8 dimen",
        ),
        (
            "0 dimensions",
            lambda _: {"gradOut": ones(), "input": ones()},
            r"input: shape \(\), expected 2 to 8 dimension",
        ),
        (
            "9 dimensions",
            lambda _: {"gradOut": ones(4, 8, *(1,) * 7), "input": ones(4, 8, *(1,) * 7)},
            r"input: shape \(4, 8, .*\), expected 2 to 8 dimensions",
        ),
        (
            "no channels",
            lambda _: {"gradOut": ones(4, 0, 3), "input": ones(4, 0, 3)},
            r"input: shape \(4, 0, 3\), expected at least one channel, on axis 1",
        ),
        (
            "too many",
            lambda _: dict.fromkeys(("gradOut", "input"), np.broadcast_to(np.float16(1), (2**31, 8, 2**27))),
            r"input: \(2147483648, 8, 134217728\), expected at most 2\*\*60 elements",
        ),
        *[
            (
                f"{name} of {size}",
                lambda g, name=name, size=size: {name: np.ones(size, g[name].dtype)},
                rf"{name}: shape \({size},\), expected 8 elements, one per channel",
            )
            for name in ("mean", "invstd", "weight", *BATCH.outputs)
            for size in (7, 9)
        ],
        (
            "mean of 9 dimensions",
            lambda g: {"mean": g["mean"].reshape((1,) * 8 + (8,))},
            "mean: shape .*, expected 0 to",
        ),
        ("inputG 1", lambda _: {"inputG": 1}, "inputG: 1, expected a bool"),
        ("weightG None", lambda _: {"weightG": None}, "weightG: None, expected a bool"),
        ("biasG 'yes'", lambda _: {"biasG": "yes"}, "biasG: 'yes', expected a bool"),
        ("sumDy read-only", lambda g: {"sumDy": read_only(g["sumDy"])}, "sumDy: read-only, expected an array that can"),
        ("sumDy on mean", lambda g: {"sumDy": g["mean"]}, "sumDy: overlaps mean in memory; pass separate arrays"),
        ("gradWeight on weight", lambda g: {"gradWeight": g["weight"]}, "gradWeight: overlaps weight in memory; pass"),
        ("sumDyXmu on sumDy", lambda g: {"sumDyXmu": g["sumDy"]}, "sumDyXmu: overlaps sumDy in memory; pass separate"),
        ("gradBias in input", lambda g: {"gradBias": g["input"].reshape(-1)[3:11]}, "gradBias: overlaps input in memo"),
    ],
}
WRONG = [
    pytest.param(face, status, change, sentence, id=f"{face.name}-{status}-{label}")
    for face, table in ((GROUP, GROUP_WRONG), (BATCH, BATCH_WRONG))
    for status, cases in table.items()
    for label, change, sentence in cases
]


def refused(face: Face, given: Arguments, status: AclnnStatus, monkeypatch: pytest.MonkeyPatch) -> str:
    """The message of a first phase, which must return this status and have no other effect."""
    before = {name: copy.deepcopy(given[name]) for name in face.outputs}
    with nothing_may_happen(monkeypatch):
        came = face.first(given)
    assert came == (status, 0, None), aclGetRecentErrMsg()
    assert type(came[0]) is AclnnStatus
    assert untouched(face, given, before)
    return aclGetRecentErrMsg()


@pytest.mark.parametrize(("face", "status", "change", "sentence"), WRONG)
def test_a_wrong_argument_returns_its_status_and_message(
    face: Face, status: AclnnStatus, change: Change, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = face.right()
    given |= change(given)
    assert re.match(sentence, refused(face, given, status, monkeypatch)), aclGetRecentErrMsg()


def test_the_codes_are_the_documented_numbers() -> None:
    assert {status.name: int(status) for status in AclnnStatus} == {
        "ACLNN_SUCCESS": 0,
        "ACLNN_ERR_PARAM_NULLPTR": 161001,
        "ACLNN_ERR_PARAM_INVALID": 161002,
    }


#: For each rank of the documented order of checks, wrong arguments and functions that return them.
RANKS: dict[str, list[list[tuple[str, Change]]]] = {
    GROUP.name: [
        [("rstd", lambda _: {"rstd": None}), ("gradBetaOut", lambda _: {"gradBetaOut": None})],
        [
            ("mean", lambda g: {"mean": g["mean"].astype(np.float64)}),
            ("rstd", lambda g: {"rstd": g["rstd"].astype(np.float64)}),
        ],
        [
            ("group", lambda _: {"group": 0}),
            ("HxW", lambda _: {"HxW": -1}),
            ("outputMask", lambda _: {"outputMask": (True, True)}),
            ("outputMask", lambda _: {"outputMask": None}),
            ("outputMask", lambda _: {"outputMask": (True, 1, True)}),
            ("gamma", lambda _: {"gamma": ones(9)}),
            ("gradOut", lambda _: {"gradOut": ones(5)}),
        ],
    ],
    BATCH.name: [
        [("invstd", lambda _: {"invstd": None}), ("sumDyXmu", lambda _: {"sumDyXmu": None})],
        [
            ("mean", lambda g: {"mean": g["mean"].astype(np.float64)}),
            ("gradBias", lambda g: {"gradBias": g["gradBias"].astype(np.float64)}),
        ],
        [("weightG", lambda _: {"weightG": 1}), ("gradOut", lambda _: {"gradOut": ones(5)})],
    ],
}


def pairs() -> Iterator[Any]:
    for face in FACES:
        for high, low in itertools.combinations(range(3), 2):
            for (first, change), (second, other) in itertools.product(RANKS[face.name][high], RANKS[face.name][low]):
                # If outputMask is invalid, gradBetaOut is not known to be wanted, so it is not checked for None.
                if (first, second) != ("gradBetaOut", "outputMask"):
                    yield pytest.param(face, high, first, change, other, id=f"{face.name}-{first}-{second}")


@pytest.mark.parametrize(("face", "rank", "name", "change", "other"), list(pairs()))
def test_wrong_arguments_are_reported_in_the_documented_order(
    face: Face, rank: int, name: str, change: Change, other: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None is checked before dtypes, and dtypes before attributes and shapes."""
    given = face.right()
    given |= {**other(given), **change(given)}
    sentence = refused(face, given, NULLPTR if rank == 0 else INVALID, monkeypatch)
    assert sentence.startswith(f"{name}: "), sentence


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
@pytest.mark.parametrize("face", FACES, ids=lambda face: face.name)
def test_no_argument_raises(face: Face) -> None:
    """Any value of any argument returns a status, and a message that starts with an argument's name."""
    junk: list[Any] = [
        None, True, 0, -1, 2, 2**80, 1.5, float("nan"), "x", b"", (), [], [True] * 3, {}, object(), int,
        np.float32(1), np.bool_(True), ones(), ones(0), ones(8), ones(2, 8, 3, 3), ones(2, 8, 3, 3, dtype=bool),
        np.array([None, 1]), np.ma.masked_array(ones(8)), np.asmatrix(ones(2, 8)), np.broadcast_to(ones(), (8,)),
        np.zeros(8, ml_dtypes.bfloat16), np.zeros(8, ml_dtypes.float8_e4m3fn), np.zeros(8, [("a", "f4"), ("b", "f4")]),
    ]  # fmt: skip
    seen = set()
    for name, value in itertools.product(face.right(), junk):
        given = {**face.right(), name: value}
        status, size, executor = face.first(given)
        seen.add(status)
        assert (executor is not None) is (status == SUCCESS)
        assert size >= 0
        if status != SUCCESS:
            assert aclGetRecentErrMsg().partition(":")[0] in given, (name, value, aclGetRecentErrMsg())
    assert seen == set(AclnnStatus)


def test_the_parameters_have_the_documented_order() -> None:
    second = "workspace workspaceSize executor stream"
    documented = {
        "GroupNormGrad": "dy mean rstd x gamma num_groups data_format dx_is_require dgamma_is_require dbeta_is_require",
        "LayerNormGrad": "dy x variance mean gamma output_mask epsilon",
        "aclnnGroupNormBackwardGetWorkspaceSize": (
            "gradOut input mean rstd gamma N C HxW group outputMask gradInput gradGammaOut gradBetaOut"
        ),
        "aclnnGroupNormBackward": second,
        "aclnnBatchNormReduceBackwardGetWorkspaceSize": (
            "gradOut input mean invstd weight inputG weightG biasG sumDy sumDyXmu gradWeight gradBias"
        ),
        "aclnnBatchNormReduceBackward": second,
    }
    for name, arguments in documented.items():
        assert list(inspect.signature(getattr(ascend, name)).parameters) == arguments.split(), name
    taken = {name: inspect.signature(getattr(ascend, name)).parameters.values() for name in documented}
    defaults = {name: {p.name: p.default for p in all_ if p.default is not p.empty} for name, all_ in taken.items()}
    flags = dict.fromkeys(("dx_is_require", "dgamma_is_require", "dbeta_is_require"), True)
    assert defaults.pop("GroupNormGrad") == {"data_format": "NCHW", **flags}
    assert defaults.pop("LayerNormGrad") == {"output_mask": (True, True, True), "epsilon": 1e-5}
    assert set(map(str, defaults.values())) == {"{}"}


def test_strict_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """C / group > 8000 returns 161002, but only while the limits are strict."""

    def call(C: int, group: int) -> Arguments:
        return group_call(group_arrays((1, C, 1), group))

    wide, widest = call(16002, 2), call(16000, 2)
    assert GROUP.first(wide)[0] == SUCCESS
    with strict_limits(True):
        assert "C / group: 8001, expected at most 8000" in refused(GROUP, wide, INVALID, monkeypatch)
        assert GROUP.first(widest)[0] == SUCCESS
        with strict_limits(False):
            assert GROUP.first(wide)[0] == SUCCESS
        assert GROUP.first(wide)[0] == INVALID
        with pytest.raises(TypeError, match=r"on: 1, expected a bool"):
            strict_limits(1)  # type: ignore[arg-type]
        assert GROUP.first(wide)[0] == INVALID
    assert GROUP.first(wide)[0] == SUCCESS
    with pytest.raises(RuntimeError, match="anything"), strict_limits(True):
        raise RuntimeError("anything")
    assert GROUP.first(wide)[0] == SUCCESS
    try:
        strict_limits(True)  # without `with`, the setting lasts until the next call
        assert GROUP.first(wide)[0] == INVALID
        assert BATCH.first(BATCH.right())[0] == SUCCESS
    finally:
        strict_limits(False)
    assert GROUP.first(wide)[0] == SUCCESS


def test_the_message_is_the_last_failure_of_its_thread() -> None:
    seen = {}

    def other() -> None:
        seen["before"] = aclGetRecentErrMsg()
        GROUP.first({**GROUP.right(), "group": 0})
        seen["after"] = aclGetRecentErrMsg()

    BATCH.first({**BATCH.right(), "mean": None})
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == {"before": "", "after": "group: 0, expected at least 1"}
    assert aclGetRecentErrMsg() == "mean: None, expected an array"
    assert GROUP.first(GROUP.right())[0] == SUCCESS
    assert aclGetRecentErrMsg() == "mean: None, expected an array"  # from the last failure, not the last call


def test_the_first_phase_accepts_more_than_2_to_the_31_elements() -> None:
    """The first phase accepts tensors of 4 GiB. Their pages are never touched, so they use no memory."""
    N, C, HxW = 1, 2**16, 2**15 + 1
    assert N * C * HxW > 2**31
    made = {name: sparse(N * C * HxW, np.float16) for name in ("gradOut", "input", "gradInput")}
    small = {"mean": ones(1, 32), "rstd": ones(1, 32), "gamma": None, "gradGammaOut": ones(C), "gradBetaOut": ones(C)}
    sizes = {"N": N, "C": C, "HxW": HxW, "group": 32, "outputMask": (True, True, True)}
    status, size, executor = GROUP.first({**made, **small, **sizes})
    assert status == SUCCESS, aclGetRecentErrMsg()
    assert size > 0
    assert f"N=1 C={C} HxW={HxW} group=32" in executor.explain()
    assert "copied" not in executor.explain()
    sizes["HxW"] += 1
    assert GROUP.first({**made, **small, **sizes})[0] == INVALID
