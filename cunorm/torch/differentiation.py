"""The norms as functions that autograd, `torch.func`, `torch.compile` and tracing understand.

There are two ways. In plain eager an `autograd.Function` launches the kernels directly, which costs little. Whenever
something watches (a compiler, a transform, a dispatch mode, a fake tensor), Functions with ``setup_context`` and vmap
rules call the operators of `cunorm.torch.operators`. The operators also have autograd formulas of their own, for
exported programs, which contain nothing else; these formulas alone would not work under `torch.func`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.autograd import Function, forward_ad
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .launches import as_parameters
from .norms import NORMS, Call, MaybeTensor, Norm, Options, by_torch, call_of, composite
from .operators import LIBRARY, OPERATORS

_PLAIN = (Tensor, torch.nn.Parameter)


def _plain(tensor: MaybeTensor) -> bool:
    """Whether a tensor is what its address, strides and dtype say, which a lazily negated view, for one, is not."""
    return tensor is None or (
        type(tensor) in _PLAIN
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and (tensor.is_cpu or tensor.is_cuda)
        and not tensor.is_neg()
        and not tensor._is_zerotensor()
        and torch._C._has_storage(tensor)
    )


def _unwatched() -> bool:
    """Whether nothing traces, transforms or intercepts the operators that this thread calls."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or _len_torch_dispatch_stack_pre_dispatch()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
    )


def normalise(options: Options, x: Tensor, gamma: MaybeTensor, beta: MaybeTensor) -> Tensor:
    """Compute a norm, differentiably. What cunorm does not take, torch's own function computes or refuses."""
    if _unwatched() and _plain(x) and _plain(gamma) and _plain(beta):
        call = call_of(options, x, gamma, beta)
        if call.ready:
            if torch.is_grad_enabled() and (
                x.requires_grad
                or (gamma is not None and gamma.requires_grad)
                or (beta is not None and beta.requires_grad)
            ):
                y: Tensor = _Eager.apply(call, x, gamma, beta)
                return y
            return call.forward(x, gamma, beta)[0]
    if _left_to_torch(options, x, gamma, beta):
        return by_torch(options, x, gamma, beta)
    dense = NORMS[options.name].dense(x), *as_parameters(gamma, beta, x.dtype)
    if any(new is not old for new, old in zip(dense, (x, gamma, beta), strict=True)):
        return normalise(options, *dense)
    options = options._replace(eps=float(options.eps))
    if torch.compiler.is_exporting():  # of a Function, the program would keep the values alone, without gradients
        name, *others = options
        results: tuple[Tensor, ...] = OPERATORS[name][0](x, gamma, beta, *others)
    else:
        results = _Forward.apply(x, gamma, beta, options)
    return results[0]


def _left_to_torch(options: Options, x: Tensor, gamma: MaybeTensor, beta: MaybeTensor) -> bool:
    """Whether torch's own function takes the call.

    Besides calls that cunorm does not take, these are: subclasses that implement torch's operators themselves, such as
    DTensor, and do not know cunorm's; nested tensors; forward-mode differentiation; `torch.jit.trace` and
    `torch.onnx.export`, whose files should run without cunorm; `torch.func.functionalize`, which takes no Function; and
    transforms of `torch.func` inside a compiled function, where torch ignores vmap rules.
    """
    given = [x, *(one for one in (gamma, beta) if one is not None)]
    if torch.compiler.is_compiling():
        if torch._C._are_functorch_transforms_active():
            return True
    elif (
        not all(isinstance(one, Tensor) for one in given)
        or torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
        or _functionalized()
    ):
        return True
    if torch.onnx.is_in_onnx_export() or any(is_traceable_wrapper_subclass(one) or one.is_nested for one in given):
        return True
    return not NORMS[options.name].takes(options, x, gamma, beta)


def _functionalized() -> bool:
    """Whether one of the active transforms of `torch.func` is functionalize."""
    if not torch._C._are_functorch_transforms_active():
        return False
    return any(one.key() == TransformType.Functionalize for one in get_interpreter_stack() or ())


class _Eager(Function):
    """A norm in plain eager: it launches at once."""

    @staticmethod
    def forward(ctx: Any, call: Call, x: Tensor, gamma: MaybeTensor, beta: MaybeTensor) -> Tensor:
        y, *stats = call.forward(x, gamma, beta)
        ctx.save_for_backward(x, gamma, beta, *stats)
        ctx.call = call
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[MaybeTensor, ...]:
        x, gamma, beta, *stats = ctx.saved_tensors
        call: Call = ctx.call
        mask = ctx.needs_input_grad[1 : 1 + len(call.norm.gradients)]
        # A hook on saved tensors may return another layout: the operators of `_gradient` read every layout.
        if torch.is_grad_enabled() or not (
            _unwatched() and _plain(dy) and _plain(x) and call.reads(x, gamma, beta, stats)
        ):
            found = _gradient(dy, x, gamma, beta, call.options, mask, stats)
        else:
            found = call.backward(dy, x, gamma, beta, stats, mask)
        return None, *found, *[None] * (3 - len(found))


