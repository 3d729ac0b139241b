"""The GPU executor. Without a GPU, tests use CuPy arrays whose memory does not exist and a driver that records calls.

The tests at the end need a GPU (``--gpu``).
"""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cunorm
from cunorm import Tile
from cunorm.core.devices import KNOWN
from cunorm.core.errors import CompileError
from cunorm.executors.cpu import executor
from cunorm.ops.group_norm.op import GROUP_NORM_BACKWARD
from cunorm.runtime.checked_call import KEPT_ADDRESSES
from tests.support.problems import TILES, forget_calls, group_arrays, laid_out

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

from cunorm.executors import gpu  # noqa: E402
from tests.support.fake_gpu import FACTS, Driver, expected  # noqa: E402


def given(
    driver: Driver, device: int = 0, shape: tuple[int, ...] = (2, 8, 3, 3), dtype: Any = np.float32
) -> dict[str, Any]:
    made = {name: driver.array(shape, dtype, device) for name in ("dy", "x")}
    made.update({name: driver.array((shape[0], 2), np.float32, device) for name in ("mean", "rstd")})
    return {**made, "gamma": driver.array((shape[1],), dtype, device)}


def results(driver: Driver, device: int = 0, shape: tuple[int, ...] = (2, 8, 3, 3)) -> tuple[Any, ...]:
    return tuple(driver.array(s, np.float32, device) for s in (shape, (shape[1],), (shape[1],)))


# ---- calls ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["block", "split"])
@pytest.mark.parametrize("with_gamma", [True, False])
def test_backward_arguments_reach_the_kernels_in_order(strategy: str, with_gamma: bool, driver: Driver) -> None:
    a, out, tile = given(driver), results(driver), TILES[strategy]
    workspace = driver.array((128,), np.uint8)
    if not with_gamma:
        a["gamma"] = None
    for _ in range(2):  # the second call is in the cache of checked calls
        driver.launches.clear()
        found = cunorm.group_norm_backward(**a, num_groups=2, out=out, workspace=workspace, tile=tile)
        assert all(came is array for came, array in zip(found, out, strict=True))
        plan = cunorm.plan(
            "group_norm_backward", shape=(2, 8, 3, 3), dtype="float32", num_groups=2, device=0, tile=tile
        )
        named = dict(zip(("dx", "dgamma", "dbeta"), out, strict=True)) | a | {"workspace": workspace}
        addresses = {name: 0 if array is None else array.data.ptr for name, array in named.items()}
        assert [launch["args"] for launch in driver.launches] == expected(plan, addresses)
        for launch, planned in zip(driver.launches, plan.launches, strict=True):
            assert all(type(value) in (int, float) for value in launch["args"])
            assert launch["entry"] == planned.entry
            assert launch["grid"] == (planned.grid,)
            assert launch["block"] == (planned.threads,)
            assert launch["shared_mem"] == planned.shared_bytes
    first = driver.launches[0]["args"]
    assert first[:4] == tuple(a[name].data.ptr for name in ("dy", "x", "mean", "rstd"))
    assert driver.allocated == []
    assert driver.synchronised == []


def test_forward_arguments_reach_the_kernel_in_order(driver: Driver) -> None:
    a = given(driver)
    out = (driver.array((2, 8, 3, 3)), driver.array((2, 2)), driver.array((2, 2)))
    for eps in (0.5, 1, np.float32(0.25)):
        cunorm.group_norm(a["x"], 2, a["gamma"], None, eps=eps, out=out, tile=TILES["block"])
        (launch,) = driver.launches
        pointers = tuple(array.data.ptr for array in (a["x"], a["gamma"]))
        assert launch["args"] == (*pointers, 0, *(o.data.ptr for o in out), 2, 8, 9, 2, 1, 10, float(eps))
        # CuPy would pass a numpy.float32 as 4 bytes.
        assert [type(value) for value in launch["args"]] == [int] * 12 + [float]
        driver.launches.clear()


