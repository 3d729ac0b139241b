"""SyncBatchNorm of PyTorch: BatchNorm with the statistics of a batch that is spread over the processes of a group."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from cunorm.core.arrays import said
from cunorm.core.problem import MOST_AXES

from .launches import NAMES, accumulator, as_parameters, dense
from .leaves import leaf_call
from .sync_operators import OPERATORS

# all_gather_tensor is the name in PyTorch before 2.14, which later versions warn of.
_all_gather: Any = getattr(collectives, "all_gather_single", None) or collectives.all_gather_tensor
#: The classes that `SyncBatchNorm.convert` replaces. A subclass may compute something else.
_CONVERTED = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def check_model(model: object) -> None:
    """Check that an argument is a model (TypeError)."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model: {said(model)}, expected a torch.nn.Module; of a pipeline, pass its parts, such as pipe.unet"
        )


class SyncBatchNorm(_BatchNorm):
    r"""BatchNorm with the statistics of the whole batch, whose samples are spread over the processes of a group.

    It has the arguments, parameters and state_dict of `torch.nn.SyncBatchNorm`, and also runs on the CPU and in
    `torch.compile(fullgraph=True)`. In training a forward makes one all-gather, and its backward one all-reduce; the
    process does not wait for the GPU. Numbers of samples may differ between processes and may be 0. Like torch's, the
    gradients of weight and bias are this process's share: `DistributedDataParallel` averages them.

    Without an initialised group, or with a group of one process, it is BatchNorm. In evaluation torch normalises with
    the running statistics, or, if there are none, with the statistics of this process's input.

    Parameters
    ----------
    num_features : int
        Number of channels C of the input, which has shape (N, C, \*) and 2 to 8 dimensions. Contiguous and
        channels-last inputs are read in place, and y has the memory layout of the input. Another input is copied once.
    eps : float
    momentum : float or None
        None: the running statistics are the average over all batches.
    affine, track_running_stats : bool
    process_group : torch.distributed.ProcessGroup, optional
        None: the default group.
    device, dtype : optional
    bias : bool
        Of PyTorch 2.14 and later. See `torch.nn.SyncBatchNorm`. The parameters and running statistics may be
        float32 for 16-bit inputs.

    Raises
    ------
    TypeError
        For an input of another dtype than float16, bfloat16, float32 and float64.
    ValueError
        For a wrong number of dimensions or channels, and if the statistics would be of one value per channel, as torch
        does. In training on the CPU also if another process has another number of channels or another dtype. If the
        messages of the processes then have different sizes (float64 beside another dtype, most numbers of channels),
        the engine raises its own error, or ends the process as gloo does.

    Examples
    --------
    >>> import torch
    >>> from cunorm.torch import SyncBatchNorm
    >>> SyncBatchNorm(2, eps=0.0)(torch.tensor([[1.0, 4.0], [3.0, 0.0]])).detach()
    tensor([[-1.,  1.],
            [ 1., -1.]])
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
    >>> SyncBatchNorm.convert(model)[1]
    SyncBatchNorm(8, eps=1e-05, momentum=0.1, affine=True..., track_running_stats=True)
    """

    # Of the class, so that a module whose class was replaced has one.
    process_group: Any = None

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        device: Any = None,
        dtype: Any = None,
        **others: Any,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, **others)
        self.process_group = process_group

    @classmethod
    def convert(cls, model: nn.Module, process_group: Any = None) -> nn.Module:
        """Turn every BatchNorm of a model into this class, in place.

        Parameters, buffers, hooks and the names in the state_dict stay, so optimisers keep working. Replaced are the
        modules whose class is BatchNorm1d, 2d, 3d or SyncBatchNorm of torch, not their subclasses.

        Parameters
        ----------
        model : torch.nn.Module
        process_group : torch.distributed.ProcessGroup, optional
            None: the default group, or the one that a SyncBatchNorm of torch has.

        Returns
        -------
        torch.nn.Module
            The model.
        """
        check_model(model)
        for module in model.modules():
            if type(module) in _CONVERTED:
                module.__class__ = cls
                if process_group is not None:
                    module.process_group = process_group
        return model

    def _check_input_dim(self, input: Tensor) -> None:
        if not 2 <= input.dim() <= MOST_AXES or input.shape[1] != self.num_features:
            raise ValueError(
                f"input: shape {tuple(input.shape)}, expected (N, {self.num_features}, ...) with 2 to {MOST_AXES} "
                "dimensions"
            )
        if input.dtype not in NAMES:
            raise TypeError(f"input: dtype {input.dtype}, expected {' or '.join(map(str, NAMES))}")

    def forward(self, input: Tensor) -> Tensor:
        """Normalise the input; in training, with the statistics of all processes."""
        if (called := leaf_call(self, input)) is not None:
            return called
        self._check_input_dim(input)
        if not self.training and self.running_mean is not None:
            return self._by_running_statistics(input)
        group = self._group()
        if group is None and input.numel() == self.num_features:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {input.shape}")
        keeps = self.training and self.track_running_stats
        running: Any = (self.running_mean, self.running_var) if keeps else (None, None)
        batches: Any = self.num_batches_tracked if keeps else None
        if batches is not None:
            batches.add_(1)
        x, parameters = dense(input), as_parameters(self.weight, self.bias, input.dtype)
        if self.momentum is not None or batches is None or running[0] is None:
            return _normalised(x, *parameters, *running, self.momentum or 0.0, self.eps, group)
        # The average's momentum is on the device: move there by it, from the old statistics to the batch's.
        found = [kept.clone() for kept in running]
        y = _normalised(x, *parameters, *found, 1.0, self.eps, group)
        for kept, new in zip(running, found, strict=True):
            kept.lerp_(new, batches.to(kept.dtype).reciprocal())
        return y

    def _by_running_statistics(self, input: Tensor) -> Tensor:
        """Normalise by torch's function, which takes parameters in the input's dtype or in that of the statistics."""
        given: list[Any] = [self.running_mean, self.running_var, self.weight, self.bias]
        if any(one is not None and one.dtype != input.dtype for one in given):
            given = [None if one is None else one.to(accumulator(input.dtype)) for one in given]
        return functional.batch_norm(input, *given, False, 0.0, self.eps)

    def _group(self) -> Any:
        """The group that exchanges, or None for no exchange."""
        if not (self.training and dist.is_available() and dist.is_initialized()):
            return None
        group = dist.group.WORLD if self.process_group is None else self.process_group
        return group if dist.get_world_size(group) > 1 else None


