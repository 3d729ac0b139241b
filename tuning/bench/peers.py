"""Peers: public libraries with the same operators. This module records what each offers, and calls it.

A peer is called only if it computes the same outputs as cunorm in the same precision. Otherwise `NotOffered` says what
the peer lacks. Most peers compute gradients through autograd, as their users do; the forward has run before, untimed.

A norm with a residual returns y and h = x + residual, and its gradient gets dy and dh. torch adds in a separate kernel,
or in the same kernel if it is compiled. The other peers are called only if their norm has a fused addition. A peer need
not return the saved statistics: Liger and Apex store rstd for their gradients, QuACK returns it, FlashInfer has none.

RMSNorm's sources: Liger's LigerRMSNormFunction and LigerFusedAddRMSNormFunction, as of 0.8; QuACK's rmsnorm_fwd and
rmsnorm_bwd; FlashInfer's flashinfer.norm; Apex's fused_rms_norm_affine.

Sources: torch.nn.functional, whose instance_norm is what torch.nn.InstanceNorm3d calls, and torch's batch_norm_*
functions; Liger's LigerLayerNormFunction and LigerGroupNormFunction; QuACK's quack.rmsnorm, as of 0.6; Apex's
apex.normalization and apex.contrib.group_norm.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cunorm.core.problem import Problem

from ..verify.inputs import EPS

#: Results by name -> tensors.
Results = Mapping[str, Any]


class NotOffered(Exception):
    """A peer does not offer the operator; the sentence says what the peer lacks."""


# ---- arrays ---------------------------------------------------------------------------------------------------------


def torch_arrays(problem: Problem, flat: Mapping[str, Any]) -> dict[str, Any]:
    """Torch tensors that share the bytes of a set.

    The shape is (N, C, HxW, 1), channels-last if the problem is, or (N, C) for the rows of LayerNorm.
    """
    torch = importlib.import_module("torch")
    found = {}
    for name, array in flat.items():
        tensor = torch.from_dlpack(array).view(getattr(torch, problem.dtype_of(name)))
        if name in problem.spec.tensors:
            shape = problem.spec.arrays[name].shape_of(problem)
            if problem.layout == "NHWC":
                N, C, HxW = shape
                tensor = tensor.view(N, HxW, 1, C).permute(0, 3, 1, 2)
            else:
                tensor = tensor.view(shape if len(shape) == 2 else (*shape, 1))
        found[name] = tensor
    return found


def torch_flat(problem: Problem, name: str, tensor: Any) -> Any:
    """The bytes of a result in the memory order of the problem's layout."""
    torch = importlib.import_module("torch")
    tensor = tensor.to(getattr(torch, problem.dtype_of(name)))  # torch may return sums in a wider dtype
    if name in problem.spec.tensors and problem.layout == "NHWC":
        tensor = tensor.permute(0, 2, 3, 1)
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


# ---- a library ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Peer:
    """A library.

    Attributes
    ----------
    name : str
    module, distribution : str
        The module that must be importable, and the distribution whose version is reported.
    prepare : callable
        (problem, arrays) -> a function that runs the operator and returns its results by name. It raises NotOffered if
        the library does not offer the operator.
    install : str
        The command that installs the library, or how to build it.
    note : callable
        (problem, version of the library) -> what a reader of its time should know, or "".
    arrays, flat : callable
        Convert the bytes of a set to the library's arrays, and a result of the library to bytes in the memory order of
        the problem's layout.
    """

    name: str
    module: str
    distribution: str
    prepare: Callable[[Problem, Mapping[str, Any]], Callable[[], Results]]
    install: str
    note: Callable[[Problem, str], str] = lambda problem, version: ""
    arrays: Callable[[Problem, Mapping[str, Any]], Mapping[str, Any]] = torch_arrays
    flat: Callable[[Problem, str, Any], Any] = torch_flat

    @property
    def missing(self) -> str | None:
        """A sentence that names a missing module and how to install it, or None."""
        for module in dict.fromkeys(("torch", self.module) if self.arrays is torch_arrays else (self.module,)):
            if importlib.util.find_spec(module.split(".")[0]) is None:
                return f"no module {module.split('.')[0]}; {self.install}"
        return None

    @property
    def version(self) -> str:
        """The version of the distribution, or "unknown"."""
        try:
            return importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            return "unknown"


# ---- forwards and gradients -----------------------------------------------------------------------------------------

#: (x, gamma, beta) -> y; of a problem with a residual or dh, (x, gamma, beta, residual) -> y, h.
Forward = Callable[..., Any]


