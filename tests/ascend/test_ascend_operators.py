"""GroupNormGrad and LayerNormGrad: results compared with the oracle, and wrong arguments."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cunorm
from cunorm import reference
from cunorm.ascend import GroupNormGrad, LayerNormGrad, strict_limits
from cunorm.core.arrays import DTYPES
from tests.conftest import Executor
from tests.support.contract import nothing_may_happen
from tests.support.problems import group_arrays, layer_arrays

EPSILON = 1e-3


def layer_call(dtype: str = "float32", width: str = "float32") -> tuple[dict[str, Any], Any]:
    """The arguments of a correct LayerNormGrad call, and its arrays with the rstd that it should compute."""
    made = layer_arrays((3, 4, 5), (4, 5), dtype)
    x = made.x.astype(np.float64)
    variance = x.var((1, 2), keepdims=True).astype(DTYPES[width])
    mean = x.mean((1, 2), keepdims=True).astype(DTYPES[width])
    sums = np.float64 if dtype == "float64" else np.float32
    made.mean = mean.astype(sums)
    made.rstd = (1 / np.sqrt(variance.astype(np.float64) + EPSILON)).astype(sums)
    given = {"dy": made.dy, "x": made.x, "variance": variance, "mean": mean, "gamma": made.gamma, "epsilon": EPSILON}
    return given, made


def there(executor: Executor, given: dict[str, Any]) -> dict[str, Any]:
    return {name: executor.put(value) if isinstance(value, np.ndarray) else value for name, value in given.items()}


# ---- GroupNormGrad --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data_format", ["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_group_norm_grad(dtype: str, data_format: str, executor: Executor) -> None:
    made = group_arrays((2, 8, 3, 3) if data_format == "NCHW" else (2, 3, 3, 8), dtype=dtype, data_format=data_format)
    made.gamma = made.gamma.astype(made.mean.dtype)
    given = [executor.put(array) for array in (made.dy, made.mean, made.rstd, made.x, made.gamma)]
    results = [executor.get(array) for array in GroupNormGrad(*given, made.groups, data_format)]
    made.check_backward(*results)
    assert [result.dtype for result in results] == [made.x.dtype, made.mean.dtype, made.mean.dtype]


def test_group_norm_grad_all_in_float16(executor: Executor) -> None:
    made = group_arrays(dtype="float16")
    made.mean, made.rstd = made.mean.astype(np.float16), made.rstd.astype(np.float16)
    given = [executor.put(array) for array in (made.dy, made.mean, made.rstd, made.x, made.gamma)]
    results = [executor.get(array) for array in GroupNormGrad(*given, made.groups)]
    made.check_backward(*results)
    assert {result.dtype for result in results} == {np.dtype(np.float16)}


def test_group_norm_grad_without_gamma(executor: Executor) -> None:
    made = group_arrays(dtype="float16", gamma_dtype=None)
    given = [executor.put(array) for array in (made.dy, made.mean, made.rstd, made.x)]
    results = [executor.get(array) for array in GroupNormGrad(*given, None, made.groups)]
    made.check_backward(*results)
    assert [result.dtype for result in results] == [np.float16, np.float32, np.float32]


@pytest.mark.parametrize("required", [(True, False, False), (False, True, False), (False, False, True), (False,) * 3])
def test_gradients_that_are_not_required_are_none(required: tuple[bool, bool, bool]) -> None:
    made = group_arrays()
    results = GroupNormGrad(made.dy, made.mean, made.rstd, made.x, made.gamma, made.groups, "NCHW", *required)
    assert tuple(result is not None for result in results) == required
    made.check_backward(*results)


def test_operators_ignore_strict_limits() -> None:
    """`strict_limits` has no effect: operators return no status code."""
    made = group_arrays((1, 8001, 1), 1)
    with strict_limits(True):
        made.check_backward(*GroupNormGrad(made.dy, made.mean, made.rstd, made.x, made.gamma, 1))


GROUP_WRONG = [
    ({"dx_is_require": 1}, TypeError, "dx_is_require: 1, expected a bool"),
    ({"dgamma_is_require": None}, TypeError, "dgamma_is_require: None, expected a bool"),
    ({"dbeta_is_require": "no"}, TypeError, "dbeta_is_require: 'no', expected a bool"),
    ({"gamma": np.ones(8, np.float64)}, TypeError, "gamma: dtype float64, expected float32, the dtype of mean"),
    ({"mean": np.ones((2, 2), np.int32)}, TypeError, "mean: dtype int32, expected float32 for float32 x"),
    ({"x": np.ones((2, 8, 3, 3), np.int32)}, TypeError, "x: dtype int32, expected float16 or"),
    ({"gamma": [1.0] * 8}, TypeError, "gamma: list, expected a cupy.ndarray or a numpy.ndarray"),
    ({"mean": None}, TypeError, "mean: NoneType, expected a cupy.ndarray or a numpy.ndarray"),
    ({"x": None}, TypeError, "x: NoneType, expected a cupy.ndarray or a numpy.ndarray"),
    ({"dy": np.ones((2, 8, 9), np.float32)}, ValueError, r"dy: shape \(2, 8, 9\), expected \(2, 8, 3, 3\)"),
    ({"mean": np.ones(5, np.float32)}, ValueError, r"mean: shape \(5,\), expected \(2, 2\)"),
    ({"num_groups": 3}, ValueError, "num_groups: 3, expected a divisor"),
    ({"data_format": "NCDHW"}, ValueError, "data_format: 'NCDHW', expected 'NCHW' or 'NHWC'"),
    ({"data_format": np.array(["NCHW", "NHWC"])}, ValueError, "data_format: ndarray, expected 'NCHW' or 'NHWC'"),
]


@pytest.mark.parametrize(("change", "error", "sentence"), GROUP_WRONG, ids=[case[2] for case in GROUP_WRONG])
def test_group_norm_grad_refuses_wrong_arguments(
    change: dict[str, Any], error: type[Exception], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = group_arrays()
    given = {"dy": made.dy, "mean": made.mean, "rstd": made.rstd, "x": made.x, "gamma": made.gamma, "num_groups": 2}
    with nothing_may_happen(monkeypatch), pytest.raises(error, match=f"^{sentence}"):
        GroupNormGrad(**(given | change))


# ---- LayerNormGrad --------------------------------------------------------------------------------------------------

WIDTHS = [
    (dtype, width)
    for dtype, widths in {
        "float16": ("float16", "bfloat16", "float32", "float64"),
        "bfloat16": ("bfloat16", "float32"),
        "float32": ("float32", "float64"),
        "float64": ("float64",),
    }.items()
    for width in widths
]


@pytest.mark.parametrize(("dtype", "width"), WIDTHS)
def test_layer_norm_grad(dtype: str, width: str, executor: Executor) -> None:
    """The statistics may have any dtype that is no narrower than x's. rstd is computed from the variance."""
    given, made = layer_call(dtype, width)
    results = [executor.get(array) for array in LayerNormGrad(**there(executor, given))]
    made.check_backward(*results)
    assert [result.dtype for result in results] == [made.x.dtype, made.gamma.dtype, made.gamma.dtype]


