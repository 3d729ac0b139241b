"""The norms as modules: subclasses of torch's, with the same arguments, parameters and state_dict.

Each calls the function of `cunorm.torch.functional`, whose docstring says what is computed and what torch computes.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.modules.instancenorm import _InstanceNorm

from . import functional
from .leaves import leaf_call


class GroupNorm(nn.GroupNorm):
    """`torch.nn.GroupNorm` with cunorm's kernels, and optionally SiLU in the same pass.

    Parameters
    ----------
    num_groups, num_channels : int
    eps : float
    affine : bool
    device, dtype : optional
    bias : bool
        Of PyTorch 2.14, not of 2.11. See `torch.nn.GroupNorm`.
    activation : {None, "silu"}
        Activation that is applied to the result.

    Examples
    --------
    >>> import torch
    >>> from cunorm.torch import GroupNorm
    >>> GroupNorm(2, 8, activation="silu")
    GroupNorm(2, 8, eps=1e-05, affine=True..., activation='silu')
    """

    # Of the class, so that a module whose class was replaced has one.
    activation: str | None = None

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        *args: Any,
        activation: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_groups, num_channels, eps, affine, *args, **kwargs)
        functional.check_activation(activation)
        self.activation = activation

    def forward(self, input: Tensor) -> Tensor:
        """Normalise the groups of channels of each sample."""
        return functional.group_norm(input, self.num_groups, self.weight, self.bias, self.eps, self.activation)

    def extra_repr(self) -> str:
        """The arguments in the module's representation."""
        return f"{super().extra_repr()}" + ("" if self.activation is None else f", activation={self.activation!r}")


class LayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm` with cunorm's kernels.

    Parameters
    ----------
    normalized_shape : int or sequence of int
    eps : float
    elementwise_affine, bias : bool
    device, dtype : optional
        See `torch.nn.LayerNorm`.

    Examples
    --------
    >>> import torch
    >>> from cunorm.torch import LayerNorm
    >>> LayerNorm(2, eps=0.0, elementwise_affine=False)(torch.tensor([[1.0, 3.0]]))
    tensor([[-1.,  1.]])
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalise the rows of the trailing axes."""
        return functional.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm` with cunorm's kernels.

    Parameters
    ----------
    normalized_shape : int or sequence of int
    eps : float, optional
        None: see `cunorm.torch.functional.rms_norm`.
    elementwise_affine : bool
    device, dtype : optional
        See `torch.nn.RMSNorm`.

    Examples
    --------
    >>> import torch
    >>> from cunorm.torch import RMSNorm
    >>> RMSNorm(2)(torch.tensor([[2.0, -2.0]])).round(decimals=3)
    tensor([[ 1., -1.]], grad_fn=...)
    """

    def forward(self, x: Tensor) -> Tensor:
        """Scale the rows of the trailing axes."""
        return functional.rms_norm(x, self.normalized_shape, self.weight, self.eps)


class _ByCunorm(_InstanceNorm):
    """InstanceNorm's modules share one function; its checks of the input and its unbatched inputs are torch's."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalise each channel of each sample."""
        if (called := leaf_call(self, input)) is not None:
            return called
        return super().forward(input)

    def _apply_instance_norm(self, input: Tensor) -> Tensor:
        return functional.instance_norm(
            input,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            self.training or not self.track_running_stats,
            0.0 if self.momentum is None else self.momentum,
            self.eps,
        )


class InstanceNorm1d(_ByCunorm, nn.InstanceNorm1d):
    """`torch.nn.InstanceNorm1d` with cunorm's kernels. With running statistics, torch computes it.

    Parameters
    ----------
    num_features : int
    eps, momentum : float
    affine, track_running_stats : bool
    device, dtype : optional
    bias : bool
        Of PyTorch 2.14, not of 2.11. See `torch.nn.InstanceNorm1d`.

    Examples
    --------
    >>> import torch
    >>> from cunorm.torch import InstanceNorm1d
    >>> InstanceNorm1d(1, eps=0.0)(torch.tensor([[[1.0, 3.0]]]))
    tensor([[[-1.,  1.]]])
    """


class InstanceNorm2d(_ByCunorm, nn.InstanceNorm2d):
    """`torch.nn.InstanceNorm2d` with cunorm's kernels. With running statistics, torch computes it.

    Parameters
    ----------
    num_features : int
    eps, momentum : float
    affine, track_running_stats : bool
    device, dtype : optional
    bias : bool
        Of PyTorch 2.14, not of 2.11. See `torch.nn.InstanceNorm2d`.

    Examples
    --------
    >>> import torch
    >>> from cunorm.torch import InstanceNorm2d
    >>> InstanceNorm2d(1, eps=0.0)(torch.tensor([[[[1.0, 3.0]]]]))
    tensor([[[[-1.,  1.]]]])
    """


class InstanceNorm3d(_ByCunorm, nn.InstanceNorm3d):
    """`torch.nn.InstanceNorm3d` with cunorm's kernels. With running statistics, torch computes it.

    Parameters
    ----------
    num_features : int
    eps, momentum : float
    affine, track_running_stats : bool
    device, dtype : optional
    bias : bool
        Of PyTorch 2.14, not of 2.11. See `torch.nn.InstanceNorm3d`.

    Examples
    --------
    >>> import torch
    >>> from cunorm.torch import InstanceNorm3d
    >>> InstanceNorm3d(1, eps=0.0)(torch.tensor([[[[[1.0, 3.0]]]]]))
    tensor([[[[[-1.,  1.]]]]])
    """


class LayerNorm2d(LayerNorm):
    """LayerNorm over the channels of (N, C, H, W), as in timm and torchvision. Channels-last input is read in place.

    Parameters
    ----------
    normalized_shape : int
        Number of channels. The other parameters are those of `torch.nn.LayerNorm`.

    Examples
    --------
    >>> import torch
    >>> from cunorm.torch.modules import LayerNorm2d
    >>> LayerNorm2d(2, eps=0.0, elementwise_affine=False)(torch.tensor([[[[1.0]], [[3.0]]]])).flatten()
    tensor([-1.,  1.])
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalise the channels at each position."""
        return super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class GroupNormAct(GroupNorm):
    """GroupNorm, then the modules ``drop`` and ``act``, as in timm. Only `cunorm.torch.replace` makes it.

    Examples
    --------
    >>> from cunorm.torch.modules import GroupNorm, GroupNormAct
    >>> issubclass(GroupNormAct, GroupNorm)
    True
    """

    drop: nn.Module
    act: nn.Module

    def forward(self, input: Tensor) -> Tensor:
        """Normalise, drop, activate."""
        y: Tensor = self.act(self.drop(super().forward(input)))
        return y