def _epsilon(problem: Problem) -> float:
    """The epsilon of a problem's statistics: a forward's argument, or that of the rstd that a gradient gets."""
    return problem.numbers.get("eps", EPS)


def _with_residual(problem: Problem, forward: Forward) -> Forward:
    """A forward that adds a residual first, if the problem has one or is the gradient of a norm with one."""
    if not problem.extras:
        return forward

    def added(x: Any, gamma: Any, beta: Any, residual: Any) -> Any:
        h = x + residual
        return forward(h, gamma, beta), h

    return added


def _prepared(problem: Problem, tensors: Mapping[str, Any], forward: Forward) -> Callable[[], Results]:
    """A function that runs the forward, or the gradients of a forward that has already run, through autograd."""
    torch = importlib.import_module("torch")
    x: Any
    gamma: Any
    x, gamma, beta = (tensors.get(name) for name in ("x", "gamma", "beta"))
    if not problem.is_backward:
        given = (x, gamma, beta, *(tensors[name] for name in problem.extras))

        def run() -> Results:
            with torch.no_grad():
                made = forward(*given)
            return dict(zip(("y", "h"), made, strict=True)) if problem.extras else {"y": made}

        return run
    if beta is None and gamma is not None:
        beta = torch.zeros_like(gamma)  # no gradient depends on it
    wanted = {"dx": x, "dgamma": gamma, "dbeta": beta}
    leaves: dict[str, Any] = {
        name: None if one is None else one.detach().requires_grad_(name in problem.outputs)
        for name, one in wanted.items()
    }
    # The gradient's x is h. As the forward's x it becomes the same h, if the residual is zero.
    made = forward(*leaves.values(), *(torch.zeros_like(x) for _ in problem.extras))
    results, upstream = (made if problem.extras else [made]), [tensors[name] for name in ("dy", *problem.extras)]
    asked = [name for name in leaves if name in problem.outputs]

    def gradients() -> Results:
        found = torch.autograd.grad(results, [leaves[name] for name in asked], upstream, retain_graph=True)
        return dict(zip(asked, found, strict=True))

    return gradients


#: Prepares the call of a peer for an op: (problem, tensors) -> a function that runs it and returns the results.
Prepare = Callable[[Problem, Mapping[str, Any]], Callable[[], Results]]


def _of(problem: Problem, offered: Mapping[str, Prepare]) -> Prepare:
    """The library's `Prepare` for an op, by the op's name or its family; raises NotOffered if there is none."""
    for name in (problem.op, problem.spec.family):
        if name in offered:
            return offered[name]
    raise NotOffered(f"no {problem.op}")


def _plain(problem: Problem) -> None:
    """Raise NotOffered for libraries that have no fused activation and require gamma."""
    if problem.activation is not None:
        raise NotOffered(f"no fused {problem.activation}")
    if problem.gamma_dtype is None:
        raise NotOffered("requires gamma")


def _unfused(problem: Problem) -> None:
    """Raise NotOffered for libraries that add neither a residual nor dh in the norm's kernel."""
    if problem.extras:
        raise NotOffered(f"no fused {problem.extras[0]}")


# ---- torch ----------------------------------------------------------------------------------------------------------


def _torch_layer(problem: Problem) -> Forward:
    F = importlib.import_module("torch.nn.functional")
    return lambda x, gamma, beta: F.layer_norm(x, (problem.C,), gamma, beta, EPS)


def _torch_rms(problem: Problem) -> Forward:
    F, eps = importlib.import_module("torch.nn.functional"), _epsilon(problem)
    return lambda x, gamma, beta: F.rms_norm(x, (problem.C,), gamma, eps)


def _torch_group(problem: Problem) -> Forward:
    F = importlib.import_module("torch.nn.functional")
    if problem.activation is None:
        return lambda x, gamma, beta: F.group_norm(x, problem.group, gamma, beta, EPS)
    behind = {"silu": F.silu}[problem.activation]
    return lambda x, gamma, beta: behind(F.group_norm(x, problem.group, gamma, beta, EPS))


def _torch_instance(problem: Problem) -> Forward:
    """The function of torch.nn.InstanceNorm3d, on (N, C, HxW, 1, 1). A channels-last x is channels_last_3d then."""
    F = importlib.import_module("torch.nn.functional")
    return lambda x, gamma, beta: F.instance_norm(x.unsqueeze(-1), None, None, gamma, beta, eps=EPS).squeeze(-1)


