"""The oracle of InstanceNorm compared with a naive definition, finite differences, GroupNorm, and torch on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cunorm import reference
from tests.reference.checks import EPS, broken, disagreements, make, naive

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
