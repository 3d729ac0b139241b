"""The other implementations in benchmarks/accuracy.py: NumPy in float32, and PyTorch's kernels for the CPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from cunorm.tuning.verify.inputs import EPS, Inputs

from cunorm.core.problem import Problem
from cunorm.ops.common.oracles import channels_second

Values = np.ndarray[Any, Any]


def _float32(problem: Problem, given: Inputs) -> dict[str, Any]:
    """Return x and dy as float32 arrays of shape (slices, elements), and the other inputs in shapes that match."""
    batch = problem.op.startswith("batch_norm")
    slices = problem.C if batch else problem.N * problem.group

    def rows(values: Values) -> Values:
        values = channels_second(problem, values).astype(np.float32)
        return np.ascontiguousarray(np.moveaxis(values, 1, 0) if batch else values).reshape(slices, -1)

    def beside(values: Values) -> Values:
        """Broadcast one value per channel to the elements of the rows of x."""
        if batch:
            return values.astype(np.float32)[:, None]
        of_sample = np.repeat(values.astype(np.float32), problem.HxW).reshape(problem.group, -1)
        return np.tile(of_sample, (problem.N, 1))

    found: dict[str, Any] = {name: rows(given[name]) for name in ("x", "dy") if name in given}
    found |= {name: beside(given[name]) for name in ("gamma", "beta") if name in given}
    others = given.keys() - found.keys()
    return found | {name: given[name].astype(np.float32).reshape(-1, 1) for name in others}


def _in_memory(problem: Problem, rows: Values) -> Values:
    """Flatten a tensor of shape (slices, elements) to the order of its elements in memory."""
    batch = problem.op.startswith("batch_norm")
    shape = (problem.C, problem.N, problem.HxW) if batch else (problem.N, problem.C, problem.HxW)
    values = np.moveaxis(rows.reshape(shape), 0, 1) if batch else rows.reshape(shape)
    return (np.moveaxis(values, 1, -1) if problem.layout == "NHWC" else values).reshape(-1)


def _by_channel(problem: Problem, rows: Values) -> Values:
    """Sum a tensor (slices, elements) of GroupNorm or LayerNorm over samples and positions: one value per channel."""
    values = rows.reshape(problem.N, problem.C, problem.HxW)
    sums: Values = np.ascontiguousarray(np.moveaxis(values, 1, 0)).reshape(problem.C, -1).sum(axis=1)
    return sums


def numpy_results(problem: Problem, given: Inputs) -> dict[str, Values]:
    """Compute the op in float32 with plain NumPy; each result is flat, in the order of its elements in memory."""
    one, op = _float32(problem, given), problem.op
    x, gamma = one["x"], one.get("gamma", np.float32(1))
    if op in ("group_norm", "layer_norm", "batch_norm_stats"):
        mean = x.mean(axis=1, keepdims=True)
        rstd = 1 / np.sqrt(((x - mean) ** 2).mean(axis=1, keepdims=True) + np.float32(EPS))
        if op == "batch_norm_stats":
            return {"mean": mean[:, 0], "invstd": rstd[:, 0]}
        y = (x - mean) * rstd * gamma + one["beta"]
        return {"y": _in_memory(problem, y), "mean": mean[:, 0], "rstd": rstd[:, 0]}
    if op == "rms_norm":
        rstd = 1 / np.sqrt((x**2).mean(axis=1, keepdims=True) + np.float32(problem.numbers["eps"]))
        return {"y": _in_memory(problem, x * rstd * gamma), "rstd": rstd[:, 0]}
    if op == "rms_norm_backward":
        dy, xhat = one["dy"], x * one["rstd"]
        dx = one["rstd"] * (dy * gamma - xhat * (dy * gamma * xhat).mean(axis=1, keepdims=True))
        return {"dx": _in_memory(problem, dx), "dgamma": _by_channel(problem, dy * xhat)}
    mean, rstd = one["mean"], one["invstd" if op.startswith("batch_norm") else "rstd"]
    if op == "batch_norm_elemt":
        return {"y": _in_memory(problem, (x - mean) * rstd * gamma + one["beta"])}
    dy, xmu = one["dy"], x - mean
    if op == "batch_norm_backward_reduce":
        sum_dy, sum_dy_xmu = dy.sum(axis=1), (dy * xmu).sum(axis=1)
        return {"sum_dy": sum_dy, "sum_dy_xmu": sum_dy_xmu, "dgamma": sum_dy_xmu * rstd[:, 0], "dbeta": sum_dy}
    if op == "batch_norm_backward_elemt":
        count = np.float32(problem.numbers["count"])
        dx = (dy - one["sum_dy"] / count - xmu * rstd**2 * (one["sum_dy_xmu"] / count)) * rstd * gamma
        return {"dx": _in_memory(problem, dx)}
    xhat, scaled = xmu * rstd, dy * gamma
    a, b = (each.mean(axis=1, keepdims=True) for each in (scaled, scaled * xhat))
    dx = rstd * (scaled - a - xhat * b)
    return {
        "dx": _in_memory(problem, dx),
        "dgamma": _by_channel(problem, dy * xhat),
        "dbeta": _by_channel(problem, dy),
    }


def torch_results(problem: Problem, given: Inputs) -> dict[str, Values]:
    """Run PyTorch's kernel for the CPU; empty without PyTorch, for NHWC, and for an op without such a kernel."""
    if importlib.util.find_spec("torch") is None or problem.layout == "NHWC":
        return {}
    import torch

    def tensor(name: str) -> Any:
        values = given[name]
        if name not in ("x", "dy"):
            return torch.from_numpy(values.astype(np.float32))
        kept = torch.from_numpy(np.ascontiguousarray(channels_second(problem, values)).astype(np.float32))
        return kept.to(getattr(torch, problem.dtype))

    def named(names: tuple[str, ...], results: Any) -> dict[str, Values]:
        return {name: one.to(torch.float32).numpy().reshape(-1) for name, one in zip(names, results, strict=True)}

    size = (problem.N, problem.C, problem.HxW, problem.group)
    if problem.op == "group_norm":
        found = torch.native_group_norm(tensor("x"), tensor("gamma"), tensor("beta"), *size, EPS)
        return named(("y", "mean", "rstd"), found)
    if problem.op == "layer_norm":
        rows = tensor("x").reshape(problem.N, problem.C)
        found = torch.native_layer_norm(rows, [problem.C], tensor("gamma"), tensor("beta"), EPS)
        return named(("y", "mean", "rstd"), found)
    if problem.op == "batch_norm_stats":
        parameters = torch.ones(problem.C), torch.zeros(problem.C)  # they are float32, so the statistics are too
        found = torch.native_batch_norm(tensor("x"), *parameters, None, None, True, 0.0, EPS)
        return named(("mean", "invstd"), found[1:])
    return torch_gradients(problem, {name: tensor(name) for name in given}, size, named)


