"""The oracle of BatchNorm compared with its definition, central finite differences, and torch on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cunorm import reference
from tests.reference.checks import DTYPES, EPS, check_dtype, disagreements, make

BATCHES = [
    (1, 3),  # one element per channel
    (4, 3),
    (3, 1),
    (2, 3, 1),
    (1, 3, 7),
    (2, 4, 2, 3),
    (3, 2, 1, 2, 3),
    (2, 3, 1, 2, 1, 2, 1, 2),  # rank 8
]


def batch_forward(x: Any, gamma: Any = None, beta: Any = None, eps: float = EPS) -> tuple[Any, Any, Any]:
    mean, invstd = reference.batch_norm_stats(x, eps=eps)
    return reference.batch_norm_elemt(x, mean, invstd, gamma, beta), mean, invstd


def batch_backward(
    dy: Any,
    x: Any,
    mean: Any,
    invstd: Any,
    gamma: Any,
    reduce: Callable[..., Any] = reference.batch_norm_backward_reduce,
    elemt: Callable[..., Any] = reference.batch_norm_backward_elemt,
) -> tuple[Any, Any, Any]:
    sum_dy, sum_dy_xmu, dgamma, dbeta = reduce(dy, x, mean, invstd, gamma)
    return elemt(dy, x, mean, invstd, gamma, sum_dy, sum_dy_xmu, x.size // x.shape[1]), dgamma, dbeta


def batch_difference_failures(shape: tuple[int, ...], with_gamma: bool = True, **functions: Any) -> set[str]:
    dy, x, gamma, beta = make(shape, "NCHW", seed=4)
    scale = gamma if with_gamma else np.ones_like(gamma)

    def loss(x: Any, gamma: Any, beta: Any) -> float:
        return float((dy * batch_forward(x, gamma, beta)[0]).sum())

    got = batch_backward(dy, x, *batch_forward(x)[1:], gamma if with_gamma else None, **functions)
    assert [each.shape for each in got] == [shape, (shape[1],), (shape[1],)]
    return disagreements(loss, [x, scale, beta], got)


@pytest.mark.parametrize("shape", BATCHES, ids=str)
def test_batch_norm_agrees_with_the_definition(shape: tuple[int, ...]) -> None:
    """The definition is computed element by element."""
    _, x, gamma, beta = make(shape, "NCHW")
    y, mean, invstd = batch_forward(x, gamma, beta)
    assert (y.shape, mean.shape, invstd.shape) == (shape, (shape[1],), (shape[1],))
    for c in range(shape[1]):
        elements = [float(x[i]) for i in np.ndindex(shape) if i[1] == c]
        average = sum(elements) / len(elements)
        scale = (sum((e - average) ** 2 for e in elements) / len(elements) + EPS) ** -0.5
        np.testing.assert_allclose([mean[c], invstd[c]], [average, scale], rtol=1e-12, atol=1e-12)
        expected = [(e - average) * scale * gamma[c] + beta[c] for e in elements]
        np.testing.assert_allclose(y[:, c].reshape(-1), expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(batch_forward(x)[0], batch_forward(x, gamma * 0 + 1, beta * 0)[0])


@pytest.mark.parametrize("with_gamma", [True, False], ids=["gamma", "plain"])
@pytest.mark.parametrize("shape", BATCHES, ids=str)
def test_batch_norm_backward_agrees_with_finite_differences(shape: tuple[int, ...], with_gamma: bool) -> None:
    assert batch_difference_failures(shape, with_gamma) == set()


def broken_batch(mistake: str) -> dict[str, Callable[..., Any]]:
    """The two functions of the backward, one of which contains a mistake."""

    def reduce(dy: Any, x: Any, mean: Any, invstd: Any, gamma: Any) -> Any:
        dy, x = (np.moveaxis(each, 1, -1).reshape(-1, x.shape[1]) for each in (dy, x))
        sum_dy = (dy[:1] if mistake == "sum_dy of one sample" else dy).sum(0)
        sum_dy_xmu = (dy * (x if mistake == "not centred" else x - mean)).sum(0)
        return sum_dy, sum_dy_xmu, sum_dy_xmu * (1 if mistake == "dgamma not scaled" else invstd), sum_dy

    def elemt(
        dy: Any, x: Any, mean: Any, invstd: Any, gamma: Any, sum_dy: Any, sum_dy_xmu: Any, count: int
    ) -> np.ndarray:
        mean, invstd, gamma, a, b = (v.reshape(-1, 1, 1) for v in (mean, invstd, gamma, sum_dy, sum_dy_xmu))
        count -= mistake == "count - 1"
        a, b = a * (mistake != "no sum_dy"), b * (mistake != "no sum_dy_xmu")
        power = 1 if mistake == "invstd once" else 2
        dx = (dy - a / count - (x - mean) * invstd**power * b / count) * invstd
        return dx if mistake == "no gamma" else dx * gamma

    return {"reduce": reduce, "elemt": elemt}


@pytest.mark.parametrize(
    ("mistake", "caught"),
    [
        ("none", set()),
        ("sum_dy of one sample", {"dx", "dbeta"}),
        ("not centred", {"dx", "dgamma"}),
        ("dgamma not scaled", {"dgamma"}),
        ("no sum_dy", {"dx"}),
        ("no sum_dy_xmu", {"dx"}),
        ("invstd once", {"dx"}),
        ("count - 1", {"dx"}),
        ("no gamma", {"dx"}),
    ],
)
def test_finite_differences_find_a_broken_batch_norm_backward(mistake: str, caught: set[str]) -> None:
    assert batch_difference_failures((2, 4, 2, 3), **broken_batch(mistake)) == caught


@pytest.mark.parametrize("shape", BATCHES[1:], ids=str)  # torch refuses one element per channel
def test_batch_norm_agrees_with_torch(shape: tuple[int, ...]) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: the oracle is not compared with it")
    dy, x, gamma, beta = make(shape, "NCHW")
    old = np.linspace(-1, 1, shape[1]), np.linspace(0.5, 2, shape[1])
    leaves = [torch.from_numpy(array).requires_grad_() for array in (x, gamma, beta)]
    running = [torch.from_numpy(array.copy()) for array in old]
    y = torch.nn.functional.batch_norm(leaves[0], *running, *leaves[1:], training=True, momentum=0.3, eps=EPS)
    gradients = torch.autograd.grad(y, leaves, torch.from_numpy(dy))
    ours_y, mean, invstd = batch_forward(x, gamma, beta)
    gathered = reference.batch_norm_gather_stats(
        mean[None], invstd[None], [x.size // shape[1]], eps=EPS, running_mean=old[0], running_var=old[1], momentum=0.3
    )
    got = (ours_y, *batch_backward(dy, x, mean, invstd, gamma), *gathered[2:])
    names = ("y", "dx", "dgamma", "dbeta", "running_mean", "running_var")
    for name, ours, theirs in zip(names, got, (y, *gradients, *running), strict=True):
        np.testing.assert_allclose(ours, theirs.detach().numpy(), rtol=1e-11, atol=1e-11, err_msg=name)


def test_the_documented_example_of_the_reduction() -> None:
    dy = np.array([[1, 1], [1, 2], [2, 2], [3, 3]], np.float32)
    x = np.arange(8, dtype=np.float32).reshape(4, 2)
    ones = np.ones(2, np.float32)
    sum_dy, sum_dy_xmu, dgamma, dbeta = reference.batch_norm_backward_reduce(dy, x, ones, ones, ones)
    np.testing.assert_array_equal([sum_dy, dbeta], [[7, 8]] * 2)
    np.testing.assert_array_equal([sum_dy_xmu, dgamma], [[21, 30]] * 2)


def test_the_reduction_ignores_gamma_and_uses_invstd_only_for_dgamma() -> None:
    dy, x, gamma, _ = make((2, 3, 5), "NCHW")
    mean, invstd = np.array([0.5, -1, 2]), np.array([2.0, 0.25, 3])
    plain = reference.batch_norm_backward_reduce(dy, x, mean, invstd)
    np.testing.assert_allclose(plain[0], dy.sum((0, 2)), rtol=1e-12)
    np.testing.assert_allclose(plain[1], (dy * (x - mean[:, None])).sum((0, 2)), rtol=1e-12)
    np.testing.assert_allclose(plain[2], plain[1] * [2, 0.25, 3], rtol=1e-15)
    np.testing.assert_array_equal(plain[3], plain[0])
    assert not np.shares_memory(plain[3], plain[0])
    for other in (
        reference.batch_norm_backward_reduce(dy, x, mean, invstd, gamma),
        reference.batch_norm_backward_reduce(dy, x, mean.reshape(1, 3, 1), invstd.reshape(3, 1)),
    ):
        np.testing.assert_array_equal(other, plain)


@pytest.mark.parametrize("offset", [0.0, 1e3])
def test_the_parts_of_a_batch_give_the_results_of_the_whole(offset: float) -> None:
    """Three uneven parts, and two ranks with count 0, whose statistics are NaN and infinity."""
    dy, x, gamma, beta = make((7, 3, 2, 2), "NCHW", seed=5)
    x += offset
    x[:, 2] += np.arange(7).reshape(7, 1, 1) * 10  # the parts have different means
    y, mean, invstd = batch_forward(x, gamma, beta)
    whole = batch_backward(dy, x, mean, invstd, gamma)
    parts = [slice(0, 1), slice(1, 5), slice(5, 7)]
    stats = [reference.batch_norm_stats(x[part], eps=EPS) for part in parts]
    nothing = [(np.full(3, value), np.full(3, value)) for value in (np.nan, np.inf)]
    means, invstds = zip(nothing[0], *stats, nothing[1], strict=True)
    old = np.array([1.0, -2, 3]), np.array([1.0, 2, 3])
    kept = [array.copy() for array in old]
    gathered = reference.batch_norm_gather_stats(
        np.array(means), np.array(invstds), np.array([0, 4, 16, 8, 0]), eps=EPS, running_mean=old[0], running_var=old[1]
    )
    expected = (mean, invstd, 0.9 * old[0] + 0.1 * mean, 0.9 * old[1] + 0.1 * x.var((0, 2, 3), ddof=1))
    for ours, theirs in zip(gathered, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12)
    np.testing.assert_array_equal(old, kept)
    sums = [reference.batch_norm_backward_reduce(dy[part], x[part], mean, invstd, gamma) for part in parts]
    totals = [sum(each) for each in zip(*sums, strict=True)]
    dx = [
        reference.batch_norm_backward_elemt(dy[part], x[part], mean, invstd, gamma, *totals[:2], 28) for part in parts
    ]
    for ours, theirs in zip((np.concatenate(dx), *totals[2:]), whole, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-11, atol=1e-11)
    forward = [reference.batch_norm_elemt(x[part], *gathered[:2], gamma, beta) for part in parts]
    np.testing.assert_allclose(np.concatenate(forward), y, rtol=1e-11, atol=1e-11)


def test_gathered_running_statistics() -> None:
    means, invstds = np.array([[1.0, 4.0]]), np.array([[0.5, 0.25]])  # variances of 4 and 16, with eps = 0
    old = np.array([10.0, 20.0])

    def gather(count: float, momentum: float = 0.25, **running: Any) -> tuple[Any, Any, Any, Any]:
        return reference.batch_norm_gather_stats(means, invstds, [count], eps=0.0, momentum=momentum, **running)

    assert gather(5)[2:] == (None, None)
    assert gather(5, running_mean=old)[3] is None
    assert gather(5, running_var=old)[2] is None
    np.testing.assert_array_equal(gather(5, running_mean=old)[2], [7.75, 16])
    np.testing.assert_array_equal(gather(5, running_var=old)[3], [7.5 + 1.25, 15 + 5])
    np.testing.assert_array_equal(gather(1, running_var=old)[3], [7.5 + 1, 15 + 4])  # biased
    np.testing.assert_array_equal(gather(5, momentum=0.0, running_var=old)[3], old)
    np.testing.assert_array_equal(gather(5, momentum=1.0, running_mean=old)[2], means[0])


def test_gathered_constants_have_no_variance() -> None:
    """A rounded invstd may correspond to a negative variance. The rounded sum of six sixths of 0.1 is not 0.1."""
    above = np.full((6, 1), 1.001 / np.sqrt(1e-5))
    mean, invstd, _, _ = reference.batch_norm_gather_stats(np.full((6, 1), 0.1), above, np.ones(6), eps=1e-5)
    assert (mean[0], invstd[0]) == (0.1, 1 / np.sqrt(1e-5))


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_value_that_is_not_finite_stays_in_its_channel(value: float) -> None:
    dy, x, gamma, _ = make((4, 3, 5), "NCHW")
    clean = batch_forward(x, gamma)
    x[1, 2, 3] = value
    spoilt = batch_forward(x, gamma)
    assert np.isnan(spoilt[0][:, 2]).all()
    np.testing.assert_array_equal(spoilt[1][2], value)
    assert np.isnan(spoilt[2][2])
    for dirty, pure in zip(spoilt, clean, strict=True):
        channels = (slice(None), slice(0, 2)) if dirty.ndim > 1 else slice(0, 2)
        np.testing.assert_array_equal(dirty[channels], pure[channels])
    parts = [reference.batch_norm_stats(x[part], eps=EPS) for part in (slice(0, 3), slice(3, 4))]
    gathered = reference.batch_norm_gather_stats(*map(np.array, zip(*parts, strict=True)), [15, 5], eps=EPS)
    np.testing.assert_allclose(gathered[:2], spoilt[1:], rtol=1e-12)
    dx, dgamma, dbeta = batch_backward(dy, x, *clean[1:], gamma)
    assert not np.isfinite(dx[:, 2]).any()
    assert np.isfinite(dx[:, :2]).all()
    assert (np.isfinite(dgamma).tolist(), np.isfinite(dbeta).tolist()) == ([True, True, False], [True] * 3)


@pytest.mark.parametrize("shape", [(0, 3), (0, 3, 4), (2, 3, 0), (0, 3, 0)])
def test_batch_norm_of_empty_tensors(shape: tuple[int, ...]) -> None:
    x = np.zeros(shape, np.float32)
    mean, invstd = reference.batch_norm_stats(x)
    assert mean.shape == invstd.shape == (3,)
    assert np.isnan([mean, invstd]).all()
    assert reference.batch_norm_elemt(x, mean, invstd, np.ones(3), np.ones(3)).shape == shape
    sums = reference.batch_norm_backward_reduce(x, x, mean, invstd, np.ones(3))
    np.testing.assert_array_equal(sums, np.zeros((4, 3)))
    assert reference.batch_norm_backward_elemt(x, x, mean, invstd, None, *sums[:2], 0).shape == shape


@pytest.mark.parametrize("constant", [0.0, 0.1, 100.1, 1e5 + 0.1, 1e300, -1 / 3])
def test_a_constant_channel_has_no_variance(constant: float) -> None:
    x = np.full((409, 2, 101), constant)
    x[:, 1] = np.random.default_rng(0).normal(size=(409, 101))
    y, mean, invstd = batch_forward(x, eps=1e-5)
    assert (mean[0], invstd[0]) == (constant, 1 / np.sqrt(1e-5))
    assert not y[:, 0].any()


def test_batch_norm_of_data_with_an_offset_loses_no_digits() -> None:
    dy, x, _, _ = make((50, 3, 20), "NCHW")
    x = np.round(x * 2**20) / 2**20  # x + 1e6 is exact
    invstd = reference.batch_norm_stats(x)[1]
    moved_mean, moved = reference.batch_norm_stats(x + 1e6)
    np.testing.assert_allclose(moved, invstd, rtol=1e-13)
    ours = reference.batch_norm_backward_reduce(dy, x + 1e6, moved_mean, moved)[1:3]
    theirs = reference.batch_norm_backward_reduce(dy, x, moved_mean - 1e6, moved)[1:3]
    # x - mean is the same number on both sides; an uncentred sum would be wrong by 1e-16 * 1e6 * sum |dy|, 1e-7.
    np.testing.assert_allclose(ours, theirs, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_batch_norm_accepts_every_dtype(dtype: Any) -> None:
    def everything(dy: Any, x: Any, gamma: Any, beta: Any) -> list[Any]:
        y, mean, invstd = batch_forward(x, gamma, beta)
        gathered = reference.batch_norm_gather_stats(mean[None], invstd[None], np.ones(1, np.int64))
        return [y, mean, invstd, *gathered[:2], *batch_backward(dy, x, mean, invstd, gamma)]

    check_dtype(everything, make((5, 6), "NCHW"), dtype)


@pytest.mark.parametrize(
    ("named", "call"),
    [
        ("x", lambda x, v: reference.batch_norm_stats(v)),
        ("x", lambda x, v: reference.batch_norm_stats(np.zeros((1,) * 9))),
        ("mean", lambda x, v: reference.batch_norm_elemt(x, v[1:], v)),
        ("invstd", lambda x, v: reference.batch_norm_elemt(x, v, v[1:])),
        ("gamma", lambda x, v: reference.batch_norm_elemt(x, v, v, v[1:])),
        ("beta", lambda x, v: reference.batch_norm_elemt(x, v, v, None, v[1:])),
        ("dy", lambda x, v: reference.batch_norm_backward_reduce(x.reshape(4, 3, 2), x, v, v)),
        ("mean", lambda x, v: reference.batch_norm_backward_reduce(x, x, v[1:], v)),
        ("invstd", lambda x, v: reference.batch_norm_backward_reduce(x, x, v, v[1:])),
        ("dy", lambda x, v: reference.batch_norm_backward_elemt(x[1:], x, v, v, None, v, v, 8)),
        ("gamma", lambda x, v: reference.batch_norm_backward_elemt(x, x, v, v, v[1:], v, v, 8)),
        ("sum_dy", lambda x, v: reference.batch_norm_backward_elemt(x, x, v, v, None, v[1:], v, 8)),
        ("sum_dy_xmu", lambda x, v: reference.batch_norm_backward_elemt(x, x, v, v, None, v, v[1:], 8)),
        ("means", lambda x, v: reference.batch_norm_gather_stats(v, v, [1])),
        ("means", lambda x, v: reference.batch_norm_gather_stats([v], [v], [1, 2])),
        ("invstds", lambda x, v: reference.batch_norm_gather_stats([v, v], [v], [1, 2])),
        ("invstds", lambda x, v: reference.batch_norm_gather_stats([v], [v[1:]], [1])),
        ("counts", lambda x, v: reference.batch_norm_gather_stats([v], [v], 1)),
        ("counts", lambda x, v: reference.batch_norm_gather_stats([v, v], [v, v], [-1, 2])),
        ("counts", lambda x, v: reference.batch_norm_gather_stats([v], [v], [np.nan])),
        ("running_mean", lambda x, v: reference.batch_norm_gather_stats([v], [v], [1], running_mean=v[1:])),
        ("running_var", lambda x, v: reference.batch_norm_gather_stats([v], [v], [1], running_var=v[1:])),
    ],
)
def test_messages_name_bad_batch_norm_arguments(named: str, call: Callable[[Any, Any], Any]) -> None:
    with pytest.raises(ValueError, match=f"^{named}:"):
        call(np.zeros((2, 3, 4)), np.ones(3))
