"""The oracle of LayerNorm compared with its definition, central finite differences, and torch on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cunorm import reference
from tests.reference.checks import DTYPES, EPS, check_dtype, disagreements, make

# (shape, normalized_shape)
ROWS: list[tuple[tuple[int, ...], int | tuple[int, ...]]] = [
    ((5,), 5),  # no outer dimension: one row
    ((3, 4), 4),
    ((4, 1), 1),  # one element per row
    ((2, 3, 4), (4,)),
    ((2, 3, 4), (3, 4)),
    ((2, 3, 4), (2, 3, 4)),
    ((2, 1, 2, 1, 3), (1, 3)),
    ((1, 2, 1, 2, 1, 1, 2, 2), (1, 2, 2)),
]


def make_rows(shape: tuple[int, ...], normalized: int | tuple[int, ...]) -> tuple[Any, tuple[int, ...], list[Any]]:
    """Random dy, the normalised shape as a tuple, and the list of x, gamma and beta."""
    row = (normalized,) if isinstance(normalized, int) else normalized
    rng = np.random.default_rng(3)
    leaves = [rng.normal(size=shape) * 1.5 + 0.7, rng.uniform(0.5, 2.0, row), rng.normal(size=row)]
    return rng.normal(size=shape), row, leaves


@pytest.mark.parametrize(("shape", "normalized"), ROWS, ids=str)
def test_layer_norm_agrees_with_the_definition(shape: tuple[int, ...], normalized: int | tuple[int, ...]) -> None:
    _, row, (x, gamma, beta) = make_rows(shape, normalized)
    y, mean, rstd = reference.layer_norm(x, normalized, gamma, beta, eps=EPS)
    axes = tuple(range(-len(row), 0))
    center, variance = x.mean(axis=axes, keepdims=True), x.var(axis=axes, keepdims=True)
    assert mean.shape == rstd.shape == center.shape
    np.testing.assert_allclose(mean, center, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(rstd, (variance + EPS) ** -0.5, rtol=1e-12)
    np.testing.assert_allclose(y, (x - center) * (variance + EPS) ** -0.5 * gamma + beta, rtol=1e-12, atol=1e-12)
    flat = reference.layer_norm(x, normalized, gamma.reshape(-1), beta.reshape(-1), eps=EPS)[0]
    np.testing.assert_array_equal(flat, y)
    plain = reference.layer_norm(x, normalized, eps=EPS)[0]
    np.testing.assert_array_equal(plain, reference.layer_norm(x, normalized, gamma * 0 + 1, beta * 0, eps=EPS)[0])


@pytest.mark.parametrize("with_gamma", [True, False], ids=["gamma", "plain"])
@pytest.mark.parametrize(("shape", "normalized"), ROWS, ids=str)
def test_layer_norm_backward_agrees_with_finite_differences(
    shape: tuple[int, ...], normalized: int | tuple[int, ...], with_gamma: bool
) -> None:
    dy, row, (x, gamma, beta) = make_rows(shape, normalized)
    if not with_gamma:
        gamma = np.ones_like(gamma)

    def loss(x: Any, gamma: Any, beta: Any) -> float:
        return float((dy * reference.layer_norm(x, normalized, gamma, beta, eps=EPS)[0]).sum())

    _, mean, rstd = reference.layer_norm(x, normalized, eps=EPS)
    got = reference.layer_norm_backward(dy, x, normalized, mean, rstd, gamma if with_gamma else None)
    assert [each.shape for each in got] == [shape, row, row]
    assert disagreements(loss, [x, gamma, beta], got) == set()


@pytest.mark.parametrize(("shape", "normalized"), ROWS, ids=str)
def test_layer_norm_agrees_with_torch(shape: tuple[int, ...], normalized: int | tuple[int, ...]) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: the oracle is not compared with it")
    dy, row, arrays = make_rows(shape, normalized)
    leaves = [torch.from_numpy(array).requires_grad_() for array in arrays]
    y, mean, rstd = torch.native_layer_norm(leaves[0], row, *leaves[1:], EPS)
    gradients = torch.autograd.grad(y, leaves, torch.from_numpy(dy))
    forward = reference.layer_norm(arrays[0], normalized, *arrays[1:], eps=EPS)
    backward = reference.layer_norm_backward(dy, arrays[0], normalized, *forward[1:], arrays[1])
    for name, ours, theirs in zip(
        ("y", "mean", "rstd", "dx", "dgamma", "dbeta"), forward + backward, (y, mean, rstd, *gradients), strict=True
    ):
        assert ours.shape == tuple(theirs.shape)
        np.testing.assert_allclose(ours, theirs.detach().numpy(), rtol=1e-11, atol=1e-11, err_msg=name)


def test_layer_norm_without_rows() -> None:
    x = np.zeros((2, 0, 3, 4), np.float32)
    y, mean, rstd = reference.layer_norm(x, (3, 4))
    assert (y.shape, mean.shape, rstd.shape) == (x.shape, (2, 0, 1, 1), (2, 0, 1, 1))
    dx, dgamma, dbeta = reference.layer_norm_backward(x, x, (3, 4), mean, rstd, np.ones((3, 4)))
    assert dx.shape == x.shape
    np.testing.assert_array_equal([dgamma, dbeta], np.zeros((2, 3, 4)))


@pytest.mark.parametrize("constant", [0.0, 0.1, 100.1, 1e5 + 0.1, 1e300, -1 / 3])
def test_a_constant_row_has_no_variance(constant: float) -> None:
    y, mean, rstd = reference.layer_norm(np.full((409, 101), constant), (409, 101), eps=1e-5)
    assert (mean[0, 0], rstd[0, 0]) == (constant, 1 / np.sqrt(1e-5))
    assert not y.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm_accepts_every_dtype(dtype: Any) -> None:
    def everything(dy: Any, x: Any, gamma: Any, beta: Any) -> list[Any]:
        y, *saved = reference.layer_norm(x, 6, gamma, beta)
        return [y, *saved, *reference.layer_norm_backward(dy, x, 6, *saved, gamma)]

    check_dtype(everything, make((5, 6), "NCHW"), dtype)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_value_that_is_not_finite_stays_in_its_row(value: float) -> None:
    dy, _, (x, gamma, beta) = make_rows((3, 4, 5), (5,))
    clean, mean, rstd = reference.layer_norm(x, 5, gamma, beta)
    x[1, 2, 3] = value
    y = reference.layer_norm(x, 5, gamma, beta)[0]
    others = np.ones((3, 4), bool)
    others[1, 2] = False
    assert np.isnan(y[1, 2]).all()
    np.testing.assert_array_equal(y[others], clean[others])
    dx, dgamma, dbeta = reference.layer_norm_backward(dy, x, 5, mean, rstd, gamma)
    assert not np.isfinite(dx[1, 2]).any()
    assert np.isfinite(dx[others]).all()
    assert np.isfinite(dgamma).tolist() == [True, True, True, False, True]
    assert np.isfinite(dbeta).all()


@pytest.mark.parametrize(
    ("named", "call"),
    [
        ("normalized_shape", lambda x: reference.layer_norm(x, 3)),
        ("normalized_shape", lambda x: reference.layer_norm(x, (2, 4))),
        ("normalized_shape", lambda x: reference.layer_norm(x, (1, 2, 3, 4))),
        ("normalized_shape", lambda x: reference.layer_norm(x, ())),
        ("normalized_shape", lambda x: reference.layer_norm(x[0, 0, 0], ())),
        ("normalized_shape", lambda x: reference.layer_norm(x[:, :, :0], 0)),
        ("gamma", lambda x: reference.layer_norm(x, (3, 4), np.ones(4))),
        ("beta", lambda x: reference.layer_norm(x, 4, None, np.ones(12))),
        ("dy", lambda x: reference.layer_norm_backward(x.reshape(3, 2, 4), x, 4, np.zeros(6), np.zeros(6))),
        ("mean", lambda x: reference.layer_norm_backward(x, x, 4, np.zeros(2), np.zeros(6))),
        ("rstd", lambda x: reference.layer_norm_backward(x, x, 4, np.zeros(6), np.zeros(2))),
        ("rstd", lambda x: reference.rms_norm_backward(x, x, 4, np.zeros(2))),
        ("gamma", lambda x: reference.rms_norm_backward(x, x, 4, np.zeros(6), np.ones(3))),
        ("dh", lambda x: reference.rms_norm_backward(x, x, 4, np.zeros(6), dh=x[:1])),
        ("normalized_shape", lambda x: reference.layer_norm_backward(x, x, 3, np.zeros(6), np.zeros(6))),
    ],
)
def test_messages_name_bad_arguments_of_row_norms(named: str, call: Callable[[Any], Any]) -> None:
    with pytest.raises(ValueError, match=f"^{named}:"):
        call(np.zeros((2, 3, 4)))