def _through_autograd(forward: Callable[[Problem], Forward]) -> Prepare:
    return lambda problem, tensors: _prepared(problem, tensors, _with_residual(problem, forward(problem)))


def _stats(problem: Problem, of: Mapping[str, Any]) -> Callable[[], Results]:
    torch = importlib.import_module("torch")
    return lambda: dict(zip(problem.outputs, torch.batch_norm_stats(of["x"], EPS), strict=True))


def _elemt(problem: Problem, of: Mapping[str, Any]) -> Callable[[], Results]:
    torch, given = importlib.import_module("torch"), [of.get(name) for name in ("x", "gamma", "beta", "mean", "invstd")]
    return lambda: {"y": torch.batch_norm_elemt(*given, EPS)}


def _wide_gamma(of: Mapping[str, Any]) -> Any:
    """Gamma in float32, as the modules of mixed-precision training have it: torch's gradients take no other with x."""
    gamma = of.get("gamma")
    return gamma.float() if gamma is not None and gamma.dtype.itemsize < of["mean"].dtype.itemsize else gamma


def _reduce(problem: Problem, of: Mapping[str, Any]) -> Callable[[], Results]:
    torch, names = importlib.import_module("torch"), tuple(problem.spec.results)
    given = [*(of.get(name) for name in ("dy", "x", "mean", "invstd")), _wide_gamma(of)]
    return lambda: dict(zip(names, torch.batch_norm_backward_reduce(*given, True, True, True), strict=True))


def _input(problem: Problem, of: Mapping[str, Any]) -> Callable[[], Results]:
    torch = importlib.import_module("torch")
    given = [*(of.get(name) for name in ("dy", "x", "mean", "invstd")), _wide_gamma(of), of["sum_dy"], of["sum_dy_xmu"]]
    count = torch.tensor([int(problem.numbers["count"])], dtype=torch.int32, device=of["x"].device)
    return lambda: {"dx": torch.batch_norm_backward_elemt(*given, count)}


def _on_gpu(prepare: Prepare) -> Prepare:
    def checked(problem: Problem, of: Mapping[str, Any]) -> Callable[[], Results]:
        if not of["x"].is_cuda:
            raise NotOffered(f"offers {problem.op} on a GPU only")
        return prepare(problem, of)

    return checked


#: torch's forwards whose gradients are computed through autograd, by family.
_FORWARDS: dict[str, Callable[[Problem], Forward]] = {
    "group_norm": _torch_group,
    "instance_norm": _torch_instance,
    "layer_norm": _torch_layer,
    "rms_norm": _torch_rms,
}
_TORCH: dict[str, Prepare] = {
    **{family: _through_autograd(forward) for family, forward in _FORWARDS.items()},
    "batch_norm_stats": _on_gpu(_stats),
    "batch_norm_elemt": _on_gpu(_elemt),
    "batch_norm_backward_reduce": _on_gpu(_reduce),
    "batch_norm_backward_elemt": _on_gpu(_input),
}


def _torch(problem: Problem, tensors: Mapping[str, Any]) -> Callable[[], Results]:
    return _of(problem, _TORCH)(problem, tensors)


@functools.lru_cache(maxsize=1)  # all sets of a problem use the same compiled forward
def _compiled_forward(problem: Problem) -> Forward:
    torch, forward = importlib.import_module("torch"), _with_residual(problem, _FORWARDS[problem.spec.family](problem))
    torch._dynamo.reset()  # compile for these sizes, not a general graph for the sizes of earlier problems too
    # Gradients are computed repeatedly from the buffers that one forward has saved, so they must not be overwritten.
    setattr(importlib.import_module("torch._functorch.config"), "donated_buffer", False)  # noqa: B010
    return torch.compile(forward, dynamic=False)  # type: ignore[no-any-return]


#: The norms whose channels-last tensors PyTorch copies to channels-first on a GPU, and the first version that reads
#: them in place: for GroupNorm by pull request 191945, whose kernels libtorch_cuda of 2.14.1 does not contain.
COPIED_BEFORE = {"group_norm": (2, 15), "instance_norm": (math.inf,)}


def torch_note(problem: Problem, version: str) -> str:
    """Whether PyTorch's eager GroupNorm or InstanceNorm copies the tensors of a problem to another layout first."""
    reads_since = COPIED_BEFORE.get(problem.spec.family, ())
    found = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    return "copies channels-last tensors to channels-first" if problem.layout == "NHWC" and found < reads_since else ""


