"""PyTorch's and Liger's kernels on the simulator: arguments of launches, what is said where they are missing, results.

The tests that need PyTorch are skipped without it.
"""

from __future__ import annotations

import ctypes
import json
import struct
import subprocess
import sys
from typing import Any

import pytest

from benchmarks.simulator import clock, cubin
from benchmarks.simulator.peers import compare, cubins, runtime, triton_driver
from benchmarks.simulator.peers.calls import Call
from cunorm.core.errors import CompileError
from tests.support.paths import ROOT

TEXT = """
struct Six { short a, b, c; };
extern "C" __global__ void mixed(const float* x, char c, Six six, double d, int n, float f) {
    const_cast<float*>(x)[n] = c + six.c + float(d) + f;
}
"""


class Tensor:
    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address


@pytest.fixture
def code(tools: None) -> cubin.Cubin:
    return cubin.compiled(TEXT, "mixed")


def test_the_places_of_arguments_are_read(code: cubin.Cubin) -> None:
    assert cubin.arguments_of(code.image, "mixed") == [(0, 8), (8, 1), (10, 6), (16, 8), (24, 4), (28, 4)]


def test_the_arguments_of_a_launch_are_gathered(code: cubin.Cubin) -> None:
    values = [struct.pack("<Q", 0x1234), b"\x05", struct.pack("<3h", 1, -2, 3), struct.pack("<d", 0.5)]
    values += [struct.pack("<i", -7), struct.pack("<f", 2.5)]
    buffers = [ctypes.create_string_buffer(value, len(value)) for value in values]
    pointers = (ctypes.c_void_p * len(buffers))(*(ctypes.addressof(one) for one in buffers))
    bank = cubins.arguments(code, pointers)
    for (offset, size), value in zip(cubin.arguments_of(code.image, "mixed"), values, strict=True):
        assert bank[offset : offset + size] == value


def test_arguments_of_triton_are_packed_by_their_types(tools: None) -> None:
    text = 'extern "C" __global__ void plain(float* x, int n, float f, long long k, void* s) { x[n] = f + k; }'
    code = cubin.compiled(text, "plain")
    # The last pointer is scratch memory, which is no argument of the signature.
    bank = triton_driver.packed(code, ["*fp32", "i32", "fp32", "i64"], [Tensor(0x1000), -3, 0.5, 2**40])
    assert bank == struct.pack("<QifqQ", 0x1000, -3, 0.5, 2**40, 0)
    with pytest.raises(ValueError, match="type 'fp8', expected a pointer or i1, "):
        triton_driver.packed(code, ["fp8"], [1.0])
    with pytest.raises(ValueError, match="an argument of type i32 has 4 bytes, the kernel has 8"):
        triton_driver.packed(code, ["i32"], [1])
    with pytest.raises(ValueError, match="6 arguments, the kernel has 5"):
        triton_driver.packed(code, ["i32"] * 6, [1] * 6)


def test_a_missing_package_is_named() -> None:
    with pytest.raises(CompileError, match=r"need no_such_package, which is not installed; pip install torch"):
        cubins.installed("no_such_package")


def test_the_runtime_must_precede_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", object())
    with pytest.raises(ImportError, match=r"torch was imported before .* call runtime\.load first"):
        runtime.load(clock.GPUS["H200"], lambda step: None)


# ---- the comparison -------------------------------------------------------------------------------------------------


def test_the_comparison_has_every_problem() -> None:
    result: dict[str, Any] = json.loads(compare.RESULT.read_text(encoding="utf-8"))
    assert result["gpu"] == clock.GPUS[compare.GPU].device.name
    for row, call in zip(result["rows"], compare.problems(), strict=True):
        assert (row["op"], row["shape"], row["groups"], row["layout"]) == (
            call.op, list(call.shape), call.groups or None, "NHWC" if call.channels_last else "NCHW",
        )  # fmt: skip
        for library in compare.peers_of(call.op):
            expected = row[f"{library}_us"] / row["cunorm_us"]
            assert row[f"{library}_over_cunorm"] == pytest.approx(expected, rel=0.01, abs=0.01)
            assert row[f"{library}_largest_error"] < 0.05
        assert 0 < row["floor_us"] < row["cunorm_us"]


def test_this_library_is_compared_with_its_default_tile(tools: None) -> None:
    call = Call("ATen", "layer_norm", (64, 256), "bfloat16")
    choice, seconds, floor = compare.own(call, clock.GPUS["H200"])
    assert choice["launches"] >= 1 and choice["tile"]
    assert floor == 2 * 2 * 64 * 256
    assert 0.5e-6 < seconds < 20e-6


SMALL = """
from benchmarks.simulator import clock
from benchmarks.simulator.peers import calls
session = calls.Session(clock.GPUS["H200"])
for library in ("ATen", "Liger"):
    recorded = session.record(calls.Call(library, "layer_norm_backward", (40, 256), "float32"))
    assert max(recorded.errors.values()) < 1e-5, recorded.errors
    assert 1e-6 < calls.seconds(calls.timed(recorded, clock.GPUS["H200"])) < 1e-4
print("right")
"""


def test_pytorch_and_liger_compute_on_the_simulator() -> None:
    try:
        cubins.library()
        cubins.installed("liger_kernel")
    except CompileError as error:
        pytest.skip(str(error))
    done = subprocess.run([sys.executable, "-c", SMALL], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "right\n", done.stderr