def test_results_are_allocated_on_the_gpu_of_x(driver: Driver) -> None:
    """Results and workspace are allocated on the GPU of the arrays, even if another GPU is current."""
    a = given(driver, device=1)
    for copied in (False, True):
        driver.allocated.clear()
        driver.launches.clear()
        if copied:
            a["dy"] = a["dy"][:, ::-1]
        found = cunorm.group_norm_backward(**a, num_groups=2, tile=TILES["block"])
        assert [launch["device"] for launch in driver.launches] == [1, 1]
        assert [device for _, _, device in driver.allocated] == [1] * (5 if copied else 4)
        assert all(array.device.id == 1 for array in found)
        assert driver.current == 0
    forward = cunorm.group_norm(a["x"], 2, tile=TILES["block"])
    assert all(array.data.device_id == 1 for array in forward)


def test_the_same_shapes_on_another_gpu_are_another_call(driver: Driver) -> None:
    for device in (0, 1, 0, 1):
        driver.launches.clear()
        a, out = given(driver, device), results(driver, device)
        workspace = driver.array((128,), np.uint8, device)
        cunorm.group_norm_backward(**a, num_groups=2, out=out, workspace=workspace, tile=TILES["block"])
        assert [launch["device"] for launch in driver.launches] == [device, device]
        assert driver.current == 0


@pytest.mark.parametrize("name", ["dy", "x", "mean", "rstd", "gamma", "out", "workspace"])
@pytest.mark.parametrize("state", ["cold", "warm"])
def test_arrays_on_different_gpus_are_refused(name: str, state: str, driver: Driver) -> None:
    a, out, workspace = given(driver), results(driver), driver.array((128,), np.uint8)
    options = {"num_groups": 2, "tile": TILES["block"]}
    if state == "warm":
        cunorm.group_norm_backward(**a, out=out, workspace=workspace, **options)
        driver.launches.clear()
    if name == "out":
        out = (out[0], driver.array((8,), np.float32, 1), out[2])
    elif name == "workspace":
        workspace = driver.array((128,), np.uint8, 1)
    else:
        a[name] = driver.array(a[name].shape, np.float32, 1)
    here, there = ("GPU 1", "GPU 0") if name == "x" else ("GPU 0", "GPU 1")
    said = {"out": "out[dgamma]", "x": "dy"}.get(name, name)
    sentence = re.escape(f"{said}: on {there}, but x is on {here}; expected one GPU")
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        cunorm.group_norm_backward(**a, out=out, workspace=workspace, **options)
    assert driver.launches == []
    assert driver.allocated == []


def test_a_numpy_workspace_or_output_is_refused_for_cupy_arrays(driver: Driver) -> None:
    a, out = given(driver), results(driver)
    with pytest.raises(TypeError, match=r"^workspace: a numpy.ndarray, but x is a cupy.ndarray; expected one kind$"):
        cunorm.group_norm_backward(**a, num_groups=2, out=out, workspace=np.zeros(128, np.uint8), tile=TILES["block"])
    with pytest.raises(TypeError, match=r"^out\[dbeta\]: a numpy.ndarray, but x is a cupy.ndarray"):
        cunorm.group_norm_backward(**a, num_groups=2, out=(*out[:2], np.zeros(8, np.float32)), tile=TILES["block"])
    assert driver.launches == []


@pytest.mark.parametrize("state", ["cold", "warm"])
def test_graph_capture_of_a_call_that_allocates_is_refused(state: str, driver: Driver) -> None:
    a, out, workspace = given(driver), results(driver), driver.array((128,), np.uint8)

    def call(**changes: Any) -> Any:
        options = {**a, "num_groups": 2, "tile": TILES["block"], "out": out, "workspace": workspace, **changes}
        return cunorm.group_norm_backward(**options)

    strided = driver.array((2, 8, 3, 6))[..., ::2]
    needs = [
        ({"out": None, "workspace": None}, ["out[dx]", "out[dgamma]", "out[dbeta]", "workspace"]),
        ({"out": (out[0], None, out[2])}, ["out[dgamma]"]),
        ({"workspace": None}, ["workspace"]),
        ({"dy": strided}, ["dy"]),
        ({"out": (strided, *out[1:])}, ["out[dx]"]),
        ({"gamma": driver.array((16,))[::2]}, ["gamma"]),
    ]
    if state == "warm":
        for changes, _ in needs[:4]:
            call(**changes)
    driver.capturing = True
    for changes, words in needs:
        driver.launches.clear()
        driver.allocated.clear()
        with pytest.raises(ValueError, match=r"^out\b.*captured") as caught:
            call(**changes)
        for word in words:
            assert word in str(caught.value)
        for given_anyway in {"out[dx]", "out[dgamma]", "out[dbeta]"} - set(words):
            assert given_anyway not in str(caught.value)
        if "workspace" not in words:
            assert "workspace" not in str(caught.value)  # it was passed, so the message must not request it
        assert driver.launches == []
        assert driver.allocated == []
    call()
    assert len(driver.launches) == 2
    assert driver.allocated == []