def _compiled(problem: Problem, tensors: Mapping[str, Any]) -> Callable[[], Results]:
    if problem.spec.family not in _FORWARDS:
        raise NotOffered(f"nothing to compile in {problem.op}: torch offers it as a single operator")
    return _prepared(problem, tensors, _compiled_forward(problem))


# ---- others ---------------------------------------------------------------------------------------------------------


def _liger_layer(problem: Problem, tensors: Mapping[str, Any]) -> Callable[[], Results]:
    _plain(problem)
    _unfused(problem)
    function = importlib.import_module("liger_kernel.ops.layer_norm").LigerLayerNormFunction
    return _prepared(problem, tensors, lambda x, gamma, beta: function.apply(x, gamma, beta, EPS))


def _liger_group(problem: Problem, tensors: Mapping[str, Any]) -> Callable[[], Results]:
    if problem.layout != "NCHW":
        raise NotOffered("copies channels-last data to another layout first")
    _plain(problem)
    function = importlib.import_module("liger_kernel.ops.group_norm").LigerGroupNormFunction
    flat = {name: one.flatten(2) if name in problem.spec.tensors else one for name, one in tensors.items()}
    return _prepared(
        problem, flat, lambda x, gamma, beta: function.apply(x, gamma, beta, problem.C, problem.group, EPS)
    )


#: Liger's offset of gamma; its casting mode that computes everything in float32 and rounds once, as cunorm does (the
#: default "llama" rounds the normalised x too); not in place. Its default writes dx over dy, which the next run reads.
_LIGER_OPTIONS = (0.0, "gemma", False)


def _liger_rms(problem: Problem, tensors: Mapping[str, Any]) -> Callable[[], Results]:
    eps = _epsilon(problem)
    if not problem.extras:
        function = importlib.import_module("liger_kernel.ops.rms_norm").LigerRMSNormFunction
        return _prepared(problem, tensors, lambda x, gamma, beta: function.apply(x, gamma, eps, *_LIGER_OPTIONS))
    _plain(problem)
    fused = importlib.import_module("liger_kernel.ops.fused_add_rms_norm").LigerFusedAddRMSNormFunction
    return _prepared(
        problem, tensors, lambda x, gamma, beta, residual: fused.apply(x, residual, gamma, eps, *_LIGER_OPTIONS)
    )


def _liger(problem: Problem, tensors: Mapping[str, Any]) -> Callable[[], Results]:
    offered = {"layer_norm": _liger_layer, "group_norm": _liger_group, "rms_norm": _liger_rms}
    return _of(problem, offered)(problem, tensors)


def _quack_layer(problem: Problem, tensors: Mapping[str, Any]) -> Callable[[], Results]:
    _plain(problem)
    _unfused(problem)
    if {problem.gamma_dtype, problem.beta_dtype} - {"float32", None}:
        raise NotOffered("offers gamma and beta in float32 only")
    quack, (x, gamma) = importlib.import_module("quack.rmsnorm"), (tensors["x"], tensors["gamma"])
    if not problem.is_backward:
        return lambda: {"y": quack.layernorm_fwd(x, gamma, tensors.get("beta"), EPS)}
    mean, rstd = (tensors[name].view(-1) for name in ("mean", "rstd"))

    def gradients() -> Results:
        found = quack.layernorm_bwd(x, gamma, tensors["dy"], rstd, mean, has_bias="dbeta" in problem.outputs)
        return {name: one for name, one in zip(("dx", "dgamma", "dbeta"), found, strict=True) if one is not None}

    return gradients


def _quack_rms(problem: Problem, tensors: Mapping[str, Any]) -> Callable[[], Results]:
    quack, eps = importlib.import_module("quack.rmsnorm"), _epsilon(problem)
    x, gamma, residual, dh = (tensors.get(name) for name in ("x", "gamma", "residual", "dh"))

    def forward() -> Results:
        y, h, rstd = quack.rmsnorm_fwd(x, gamma, residual=residual, eps=eps, store_rstd=True)
        return {"y": y, "rstd": rstd, **({"h": h} if problem.extras else {})}

    if not problem.is_backward:
        return forward
    dy, rstd = tensors["dy"], tensors["rstd"].view(-1)

    def gradients() -> Results:
        dx, dgamma, *_ = quack.rmsnorm_bwd(x, gamma, dy, rstd, dh)
        return {name: one for name, one in (("dx", dx), ("dgamma", dgamma)) if name in problem.outputs}

    return gradients


def _quack(problem: Problem, tensors: Mapping[str, Any]) -> Callable[[], Results]:
    return _of(problem, {"layer_norm": _quack_layer, "rms_norm": _quack_rms})(problem, tensors)


