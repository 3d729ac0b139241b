"""Modules that `torch.fx.symbolic_trace` records as one call, as it records all modules of `torch.nn`."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.fx import Proxy


def leaf_call(module: nn.Module, input: Any) -> Any:
    """Record the call of a module whose forward looks at the input's shape, which a Proxy does not have.

    Parameters
    ----------
    module : torch.nn.Module
        Module of a model that is traced.
    input : Tensor or torch.fx.Proxy

    Returns
    -------
    torch.fx.Proxy or None
        The result; None if nothing is traced, or if the module is the whole model.
    """
    if not isinstance(input, Proxy):
        return None
    path = input.tracer.path_of_module(module)
    return input.tracer.create_proxy("call_module", path, (input,), {}) if path else None
