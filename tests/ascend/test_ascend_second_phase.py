"""The second phases: the status code and message of each wrong argument, and errors that have no status code."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cunorm import CompileError
from cunorm.ascend import AclnnStatus, aclGetRecentErrMsg
from tests.ascend.ascend_calls import FACES, GROUP, INVALID, NULLPTR, SUCCESS, Face, read_only, untouched
from tests.support.problems import forget_calls


@pytest.mark.parametrize("face", FACES, ids=lambda face: face.name)
def test_a_second_phase_refuses_wrong_arguments(face: Face) -> None:
    """A wrong call returns its status and message, and does not change the outputs. The executor stays usable."""
    given = face.call(face.made_with_workspace())
    memories = {}
    for name, value in given.items():
        if isinstance(value, np.ndarray):  # after 8192 bytes of memory that no array uses
            memories[name] = np.zeros(8192 + value.nbytes, np.uint8)
            given[name] = memories[name][8192:].view(value.dtype).reshape(value.shape)
            given[name][...] = value
    before = copy.deepcopy(given)
    status, size, executor = face.first(given)
    assert status == SUCCESS
    assert size > 0
    other = next(other for other in FACES if other is not face)
    foreign = other.first(other.right())[2]
    enough = np.empty(size, np.uint8)
    cases: list[tuple[tuple[Any, Any, Any], AclnnStatus, str]] = [
        ((enough, size, None), NULLPTR, f"executor: None, expected the executor of {face.name}GetWorkspaceSize"),
        ((None, size, executor), NULLPTR, f"workspace: None, expected an array of at least {size} bytes"),
        ((None, 0, executor), NULLPTR, f"workspace: None, expected an array of at least {size} bytes"),
        ((enough, size, foreign), INVALID, f"executor: made for {other.name}, expected one for {face.name}"),
        ((enough, size, "executor"), INVALID, f"executor: str, expected the executor of {face.name}GetWorkspaceSize"),
        ((enough, size - 1, executor), INVALID, f"workspaceSize: {size - 1}, expected at least {size}"),
        ((enough, -1, executor), INVALID, "workspaceSize: -1, expected at least 0"),
        ((enough, float(size), executor), INVALID, f"workspaceSize: {float(size)}, expected an int"),
        ((enough, None, executor), INVALID, "workspaceSize: None, expected an int"),
        ((enough[:-1], size, executor), INVALID, f"workspace: {size - 1} bytes, expected at least {size}"),
        ((bytearray(size), size, executor), INVALID, "workspace: bytearray, expected a cupy.ndarray or a numpy"),
        ((np.empty(size, object), size, executor), INVALID, "workspace: dtype object, expected a dtype without Python"),
        ((np.empty(2 * size, np.uint8)[::2], size, executor), INVALID, r"workspace: strides \(2,\), expected memory"),
        ((read_only(enough), size, executor), INVALID, "workspace: read-only, expected an array that can be written"),
        *[
            ((memory, size, executor), INVALID, f"workspace: overlaps {name} in memory; pass an array of its own")
            for name, memory in memories.items()
        ],
    ]
    for arguments, code, sentence in cases:
        came = face.second(*arguments)
        assert came == code, (arguments, aclGetRecentErrMsg())
        assert type(came) is AclnnStatus
        assert re.match(sentence, aclGetRecentErrMsg()), aclGetRecentErrMsg()
        assert untouched(face, given, before)
    assert face.second(enough, size, executor) == SUCCESS
    assert not untouched(face, given, before)


def _flagged(array: np.ndarray) -> None:
    array.flags.writeable = False


def _resized(array: np.ndarray) -> None:
    array.resize(100_000, refcheck=False)


def _reshaped(array: np.ndarray) -> None:
    array.shape = (array.size,)


@pytest.mark.parametrize("face", FACES, ids=lambda face: face.name)
def test_an_executor_is_invalid_after_a_memmap_becomes_read_only(face: Face, tmp_path: Path) -> None:
    given = face.right()
    name = face.outputs[0]
    given[name] = np.memmap(tmp_path / "array", given[name].dtype, "w+", shape=given[name].shape)
    status, size, executor = face.first(given)
    assert status == SUCCESS
    assert face.second(np.empty(size, np.uint8), size, executor) == SUCCESS
    given[name].flags.writeable = False
    assert face.second(np.empty(size, np.uint8), size, executor) == INVALID
    assert aclGetRecentErrMsg().startswith(
        f"{name}: writeable False, expected True, as in the first phase; call {face.name}Get"
    )


@pytest.mark.parametrize(
    ("change", "what"), [(_flagged, "writeable False, expected True"), (_resized, "address"), (_reshaped, "shape")]
)
@pytest.mark.parametrize("position", [0, 4, -1], ids=["an input", "gamma", "an output"])
@pytest.mark.parametrize("face", FACES, ids=lambda face: face.name)
@pytest.mark.filterwarnings("ignore:Setting the shape:DeprecationWarning")
def test_an_executor_is_invalid_after_its_arrays_change(
    face: Face, position: int, change: Callable[[Any], None], what: str
) -> None:
    """It does not run if one of the arrays, even weight, has changed. But an input may become read-only."""
    given = face.right()
    two_axes = ("gamma", "gradGammaOut", "gradBetaOut") if face is GROUP else ("weight", "gradBias")
    given |= {name: given[name].reshape(2, 4) for name in two_axes}
    name = [name for name, value in given.items() if isinstance(value, np.ndarray)][position]
    given[name] = given[name].copy()  # an array that owns its memory can be resized
    status, size, executor = face.first(given)
    assert status == SUCCESS, aclGetRecentErrMsg()
    change(given[name])
    came = face.second(np.empty(size, np.uint8), size, executor)
    if change is _flagged and position != -1:
        assert came == SUCCESS
    else:
        assert came == INVALID
        assert re.match(
            rf"{name}: {what}.*, as in the first phase; call {face.name}GetWorkspaceSize again", aclGetRecentErrMsg()
        ), aclGetRecentErrMsg()


@pytest.mark.parametrize("face", FACES, ids=lambda face: face.name)
def test_an_error_without_a_status_code_is_raised(face: Face, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing compiler is not a fault of the arguments."""
    given = face.right()
    before = copy.deepcopy(given)
    monkeypatch.setenv("CUNORM_CXX", "/nowhere/g++")
    monkeypatch.setattr("cunorm.runtime.plans._plans", {})
    forget_calls()
    status, size, executor = face.first(given)
    assert status == SUCCESS
    with pytest.raises(CompileError, match="CUNORM_CXX"):
        face.second(np.empty(size, np.uint8), size, executor)
    assert untouched(face, given, before)


@pytest.mark.parametrize("name", ["CUNORM_CPU_DEVICE", "CUNORM_CPU_ORDER", "CUNORM_CPU_BUILD", "CUNORM_CPU_CORES"])
def test_a_wrong_environment_variable_returns_a_status(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first or the second phase returns it, whichever reads the variable."""
    monkeypatch.setenv(name, "sideways")
    monkeypatch.setattr("cunorm.runtime.plans._plans", {})
    forget_calls()
    status, size, executor = GROUP.first(GROUP.right())
    if status == SUCCESS:
        status = GROUP.second(np.empty(size, np.uint8), size, executor)
    assert status == INVALID
    assert aclGetRecentErrMsg().startswith(f"{name}: ")