def test_variance_and_mean_may_differ_in_dtype(executor: Executor) -> None:
    given, made = layer_call("float16", "float16")
    exact = {"variance": given["variance"].astype(np.float64), "mean": given["mean"].astype(np.float32).reshape(3)}
    made.check_backward(*[executor.get(array) for array in LayerNormGrad(**there(executor, given | exact))])


def test_the_rounding_of_rstd() -> None:
    """It is computed in float64 and rounded once. float32 arithmetic would differ in the last place."""
    random = np.random.default_rng(0)
    x = random.standard_normal((200, 4)).astype(np.float32)
    variance, mean = random.random((200, 1)).astype(np.float32) + np.float32(0.1), np.zeros((200, 1), np.float32)
    one = np.float32(1)
    exact = (1 / np.sqrt(variance.astype(np.float64) + EPSILON)).astype(np.float32)
    assert (exact != one / np.sqrt(variance + np.float32(EPSILON))).any()
    dx = LayerNormGrad(x, x, variance, mean, np.ones(4, np.float32), epsilon=EPSILON)[0]
    assert dx is not None
    assert dx.tobytes() == cunorm.layer_norm_backward(x, x, 4, mean, exact, np.ones(4, np.float32))[0].tobytes()  # type: ignore[union-attr]


def test_the_default_epsilon_is_1e_5() -> None:
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    variance, mean, gamma = np.full((2, 1), 1e-5), np.full((2, 1), 1.5), np.ones(4, np.float32)
    came, given = (
        LayerNormGrad(x, x, variance, mean, gamma)[0],
        LayerNormGrad(x, x, variance, mean, gamma, epsilon=1e-5)[0],
    )
    assert came is not None
    assert given is not None
    assert came.tobytes() == given.tobytes()
    other = LayerNormGrad(x, x, variance, mean, gamma, epsilon=2e-5)[0]
    assert other is not None
    assert came.tobytes() != other.tobytes()