def _flashinfer_layer(problem: Problem, tensors: Mapping[str, Any]) -> Callable[[], Results]:
    _unfused(problem)
    if (problem.dtype, problem.gamma_dtype, problem.beta_dtype) != ("bfloat16", "float32", "float32"):
        raise NotOffered("offers LayerNorm only for x in bfloat16 with gamma and beta in float32")
    norm, given = importlib.import_module("flashinfer.norm"), [tensors[name] for name in ("x", "gamma", "beta")]
    return lambda: {"y": norm.layernorm(*given, EPS)}


def _flashinfer_rms(problem: Problem, tensors: Mapping[str, Any]) -> Callable[[], Results]:
    if problem.dtype not in ("float16", "bfloat16") or problem.gamma_dtype != problem.dtype:
        raise NotOffered("offers x and gamma in the same 16-bit dtype only")  # it reads any gamma in the dtype of x
    norm, eps, x, gamma = importlib.import_module("flashinfer.norm"), _epsilon(problem), tensors["x"], tensors["gamma"]
    if not problem.extras:
        return lambda: {"y": norm.rmsnorm(x, gamma, eps)}
    y, h = x.clone(), tensors["residual"].clone()

    def run() -> Results:
        """Overwrite x by y and the residual by h. The next run starts from these, which takes no longer."""
        norm.fused_add_rmsnorm(y, h, gamma, eps)
        return {"y": y, "h": h}

    return run


def _flashinfer(problem: Problem, tensors: Mapping[str, Any]) -> Callable[[], Results]:
    if problem.is_backward:
        raise NotOffered(f"no {problem.op}")
    return _of(problem, {"layer_norm": _flashinfer_layer, "rms_norm": _flashinfer_rms})(problem, tensors)


def _apex_layer(problem: Problem, tensors: Mapping[str, Any]) -> Callable[[], Results]:
    if problem.gamma_dtype is None:
        raise NotOffered("requires gamma for this kernel")
    _unfused(problem)
    affine = importlib.import_module("apex.normalization.fused_layer_norm").fused_layer_norm_affine
    return _prepared(problem, tensors, lambda x, gamma, beta: affine(x, gamma, beta, (problem.C,), EPS))


def _apex_rms(problem: Problem, tensors: Mapping[str, Any]) -> Callable[[], Results]:
    if problem.gamma_dtype is None:
        raise NotOffered("requires gamma for this kernel")
    _unfused(problem)
    affine = importlib.import_module("apex.normalization.fused_layer_norm").fused_rms_norm_affine
    eps = _epsilon(problem)
    return _prepared(problem, tensors, lambda x, gamma, beta: affine(x, gamma, (problem.C,), eps))


def _apex_group(problem: Problem, tensors: Mapping[str, Any]) -> Callable[[], Results]:
    if problem.layout != "NHWC" or problem.gamma_dtype is None:
        raise NotOffered("offers GroupNorm only for channels-last data and with gamma")
    GroupNorm = importlib.import_module("apex.contrib.group_norm").GroupNorm
    x = tensors["x"]
    one = GroupNorm(
        problem.group, problem.C, eps=EPS, device=x.device, dtype=tensors["gamma"].dtype, act=problem.activation or ""
    )
    if not one._check_legality(x):  # GroupNorm would silently call torch
        raise NotOffered(f"no kernels for {problem.C} channels in {problem.group} groups")
    call = importlib.import_module("torch.func").functional_call
    return _prepared(problem, tensors, lambda x, gamma, beta: call(one, {"weight": gamma, "bias": beta}, (x,)))


def _apex(problem: Problem, tensors: Mapping[str, Any]) -> Callable[[], Results]:
    offered = {"layer_norm": _apex_layer, "group_norm": _apex_group, "rms_norm": _apex_rms}
    return _of(problem, offered)(problem, tensors)


#: The peers by the name that ``--peers`` takes.
PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer("torch", "torch", "torch", _torch, "pip install torch", torch_note),
        Peer("torch.compile", "torch", "torch", _compiled, "pip install torch"),
        Peer("liger", "liger_kernel", "liger-kernel", _liger, "pip install liger-kernel"),
        Peer("quack", "quack", "quack-kernels", _quack, "pip install quack-kernels"),
        Peer("flashinfer", "flashinfer", "flashinfer-python", _flashinfer, "pip install flashinfer-python"),
        Peer("apex", "apex", "apex", _apex, "build it: https://github.com/NVIDIA/apex"),
    )
}
