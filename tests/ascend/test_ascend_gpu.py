"""The Ascend functions on CuPy arrays with a fake driver: addresses, streams, devices and graph capture.

Results on a GPU are tested by test_ascend.py and test_ascend_operators.py with ``--gpu``, and by the last test here.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import cunorm
from cunorm.ascend import GroupNormGrad, LayerNormGrad, aclGetRecentErrMsg
from tests.ascend.ascend_calls import BATCH, FACES, GROUP, INVALID, NULLPTR, SUCCESS, Arguments, Face
from tests.support.problems import laid_out

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

from tests.support.fake_gpu import Driver, expected  # noqa: E402


def call(face: Face, driver: Driver, device: int = 0) -> Arguments:
    """The arguments of a correct call with arrays on that GPU."""
    return {
        name: driver.array(value.shape, value.dtype, device) if isinstance(value, np.ndarray) else value
        for name, value in face.call(face.made_with_workspace()).items()
    }


def pointers(face: Face, given: Arguments) -> dict[str, int]:
    """The addresses of a call's arrays, by their names in the public function."""
    names = {
        GROUP.name: ("dy", "x", "mean", "rstd", "gamma"),
        BATCH.name: ("dy", "x", "mean", "invstd"),
    }[face.name]
    results = ("dx", "dgamma", "dbeta") if face is GROUP else ("sum_dy", "sum_dy_xmu", "dgamma", "dbeta")
    found = [value.data.ptr for value in given.values() if hasattr(value, "data")]
    return dict(zip((*names, *results), [*found[: len(names)], *found[-len(results) :]], strict=True))


def planned(face: Face, **changes: Any) -> cunorm.Plan:
    if face is GROUP:
        asked = {"shape": (3, 8, 9), "dtype": "float32", "num_groups": 2, "gamma_dtype": "float32", "device": 0}
        return cunorm.plan("group_norm_backward", **(asked | changes))
    return cunorm.plan(
        "batch_norm_backward_reduce", **({"shape": (70, 8, 9), "dtype": "float32", "device": 0} | changes)
    )


class Stream:
    """A stream that records the number of launches when it becomes current and when it stops being current."""

    def __init__(self, driver: Driver, device_id: int) -> None:
        self.driver, self.device_id, self.ptr = driver, device_id, 0x5EED
        self.seen: list[int] = []

    def __enter__(self) -> Any:
        assert self.device_id in (-1, self.driver.current)  # CuPy raises for a stream of another GPU
        self.seen.append(len(self.driver.launches))
        return self

    def __exit__(self, *_: object) -> None:
        self.seen.append(len(self.driver.launches))


