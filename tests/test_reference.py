"""The float64 oracle compared with a naive definition, central finite differences, and torch on the CPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cunorm import reference
from tests.support.tolerance import (
    assert_within,
    batch_elemt,
    batch_input,
    batch_reduce,
    batch_stats,
    layer_backward,
    layer_forward,
)

EPS = 1e-3

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


def make(shape: tuple[int, ...], layout: str, seed: int = 0) -> tuple[Any, Any, Any, Any]:
    """Random dy, x, gamma and beta in float64, without special values."""
    rng = np.random.default_rng(seed)
    channels = shape[1 if layout == "NCHW" else -1]
    return (
        rng.normal(size=shape),
        rng.normal(size=shape) * 1.5 + 0.7,
        rng.uniform(0.5, 2.0, channels),
        rng.normal(size=channels),
    )


def naive(x: Any, groups: int, gamma: Any, beta: Any, eps: float, layout: str) -> tuple[Any, Any, Any]:
    """y, mean and rstd by the definition, computed element by element."""
    size = x.shape[1 if layout == "NCHW" else -1] // groups
    y, mean, rstd = np.empty_like(x), np.empty((x.shape[0], groups)), np.empty((x.shape[0], groups))
    axis = 1 if layout == "NCHW" else x.ndim - 1
    for n, g in itertools.product(range(x.shape[0]), range(groups)):
        members = [i for i in np.ndindex(x.shape) if i[0] == n and i[axis] // size == g]
        elements = [float(x[i]) for i in members]
        average = sum(elements) / len(elements)
        variance = sum((e - average) ** 2 for e in elements) / len(elements)
        mean[n, g], rstd[n, g] = average, (variance + eps) ** -0.5
        for i in members:
            y[i] = (x[i] - average) * rstd[n, g] * gamma[i[axis]] + beta[i[axis]]
    return y, mean, rstd


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


def differences(function: Callable[[Any], float], at: Any, step: float = 1e-5) -> Any:
    """Central finite differences of a scalar function of an array."""
    result = np.empty_like(at)
    for i in np.ndindex(at.shape):
        moved = at.copy()
        moved[i] = at[i] + step
        above = function(moved)
        moved[i] = at[i] - step
        result[i] = (above - function(moved)) / (2 * step)
    return result


def disagreements(loss: Callable[..., float], leaves: list[Any], got: tuple[Any, ...]) -> set[str]:
    """The names of the gradients in `got` that disagree with finite differences of the loss.

    `leaves` are x, gamma and beta, the arguments of the loss; `got` are dx, dgamma and dbeta.
    """
    # The error of central differences is step^2 / 6 times a third derivative (some tens if a slice has little spread),
    # plus the rounding error 1e-16 * loss / step: at most 5e-10.
    failures = set()
    for i, (name, ours) in enumerate(zip(("dx", "dgamma", "dbeta"), got, strict=True)):
        theirs = differences(lambda moved, i=i: loss(*leaves[:i], moved, *leaves[i + 1 :]), leaves[i])
        if not np.allclose(ours, theirs, rtol=1e-8, atol=1e-8):
            failures.add(name)
    return failures


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


def broken(mistake: str) -> Callable[..., tuple[Any, Any, Any]]:
    """A group_norm_backward for NCHW that contains one mistake."""

    def backward(dy: Any, x: Any, mean: Any, rstd: Any, gamma: Any, *, num_groups: int, **_: Any) -> Any:
        shape = (x.shape[0], num_groups, -1)
        scale = rstd[..., None]
        xhat = (x.reshape(shape) - mean[..., None]) * scale
        weights = np.ones_like(gamma) if mistake == "no gamma" else gamma
        dxhat = (dy * weights.reshape(1, -1, *[1] * (x.ndim - 2))).reshape(shape)
        length = dxhat.shape[-1] - (mistake == "L - 1")
        dx = dxhat.copy()
        if mistake != "no mean term":
            dx -= dxhat.sum(-1, keepdims=True) / length
        if mistake != "no xhat term":
            dx -= xhat * (dxhat * xhat).sum(-1, keepdims=True) / length
        if mistake != "no rstd":
            dx = dx * scale
        axes = (0, *range(2, x.ndim))
        dgamma, dbeta = (dy * xhat.reshape(x.shape)).sum(axes), dy.sum(axes)
        if mistake == "dgamma halved":
            dgamma *= 0.5
        if mistake == "dgamma not centred":
            dgamma = (dy * (x.reshape(shape) * scale).reshape(x.shape)).sum(axes)
        if mistake == "dbeta of one sample":
            dbeta = dy[:1].sum(axes)
        return dx.reshape(x.shape), dgamma, dbeta

    return backward


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


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_group_norm_accepts_every_dtype(dtype: Any) -> None:
    dy, x, gamma, beta = (array.astype(dtype) for array in make((2, 6, 5), "NCHW"))
    narrow = reference.group_norm(x, 3, gamma, beta)
    wide = reference.group_norm(x.astype(np.float64), 3, gamma.astype(np.float64), beta.astype(np.float64))
    for ours, theirs in zip(narrow, wide, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    gradients = reference.group_norm_backward(dy, x, *(s.astype(np.float32) for s in narrow[1:]), gamma, num_groups=3)
    assert all(g.dtype == np.float64 for g in gradients)


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


# ---- InstanceNorm ---------------------------------------------------------------------------------------------------

# (shape, data_format)
VOLUMES = [
    ((3, 4), "NCHW"),  # HxW = 1
    ((2, 3, 1), "NCHW"),
    ((2, 3, 5), "NCHW"),
    ((2, 2, 3, 3), "NHWC"),
    ((1, 3, 2, 1, 3), "NCHW"),
    ((2, 2, 1, 3, 2), "NHWC"),
]
OF_VOLUMES = ("x".join(map(str, shape)) + f"-{layout}" for shape, layout in VOLUMES)
each_volume = pytest.mark.parametrize(("shape", "layout"), VOLUMES, ids=[*OF_VOLUMES])


@each_volume
def test_instance_norm_agrees_with_the_definition(shape: tuple[int, ...], layout: str) -> None:
    _, x, gamma, beta = make(shape, layout)
    got = reference.instance_norm(x, gamma, beta, eps=EPS, data_format=layout)
    for ours, theirs in zip(got, naive(x, len(gamma), gamma, beta, EPS, layout), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12)


def instance_failures(
    backward: Callable[..., tuple[Any, Any, Any]], shape: tuple[int, ...], layout: str, *, with_gamma: bool = True
) -> set[str]:
    """The names of the gradients that disagree with finite differences of the loss sum(dy * y)."""
    dy, x, gamma, beta = make(shape, layout)

    def loss(x: Any, gamma: Any, beta: Any) -> float:
        return float((dy * reference.instance_norm(x, gamma, beta, eps=EPS, data_format=layout)[0]).sum())

    scale = gamma if with_gamma else np.ones_like(gamma)
    _, mean, rstd = reference.instance_norm(x, eps=EPS, data_format=layout)
    got = backward(dy, x, mean, rstd, gamma if with_gamma else None, data_format=layout)
    return disagreements(loss, [x, scale, beta], got)


@pytest.mark.parametrize("with_gamma", [True, False], ids=["gamma", "plain"])
@each_volume
def test_instance_norm_backward_agrees_with_finite_differences(
    shape: tuple[int, ...], layout: str, with_gamma: bool
) -> None:
    assert instance_failures(reference.instance_norm_backward, shape, layout, with_gamma=with_gamma) == set()


@pytest.mark.parametrize(
    ("mistake", "caught"),
    [("none", set()), ("no gamma", {"dx"}), ("no xhat term", {"dx"}), ("dgamma not centred", {"dgamma"})],
)
def test_finite_differences_find_a_broken_instance_norm_backward(mistake: str, caught: set[str]) -> None:
    def backward(*given: Any, data_format: str) -> tuple[Any, Any, Any]:
        return broken(mistake)(*given, num_groups=given[1].shape[1])

    assert instance_failures(backward, (2, 3, 5), "NCHW") == caught


@each_volume
def test_instance_norm_is_group_norm_with_one_channel_per_group(shape: tuple[int, ...], layout: str) -> None:
    """Also with statistics that were rounded, and of any shape."""
    dy, x, gamma, beta = make(shape, layout)
    own = reference.instance_norm(x, gamma, beta, eps=EPS, data_format=layout)
    same = reference.group_norm(x, len(gamma), gamma, beta, eps=EPS, data_format=layout)
    mean, rstd = (one.astype(np.float32).reshape(-1) for one in own[1:])
    own += reference.instance_norm_backward(dy, x, mean, rstd, gamma, data_format=layout)
    same += reference.group_norm_backward(dy, x, mean, rstd, gamma, num_groups=len(gamma), data_format=layout)
    for ours, theirs in zip(own, same, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12)


def test_instance_norm_agrees_with_torch() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: the oracle is not compared with it")
    dy, x, gamma, beta = make((2, 3, 2, 3, 4), "NCHW")
    leaves = [torch.from_numpy(one).requires_grad_() for one in (x, gamma, beta)]
    y = torch.nn.functional.instance_norm(leaves[0], None, None, leaves[1], leaves[2], eps=EPS)
    theirs = (y, *torch.autograd.grad(y, leaves, torch.from_numpy(dy)))
    got, *saved = reference.instance_norm(x, gamma, beta, eps=EPS)
    for ours, other in zip((got, *reference.instance_norm_backward(dy, x, *saved, gamma)), theirs, strict=True):
        np.testing.assert_allclose(ours, other.detach().numpy(), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("shape", [(0, 3), (0, 3, 4), (2, 3, 0), (2, 0, 4)])
def test_instance_norm_of_empty_tensors(shape: tuple[int, ...]) -> None:
    x, saved = np.zeros(shape, np.float32), shape[:2]
    y, mean, rstd = reference.instance_norm(x, np.ones(shape[1]))
    assert [one.shape for one in (y, mean, rstd)] == [shape, saved, saved]
    assert np.isnan([mean, rstd]).all()
    dx, dgamma, dbeta = reference.instance_norm_backward(x, x, mean, rstd)
    assert dx.shape == shape
    assert not dgamma.any() and not dbeta.any() and dgamma.shape == dbeta.shape == shape[1:2]


def test_messages_name_bad_instance_norm_arguments() -> None:
    x, few, right = np.zeros((2, 3, 4)), np.zeros((2, 1)), np.zeros((2, 3))
    wrong = {"dy": (x[1:], x, right, right), "mean": (x, x, few, right), "rstd": (x, x, right, few)}
    for named, arguments in wrong.items():
        with pytest.raises(ValueError, match=f"^{named}:"):
            reference.instance_norm_backward(*arguments)
    bad: dict[str, Any] = {"gamma": few, "data_format": "NCL"}
    for named, value in bad.items():
        with pytest.raises(ValueError, match=f"^{named}:"):
            reference.instance_norm(x, **{named: value})


# ---- LayerNorm ------------------------------------------------------------------------------------------------------

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
        ("normalized_shape", lambda x: reference.layer_norm_backward(x, x, 3, np.zeros(6), np.zeros(6))),
    ],
)
def test_messages_name_bad_layer_norm_arguments(named: str, call: Callable[[Any], Any]) -> None:
    with pytest.raises(ValueError, match=f"^{named}:"):
        call(np.zeros((2, 3, 4)))


# ---- BatchNorm ------------------------------------------------------------------------------------------------------

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
def test_a_constant_channel_and_a_constant_row_have_no_variance(constant: float) -> None:
    x = np.full((409, 2, 101), constant)
    x[:, 1] = np.random.default_rng(0).normal(size=(409, 101))
    y, mean, invstd = batch_forward(x, eps=1e-5)
    assert (mean[0], invstd[0]) == (constant, 1 / np.sqrt(1e-5))
    assert not y[:, 0].any()
    y, mean, rstd = reference.layer_norm(x[:, 0], (409, 101), eps=1e-5)
    assert (mean[0, 0], rstd[0, 0]) == (constant, 1 / np.sqrt(1e-5))
    assert not y.any()


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


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_layer_norm_and_batch_norm_accept_every_dtype(dtype: Any) -> None:
    def everything(dy: Any, x: Any, gamma: Any, beta: Any) -> list[Any]:
        y, mean, invstd = batch_forward(x, gamma, beta)
        gathered = reference.batch_norm_gather_stats(mean[None], invstd[None], np.ones(1, np.int64))
        layer = reference.layer_norm(x, 6, gamma, beta)
        return [
            *(y, mean, invstd, *gathered[:2], *layer),
            *batch_backward(dy, x, mean, invstd, gamma),
            *reference.layer_norm_backward(dy, x, 6, *layer[1:], gamma),
        ]

    narrow = [array.astype(dtype) for array in make((5, 6), "NCHW")]
    before = [array.tobytes() for array in narrow]
    results = everything(*narrow)
    for ours, theirs in zip(results, everything(*(array.astype(np.float64) for array in narrow)), strict=True):
        assert ours.dtype == np.float64
        np.testing.assert_array_equal(ours, theirs)
    assert [array.tobytes() for array in narrow] == before


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


# ---- the bounds of tolerance.py -------------------------------------------------------------------------------------
# The bounds accept the results of a careful float32 computation, and reject those of a careless one. x is around 1000.


def check(results: Any, exact: Any, bounds: Any) -> None:
    for i, (came, want, bound) in enumerate(zip(results, exact, bounds, strict=True)):
        assert came.dtype == np.float32
        assert_within(str(i), came, want, bound, "float32")


def far(came: Any, exact: Any, bound: Any) -> None:
    with pytest.raises(AssertionError, match="are too far"):
        check((came,), (exact,), (bound,))


def make_narrow(shape: tuple[int, ...], width: int) -> tuple[Any, ...]:
    """Random dy, x, gamma and beta in float32."""
    rng = np.random.default_rng(6)
    sizes = (shape, shape, (width,), (width,))
    return tuple((rng.normal(size=s) + 1000 * (i == 1)).astype(np.float32) for i, s in enumerate(sizes))


def moments(x: Any, axis: Any) -> tuple[Any, Any]:
    """Mean and rstd in float32 by the corrected two-pass algorithm."""
    mean = x.mean(axis, keepdims=True)
    mean = mean + (x - mean).mean(axis, keepdims=True)
    return mean, 1 / np.sqrt(((x - mean) ** 2).mean(axis, keepdims=True) + np.float32(1e-5))


def test_layer_norm_bounds() -> None:
    dy, x, gamma, beta = make_narrow((60, 7, 11), 77)
    gamma, beta = gamma.reshape(7, 11), beta.reshape(7, 11)
    exact = reference.layer_norm(x, (7, 11), gamma, beta)
    mean, rstd = moments(x, (1, 2))
    bounds = layer_forward(x, (7, 11), gamma, beta, *exact[1:], "float32")
    check(((x - mean) * rstd * gamma + beta, mean, rstd), exact, bounds)
    careless = 1 / np.sqrt(np.abs((x * x).mean((1, 2), keepdims=True) - mean**2) + np.float32(1e-5))
    far(careless, exact[2], bounds[2])
    far((x - mean) * careless * gamma + beta, exact[0], bounds[0])
    far(mean * np.float32(1 + 1e-6), exact[1], bounds[1])

    exact = reference.layer_norm_backward(dy, x, (7, 11), mean, rstd, gamma)
    bounds = layer_backward(dy, x, (7, 11), mean, rstd, gamma, "float32")
    xhat, dxhat = (x - mean) * rstd, dy * gamma
    a, b = (each.mean((1, 2), keepdims=True) for each in (dxhat, dxhat * xhat))
    check((rstd * (dxhat - a - xhat * b), (dy * xhat).sum(0), dy.sum(0)), exact, bounds)
    far((dy * (x * rstd)).sum(0) - (dy * (mean * rstd)).sum(0), exact[1], bounds[1])
    far(rstd * (dxhat - a - (x * (rstd * b) - mean * (rstd * b))), exact[0], bounds[0])
    far(dy.astype(np.float16).astype(np.float32).sum(0), exact[2], bounds[2])


def test_batch_norm_bounds() -> None:
    dy, x, gamma, beta = make_narrow((60, 5, 9), 5)
    g, b = gamma[:, None], beta[:, None]
    m, r = moments(x, (0, 2))
    mean, invstd = m.reshape(5), r.reshape(5)
    exact = reference.batch_norm_stats(x)
    bounds = batch_stats(x, *exact, "float32")
    check((mean, invstd), exact, bounds)
    far(1 / np.sqrt(np.abs((x * x).mean((0, 2)) - mean**2) + np.float32(1e-5)), exact[1], bounds[1])
    far(mean * np.float32(1 + 1e-6), exact[0], bounds[0])

    y = reference.batch_norm_elemt(x, mean, invstd, gamma, beta)
    bound = batch_elemt(x, mean, invstd, gamma, beta, "float32")
    check(((x - m) * (r * g) + b, (x - m) * r * g + b), (y, y), (bound, bound))
    far(x * (r * g) + (b - m * (r * g)), y, bound)

    exact_sums = reference.batch_norm_backward_reduce(dy, x, mean, invstd)
    bounds = batch_reduce(dy, x, mean, invstd, "float32")
    sum_dy, sum_dy_xmu = (each.sum(2).sum(0) for each in (dy, dy * (x - m)))
    check((sum_dy, sum_dy_xmu, sum_dy_xmu * invstd, sum_dy), exact_sums, bounds)
    uncentred = (dy * x).sum(2).sum(0) - mean * sum_dy
    far(uncentred, exact_sums[1], bounds[1])
    far(uncentred * invstd, exact_sums[2], bounds[2])
    for i in (0, 3):
        far(dy.astype(np.float16).astype(np.float32).sum(2).sum(0), exact_sums[i], bounds[i])

    given = (dy, x, mean, invstd, gamma, sum_dy, sum_dy_xmu, 540)
    dx, bound = reference.batch_norm_backward_elemt(*given), batch_input(*given, "float32")
    count = np.float32(540)
    a, s = sum_dy[:, None] / count, r[0] ** 2 * sum_dy_xmu[:, None] / count
    check(((dy - a - (x - m) * s) * r * g, (dy - a - (x - m) * s) * (r * g)), (dx, dx), (bound, bound))
    far((dy - a - (x * s - m * s)) * r * g, dx, bound)
    far((dy - sum_dy[:, None] / np.float32(539) - (x - m) * s) * r * g, dx, bound)


@pytest.mark.parametrize("gamma", [None, np.ones(3)], ids=["plain", "gamma"])
def test_bounds_of_empty_tensors_have_the_shapes_of_the_results(gamma: Any) -> None:
    for shape in ((0, 3), (2, 3, 0)):
        x = np.zeros(shape)
        stats = reference.batch_norm_stats(x)
        assert [each.shape for each in batch_stats(x, *stats, "float64")] == [(3,), (3,)]
        assert batch_elemt(x, *stats, gamma, gamma, "float64").shape == shape
        sums = batch_reduce(x, x, *stats, "float64")
        np.testing.assert_array_equal(sums, np.zeros((4, 3)))
        assert batch_input(x, x, *stats, gamma, *sums[:2], 0, "float64").shape == shape
    x = np.zeros((0, 3))
    y, *saved = reference.layer_norm(x, 3)
    assert [each.shape for each in layer_forward(x, 3, gamma, gamma, *saved, "float64")] == [(0, 3), (0, 1), (0, 1)]
    dx, dgamma, dbeta = layer_backward(x, y, 3, *saved, gamma, "float64")
    assert (dx.shape, dgamma.tolist(), dbeta.tolist()) == ((0, 3), [0] * 3, [0] * 3)