def test_overlap_of_outputs_and_inputs_on_a_gpu(driver: Driver) -> None:
    a, out = given(driver), results(driver)
    options = {"num_groups": 2, "tile": TILES["block"]}
    cunorm.group_norm_backward(**a, out=(a["dy"], *out[1:]), **options)
    whole = driver.array((3, 8, 3, 3))
    a["dy"] = whole[:2]
    for wrong in ((a["x"], *out[1:]), (whole[1:], *out[1:]), (out[0], a["gamma"], out[2])):
        with pytest.raises(ValueError, match=r"^out"):
            cunorm.group_norm_backward(**a, out=wrong, **options)


def test_addresses_that_were_checked_do_not_excuse_others(driver: Driver) -> None:
    """A call skips the check for overlaps at addresses that it has checked, and at no others."""
    a, good = given(driver), results(driver)
    options = {"num_groups": 2, "tile": TILES["block"], "workspace": driver.array((128,), np.uint8)}
    wrong = (cupy.ndarray((2, 8, 3, 3), np.float32, a["x"].data + 16), *good[1:])  # the signature of the good call
    cunorm.group_norm_backward(**a, out=good, **options)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^out\[dx\]: overlaps x"):
            cunorm.group_norm_backward(**a, out=wrong, **options)
        assert len(driver.launches) == 2
    for _ in range(KEPT_ADDRESSES + 2):
        cunorm.group_norm_backward(**a, out=results(driver), **options)
    assert len(driver.launches) == 2 * (KEPT_ADDRESSES + 3)
    (call,) = GROUP_NORM_BACKWARD.calls.values()
    assert len(call._seen) <= KEPT_ADDRESSES


