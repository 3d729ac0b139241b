"""The 16-bit conversions of types.cuh, bit for bit: one rounding to nearest even, with subnormals and infinities."""

from __future__ import annotations

import numpy as np
import pytest

from cunorm.core.arrays import DTYPES, addresses
from cunorm.executors import choose
from cunorm.jit import sources
from tests.conftest import Executor
from tests.support.paths import KERNELS

THREADS = 128


def text_of(dtype: str) -> str:
    """Return the head that the host writes and the test kernel, with the include of types.cuh expanded."""
    head = (
        "struct float16; struct bfloat16; struct ChannelsFirst; struct ChannelsLast;\n"
        f"typedef {dtype} data_t;\nstruct Tile {{ static constexpr int threads = {THREADS}; }};\n"
    )
    kernel = (KERNELS / "conversions.cu").read_text(encoding="utf-8")
    types = (sources.folder() / "common" / "types.cuh").read_text(encoding="utf-8")
    return head + kernel.replace('#include "common/types.cuh"', types)


def interesting_floats(dtype: str) -> np.ndarray:
    """Return every 16-bit value, the midpoints of neighbours (ties), the floats next to each midpoint, and values past
    the largest.
    """
    bits = np.arange(65536, dtype=np.uint16)
    values = bits.view(DTYPES[dtype]).astype(np.float32)
    finite = np.sort(values[np.isfinite(values)])
    middles = ((finite[:-1].astype(np.float64) + finite[1:]) / 2).astype(np.float32)
    largest = finite[-1].astype(np.float64)
    beyond = np.float32([largest + (finite[-1] - finite[-2]) / 2, np.finfo(np.float32).max, np.inf, np.nan])
    around = [np.nextafter(middles, np.float32(np.inf)), np.nextafter(middles, np.float32(-np.inf))]
    return np.concatenate([values, middles, *around, beyond, -beyond])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_conversions_are_exact(dtype: str, executor: Executor) -> None:
    with np.errstate(all="ignore"):
        wide = interesting_floats(dtype)
        exact = wide.astype(DTYPES[dtype])
    if executor.name == "gpu":  # CuPy compiles with -ftz=true, which flushes float32 subnormals to zero
        kept = (np.abs(wide) >= np.finfo(np.float32).tiny) | (wide == 0) | ~np.isfinite(wide)
        wide, exact = wide[kept], exact[kept]
    stored = np.resize(np.arange(65536, dtype=np.uint16).view(DTYPES[dtype]), wide.shape)
    arrays = [executor.put(a) for a in (wide, np.zeros_like(exact), stored, np.zeros_like(wide))]
    made = choose.executor(executor.name)
    kernel = made.compile(text_of(dtype), "conversions")
    made.launch(kernel, 64, THREADS, 0, (*addresses(executor.name, arrays), wide.size))
    rounded, widened = (executor.get(arrays[i]) for i in (1, 3))
    assert wide.size > 200_000
    numbers = ~np.isnan(wide)
    assert np.array_equal(rounded.view(np.uint16)[numbers], exact.view(np.uint16)[numbers])
    assert np.all(np.isnan(rounded.astype(np.float32)[~numbers]))
    with np.errstate(all="ignore"):
        back = stored.astype(np.float32)
    assert np.array_equal(widened, back, equal_nan=True)