def _normalised(*arguments: Any) -> Tensor:
    """Call `_Sync`."""
    y: Tensor = _Sync.apply(*arguments)
    return y


class _Sync(Function):
    """The operators of this process and the exchanges between them."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gamma: Tensor | None,
        beta: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        momentum: float,
        eps: float,
        group: Any,
    ) -> Tensor:
        packets = OPERATORS.batch_norm_packet(x, eps)
        if group is not None:
            packets = collectives.wait_tensor(_all_gather(packets, 0, group))
        packets = packets.view(1 if group is None else dist.get_world_size(group), -1)
        mean, invstd, counts = OPERATORS.batch_norm_merge(packets, x, running_mean, running_var, momentum, eps)
        ctx.save_for_backward(x, mean, invstd, gamma, counts)
        ctx.group = group
        y: Tensor = OPERATORS.batch_norm_elemt(x, mean, invstd, gamma, beta)
        return y

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator,unused-ignore]
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, invstd, gamma, counts = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]
        sums, dgamma, dbeta = OPERATORS.batch_norm_reduce(dy, x, mean, invstd, gamma, wanted)
        dx = None
        if wanted[0]:
            if ctx.group is not None:
                sums = collectives.wait_tensor(collectives.all_reduce(sums, "sum", ctx.group))
            dx = OPERATORS.batch_norm_input_gradient(dy, x, mean, invstd, gamma, sums, counts)
        return dx, dgamma if wanted[1] else None, dbeta if wanted[2] else None, *[None] * 5