def test_a_repeated_call_is_checked_once(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    a = {name: array for name, array in given(driver, shape=(2, 3, 3, 8)).items() if name != "gamma"}
    last = {name: array.transpose(0, 3, 1, 2) if array.ndim == 4 else array for name, array in a.items()}
    for arrays in (a | {"data_format": "NHWC"}, last):
        cunorm.group_norm_backward(**arrays, num_groups=2)
        with monkeypatch.context() as patched:
            patched.setattr("cunorm.runtime.op._checked", None)
            cunorm.group_norm_backward(**arrays, num_groups=2)


@pytest.mark.parametrize("later", [((64,), {}), ((), {"count": 64}), ((), {"count": 64.0})])
def test_a_plan_takes_a_required_number_by_position_or_name(later: Any, driver: Driver) -> None:
    plan = cunorm.plan("batch_norm_backward_elemt", shape=(2, 8, 4, 4), dtype="float32", device=0)
    arrays = [driver.array((2, 8, 4, 4)), driver.array((2, 8, 4, 4)), *[driver.array((8,)) for _ in range(5)]]
    plan(*arrays, *later[0], **later[1])
    assert [one for one in driver.launches[0]["args"] if isinstance(one, float)] == [64.0]
    for wrong in (-1, float("inf"), float("nan"), True, "64", None, 10**400):
        with pytest.raises((TypeError, ValueError), match=r"^count"):
            plan(*arrays, wrong)
    for few in ((arrays, {}), (arrays[:6], {"count": 64}), ([*arrays, 64], {"count": 64}), ([*arrays, 64, 64], {})):
        with pytest.raises(TypeError):
            plan(*few[0], **few[1])


# ---- the functions of the executor ----------------------------------------------------------------------------------


def test_both_executors_have_the_same_functions() -> None:
    """Plans and the tuner call these on either of them."""
    assert isinstance(gpu.Kernel, type) and isinstance(executor.Kernel, type)
    for name in ("limits", "build", "load", "loaded", "fill", "synchronise"):
        assert inspect.signature(getattr(gpu, name)).parameters.keys() == (
            inspect.signature(getattr(executor, name)).parameters.keys()
        ), name
    for name, count in (("compile", 3), ("launch", 5), ("run", 2)):  # the arguments that both have; others have names
        of_gpu, of_cpu = ([*inspect.signature(getattr(one, name)).parameters][:count] for one in (gpu, executor))
        assert of_gpu == of_cpu, name


def test_kernels_are_compiled_once_per_text_and_device(driver: Driver) -> None:
    texts = [f"/* {index} */" for index in range(2)]
    made = {(text, device): gpu.compile(text, "kernel", device) for text in texts for device in (0, 1)}
    for _ in range(2):
        for (text, device), kernel in made.items():
            assert gpu.compile(text, "kernel", device) is kernel
    assert sorted(driver.compiled) == sorted((text, "kernel", device) for text in texts for device in (0, 1))
    assert driver.current == 0


def test_several_threads_compile_a_kernel_once(driver: Driver) -> None:
    count, kernels = 8, []
    barrier = threading.Barrier(count)

    def work() -> None:
        barrier.wait()
        kernels.append(gpu.compile("/* slow */", "kernel"))

    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(kernels) == count
    assert len({id(kernel) for kernel in kernels}) == 1
    assert len(driver.compiled) == 1


def test_a_compile_inside_a_compile(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal handler may compile the kernel that its own thread is compiling."""
    genuine, kernels = cupy.RawKernel, []

    def interrupted(*arguments: Any, **options: Any) -> Any:
        if not kernels:
            kernels.append(None)
            kernels.append(gpu.compile("/* handled */", "kernel"))
        return genuine(*arguments, **options)

    monkeypatch.setattr(cupy, "RawKernel", interrupted)
    thread = threading.Thread(target=lambda: kernels.append(gpu.compile("/* handled */", "kernel")), daemon=True)
    thread.start()
    thread.join(30)
    assert [kernel and kernel.entry for kernel in kernels] == [None, "kernel", "kernel"]


def test_compile_errors_name_kernel_architecture_and_line(driver: Driver) -> None:
    with pytest.raises(CompileError) as caught:
        gpu.compile("broken", "group_norm_block", 1)
    sentence = str(caught.value)
    assert "group_norm_block" in sentence
    assert "sm_90" in sentence
    assert 'norm.cuh(0): error: identifier "chanels" is undefined' in sentence
    assert 2 <= len(sentence.splitlines()) <= 60  # the first lines of a long log
    assert isinstance(caught.value.__cause__, cupy.cuda.compiler.CompileException)
    assert driver.current == 0
    with pytest.raises(CompileError):  # the failure is not cached as a kernel
        gpu.compile("broken", "group_norm_block", 1)


def test_a_call_that_does_not_compile_launches_nothing(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    a, out = given(driver), results(driver)
    with monkeypatch.context() as patched:
        patched.setattr("cunorm.jit.sources.kernel_text", lambda *_: "broken")
        with pytest.raises(CompileError, match="group_norm_backward_block"):
            cunorm.group_norm_backward(**a, num_groups=2, out=out, tile=TILES["block"])
    assert driver.launches == []
    cunorm.group_norm_backward(**a, num_groups=2, out=out, tile=TILES["block"])
    assert len(driver.launches) == 2


def test_the_limit_of_shared_memory_is_raised_once(driver: Driver) -> None:
    kernel = gpu.compile("/* shared */", "kernel", 1)
    gpu.launch(kernel, 1, 32, 48 * 1024, ())
    assert driver.opted_in == []
    allowed = 0
    for shared_bytes in (48 * 1024 + 16, 48 * 1024 + 16, 1000, 100000, 60000, 100000):
        gpu.launch(kernel, 1, 32, shared_bytes, ())
        if shared_bytes > 48 * 1024:
            assert driver.opted_in[-1][1] >= max(shared_bytes, allowed)  # never lowered: another thread may need more
            allowed = driver.opted_in[-1][1]
    assert len(driver.opted_in) <= 2
    assert {(name, device) for name, _, device in driver.opted_in} == {("kernel", 1)}
    assert allowed <= FACTS["sharedMemPerBlockOptin"]
    assert [launch["shared_mem"] for launch in driver.launches][1:] == [49168, 49168, 1000, 100000, 60000, 100000]


def test_a_call_that_uses_more_than_48_kib_raises_the_limit(driver: Driver) -> None:
    a = given(driver, shape=(2, 8, 64, 64))
    for _ in range(3):
        cunorm.group_norm_backward(**a, num_groups=2, tile=TILES["block"])
    ((entry, cap, device),) = driver.opted_in
    assert (entry, device) == ("group_norm_backward_block", 0)
    assert 2 * 4 * 64 * 64 * 4 < driver.launches[0]["shared_mem"] <= cap


def test_a_kernel_is_launched_on_its_own_gpu(driver: Driver) -> None:
    for ordinal in (0, 1):
        kernel = gpu.compile("/* guard */", "kernel", ordinal)
        for current in (0, 1, 2):
            driver.current = current
            gpu.launch(kernel, 5, 64, 0, [1, 2.5])
            assert driver.launches[-1] | {"stream": None} == {
                "entry": "kernel",
                "grid": (5,),
                "block": (64,),
                "args": (1, 2.5),
                "shared_mem": 0,
                "device": ordinal,
                "stream": None,
            }
            assert driver.current == current
    assert driver.synchronised == []
    gpu.synchronise(1)
    assert driver.synchronised == [1]


def test_limits_are_read_from_the_driver(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    facts, h200 = gpu.limits(0), KNOWN["H200"]
    assert facts.architecture == "sm_90"
    for name in ("name", "multiprocessors", "l2_bytes", "shared_memory_per_block", "shared_memory_per_multiprocessor"):
        assert getattr(facts, name) == getattr(h200, name)
    assert facts.bandwidth == pytest.approx(h200.bandwidth, rel=0.05)
    assert facts.largest_cluster == 16  # twice the portable cluster size
    assert facts.clock == h200.clock  # under load; a driver reports the highest
    # CUDA 13 drivers do not report the memory clock. Other properties may be missing too.
    fewer = {k: v for k, v in FACTS.items() if k not in ("memoryClockRate", "reservedSharedMemPerBlock")}
    monkeypatch.setattr(gpu.runtime, "getDeviceProperties", lambda _: dict(fewer))
    assert gpu.limits(1).bandwidth == h200.bandwidth
    other = {**FACTS, "name": b"Unheard-of", "major": 8, "minor": 9, "memoryClockRate": 0}
    monkeypatch.setattr(gpu.runtime, "getDeviceProperties", lambda _: dict(other))
    assert gpu.limits(2).bandwidth > 0
    assert gpu.limits(2).architecture == "sm_89"
    assert gpu.limits(2).largest_cluster == 1
    assert gpu.limits(2).clock == h200.clock
    monkeypatch.setattr(gpu.runtime, "getDeviceProperties", lambda _: {**other, "clockRate": 2520000})
    assert gpu.limits(3).clock == 2.52e9


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ((8, 8, 8, 16), (18, 18, 16, 16, 16, 16, 16, 16)),
        ((7, 8, 8, 15), (18, 18, 18, 16, 16, 16, 16, 14)),
        ((6, 7, 8, 14), (18, 18, 18, 18, 18, 16, 14, 12)),
        ((7, 7, 7, 15), (18, 18, 18, 18, 18, 18, 16, 8)),  # what an H100 said
        ((0, 0, 0, 0), KNOWN["H200"].processing_clusters),  # a part of a GPU
        (None, KNOWN["H200"].processing_clusters),
    ],
)
def test_processing_clusters(
    counts: tuple[int, ...] | None, expected: tuple[int, ...], driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver says how many clusters of full blocks are resident at a time."""
    monkeypatch.setattr(gpu, "_full_clusters", lambda *_: counts)
    found = gpu.limits(3)
    assert found.processing_clusters == expected
    assert sum(found.processing_clusters) == found.multiprocessors
    full = found.resident_clusters(8, 1)
    assert full == sum(count // 8 for count in expected)
    assert 2 * full <= found.resident_clusters(8, 2) <= 2 * full + len(expected)


def test_a_gpu_without_known_processing_clusters_counts_as_one() -> None:
    assert KNOWN["A100"].resident_clusters(8, 2) == 2 * (108 // 8)


@pytest.mark.gpu
def test_gpu_processing_clusters() -> None:
    """The clusters that the driver counts for a size from which the sizes were not derived."""
    found = gpu.limits()
    counted = gpu._full_clusters(0, (2, 8))
    if found.largest_cluster < 16 or counted is None:
        pytest.skip("needs a GPU with clusters of 16 blocks")
    assert counted == (found.resident_clusters(2, 1), found.resident_clusters(8, 1))


def test_plans_for_gpus(driver: Driver) -> None:
    options = {"shape": (2, 8, 3, 3), "dtype": "float32", "num_groups": 2}
    assert cunorm.plan("group_norm", **options).place.kind == "gpu"  # the current GPU
    driver.current = 1
    assert cunorm.plan("group_norm", **options).place.ordinal == 1
    driver.current = 0
    plan = cunorm.plan("group_norm", **options, device=1)
    assert (plan.place.kind, plan.place.ordinal) == ("gpu", 1)
    assert "cpu executor" not in plan.explain()
    assert KNOWN["H200"].name in plan.explain()
    y, _, _ = plan(driver.array((2, 8, 3, 3), np.float32, 1))
    assert y.data.device_id == 1
    with pytest.raises(ValueError, match=r"^x: on GPU 0, but the plan is for GPU 1$"):
        plan(driver.array((2, 8, 3, 3), np.float32, 0))
    other = r'^x: a numpy.ndarray, but the plan is for GPU 1; make a plan with device="cpu"$'
    with pytest.raises(TypeError, match=other):
        plan(np.zeros((2, 8, 3, 3), np.float32))
    other = r"^x: a cupy.ndarray, but the plan is for the CPU executor; make a plan with device=1$"
    with pytest.raises(TypeError, match=other):
        cunorm.plan("group_norm", **options, device="cpu")(driver.array((2, 8, 3, 3), np.float32, 1))
    assert {launch["device"] for launch in driver.launches} == {1}


def test_options_name_no_architecture_and_no_folder() -> None:
    assert isinstance(gpu.OPTIONS, tuple)  # CuPy refuses a list
    assert not any("arch" in option or option.startswith("-I") for option in gpu.OPTIONS)


# ---- on a GPU -------------------------------------------------------------------------------------------------------

SPIN = r"""
extern "C" __global__ void spin(long long cycles) {
    for (const long long began = clock64(); clock64() - began < cycles;) {}
}
"""


def _on_gpu(shape: tuple[int, ...] = (4, 32, 16, 16), **options: Any) -> tuple[Any, dict[str, Any]]:
    a = group_arrays(shape, **options)
    return a, {name: cupy.asarray(getattr(a, name)) for name in ("dy", "x", "mean", "rstd", "gamma")}


def _same_bits(first: Any, second: Any) -> bool:
    return all(cupy.asnumpy(f).tobytes() == cupy.asnumpy(s).tobytes() for f, s in zip(first, second, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("tile", [None, TILES["block"], TILES["split"]])
def test_gpu_equals_the_oracle(dtype: str, tile: Tile | None) -> None:
    a, on_gpu = _on_gpu(dtype=dtype)
    beta = cupy.asarray(a.beta)
    a.check_forward(*map(cupy.asnumpy, cunorm.group_norm(on_gpu["x"], 2, on_gpu["gamma"], beta, tile=tile)))
    found = cunorm.group_norm_backward(**on_gpu, num_groups=2, tile=tile)
    assert all(isinstance(array, cupy.ndarray) for array in found)
    a.check_backward(*map(cupy.asnumpy, found))


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["reversed", "every other", "channels last", "misaligned"])
def test_gpu_strides_and_layouts(layout: str) -> None:
    a, on_gpu = _on_gpu()
    for name in ("dy", "x"):
        on_gpu[name] = laid_out(cupy, getattr(a, name), layout)
    a.check_backward(*map(cupy.asnumpy, cunorm.group_norm_backward(**on_gpu, num_groups=2)))


@pytest.mark.gpu
def test_gpu_calls_use_the_current_stream_and_do_not_wait() -> None:
    a, on_gpu = _on_gpu()
    cunorm.group_norm_backward(**on_gpu, num_groups=2)  # compiles the kernels
    late = cupy.empty_like(on_gpu["dy"])
    late.fill(np.nan)
    spin = cupy.RawKernel(SPIN, "spin")
    spin((1,), (1,), (1,))
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        spin((1,), (1,), (1_000_000_000,))  # about half a second
        cupy.copyto(late, on_gpu["dy"])
        found = cunorm.group_norm_backward(**{**on_gpu, "dy": late}, num_groups=2)
        waiting = not stream.done
    assert waiting, "the call waited for the GPU"
    stream.synchronize()
    a.check_backward(*map(cupy.asnumpy, found))  # on another stream the call would have read NaN


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", ["block", "split"])
def test_gpu_graph_capture(strategy: str) -> None:
    a, on_gpu = _on_gpu()
    tile, b = TILES[strategy], group_arrays((4, 32, 16, 16), seed=1)
    plan = cunorm.plan("group_norm_backward", shape=a.x.shape, dtype="float32", num_groups=2, tile=tile)
    assert plan.place.kind == "gpu"
    workspace = cupy.full(max(1, plan.workspace_nbytes), 0xFF, cupy.uint8)
    out = cunorm.group_norm_backward(**on_gpu, num_groups=2, tile=tile)
    alone = [array.copy() for array in out]
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        try:
            with pytest.raises(ValueError, match=r"^out.*captured.*workspace"):
                cunorm.group_norm_backward(**on_gpu, num_groups=2, tile=tile)
            cunorm.group_norm_backward(**on_gpu, num_groups=2, tile=tile, out=out, workspace=workspace)
        finally:
            graph = stream.end_capture()
        for array in out:
            array.fill(np.nan)
        graph.launch()
        stream.synchronize()
        assert _same_bits(out, alone)
        for name in ("dy", "x", "mean", "rstd", "gamma"):  # other values in the same arrays
            on_gpu[name].set(getattr(b, name))
        graph.launch()
    stream.synchronize()
    b.check_backward(*map(cupy.asnumpy, out))


def _in_parallel(works: list[Callable[[], None]]) -> None:
    errors: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert errors == []


@pytest.mark.gpu
def test_gpu_two_streams() -> None:
    cases = [_on_gpu(seed=seed) for seed in range(2)]
    alone = [cunorm.group_norm_backward(**on_gpu, num_groups=2, tile=TILES["split"]) for _, on_gpu in cases]
    cupy.cuda.Device().synchronize()
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in cases]
    found: list[Any] = [None] * len(cases)
    for _ in range(50):
        for index, (stream, (_, on_gpu)) in enumerate(zip(streams, cases, strict=True)):
            with stream:
                found[index] = cunorm.group_norm_backward(**on_gpu, num_groups=2, tile=TILES["split"])
    for stream, first, second in zip(streams, alone, found, strict=True):
        stream.synchronize()
        assert _same_bits(first, second)


@pytest.mark.gpu
def test_gpu_two_threads() -> None:
    forget_calls()
    cases = [_on_gpu((2, 8, 5, 3 + seed), seed=seed) for seed in range(2)]
    cupy.cuda.Device().synchronize()

    def work(index: int) -> None:
        a, on_gpu = cases[index]
        with cupy.cuda.Stream(non_blocking=True) as stream:
            for _ in range(20):
                found = cunorm.group_norm_backward(**on_gpu, num_groups=2, tile=TILES["split"])
            stream.synchronize()
            a.check_backward(*map(cupy.asnumpy, found))

    _in_parallel([lambda index=index: work(index) for index in range(2)])


@pytest.mark.gpu
def test_gpu_more_than_48_kib_of_shared_memory() -> None:
    a, on_gpu = _on_gpu((2, 8, 48, 48))
    tile = Tile("block", threads=256, groups=1, stages=2, load="cp_async", packs_per_thread=1)
    plan = cunorm.plan("group_norm_backward", shape=a.x.shape, dtype="float32", num_groups=2, tile=tile)
    assert plan.launches[0].shared_bytes > 48 * 1024
    a.check_backward(*map(cupy.asnumpy, cunorm.group_norm_backward(**on_gpu, num_groups=2, tile=tile)))


@pytest.mark.gpu
def test_gpu_workspace_of_any_content() -> None:
    _, on_gpu = _on_gpu()
    for tile in (TILES["block"], TILES["split"]):
        plan = cunorm.plan("group_norm_backward", shape=(4, 32, 16, 16), dtype="float32", num_groups=2, tile=tile)
        alone = cunorm.group_norm_backward(**on_gpu, num_groups=2, tile=tile)
        workspace = cupy.full(plan.workspace_nbytes, 0xFF, cupy.uint8)
        for _ in range(2):
            assert _same_bits(cunorm.group_norm_backward(**on_gpu, num_groups=2, tile=tile, workspace=workspace), alone)


@pytest.mark.gpu
def test_gpu_limits_are_plausible() -> None:
    facts = gpu.limits(0)
    assert facts.multiprocessors > 0
    assert facts.shared_memory_per_block >= 48 * 1024
    assert 1e11 < facts.bandwidth < 1e14
    assert cunorm.plan("group_norm", shape=(2, 8), dtype="float32", num_groups=2).place.device == gpu.limits(
        gpu.current()
    )


@pytest.mark.gpu
def test_gpu_of_the_arrays_need_not_be_the_current_one() -> None:
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    a = group_arrays()
    with cupy.cuda.Device(1):
        on_gpu = {name: cupy.asarray(getattr(a, name)) for name in ("dy", "x", "mean", "rstd", "gamma")}
    with cupy.cuda.Device(0):
        found = cunorm.group_norm_backward(**on_gpu, num_groups=2)
        assert all(array.device.id == 1 for array in found)
    with cupy.cuda.Device(1):
        a.check_backward(*map(cupy.asnumpy, found))


@pytest.mark.gpu
def test_gpu_empty_arrays() -> None:
    x = cupy.zeros((0, 8, 3), cupy.float32)
    y, mean, rstd = cunorm.group_norm(x, 2)
    assert (y.shape, mean.shape, rstd.shape) == ((0, 8, 3), (0, 2), (0, 2))
    dx, dgamma, dbeta = cunorm.group_norm_backward(x, x, mean, rstd, num_groups=2)
    assert dx.shape == x.shape
    assert not dgamma.any()
    assert not dbeta.any()
    y, mean, rstd = cunorm.group_norm(cupy.zeros((2, 8, 0), cupy.float32), 2)
    assert bool(cupy.isnan(mean).all())
    assert bool(cupy.isnan(rstd).all())


def test_clusters_of_more_than_8_blocks_set_an_attribute(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> None:
    """Clusters of more than 8 blocks need an attribute of the kernel. For at most 8 blocks it is not set."""
    from types import SimpleNamespace

    from cunorm.executors import gpu

    asked: list[tuple[int, ...]] = []
    monkeypatch.setattr(gpu, "driver", SimpleNamespace(funcSetAttribute=lambda *of: asked.append(of)))
    kernel = gpu.Kernel(SimpleNamespace(kernel=SimpleNamespace(ptr=7)), "entry", 0)
    for blocks in (1, 2, 8, 16):
        gpu.allow_cluster(kernel, blocks)
    assert asked == [(7, 14, 1)]
