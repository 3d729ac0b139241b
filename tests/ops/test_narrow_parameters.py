"""gamma and beta of 16 bits with float32 x, as models hold them that keep activations in float32.

A kernel then reads a part of a 16-byte pack of gamma for each pack of x. dgamma and dbeta have gamma's dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

import cunorm
from cunorm.core.arrays import DTYPES
from cunorm.ops.registry import OPS
from cunorm.runtime.checks import parameter_dtypes
from tests.battery import cases as battery
from tests.battery.case import ALL_OFF, Case
from tests.support.covering import every
from tests.support.problems import layer_arrays

STRATEGIES = [(op.name, name) for op in OPS.values() if "gamma" in op.inputs for name in op.strategies]


def narrow_cases(op: str, strategy: str) -> Iterator[Case]:
    """The cases of a strategy in float32, with parameters of 16 bits."""
    for case in battery.cases(op, strategy):
        if case.dtype == "float32" and case.gamma == "same":
            yield replace(case, gamma="bfloat16", beta="float16", sums=())


@pytest.mark.parametrize(
    ("op", "strategy"), every(3, STRATEGIES), ids=[f"{op}-{strategy}" for op, strategy in STRATEGIES]
)
def test_parameters_of_16_bits_with_float32_x(op: str, strategy: str, pytestconfig: pytest.Config) -> None:
    """A case whose arrays are all misaligned, or the first of a strategy without such a case. All with --long."""
    found = [*narrow_cases(op, strategy)]
    if not pytestconfig.getoption("--long"):
        found = [case for case in found if case.shifts == ALL_OFF][:1] or found[:1]
    assert found
    for case in found:
        try:
            case.run()
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from None


def test_gradients_of_16_bits_are_rounded_once() -> None:
    """dgamma of bfloat16 is dgamma of float32, rounded: gamma is read exactly, and sums are float32."""
    a = layer_arrays((40, 24), 24)
    a.gamma = a.gamma.astype(DTYPES["bfloat16"])
    a.settle()
    given = (a.dy, a.x, a.mean, a.rstd)
    names = ("dy", "x", "mean", "rstd")
    narrow, wide = (
        cunorm.layer_norm_backward(**dict(zip(names, given, strict=True)), gamma=gamma, normalized_shape=24)
        for gamma in (a.gamma, a.gamma.astype(np.float32))
    )
    assert [each.dtype for each in narrow] == [np.float32, a.gamma.dtype, a.gamma.dtype]
    np.testing.assert_array_equal(narrow[0], wide[0])
    for came, want in zip(narrow[1:], wide[1:], strict=True):
        assert came.tobytes() == want.astype(a.gamma.dtype).tobytes()


def test_which_parameters_go_with_which_x() -> None:
    assert {dtype: parameter_dtypes(dtype) for dtype in DTYPES} == {
        "float16": ("float16", "float32"),
        "bfloat16": ("bfloat16", "float32"),
        "float32": ("float32", "float16", "bfloat16"),
        "float64": ("float64",),
    }
    x = np.ones((2, 8), np.float64)
    for dtype in ("float32", "float16"):
        with pytest.raises(TypeError, match=rf"^gamma: dtype {dtype}, expected float64 for float64 x"):
            cunorm.layer_norm(x, 8, np.ones(8, dtype))
    with pytest.raises(TypeError, match=r"^gamma_dtype: 'float16', expected bfloat16 or float32"):
        cunorm.plan("layer_norm", shape=(2, 8), dtype="bfloat16", normalized_shape=8, gamma_dtype="float16")
