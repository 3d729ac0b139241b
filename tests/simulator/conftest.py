"""Fixtures of the simulator's tests."""

from __future__ import annotations

import pytest

from benchmarks.simulator import cubin
from cunorm.core.errors import CompileError


@pytest.fixture(scope="session")
def tools() -> None:
    """Skip if NVRTC or nvdisasm is not installed."""
    try:
        cubin.compiler()
        cubin.nvdisasm()
    except CompileError as error:
        pytest.skip(str(error))
