"""What a kernel text uses, for a test that has one text and no choice of NVRTC."""

from __future__ import annotations

import pytest

from cunorm.jit.nvrtc import ends, supported, usages
from cunorm.jit.ptxas import Usage


def compile_for(text: str, architecture: str) -> list[Usage]:
    """With the oldest NVRTC that is installed; CompileError with the log if it does not compile."""
    if not ends():
        pytest.skip(f"needs NVRTC {supported()}")
    return usages(text, architecture, ends()[0])