def _gradient(
    dy: Tensor,
    x: Tensor,
    gamma: MaybeTensor,
    beta: MaybeTensor,
    options: Options,
    mask: Sequence[bool],
    stats: Sequence[Tensor],
) -> list[MaybeTensor]:
    mean, rstd = (None, *stats)[-2:]  # torch.compile counts the parameters, so no *stats
    found = _Gradient.apply(dy, x, gamma, beta, mean, rstd, options, tuple(mask))
    return [one if wanted else None for one, wanted in zip(found, mask, strict=True)]


class _Forward(Function):
    """A norm for everything that transforms it. Returns y and the statistics."""

    @staticmethod
    def forward(x: Tensor, gamma: MaybeTensor, beta: MaybeTensor, options: Options) -> tuple[Tensor, ...]:
        forward = OPERATORS[options.name][0]
        results: tuple[Tensor, ...] = forward(x, gamma, beta, options.sizes, options.eps, options.activation)
        return results

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, gamma, beta, ctx.options = inputs
        _, *stats = output
        ctx.mark_non_differentiable(*stats)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, gamma, beta, *stats)

    @staticmethod
    def backward(ctx: Any, dy: MaybeTensor, *_: MaybeTensor) -> tuple[MaybeTensor, ...]:
        if dy is None:
            return (None,) * 4
        x, gamma, beta, *stats = ctx.saved_tensors
        mask = ctx.needs_input_grad[: len(NORMS[ctx.options.name].gradients)]
        found = _gradient(dy, x, gamma, beta, ctx.options, mask, stats)
        return *found, *[None] * (4 - len(found))

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], x: Tensor, gamma: MaybeTensor, beta: MaybeTensor, options: Options
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        """Samples are independent, so a batch of x is folded into them. Batched parameters are left to torch's vmap."""
        norm, size = NORMS[options.name], info.batch_size
        x = _batched(x, in_dims[0], size)
        shared = in_dims[1] is None and in_dims[2] is None
        given = (gamma, beta, options) if shared else (None, None, options._replace(activation=None))
        y, *stats = _Forward.apply(norm.dense(_folded(norm, x, options)), *given)
        stats = [one.reshape(size, *norm.stats_shape(x.shape[1:], options.sizes)) for one in stats]
        if shared:
            y = y.reshape(x.shape)
        else:
            y = _over(lambda *one: composite(options, *one), (0, *in_dims[1:3]))(x, gamma, beta)
        return (y, *stats), (0,) * (1 + len(stats))


