"""Replace the norms of a model in place."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import textwrap
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from .modules import (
    GroupNorm,
    GroupNormAct,
    InstanceNorm1d,
    InstanceNorm2d,
    InstanceNorm3d,
    LayerNorm,
    LayerNorm2d,
    RMSNorm,
)
from .sync_batch_norm import SyncBatchNorm, check_model

_OURS = (GroupNorm, LayerNorm, RMSNorm, InstanceNorm1d, InstanceNorm2d, InstanceNorm3d, SyncBatchNorm)
_NORMS = (nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, nn.LocalResponseNorm, _NormBase)


@dataclass(frozen=True)
class Replaced:
    """What `replace` did.

    Attributes
    ----------
    counts : dict of str to int
        Replaced modules: names of their new classes, and how many modules have that class now.
    fused : int
        Activations that a norm applies now.
    left : dict of str to str
        Modules that stay as they were: their names in the model, and the reasons.

    Examples
    --------
    >>> from torch import nn
    >>> from cunorm.torch import replace
    >>> print(replace(nn.Sequential(nn.GroupNorm(2, 4), nn.BatchNorm1d(4))))
    replaced: 1 GroupNorm; fused: 0; left: 1
      1: BatchNorm1d is no norm of cunorm.torch
    """

    counts: dict[str, int] = field(default_factory=dict)
    fused: int = 0
    left: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {name}" for name, count in sorted(self.counts.items())) or "none"
        lines = [f"replaced: {counts}; fused: {self.fused}; left: {len(self.left)}"]
        return "\n".join([*lines, *(f"  {name or 'the model'}: {reason}" for name, reason in self.left.items())])


def _nothing(module: Any) -> dict[str, Any]:
    return {}


def _no_statistics(module: Any) -> str | None:
    return "it keeps running statistics" if module.track_running_stats else None


def _no_bias(module: Any) -> str | None:
    return "it has a bias" if module.bias is not None else None


@dataclass(frozen=True)
class _Rule:
    """The class that takes over a module, the attributes it needs besides, and (module) -> why not, or None."""

    to: type[nn.Module]
    attributes: Callable[[Any], dict[str, Any]] = _nothing
    refuses: Callable[[Any], str | None] = lambda module: None


#: By qualified name: what a subclass means depends on its forward, so only known classes are replaced. timm's classes
#: for float32 and its fast ones compute what cunorm computes for any dtype.
_RULES = {
    "torch.nn.modules.normalization.GroupNorm": _Rule(GroupNorm),
    "torch.nn.modules.normalization.LayerNorm": _Rule(LayerNorm),
    "torch.nn.modules.normalization.RMSNorm": _Rule(RMSNorm),
    "torch.nn.modules.instancenorm.InstanceNorm1d": _Rule(InstanceNorm1d, refuses=_no_statistics),
    "torch.nn.modules.instancenorm.InstanceNorm2d": _Rule(InstanceNorm2d, refuses=_no_statistics),
    "torch.nn.modules.instancenorm.InstanceNorm3d": _Rule(InstanceNorm3d, refuses=_no_statistics),
    "timm.layers.norm.GroupNorm": _Rule(GroupNorm),
    "timm.layers.norm.GroupNorm1": _Rule(GroupNorm),
    "timm.layers.norm.LayerNorm": _Rule(LayerNorm),
    "timm.layers.norm.LayerNormFp32": _Rule(LayerNorm),
    "timm.layers.norm.LayerNorm2d": _Rule(LayerNorm2d),
    "timm.layers.norm.LayerNorm2dFp32": _Rule(LayerNorm2d),
    "timm.layers.norm.RmsNorm": _Rule(RMSNorm),
    "timm.layers.norm_act.GroupNormAct": _Rule(GroupNormAct),
    "timm.layers.norm_act.GroupNorm1Act": _Rule(GroupNormAct),
    "torchvision.models.convnext.LayerNorm2d": _Rule(LayerNorm2d),
    "diffusers.models.normalization.FP32LayerNorm": _Rule(LayerNorm),
    "diffusers.models.normalization.RMSNorm": _Rule(
        RMSNorm, lambda module: {"normalized_shape": tuple(module.dim)}, _no_bias
    ),
}

#: The forwards of transformers that are RMSNorm with a plain weight: nearly every model there has its own copy of such
#: a class. Which one it is is read from its text.
_RMS_FORWARDS = (
    """
    input_dtype = hidden_states.dtype
    hidden_states = hidden_states.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
    return self.weight * hidden_states.to(input_dtype)
    """,
    """
    input_dtype = hidden_states.dtype
    hidden_states = hidden_states.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
    return (self.weight * hidden_states).to(input_dtype)
    """,
    """
    input_dtype = hidden_states.dtype
    hidden_states = hidden_states.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
    return (self.weight.to(torch.float32) * hidden_states).to(input_dtype)
    """,
    """
    variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
    if self.weight.dtype in [torch.float16, torch.bfloat16]:
        hidden_states = hidden_states.to(self.weight.dtype)
    return self.weight * hidden_states
    """,
)
_RMS_RULE = _Rule(
    RMSNorm,
    lambda module: {
        "normalized_shape": tuple(module.weight.shape),
        "eps": module.variance_epsilon,
        "elementwise_affine": True,
    },
)


def _statements(body: list[ast.stmt]) -> str:
    return "\n".join(ast.unparse(one) for one in body)


_KNOWN_FORWARDS = frozenset(_statements(ast.parse(textwrap.dedent(one)).body) for one in _RMS_FORWARDS)


@functools.cache
def _rule_of(kind: Any) -> _Rule | None:
    """The rule of a class, by its name or by the text of its forward; None if it is unknown."""
    if kind.__module__.startswith("transformers.models."):
        try:
            text = textwrap.dedent(inspect.getsource(kind.forward))
        except (OSError, TypeError):
            return None
        function = ast.parse(text).body[0]
        if not isinstance(function, ast.FunctionDef):
            return None
        body = function.body[1:] if ast.get_docstring(function) is not None else function.body
        return _RMS_RULE if _statements(body) in _KNOWN_FORWARDS else None
    return _RULES.get(f"{kind.__module__}.{kind.__qualname__}")


def replace(model: nn.Module, *, fuse_silu: bool = False) -> Replaced:
    """Let the norms of a model run on cunorm from now on.

    Each norm of a known class changes its class, in place. Parameters, buffers, hooks, optimisers, references to the
    module and the names in the state_dict stay what they are. Known are torch's own classes, those of timm, torchvision
    and diffusers that compute the same, and the RMSNorms of transformers with a plain weight. A call that cunorm does
    not take (see `cunorm.torch.functional`) is computed by torch's function as before.

    Parameters
    ----------
    model : nn.Module
        The model, or a norm itself.
    fuse_silu : bool
        Whether GroupNorm also applies the SiLU that follows it, in one kernel. This is done for a `nn.GroupNorm`
        followed by a `nn.SiLU` in a `nn.Sequential`, where `nn.Identity` takes the place of the SiLU, and for timm's
        GroupNormAct. The norm must be in one place of the model alone, and neither module may have hooks. The
        Sequential must be called as a whole: code that calls its modules one by one must not be fused. A SiLU that is
        called by a forward, as in diffusers, cannot be seen and is left.

    Returns
    -------
    Replaced
        How many modules were replaced and fused, and which were left and why.

    Examples
    --------
    >>> from torch import nn
    >>> from cunorm.torch import replace
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.SiLU())
    >>> replace(model, fuse_silu=True).counts
    {'GroupNorm': 1}
    >>> model
    Sequential(
      (0): Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1))
      (1): GroupNorm(2, 8, eps=1e-05, affine=True..., activation='silu')
      (2): Identity()
    )
    """
    check_model(model)
    counts: Counter[str] = Counter()
    left: dict[str, str] = {}
    for name, module in model.named_modules():
        kind: Any = type(module)
        rule = _rule_of(kind)
        reason = _reason(module, rule)
        if reason is not None:
            left[name] = reason
        elif rule is not None:
            for attribute, value in rule.attributes(module).items():
                setattr(module, attribute, value)
            module.__class__ = rule.to
            counts[rule.to.__name__] += 1
    fused = 0
    if fuse_silu:
        fused = _fuse_sequentials(model, left) + _fuse_acts(model, left)
    return Replaced(dict(counts), fused, left)


def _reason(module: nn.Module, rule: _Rule | None) -> str | None:
    """Why a norm is left; None if it is replaced, or is no norm, or is cunorm's already."""
    kind = type(module)
    if rule is not None:
        if "forward" in vars(module):
            return f"{kind.__name__}: its forward was replaced"
        refused = rule.refuses(module)
        return None if refused is None else f"{kind.__name__}: {refused}"
    if isinstance(module, _OURS):
        return None
    if isinstance(module, (_NormBase, nn.LocalResponseNorm)) and kind.__module__.startswith("torch."):
        return f"{kind.__name__} is no norm of cunorm.torch"
    leaf = next(module.children(), None) is None and not kind.__module__.startswith("torch.nn.utils.")  # weight_norm
    if isinstance(module, _NORMS) or (leaf and "norm" in kind.__name__.lower()):
        return f"{kind.__module__}.{kind.__qualname__} is an unknown class, whose forward may compute something else"
    return None


