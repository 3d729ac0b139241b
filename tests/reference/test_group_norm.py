"""The oracle of GroupNorm compared with a naive definition, central finite differences, and torch on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cunorm import reference
from tests.reference.checks import DTYPES, EPS, broken, check_dtype, disagreements, make, naive

# (shape, num_groups, data_format)
CASES = [
    ((3, 6), 3, "NCHW"),  # HxW = 1
    ((2, 4), 4, "NCHW"),  # one element per slice
    ((2, 3, 1), 1, "NCHW"),
    ((1, 6, 5), 1, "NCHW"),  # one group
    ((2, 3, 2, 3), 3, "NCHW"),  # G = C
    ((2, 6, 2, 3), 2, "NCHW"),
    ((2, 3, 2, 6), 2, "NHWC"),
    ((3, 4), 2, "NHWC"),
    ((2, 5, 4), 4, "NHWC"),
    ((2, 4, 2, 1, 3), 2, "NCHW"),
    ((1, 4, 2, 2, 1, 2), 2, "NCHW"),
    ((2, 2, 1, 2, 2, 2, 4), 2, "NHWC"),
    ((1, 4, 2, 1, 2, 1, 2, 2), 2, "NCHW"),  # rank 8
]
IDS = [f"{'x'.join(map(str, shape))}-G{groups}-{layout}" for shape, groups, layout in CASES]


@pytest.mark.parametrize(("shape", "groups", "layout"), CASES, ids=IDS)
def test_group_norm_agrees_with_the_definition(shape: tuple[int, ...], groups: int, layout: str) -> None:
    _, x, gamma, beta = make(shape, layout)
    got = reference.group_norm(x, groups, gamma, beta, eps=EPS, data_format=layout)
    for name, ours, theirs in zip(("y", "mean", "rstd"), got, naive(x, groups, gamma, beta, EPS, layout), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12, err_msg=name)
        assert ours.dtype == np.float64
    plain = reference.group_norm(x, groups, eps=EPS, data_format=layout)[0]
    same = reference.group_norm(x, groups, gamma * 0 + 1, beta * 0, eps=EPS, data_format=layout)[0]
    np.testing.assert_array_equal(plain, same)


def finite_difference_failures(
    backward: Callable[..., tuple[Any, Any, Any]],
    shape: tuple[int, ...],
    groups: int,
    layout: str,
    *,
    with_gamma: bool = True,
) -> set[str]:
    """The names of the gradients that disagree with finite differences of the loss sum(dy * y)."""
    dy, x, gamma, beta = make(shape, layout)

    def loss(x: Any, gamma: Any, beta: Any) -> float:
        return float((dy * reference.group_norm(x, groups, gamma, beta, eps=EPS, data_format=layout)[0]).sum())

    scale = gamma if with_gamma else np.ones_like(gamma)
    _, mean, rstd = reference.group_norm(x, groups, eps=EPS, data_format=layout)
    got = backward(dy, x, mean, rstd, gamma if with_gamma else None, num_groups=groups, data_format=layout)
    return disagreements(loss, [x, scale, beta], got)


@pytest.mark.parametrize("with_gamma", [True, False], ids=["gamma", "plain"])
@pytest.mark.parametrize(("shape", "groups", "layout"), CASES, ids=IDS)
def test_group_norm_backward_agrees_with_finite_differences(
    shape: tuple[int, ...], groups: int, layout: str, with_gamma: bool
) -> None:
    failures = finite_difference_failures(reference.group_norm_backward, shape, groups, layout, with_gamma=with_gamma)
    assert failures == set()


@pytest.mark.parametrize(
    ("mistake", "caught"),
    [
        ("none", set()),
        ("no gamma", {"dx"}),
        ("no mean term", {"dx"}),
        ("no xhat term", {"dx"}),
        ("L - 1", {"dx"}),
        ("no rstd", {"dx"}),
        ("dgamma halved", {"dgamma"}),
        ("dgamma not centred", {"dgamma"}),
        ("dbeta of one sample", {"dbeta"}),
    ],
)
def test_finite_differences_find_a_broken_group_norm_backward(mistake: str, caught: set[str]) -> None:
    assert finite_difference_failures(broken(mistake), (2, 6, 2, 3), 2, "NCHW") == caught


@pytest.mark.parametrize(("shape", "groups", "layout"), CASES, ids=IDS)
def test_group_norm_agrees_with_torch(shape: tuple[int, ...], groups: int, layout: str) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: the oracle is not compared with it")
    dy, x, gamma, beta = (torch.from_numpy(array) for array in make(shape, layout))
    leaves = [tensor.requires_grad_() for tensor in (x, gamma, beta)]
    channels_first = x.movedim(-1, 1) if layout == "NHWC" else x
    y = torch.nn.functional.group_norm(channels_first, groups, gamma, beta, EPS)
    y = y.movedim(1, -1) if layout == "NHWC" else y
    gradients = torch.autograd.grad(y, leaves, dy)
    with torch.no_grad():
        saved = torch.native_group_norm(
            channels_first.contiguous(), gamma, beta, x.shape[0], len(gamma), channels_first[0, 0].numel(), groups, EPS
        )[1:]
    arrays = [tensor.detach().numpy() for tensor in (dy, x, gamma, beta)]
    forward = reference.group_norm(arrays[1], groups, *arrays[2:], eps=EPS, data_format=layout)
    backward = reference.group_norm_backward(
        *arrays[:2], *forward[1:], arrays[2], num_groups=groups, data_format=layout
    )
    for name, ours, theirs in zip(
        ("y", "mean", "rstd", "dx", "dgamma", "dbeta"), forward + backward, (y, *saved, *gradients), strict=True
    ):
        # 1e-11: torch computes the variance in another order, and rstd is up to 1 / sqrt(EPS) = 32 without spread.
        np.testing.assert_allclose(ours, theirs.detach().numpy(), rtol=1e-11, atol=1e-11, err_msg=name)


def test_an_unknown_activation_is_an_error() -> None:
    x, ones = np.ones((2, 4, 3)), np.ones((2, 2))
    with pytest.raises(ValueError, match=r"^activation: 'relu', expected None or 'silu'"):
        reference.group_norm(x, 2, activation="relu")
    with pytest.raises(ValueError, match=r"^activation: 'relu', expected None or 'silu'"):
        reference.group_norm_backward(x, x, ones, ones, num_groups=2, activation="relu")


@pytest.mark.parametrize("shape", [(0, 6), (0, 6, 4), (0, 6, 0), (2, 6, 0), (2, 6, 3, 0)])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_group_norm_of_empty_tensors(shape: tuple[int, ...], layout: str) -> None:
    x = np.zeros(shape if layout == "NCHW" else (shape[0], *shape[2:], shape[1]), np.float32)
    y, mean, rstd = reference.group_norm(x, 3, np.ones(6), np.zeros(6), data_format=layout)
    assert [array.shape for array in (y, mean, rstd)] == [x.shape, (shape[0], 3), (shape[0], 3)]
    assert np.isnan([mean, rstd]).all()
    dx, dgamma, dbeta = reference.group_norm_backward(x, x, mean, rstd, np.ones(6), num_groups=3, data_format=layout)
    assert dx.shape == x.shape
    np.testing.assert_array_equal(dgamma, np.zeros(6))
    np.testing.assert_array_equal(dbeta, np.zeros(6))


@pytest.mark.parametrize("constant", [0.0, 0.1, 100.1, 1e4 + 0.1, 1e5 + 0.1, 1e300, -1 / 3])
def test_constant_elements_have_no_variance(constant: float) -> None:
    y, mean, rstd = reference.group_norm(np.full((1, 3, 40961), constant), 1, eps=1e-5)
    assert mean[0, 0] == constant
    assert rstd[0, 0] == 1 / np.sqrt(1e-5)
    assert not y.any()


def test_group_norm_of_data_with_an_offset_loses_no_digits() -> None:
    """x has unit spread around 1e6. The formula E[x^2] - E[x]^2 would lose 12 of 16 digits."""
    x = np.round(np.random.default_rng(1).normal(size=(2, 4, 1000)) * 2**20) / 2**20  # x + 1e6 is exact
    _, mean, rstd = reference.group_norm(x, 2)
    _, moved_mean, moved_rstd = reference.group_norm(x + 1e6, 2)
    np.testing.assert_allclose(moved_rstd, rstd, rtol=1e-13)
    np.testing.assert_allclose(moved_mean - 1e6, mean, atol=3e-10)  # one ulp of 1e6


@pytest.mark.parametrize("dtype", DTYPES)
def test_group_norm_accepts_every_dtype(dtype: Any) -> None:
    def everything(dy: Any, x: Any, gamma: Any, beta: Any) -> list[Any]:
        y, *saved = reference.group_norm(x, 3, gamma, beta)
        return [y, *saved, *reference.group_norm_backward(dy, x, *saved, gamma, num_groups=3)]

    check_dtype(everything, make((2, 6, 5), "NCHW"), dtype)


def test_the_passed_statistics_are_used_and_may_have_any_shape() -> None:
    dy, x, gamma, _ = make((2, 6, 5), "NCHW")
    mean, rstd = np.full((2, 3), 0.25), np.full((2, 3), 2.0)
    expected = reference.group_norm_backward(dy, x, mean, rstd, gamma, num_groups=3)
    np.testing.assert_allclose(expected[1], (dy * (x - 0.25) * 2).sum((0, 2)), rtol=1e-12)
    for shape in ((6,), (2, 3, 1), (1, 6)):
        got = reference.group_norm_backward(dy, x, mean.reshape(shape), rstd.reshape(shape), gamma, num_groups=3)
        for ours, theirs in zip(got, expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_layouts_and_strides_agree() -> None:
    dy, x, gamma, beta = make((2, 6, 3, 5), "NCHW")
    last = [np.ascontiguousarray(np.moveaxis(array, 1, -1)) for array in (dy, x)]
    first = reference.group_norm(x, 3, gamma, beta)
    for view in (last[1], np.moveaxis(x, 1, -1)):  # the second is strided
        other = reference.group_norm(view, 3, gamma, beta, data_format="NHWC")
        np.testing.assert_array_equal(np.moveaxis(other[0], -1, 1), first[0])
    dx = reference.group_norm_backward(dy, x, *first[1:], gamma, num_groups=3)[0]
    dx_last = reference.group_norm_backward(*last, *first[1:], gamma, num_groups=3, data_format="NHWC")[0]
    np.testing.assert_array_equal(np.moveaxis(dx_last, -1, 1), dx)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_value_that_is_not_finite_stays_in_its_group(value: float) -> None:
    x = np.random.default_rng(2).normal(size=(2, 4, 9))
    clean = reference.group_norm(x, 2)[0]
    x[1, 2, 4] = value
    y, mean, rstd = reference.group_norm(x, 2)
    assert np.isnan(y[1, 2:]).all()
    assert (np.isnan(rstd[1, 1]), np.isfinite(mean[1, 1])) == (True, False)
    np.testing.assert_array_equal(y[0], clean[0])
    np.testing.assert_array_equal(y[1, :2], clean[1, :2])


@pytest.mark.parametrize(
    ("arguments", "options", "named"),
    [
        ((np.zeros(6), 3), {}, "x"),
        ((np.zeros((1,) * 9), 1), {}, "x"),
        ((np.zeros((2, 6)), 4), {}, "num_groups"),
        ((np.zeros((2, 6)), 0), {}, "num_groups"),
        ((np.zeros((2, 6)), 3, np.ones(3)), {}, "gamma"),
        ((np.zeros((2, 6)), 3, None, np.ones(7)), {}, "beta"),
        ((np.zeros((2, 6)), 3), {"data_format": "NCWH"}, "data_format"),
    ],
)
def test_messages_name_bad_group_norm_arguments(
    arguments: tuple[Any, ...], options: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=f"^{named}:"):
        reference.group_norm(*arguments, **options)


def test_messages_name_bad_group_norm_backward_arguments() -> None:
    x, few, right = np.zeros((2, 6, 4)), np.zeros((1, 3)), np.zeros((2, 3))
    wrong = {"dy": (x[1:], x, right, right), "mean": (x, x, few, right), "rstd": (x, x, right, few)}
    for named, arguments in wrong.items():
        with pytest.raises(ValueError, match=f"^{named}:"):
            reference.group_norm_backward(*arguments, num_groups=3)