@pytest.mark.parametrize("rank", [1, 8])
@pytest.mark.parametrize("shape", [(), (1,), None])
def test_layer_norm_grad_of_one_row_and_of_many_dimensions(rank: int, shape: Any, executor: Executor) -> None:
    """A statistic of one row may have zero dimensions."""
    made = layer_arrays((4,) if rank == 1 else (1,) * 6 + (2, 2), (4,) if rank == 1 else (2, 2))
    variance = made.x.astype(np.float64).var().reshape(shape if shape is not None else made.mean.shape)
    made.rstd = (1 / np.sqrt(variance + 1e-5)).astype(np.float32)
    given = [made.dy, made.x, variance, made.mean.reshape(variance.shape), made.gamma]
    made.check_backward(*[executor.get(a) for a in LayerNormGrad(*[executor.put(np.asarray(a)) for a in given])])


@pytest.mark.parametrize(
    ("shape", "data_format"), [((4, 6), "NCHW"), ((2,) * 7 + (3,), "NCHW"), ((2,) * 7 + (6,), "NHWC")]
)
def test_group_norm_grad_of_2_and_of_8_dimensions(shape: Any, data_format: str, executor: Executor) -> None:
    made = group_arrays(shape, groups=2, data_format=data_format)
    given = [executor.put(array) for array in (made.dy, made.mean, made.rstd, made.x, made.gamma)]
    made.check_backward(*[executor.get(a) for a in GroupNormGrad(*given, 2, data_format)])


@pytest.mark.parametrize("name", ["dy", "x", "variance", "mean", "gamma"])
def test_layer_norm_grad_refuses_a_masked_array(name: str) -> None:
    """Its mask would be lost, and its arithmetic would mask the result for a negative variance."""
    given, _ = layer_call()
    given["variance"][1] = -1
    given[name] = np.ma.masked_array(given[name])
    with pytest.raises(TypeError, match=rf"^{name}: a numpy.ma.MaskedArray, expected .*; pass {name}\.filled"):
        LayerNormGrad(**given)


@pytest.mark.parametrize("name", ["dy", "mean", "rstd", "x", "gamma"])
def test_group_norm_grad_refuses_a_masked_array(name: str) -> None:
    made = group_arrays((2, 8, 3, 3))
    given = {"dy": made.dy, "mean": made.mean, "rstd": made.rstd, "x": made.x, "gamma": made.gamma}
    given[name] = np.ma.masked_array(given[name])
    with pytest.raises(TypeError, match=rf"^{name}: a numpy.ma.MaskedArray, expected .*; pass {name}\.filled"):
        GroupNormGrad(*given.values(), made.groups)


def test_layer_norm_grad_is_the_gradient_of_layer_norm() -> None:
    """It agrees with `layer_norm` and `layer_norm_backward` for the variance of x and the same eps."""
    made = layer_arrays((6, 10), (10,))
    variance = made.x.var(1, keepdims=True)
    results = LayerNormGrad(made.dy, made.x, variance, made.mean, made.gamma)
    expected = cunorm.layer_norm_backward(
        made.dy, made.x, 10, *cunorm.layer_norm(made.x, 10, made.gamma, eps=1e-5)[1:], made.gamma
    )
    for came, want in zip(results, expected, strict=True):
        assert np.allclose(came, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, False), (False, False, True), (False,) * 3])
def test_gradients_outside_the_output_mask_are_none(wanted: tuple[bool, bool, bool]) -> None:
    given, made = layer_call()
    results = LayerNormGrad(**given, output_mask=wanted)
    assert tuple(result is not None for result in results) == wanted
    made.check_backward(*results)


def test_layer_norm_grad_without_rows(executor: Executor) -> None:
    given = {name: executor.put(np.ones((0, 4), np.float32)) for name in ("dy", "x")}
    given |= {name: executor.put(np.ones((0, 1), np.float32)) for name in ("variance", "mean")}
    dx, dgamma, dbeta = LayerNormGrad(**given, gamma=executor.put(np.ones(4, np.float32)))
    assert dx is not None
    assert dx.shape == (0, 4)
    assert executor.get(dgamma).tolist() == executor.get(dbeta).tolist() == [0, 0, 0, 0]


