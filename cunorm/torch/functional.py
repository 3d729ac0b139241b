"""The norms as functions on tensors, with the arguments of `torch.nn.functional`."""

from __future__ import annotations

from collections.abc import Sequence

try:  # the package imports this module first
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError("cunorm.torch needs PyTorch; type: pip install 'cunorm[torch]'", name="torch") from None
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_variadic

from cunorm.core.arrays import choice
from cunorm.core.problem import ACTIVATIONS

from .differentiation import normalise
from .launches import accumulator
from .norms import Options


def check_activation(activation: str | None) -> None:
    """Raise the error for an unknown activation."""
    choice("activation", activation, (None, *ACTIVATIONS))


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    activation: str | None = None,
) -> Tensor:
    r"""GroupNorm, as `torch.nn.functional.group_norm`, and optionally SiLU in the same pass.

    Parameters
    ----------
    input : Tensor
        Shape (N, C, \*). A contiguous or channels-last tensor is read in place; any other is copied once.
    num_groups : int
        Number of groups, a divisor of C.
    weight, bias : Tensor of shape (C,), optional
        Scale and offset, in any floating dtype that is not wider than the statistics. Best both in the input's dtype or
        both in float32: others are converted first.
    eps : float
        Number that is added to the variance.
    activation : {None, "silu"}
        Activation that is applied to the result.

    Returns
    -------
    Tensor
        Shape, dtype and memory layout of the input, also under autocast. Contiguous if the input was copied.

    Raises
    ------
    ValueError
        If ``activation`` is unknown, or if all groups together have one value, as torch does.
    RuntimeError, TypeError
        For other wrong arguments, which torch's function gets.

    Examples
    --------
    >>> import torch
    >>> from cunorm.torch import functional
    >>> x = torch.arange(8.0).reshape(1, 4, 2).requires_grad_()
    >>> y = functional.group_norm(x, 2, activation="silu")
    >>> y.shape
    torch.Size([1, 4, 2])
    >>> y.sum().backward()
    """
    if has_torch_function_variadic(input, weight, bias):
        y: Tensor = handle_torch_function(
            group_norm,
            (input, weight, bias),
            input,
            num_groups,
            weight=weight,
            bias=bias,
            eps=eps,
            activation=activation,
        )
        return y
    check_activation(activation)
    return normalise(Options("group_norm", (num_groups,), eps, activation), input, weight, bias)


def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    r"""InstanceNorm, as `torch.nn.functional.instance_norm`.

    Parameters
    ----------
    input : Tensor
        Shape (N, C, \*). See `group_norm`.
    running_mean, running_var : Tensor of shape (C,), optional
        Running statistics. With them, or with ``use_input_stats=False``, torch's own function computes the result.
    weight, bias : Tensor of shape (C,), optional
        Scale and offset.
    use_input_stats : bool
        Whether to use the statistics of the input.
    momentum : float
        Weight of the new values in the running statistics.
    eps : float
        Number that is added to the variance.

    Returns
    -------
    Tensor
        See `group_norm`.

    Raises
    ------
    ValueError
        If there is only one position in space, as torch does.
    RuntimeError, TypeError
        For other wrong arguments, which torch's function gets.

    Examples
    --------
    >>> import torch
    >>> from cunorm.torch import functional
    >>> functional.instance_norm(torch.tensor([[[1.0, 3.0], [0.0, 8.0]]]), eps=0.0)
    tensor([[[-1.,  1.],
             [-1.,  1.]]])
    """
    if has_torch_function_variadic(input, running_mean, running_var, weight, bias):
        y: Tensor = handle_torch_function(
            instance_norm,
            (input, running_mean, running_var, weight, bias),
            input,
            running_mean=running_mean,
            running_var=running_var,
            weight=weight,
            bias=bias,
            use_input_stats=use_input_stats,
            momentum=momentum,
            eps=eps,
        )
        return y
    if running_mean is not None or running_var is not None or not use_input_stats:
        return torch.nn.functional.instance_norm(
            input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps
        )
    return normalise(Options("instance_norm", (), eps), input, weight, bias)


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """LayerNorm, as `torch.nn.functional.layer_norm`.

    Parameters
    ----------
    input : Tensor
        Shape (..., normalized_shape). A contiguous tensor is read in place; any other is copied once.
    normalized_shape : sequence of int
        Last sizes of the input, which make up a row.
    weight, bias : Tensor of shape normalized_shape, optional
        Scale and offset. See `group_norm` for their dtypes.
    eps : float
        Number that is added to the variance.

    Returns
    -------
    Tensor
        Shape and dtype of the input, also under autocast. Contiguous.

    Raises
    ------
    RuntimeError, TypeError
        For wrong arguments, which torch's function gets.

    Examples
    --------
    >>> import torch
    >>> from cunorm.torch import functional
    >>> functional.layer_norm(torch.tensor([[1.0, 3.0], [0.0, 8.0]]), (2,), eps=0.0)
    tensor([[-1.,  1.],
            [-1.,  1.]])
    """
    if has_torch_function_variadic(input, weight, bias):
        y: Tensor = handle_torch_function(
            layer_norm, (input, weight, bias), input, normalized_shape, weight=weight, bias=bias, eps=eps
        )
        return y
    if isinstance(normalized_shape, int):
        return torch.nn.functional.layer_norm(input, normalized_shape, weight, bias, eps)  # raises torch's error
    return normalise(Options("layer_norm", tuple(normalized_shape), eps), input, weight, bias)


def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """RMSNorm, as `torch.nn.functional.rms_norm`.

    Parameters
    ----------
    input : Tensor
        Shape (..., normalized_shape). A contiguous tensor is read in place; any other is copied once.
    normalized_shape : sequence of int
        Last sizes of the input, which make up a row.
    weight : Tensor of shape normalized_shape, optional
        Scale. See `group_norm` for its dtype.
    eps : float, optional
        Number that is added to the mean square. None: the spacing of 1 in the dtype of the statistics, which is float32
        for a 16-bit input. That is what torch computes.

    Returns
    -------
    Tensor
        Shape and dtype of the input, also under autocast. Contiguous.

    Raises
    ------
    RuntimeError, TypeError
        For wrong arguments, which torch's function gets.

    Examples
    --------
    >>> import torch
    >>> from cunorm.torch import functional
    >>> functional.rms_norm(torch.tensor([[1.0, 1.0], [0.0, 0.0]]), (2,), eps=0.25).round(decimals=3)
    tensor([[0.8940, 0.8940],
            [0.0000, 0.0000]])
    """
    if has_torch_function_variadic(input, weight):
        y: Tensor = handle_torch_function(rms_norm, (input, weight), input, normalized_shape, weight=weight, eps=eps)
        return y
    if isinstance(normalized_shape, int) or not isinstance(input, Tensor):
        return torch.nn.functional.rms_norm(input, normalized_shape, weight, eps)  # raises torch's error
    if eps is None:
        eps = torch.finfo(accumulator(input.dtype)).eps
    return normalise(Options("rms_norm", tuple(normalized_shape), eps), input, weight, None)