@pytest.mark.parametrize("face", FACES, ids=lambda face: face.name)
def test_kernels_receive_the_memory_of_the_caller(face: Face, driver: Driver) -> None:
    """Nothing is allocated, copied or synchronised. Kernels receive a workspace that is aligned to 16 bytes."""
    given = call(face, driver)
    status, size, executor = face.first(given)
    assert status == SUCCESS, aclGetRecentErrMsg()
    assert driver.launches == []
    workspace = driver.array((size + 3,), np.uint8)[3:]
    for _ in range(2):
        driver.launches.clear()
        assert face.second(workspace, size, executor) == SUCCESS, aclGetRecentErrMsg()
        start = -(-workspace.data.ptr // 16) * 16
        named = pointers(face, given) | {"workspace": start}
        assert [launch["args"] for launch in driver.launches] == expected(planned(face), named)
        assert start + planned(face).workspace_nbytes <= workspace.data.ptr + workspace.nbytes
    assert driver.allocated == []
    assert driver.synchronised == []


@pytest.mark.parametrize("layout", ["channels last", "reshaped"])
@pytest.mark.parametrize("face", FACES, ids=lambda face: face.name)
def test_tensors_in_other_shapes_are_not_copied(face: Face, layout: str, driver: Driver) -> None:
    given = call(face, driver)
    N, C = given["input"].shape[:2]
    changes = {}
    for name in ("gradOut", "input", "gradInput")[: 3 if face is GROUP else 2]:
        if layout == "channels last":
            changes = {"shape": (N, 9, C), "data_format": "NHWC"}
            given[name] = driver.array((N, 3, 3, C), np.float32).transpose(0, 3, 1, 2)
        elif face is GROUP:
            given[name] = given[name].reshape(N * C * 9)
        else:
            given[name] = given[name].reshape(N, C, 9, 1)
    status, size, executor = face.first(given)
    assert status == SUCCESS, aclGetRecentErrMsg()
    assert "copied" not in executor.explain()
    workspace = driver.array((size,), np.uint8) if size else None
    assert face.second(workspace, size, executor) == SUCCESS, aclGetRecentErrMsg()
    named = pointers(face, given) | {"workspace": workspace.data.ptr if workspace is not None else 0}
    assert [launch["args"] for launch in driver.launches] == expected(planned(face, **changes), named)
    assert driver.allocated == []


@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("face", FACES, ids=lambda face: face.name)
def test_kernels_launch_on_the_stream(face: Face, device: int, driver: Driver) -> None:
    """Launches are on the arrays' GPU, whichever GPU is current. The stream is current only during the launches."""
    status, size, executor = face.first(call(face, driver, device))
    assert status == SUCCESS, aclGetRecentErrMsg()
    workspace = driver.array((size,), np.uint8, device)
    for stream in (None, Stream(driver, device), Stream(driver, -1)):
        driver.launches.clear()
        assert face.second(workspace, size, executor, stream) == SUCCESS, aclGetRecentErrMsg()
        assert {launch["device"] for launch in driver.launches} == {device}
        assert driver.current == 0
        if stream is not None:
            assert stream.seen == [0, len(driver.launches)]


def test_a_wrong_stream_is_refused(driver: Driver) -> None:
    _, size, executor = GROUP.first(call(GROUP, driver))
    workspace = driver.array((size,), np.uint8)
    assert GROUP.second(workspace, size, executor, Stream(driver, 1)) == INVALID
    assert aclGetRecentErrMsg() == "stream: belongs to GPU 1, but the arrays are on GPU 0"
    for wrong in (0, 0x5EED, "stream", object(), Stream):
        assert GROUP.second(workspace, size, executor, wrong) == INVALID
        assert aclGetRecentErrMsg().startswith(f"stream: {type(wrong).__name__}, expected a cupy.cuda.Stream (")
    assert driver.launches == []


@pytest.mark.parametrize("face", FACES, ids=lambda face: face.name)
def test_arrays_on_two_devices_are_refused(face: Face, driver: Driver) -> None:
    given = call(face, driver)
    for name in [name for name, value in given.items() if hasattr(value, "data")]:
        for other, sentence in (
            (driver.array(given[name].shape, given[name].dtype, 1), "on GPU"),
            (np.ones(given[name].shape, given[name].dtype), "numpy.ndarray, but|cupy.ndarray, but"),
        ):
            assert face.first({**given, name: other}) == (INVALID, 0, None)
            assert any(part in aclGetRecentErrMsg() for part in sentence.split("|")), aclGetRecentErrMsg()
    _, size, executor = face.first(given)
    assert face.second(np.empty(size, np.uint8), size, executor) == INVALID
    assert aclGetRecentErrMsg() == "workspace: a numpy.ndarray, but gradOut is a cupy.ndarray; expected one kind"
    assert face.second(driver.array((size,), np.uint8, 1), size, executor) == INVALID
    assert aclGetRecentErrMsg() == "workspace: on GPU 1, but gradOut is on GPU 0; expected one GPU"
    assert face.second(None, size, executor) == NULLPTR
    assert driver.launches == []


@pytest.mark.parametrize("face", FACES, ids=lambda face: face.name)
def test_graph_capture(face: Face, driver: Driver) -> None:
    """A call without copies may be captured. A call with copies is refused before it allocates anything."""
    given = call(face, driver)
    _, size, executor = face.first(given)
    workspace = driver.array((size,), np.uint8)
    driver.capturing = True
    assert face.second(workspace, size, executor) == SUCCESS, aclGetRecentErrMsg()
    assert driver.launches
    driver.launches.clear()
    given["input"] = given["input"].swapaxes(2, 3)
    given[face.outputs[-1]] = driver.array((16,))[::2]
    status, size, executor = face.first(given)
    assert status == SUCCESS
    assert face.second(driver.array((size,), np.uint8), size, executor) == INVALID
    assert aclGetRecentErrMsg().startswith("input: the stream is being captured into a graph")
    sentence = aclGetRecentErrMsg()
    assert re.search(
        r"but these arrays need a copy: input: strides \(288, 36, 4, 12\), needed without gaps in the ", sentence
    )
    assert sentence.endswith(f"; {face.outputs[-1]}: strides (8,), needed without gaps"), sentence
    assert driver.launches == []
    assert driver.allocated == []


def test_a_scalar_on_a_gpu_is_refused_without_synchronisation(driver: Driver) -> None:
    """Printing a value would synchronise too. The message contains the type instead."""
    given = call(GROUP, driver)
    wrong = driver.array((), np.int64)
    for name in ("N", "C", "HxW", "group", "outputMask"):
        assert GROUP.first({**given, name: wrong}) == (INVALID, 0, None)
        assert aclGetRecentErrMsg().startswith(f"{name}: ndarray, expected ")
    assert GROUP.first({**given, "outputMask": (wrong, True, True)})[0] == INVALID
    assert aclGetRecentErrMsg() == "outputMask: contains ndarray, expected bools"
    assert BATCH.first({**call(BATCH, driver), "weightG": wrong})[0] == INVALID
    assert aclGetRecentErrMsg() == "weightG: ndarray, expected a bool"
    _, size, executor = GROUP.first(given)
    assert GROUP.second(driver.array((size,), np.uint8), wrong, executor) == INVALID
    assert aclGetRecentErrMsg() == "workspaceSize: ndarray, expected an int"


def test_empty_arrays_on_a_gpu(driver: Driver) -> None:
    given = call(GROUP, driver)
    given |= {name: driver.array((0, 8, 3, 3)) for name in ("gradOut", "input")}
    given |= {name: driver.array((0, 2)) for name in ("mean", "rstd")}
    given |= {"N": 0, "outputMask": (True, False, False), "gradInput": driver.array((0, 8, 3, 3))}
    status, size, executor = GROUP.first(given)
    assert (status, size) == (SUCCESS, 0), aclGetRecentErrMsg()
    assert GROUP.first({**given, "C": 2**62}) == (INVALID, 0, None)
    assert executor.explain().splitlines()[-1].startswith("strategy   none")


def test_without_results_nothing_is_copied(driver: Driver) -> None:
    given = call(GROUP, driver) | {"outputMask": (False, False, False)}
    given["input"] = given["input"].swapaxes(2, 3)
    driver.capturing = True
    status, size, executor = GROUP.first(given)
    assert (status, size) == (SUCCESS, 0), aclGetRecentErrMsg()
    assert GROUP.second(None, 0, executor) == SUCCESS, aclGetRecentErrMsg()
    assert driver.allocated == driver.launches == []


def test_operators_refuse_graph_capture(driver: Driver) -> None:
    driver.capturing = True
    x, vector, gamma = driver.array((2, 8, 9)), driver.array((2, 2)), driver.array((8,))
    with pytest.raises(ValueError, match=r"x: the stream is being captured .*; call cunorm.group_norm_backward with"):
        GroupNormGrad(x, vector, vector, x, gamma, 2)
    rows, gamma = driver.array((2, 8, 1)), driver.array((9,))
    with pytest.raises(ValueError, match=r"x: the stream is being captured .*; call cunorm.layer_norm_backward with"):
        LayerNormGrad(x, x, rows, rows, gamma)
    assert driver.allocated == []


# ---- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("face", FACES, ids=lambda face: face.name)
def test_the_flow_on_a_stream_of_the_caller(face: Face) -> None:
    """Copies of arrays run on the stream too, in order. The flow can be captured as a graph."""
    right = face.right().items()
    given = {name: cupy.asarray(value) if isinstance(value, np.ndarray) else value for name, value in right}
    results = [cupy.asnumpy(array) for array in face.walk(given, cupy)]
    strided = {**given, "gradOut": laid_out(cupy, given["gradOut"], "swapped")}
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        again = face.walk(strided, cupy, stream)
    stream.synchronize()
    assert all(np.array_equal(cupy.asnumpy(a), b) for a, b in zip(again, results, strict=True))

    _, size, executor = face.first(given)
    workspace = cupy.empty(size, np.uint8)
    for name in face.outputs:
        given[name].fill(0)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        assert face.second(workspace, size, executor, stream) == SUCCESS, aclGetRecentErrMsg()
        graph = stream.end_capture()
        graph.launch()
    stream.synchronize()
    assert all(np.array_equal(cupy.asnumpy(given[name]), b) for name, b in zip(face.outputs, results, strict=True))