def test_variances_without_a_square_root_issue_no_warning() -> None:
    """A variance of 0 with epsilon 0, or a negative one, makes its own row infinite or NaN, as on a GPU."""
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    variance, mean = np.array([[0], [-1], [1.25]], np.float32), x.mean(1, keepdims=True)
    dx, _, _ = LayerNormGrad(x, x, variance, mean, np.ones(4, np.float32), epsilon=0)
    assert dx is not None
    assert not np.isfinite(dx[:2]).any()
    exact = reference.layer_norm_backward(x[2:], x[2:], 4, mean[2:], 1 / np.sqrt(variance[2:]), np.ones(4))[0]
    assert np.allclose(dx[2], exact, atol=1e-5)


LAYER_WRONG = [
    (
        {"variance": np.ones((3, 1, 1), np.float16)},
        TypeError,
        "variance: dtype float16, expected float32 or float64, no",
    ),
    (
        {"mean": np.ones((3, 1, 1), ml_dtypes.bfloat16)},
        TypeError,
        "mean: dtype bfloat16, expected float32 or float64, n",
    ),
    ({"mean": np.ones((3, 1, 1), int)}, TypeError, "mean: dtype int64, expected float32 or float64, no narrower"),
    ({"gamma": None}, TypeError, "gamma: NoneType, expected a cupy.ndarray or a numpy.ndarray"),
    ({"variance": 1.0}, TypeError, "variance: float, expected a cupy.ndarray or a numpy.ndarray"),
    (
        {"gamma": np.ones((4, 5))},
        TypeError,
        "gamma: dtype float64, expected float32 or float16 or bfloat16 for float32 x",
    ),
    ({"dy": np.ones((3, 4, 5))}, TypeError, "dy: dtype float64, expected float32, the dtype of x"),
    ({"x": np.ones((3, 4, 5), int)}, TypeError, "x: dtype int64, expected"),
    ({"gamma": np.ones((3, 5), np.float32)}, ValueError, r"gamma: shape \(3, 5\), expected the last sizes of x"),
    ({"gamma": np.ones((), np.float32)}, ValueError, r"gamma: shape \(\), expected the last sizes of x"),
    ({"gamma": np.ones((2, 3, 4, 5), np.float32)}, ValueError, r"gamma: shape \(2, 3, 4, 5\), expected the last sizes"),
    ({"dy": np.ones((3, 20), np.float32)}, ValueError, r"dy: shape \(3, 20\), expected \(3, 4, 5\), the shape of x"),
    ({"mean": np.ones(2, np.float32)}, ValueError, r"mean: shape \(2,\), expected \(3, 1, 1\), or any shape of 3 elem"),
    ({"variance": np.ones((3, 4), np.float32)}, ValueError, r"variance: shape \(3, 4\), expected \(3, 1, 1\), or any"),
    ({"epsilon": -1e-5}, ValueError, "epsilon: -1e-05, expected a finite number of at least 0"),
    ({"epsilon": "small"}, TypeError, "epsilon: 'small', expected a number"),
    ({"output_mask": (True, True)}, ValueError, "output_mask: 2 flags, expected 3 for pd_x, pd_gamma, pd_beta"),
    ({"output_mask": (1, 1, 1)}, TypeError, "output_mask: contains 1, expected bools"),
]


@pytest.mark.parametrize(("change", "error", "sentence"), LAYER_WRONG, ids=[case[2] for case in LAYER_WRONG])
def test_layer_norm_grad_refuses_wrong_arguments(
    change: dict[str, Any], error: type[Exception], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, _ = layer_call()
    monkeypatch.delattr(np, "sqrt")  # the square root too must come after all checks
    with nothing_may_happen(monkeypatch), pytest.raises(error, match=f"^{sentence}"):
        LayerNormGrad(**(given | change))


def test_layer_norm_grad_refuses_empty_rows_and_too_many_dimensions() -> None:
    empty = np.ones((3, 0), np.float32)
    with pytest.raises(ValueError, match=r"gamma: shape \(0,\), expected the last sizes of x .*, none of them 0"):
        LayerNormGrad(empty, empty, np.ones(3, "f4"), np.ones(3, "f4"), np.ones(0, "f4"))
    deep = np.ones((1,) * 9, np.float32)
    with pytest.raises(ValueError, match=r"x: shape .*, expected 1 to 8 dimensions"):
        LayerNormGrad(deep, deep, np.ones(1, "f4"), np.ones(1, "f4"), np.ones(1, "f4"))