def _watched(module: nn.Module) -> bool:
    """Whether somebody sees what goes in or out of a module, or replaced its forward."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return "forward" in vars(module) or any(getattr(module, name, None) for name in hooks)


def _places(model: nn.Module) -> Counter[int]:
    """How often each module is in the model, by identity."""
    return Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))


def _unsafe(norm: nn.Module, silu: nn.Module, places: Counter[int]) -> str | None:
    """Why a SiLU is not fused, or None."""
    if _watched(norm) or _watched(silu):
        return "SiLU: it or the norm before it has hooks"
    if places[id(norm)] > 1:
        return "SiLU: the norm before it is in several places of the model"
    return None


def _fuse_sequentials(model: nn.Module, left: dict[str, str]) -> int:
    fused, places = 0, _places(model)
    for path, parent in model.named_modules():
        if type(parent) is not nn.Sequential:
            continue
        # Not named_children, which leaves out what comes twice.
        for (_, norm), (name, silu) in itertools.pairwise(list(parent._modules.items())):
            if type(norm) is not GroupNorm or norm.activation is not None or type(silu) is not nn.SiLU:
                continue
            reason = _unsafe(norm, silu, places)
            if reason is not None:
                left[f"{path}.{name}" if path else name] = reason
                continue
            norm.activation = "silu"
            setattr(parent, name, nn.Identity())
            fused += 1
    return fused


def _fuse_acts(model: nn.Module, left: dict[str, str]) -> int:
    fused, places = 0, _places(model)
    for path, module in model.named_modules():
        if type(module) is not GroupNormAct or type(module.act) is not nn.SiLU:
            continue
        reason = _unsafe(nn.Identity(), module.act, places)
        if type(module.drop) is not nn.Identity:
            reason = "SiLU: there is dropout before it"
        if reason is not None:
            left[f"{path}.act" if path else "act"] = reason
            continue
        module.activation, module.act = "silu", nn.Identity()
        fused += 1
    return fused