def torch_gradients(
    problem: Problem, given: Mapping[str, Any], size: tuple[int, ...], named: Callable[..., dict[str, Values]]
) -> dict[str, Values]:
    """See `torch_results`; for the gradients."""
    import torch

    names, mask = ("dx", "dgamma", "dbeta"), [True] * 3
    if problem.op == "group_norm_backward":
        five = (given["dy"], given["x"], given["mean"].reshape(problem.N, -1), given["rstd"].reshape(problem.N, -1))
        found = torch.ops.aten.native_group_norm_backward(*five, given["gamma"], *size, mask)
    elif problem.op == "layer_norm_backward":
        dy, x = (given[name].reshape(problem.N, problem.C) for name in ("dy", "x"))
        mean, rstd = (given[name].reshape(problem.N, 1) for name in ("mean", "rstd"))
        beta = torch.zeros_like(given["gamma"])
        found = torch.ops.aten.native_layer_norm_backward(dy, x, [problem.C], mean, rstd, given["gamma"], beta, mask)
    elif problem.op == "batch_norm_backward_reduce":
        four = (given["dy"], given["x"], given["gamma"], None, None, given["mean"], given["invstd"])
        found = torch.ops.aten.native_batch_norm_backward(*four, True, EPS, mask)
        return {name: one for name, one in named(names, found).items() if name != "dx"}
    else:
        return {}
    return named(names, found)