class _Gradient(Function):
    """The gradients of a norm, by the operator. Their own gradients are made of torch's operators."""

    @staticmethod
    def forward(
        dy: Tensor,
        x: Tensor,
        gamma: MaybeTensor,
        beta: MaybeTensor,
        mean: MaybeTensor,
        rstd: Tensor,
        options: Options,
        mask: tuple[bool, ...],
    ) -> tuple[Tensor, ...]:
        backward = OPERATORS[options.name][1]
        given = (options.sizes, options.eps, options.activation, mask)
        results: tuple[Tensor, ...] = backward(dy, x, gamma, beta, mean, rstd, *given)
        return results

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        dy, x, gamma, beta, _, _, ctx.options, ctx.mask = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(dy, x, gamma, beta)

    @staticmethod
    def backward(ctx: Any, *upstream: MaybeTensor) -> tuple[MaybeTensor, ...]:
        tensors = ctx.saved_tensors
        present = [one is not None for one in tensors]

        def gradients(*given: Tensor) -> tuple[Tensor, ...]:
            found = _pulled(ctx.options, *_absent_as_none(given, present))
            return tuple(one for one in found if one is not None)

        results, pull, *_ = torch.func.vjp(gradients, *[one for one in tensors if one is not None])
        arrived = [one if wanted else None for one, wanted in zip(upstream, ctx.mask, strict=True)]
        arrived = [one for one, is_there in zip(arrived, present[1:], strict=False) if is_there]
        arrived += [None] * (len(results) - len(arrived))
        cotangents = [
            torch.zeros_like(result) if one is None else one for one, result in zip(arrived, results, strict=True)
        ]
        found = _absent_as_none(pull(tuple(cotangents)), present)
        return *found, *[None] * (8 - len(found))

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[Any, ...],
        dy: Tensor,
        x: Tensor,
        gamma: MaybeTensor,
        beta: MaybeTensor,
        mean: MaybeTensor,
        rstd: Tensor,
        options: Options,
        mask: tuple[bool, ...],
    ) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
        """Gradients of x alone fold the batch into the samples. Gradients of parameters, one a sample, are torch's."""
        norm, size = NORMS[options.name], info.batch_size
        dy, x = _batched(dy, in_dims[0], size), _batched(x, in_dims[1], size)
        out_dims = tuple(0 if wanted else None for wanted in mask)
        if in_dims[2] is None and in_dims[3] is None and not any(mask[1:]):
            batched = [
                None if one is None else _batched(one, dim, size)
                for one, dim in zip((mean, rstd), in_dims[4:6], strict=True)
            ]
            flat_dy, flat_x = _folded(norm, dy, options), norm.dense(_folded(norm, x, options))
            shape = norm.stats_shape(flat_x.shape, options.sizes)
            stats = [None if one is None else one.reshape(shape) for one in batched]
            dx, *others = _Gradient.apply(flat_dy, flat_x, gamma, beta, *stats, options, mask)
            return (dx.reshape(x.shape) if mask[0] else dx, *others), out_dims

        def compute(*one: Any) -> tuple[Tensor, ...]:
            found = _pulled(options, *one)
            return tuple(one for one, wanted in zip(found, mask, strict=False) if wanted and one is not None)

        found = iter(_over(compute, (0, 0, *in_dims[2:4]))(dy, x, gamma, beta))
        return tuple(next(found) if wanted else x.new_empty(0) for wanted in mask), out_dims


def _pulled(options: Options, dy: Tensor, x: Tensor, gamma: MaybeTensor, beta: MaybeTensor) -> list[MaybeTensor]:
    """The gradients of x, gamma and beta by torch's operators; None for an absent parameter."""
    present = [one is not None for one in (x, gamma, beta)]

    def compute(*given: Tensor) -> Tensor:
        return composite(options, *_absent_as_none(given, present))

    _, pull, *_ = torch.func.vjp(compute, *[one for one in (x, gamma, beta) if one is not None])
    return _absent_as_none(pull(dy), present)


def _absent_as_none(given: Sequence[Any], present: Sequence[bool]) -> list[Any]:
    """Put None at the places of the absent values."""
    values = iter(given)
    return [next(values) if is_there else None for is_there in present]


def _batched(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """The tensor with its batch in front."""
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def _folded(norm: Norm, x: Tensor, options: Options) -> Tensor:
    """A batch of x as one x. A batch of single rows is one already."""
    return x if norm.rows and x.dim() == 1 + len(options.sizes) else x.flatten(0, 1)


def _over(compute: Callable[..., Any], in_dims: Sequence[int | None]) -> Callable[..., Any]:
    """`torch.vmap` of a function, some of whose arguments are None."""

    def call(*arguments: MaybeTensor) -> Any:
        present = [one is not None for one in arguments]
        dims = tuple(dim for dim, is_there in zip(in_dims, present, strict=True) if is_there)
        given = [one for one in arguments if one is not None]
        return torch.vmap(lambda *given: compute(*_absent_as_none(given, present)), dims)(*given)

    return call


def _register(norm: Norm) -> None:
    """Give the operators of a norm the formulas of `_Forward` and `_Gradient`."""

    def setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _Forward.setup_context(ctx, (*inputs[:3], Options(norm.name, *inputs[3:])), output)

    def backward(ctx: Any, *upstream: MaybeTensor) -> tuple[MaybeTensor, ...]:
        return *_Forward.backward(ctx, *upstream)[:3], None, None, None

    def setup_gradient(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _Gradient.setup_context(ctx, (*inputs[:6], Options(norm.name, *inputs[6:9]), inputs[9]), output)

    def backward_gradient(ctx: Any, *upstream: MaybeTensor) -> tuple[MaybeTensor, ...]:
        return *_Gradient.backward(ctx, *upstream)[:6], None, None, None, None

    torch.library.register_autograd(f"cunorm::{norm.name}", backward, setup_context=setup, lib=LIBRARY)
    torch.library.register_autograd(
        f"cunorm::{norm.backward}", backward_gradient, setup_context=setup_gradient, lib=LIBRARY
    )


for _norm in NORMS.values():
    _register(_norm)
