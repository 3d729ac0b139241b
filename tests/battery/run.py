"""How the problem of a case is made, called and compared with the oracle, op by op. Cases are in case.py."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

import cunorm
from cunorm import reference
from cunorm.core.arrays import DTYPES, NAMES
from cunorm.core.problem import accumulator
from tests.support import problems
from tests.support.tolerance import assert_within

if TYPE_CHECKING:
    from tests.battery.case import Case

#: Added to x: what is read or counted outside a slice then shows, where zeros would be as good as values about 0.
OFFSET = 3.0
#: An element that far is no shift for the others: relative to it their squares cancel.
OUTLIER = 1e5


def placed(values: np.ndarray, shift: int = 0, last: bool = False) -> np.ndarray:
    """A copy in an allocation of its own, which ends where the array ends and starts `shift` elements before it.

    ``last`` puts the second axis innermost. What stands before the array is NaN.
    """
    inner = np.moveaxis(values, 1, -1) if last else values
    whole = np.empty(shift + values.size, values.dtype)
    if shift:
        whole[:shift] = np.nan
    view = whole[shift:].reshape(inner.shape)
    view[...] = inner
    return np.moveaxis(view, -1, 1) if last else view


def emptied(shape: tuple[int, ...], dtype: Any, shift: int = 0, last: bool = False) -> np.ndarray:
    """Memory for a result, full of NaN."""
    return placed(np.full(shape, np.nan).astype(dtype), shift, last)


def _parameter(case: Case, given: str | None) -> str | None:
    """The dtype of gamma or beta."""
    return case.dtype if given == "same" else given


def _moved(case: Case, made: Any) -> Any:
    """The arrays, OFFSET further from 0, at their places; absent parameters are None."""
    x = (made.x.astype(np.float64) + OFFSET).astype(made.x.dtype)
    if case.constant is not None:
        x[...] = case.constant
    if case.flat:
        x[...] = x[..., :1]
    if case.outlier is not None:
        x[case.outlier] = OUTLIER
    if case.nan is not None:
        x[case.nan] = np.nan
    made = replace(made, x=x)
    if case.infinite:
        made = replace(made, dy=np.abs(made.dy))
    for name, dtype in (("gamma", case.gamma), ("beta", case.beta)):
        wanted = _parameter(case, dtype)
        values = None if wanted is None else getattr(made, name).astype(DTYPES[wanted])
        made = replace(made, **{name: values})
    return made


def _settled(case: Case, made: Any, last: bool = False) -> tuple[Any, np.ndarray]:
    """Copies of the arrays at their places, which a kernel may spoil, and memory for what has the size of x."""
    if case.infinite:
        made.mean.flat[0] = -np.inf
    names = [name for name in vars(made) if isinstance(getattr(made, name), np.ndarray)]
    copies = {name: placed(getattr(made, name), case.at(name), last and name in ("x", "dy")) for name in names}
    if case.in_place:
        return replace(made, **copies), copies["dy" if "backward" in case.op else "x"]
    return replace(made, **copies), emptied(made.x.shape, made.x.dtype, case.at("out"), last)


def _group(case: Case, **options: Any) -> list[np.ndarray | None]:
    formatted = "NHWC" if case.last else "NCHW"
    made = _moved(case, problems.group_arrays(case.shape, case.groups, case.dtype, data_format=formatted))
    sums = made.mean.dtype
    mean, rstd = (a.astype(sums) for a in reference.group_norm(made.x, case.groups, data_format=formatted)[1:])
    made = replace(made, mean=mean, rstd=rstd)
    given, out = _settled(case, made)
    options |= {"num_groups": case.groups, "data_format": formatted}
    if case.op == "group_norm":
        outs = (out, *(emptied(mean.shape, sums) for _ in range(2)))
        cunorm.group_norm(given.x, gamma=given.gamma, beta=given.beta, out=outs, **options)
        made.check_forward(*outs)
    else:
        outs = _gradients(case, out, made.gamma, mean)
        arrays = (given.dy, given.x, given.mean, given.rstd, given.gamma)
        cunorm.group_norm_backward(*arrays, output_mask=case.mask, out=outs, **options)
        made.check_backward(*outs)
    return list(outs)


def _gradients(case: Case, dx: np.ndarray, gamma: np.ndarray | None, mean: np.ndarray) -> tuple[Any, ...]:
    """Memory for those of dx, dgamma and dbeta that are wanted."""
    C = case.shape[-1] if case.last or case.op.startswith("layer") else case.shape[1]
    dtype = mean.dtype if gamma is None else gamma.dtype
    made = (dx, *(emptied((C,), dtype) for _ in range(2)))
    return tuple(array if wanted else None for array, wanted in zip(made, case.mask, strict=True))


def _layer(case: Case, **options: Any) -> list[np.ndarray | None]:
    made = _moved(case, problems.layer_arrays(case.shape, case.shape[-1], case.dtype))
    sums = made.mean.dtype
    mean, rstd = (a.astype(sums) for a in reference.layer_norm(made.x, case.shape[-1])[1:])
    made = replace(made, mean=mean, rstd=rstd)
    given, out = _settled(case, made)
    if case.op == "layer_norm":
        outs = (out, *(emptied(mean.shape, sums) for _ in range(2)))
        cunorm.layer_norm(given.x, case.shape[-1], given.gamma, given.beta, out=outs, **options)
        made.check_forward(*outs)
    else:
        outs = _gradients(case, out, made.gamma, mean)
        arrays = (given.dy, given.x, case.shape[-1], given.mean, given.rstd, given.gamma)
        cunorm.layer_norm_backward(*arrays, output_mask=case.mask, out=outs, **options)
        made.check_backward(*outs)
    return list(outs)


def _batch(case: Case, **options: Any) -> list[np.ndarray | None]:
    made = _moved(case, problems.batch_arrays(case.shape, case.dtype))
    sums, (_, C) = made.mean.dtype, case.shape[:2]
    mean, invstd = (a.astype(sums) for a in reference.batch_norm_stats(made.x))
    totals = [a.astype(sums) for a in reference.batch_norm_backward_reduce(made.dy, made.x, mean, invstd)[:2]]
    made = replace(made, mean=mean, invstd=invstd, sum_dy=totals[0], sum_dy_xmu=totals[1])
    arrays, out = _settled(case, made, case.last)
    function, given = getattr(cunorm, case.op), arrays.given(case.op)
    if case.op in ("batch_norm_elemt", "batch_norm_backward_elemt"):
        function(**given, out=out, **options)
        made.check(case.op, out)
        return [out]
    outs: tuple[Any, ...]
    if case.op == "batch_norm_stats":
        outs = (emptied((C,), sums), emptied((C,), sums))
    else:
        options |= dict(zip(("input_g", "gamma_g", "beta_g"), case.mask, strict=True))
        parameter = _parameter(case, case.gamma) or NAMES[sums]
        dtypes = case.sums or (NAMES[sums], NAMES[sums], *[parameter if parameter == case.dtype else NAMES[sums]] * 2)
        wanted = (case.mask[0], case.mask[0], *case.mask[1:])
        outs = tuple(emptied((C,), DTYPES[one]) if want else None for one, want in zip(dtypes, wanted, strict=True))
    function(**given, out=outs, **options)
    made.check(case.op, outs)
    return list(outs)


def _gather(case: Case, **options: Any) -> list[np.ndarray | None]:
    world, C = case.shape
    random = np.random.default_rng(0)
    sums = DTYPES[accumulator(case.dtype)]
    means = placed((random.standard_normal((world, C)) + OFFSET).astype(DTYPES[case.dtype]), case.at("x"))
    invstds = placed((0.1 + random.random((world, C))).astype(DTYPES[case.dtype]), case.at("x"))
    counts = placed(random.integers(1, 1000, world))
    if world > 1:
        counts[1], means[1] = 0, np.nan  # a rank that is absent, whatever it holds
    outs = [emptied((C,), sums) for _ in range(2)]
    running = [placed(np.full(C, v).astype(DTYPES[one])) for v, one in zip((1, 2), case.sums, strict=False)]
    kept = dict(zip(("running_mean", "running_var"), (a.astype(np.float64) for a in running), strict=False))
    exact = reference.batch_norm_gather_stats(means, invstds, counts, **kept)
    named = dict(zip(("running_mean", "running_var"), running, strict=False))
    cunorm.batch_norm_gather_stats(means, invstds, counts, out=tuple(outs), **named, **options)
    for index, came in enumerate((*outs, *running)):
        want = np.asarray(exact[index])
        assert_within(f"{case.op}[{index}]", came, want, 1e-13 * np.abs(want) + 1e-13, NAMES[came.dtype])
    return [*outs, *running]


#: By op: what runs a case, with the options of the call, and returns the results.
RUNS = {
    "group_norm": _group,
    "group_norm_backward": _group,
    "layer_norm": _layer,
    "layer_norm_backward": _layer,
    "batch_norm_stats": _batch,
    "batch_norm_gather_stats": _gather,
    "batch_norm_elemt": _batch,
    "batch_norm_backward_reduce": _batch,
    "batch_norm_backward_elemt": _batch,
}
