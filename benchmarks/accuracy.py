"""How exact every strategy of every op is, beside NumPy's float32 and PyTorch on the CPU: docs/accuracy.md.

Example: ``python benchmarks/accuracy.py`` runs everything on all cores (half an hour on two), and writes the results,
the page and its picture; ``--page`` writes both from the kept results; ``--check`` says whether the page is what these
give; ``--only group_norm`` runs a part, and keeps the other results.

The kernels run on the CPU executor, posing as an H200. It rounds as a GPU does but for fused multiply-adds and float32
denormals. Exact is the float64 oracle on the same rounded inputs. NumPy sums float32 in pairs (``numpy.mean``,
``numpy.sum``), which few GPU kernels do as well.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import itertools
import json
import math
import multiprocessing
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from cunorm.tuning.files import write_whole
from cunorm.tuning.inputs import CONSTANT, EPS, OFFSET, OUTLIER, WIDTH, Inputs, channels_second, inputs_of, numbers_of
from cunorm.tuning.oracle import Expected, expected
from cunorm.tuning.tolerance import UNIT, stored
from cunorm.tuning.verify import Verifier

from cunorm import costmodel
from cunorm.arrays import DTYPES
from cunorm.devices import known
from cunorm.launch import Place, plan_for
from cunorm.ops import OPS
from cunorm.problem import Problem, accumulator
from cunorm.strategy import Strategy, Tile, main_launch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "accuracy.json"
PAGE, PICTURE = ROOT / "docs" / "accuracy.md", ROOT / "docs" / "accuracy.svg"
DEVICE = "H200"
DTYPES_SHOWN = ("float32", "bfloat16")
KINDS_SHOWN = ("plain", "far from zero", "outlier first", "outlier second", "wide", "constant")
#: Elements of a slice -> slices. Fewer of the long ones: they take their time, and an error of a mean is one of many.
LENGTHS = {10**3: 64, 10**5: 16, 10**6: 8}
CHANNELS = 8  # of a group of GroupNorm; samples that a channel of BatchNorm has
GROUPS = 2
#: Mean and rstd of every strategy may be off by that many times what NumPy's are, or what rounding them once costs.
GOAL = 4.0
STATISTICS = ("mean", "rstd", "invstd")
ACTIVE = [op for op in OPS if op != "batch_norm_gather_stats"]  # which adds up in float64

Values = np.ndarray[Any, Any]


def problem_of(op: str, layout: str, dtype: str, length: int, slices: int) -> Problem:
    """A problem of so many slices of statistics of one length, with parameters of the statistics' dtype."""
    sums = accumulator(dtype)
    forward, gradients = ("y", "mean", "rstd"), ("dx", "dgamma", "dbeta")
    if op.startswith("layer_norm"):
        sizes: tuple[Any, ...] = ("NCHW", slices, length, 1, 1)
    elif op.startswith("group_norm"):
        sizes = (layout, slices // GROUPS, GROUPS * CHANNELS, length // CHANNELS, GROUPS)
    else:
        sizes = (layout, CHANNELS, slices, length // CHANNELS, slices)
    if op == "batch_norm_stats":
        return Problem(op, dtype, None, None, sums, *sizes, ("mean", "invstd")).canonical()
    if op == "batch_norm_backward_reduce":
        names = ("sum_dy", "sum_dy_xmu", "dgamma", "dbeta")
        return Problem(op, dtype, sums, None, sums, *sizes, names, tuple((f"{n}_t", sums) for n in names)).canonical()
    if op == "batch_norm_backward_elemt":
        return Problem(op, dtype, sums, None, sums, *sizes, ("dx",), (("sum_t", sums),)).canonical()
    if op.endswith("backward"):
        return Problem(op, dtype, sums, None, sums, *sizes, gradients).canonical()
    outputs = ("y",) if op == "batch_norm_elemt" else forward
    return Problem(op, dtype, sums, sums, sums, *sizes, outputs).canonical()


def tiles_of(problem: Problem, strategy: Strategy) -> Iterator[Tile]:
    """The strategy's default tile, and the one whose threads are fewest: their chains of additions are the longest."""
    choices = costmodel.ranked(problem, [strategy], known(DEVICE))
    yield choices[0].tile

    def threads(tile: Tile) -> int:
        main = main_launch(strategy.launches(problem, tile))
        return main.grid * main.threads

    fewest = min((one.tile for one in choices), key=threads)
    if fewest != choices[0].tile:
        yield fewest


# ---- the others -----------------------------------------------------------------------------------------------------


def _float32(problem: Problem, given: Inputs) -> dict[str, Any]:
    """Inputs for a sum over the last axis: x and dy as float32 (slices, elements), the others beside them."""
    batch = problem.op.startswith("batch_norm")
    slices = problem.C if batch else problem.N * problem.group

    def rows(values: Values) -> Values:
        values = channels_second(problem, values).astype(np.float32)
        return np.ascontiguousarray(np.moveaxis(values, 1, 0) if batch else values).reshape(slices, -1)

    def beside(values: Values) -> Values:
        """Of channels, as each element of a row of x meets it."""
        if batch:
            return values.astype(np.float32)[:, None]
        of_sample = np.repeat(values.astype(np.float32), problem.HxW).reshape(problem.group, -1)
        return np.tile(of_sample, (problem.N, 1))

    found: dict[str, Any] = {name: rows(given[name]) for name in ("x", "dy") if name in given}
    found |= {name: beside(given[name]) for name in ("gamma", "beta") if name in given}
    others = given.keys() - found.keys()
    return found | {name: given[name].astype(np.float32).reshape(-1, 1) for name in others}


def _in_memory(problem: Problem, rows: Values) -> Values:
    """A tensor (slices, elements), flat as it lies in memory."""
    batch = problem.op.startswith("batch_norm")
    shape = (problem.C, problem.N, problem.HxW) if batch else (problem.N, problem.C, problem.HxW)
    values = np.moveaxis(rows.reshape(shape), 0, 1) if batch else rows.reshape(shape)
    return (np.moveaxis(values, 1, -1) if problem.layout == "NHWC" else values).reshape(-1)


def _by_channel(problem: Problem, rows: Values) -> Values:
    """The sum over samples and positions of (slices, elements) of GroupNorm or LayerNorm, channel by channel."""
    values = rows.reshape(problem.N, problem.C, problem.HxW)
    return np.ascontiguousarray(np.moveaxis(values, 1, 0)).reshape(problem.C, -1).sum(axis=1)


def numpy_results(problem: Problem, given: Inputs) -> dict[str, Values]:
    """The formulas in float32, as one would write them in NumPy; each result flat as it lies in memory."""
    one, op = _float32(problem, given), problem.op
    x, gamma = one["x"], one.get("gamma", np.float32(1))
    if op in ("group_norm", "layer_norm", "batch_norm_stats"):
        mean = x.mean(axis=1, keepdims=True)
        rstd = 1 / np.sqrt(((x - mean) ** 2).mean(axis=1, keepdims=True) + np.float32(EPS))
        if op == "batch_norm_stats":
            return {"mean": mean[:, 0], "invstd": rstd[:, 0]}
        y = (x - mean) * rstd * gamma + one["beta"]
        return {"y": _in_memory(problem, y), "mean": mean[:, 0], "rstd": rstd[:, 0]}
    mean, rstd = one["mean"], one["invstd" if op.startswith("batch_norm") else "rstd"]
    if op == "batch_norm_elemt":
        return {"y": _in_memory(problem, (x - mean) * rstd * gamma + one["beta"])}
    dy, xmu = one["dy"], x - mean
    if op == "batch_norm_backward_reduce":
        sum_dy, sum_dy_xmu = dy.sum(axis=1), (dy * xmu).sum(axis=1)
        return {"sum_dy": sum_dy, "sum_dy_xmu": sum_dy_xmu, "dgamma": sum_dy_xmu * rstd[:, 0], "dbeta": sum_dy}
    if op == "batch_norm_backward_elemt":
        count = np.float32(numbers_of(problem)["count"])
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
    """PyTorch's own kernels for the CPU, channels-first; nothing where it is not installed or has no such function."""
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
        parameters = torch.ones(problem.C), torch.zeros(problem.C)  # float32, and so are the statistics
        found = torch.native_batch_norm(tensor("x"), *parameters, None, None, True, 0.0, EPS)
        return named(("mean", "invstd"), found[1:])
    return torch_gradients(problem, {name: tensor(name) for name in given}, size, named)


def torch_gradients(problem: Problem, given: Mapping[str, Any], size: tuple[int, ...], named: Any) -> dict[str, Values]:
    """The same of a gradient."""
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


# ---- errors ---------------------------------------------------------------------------------------------------------


def errors(wanted: list[Expected], came: Mapping[str, Values]) -> dict[str, dict[str, float]]:
    """The largest error of each result: in units of the last place of the exact value, of the bound, and as it is."""
    found = {}
    for one in wanted:
        if one.name in came:
            values = one.looked_at(came[one.name].astype(DTYPES[one.dtype])).astype(np.float64)
            error, exact = np.abs(values - one.exact), np.abs(one.exact)
            _, exponent = np.frexp(exact)
            place = np.ldexp(2 * UNIT[one.dtype], exponent - 1)
            ulps = np.divide(error, place, out=np.zeros_like(error), where=error > 0)
            bound = error / stored(one.bound, one.exact, one.dtype)
            rounding = float((UNIT[one.dtype] * exact).max(initial=0.0))
            kept = {"ulp": ulps.max(initial=0.0), "bound": bound.max(initial=0.0), "error": error.max(initial=0.0)}
            found[one.name] = {key: _short(value) for key, value in kept.items()} | {"rounding": _short(rounding)}
    return found


def _short(value: float) -> float:
    return float(f"{value:.3g}") if math.isfinite(value) else 1e99  # which is worse than anything


@dataclass(frozen=True)
class Work:
    """What one process does at a time."""

    op: str
    layout: str
    dtype: str
    kind: str
    length: int


def rows_of(work: Work) -> list[dict[str, Any]]:
    """The results of one problem on one kind of data: a row for each contender."""
    problem = problem_of(work.op, work.layout, work.dtype, work.length, LENGTHS[work.length])
    given = inputs_of(problem, 0, kinds=(work.kind,))
    wanted = expected(problem, given)
    shared = {"op": work.op, "layout": problem.layout, "dtype": work.dtype, "kind": work.kind, "length": work.length}
    rows = []
    verifier, device = Verifier(problem, "cpu"), known(DEVICE)
    for name, strategy in OPS[work.op].strategies.items():
        if not any(costmodel.legal(problem, [strategy], device)):
            continue
        for tile in tiles_of(problem, strategy):
            plan = plan_for(problem, OPS[work.op].strategies, OPS[work.op].names, Place("cpu", 0, device), tile)
            found = errors(wanted, verifier.results(plan, given))
            rows.append({**shared, "contender": name, "tile": tile.as_dict(), "results": found})
    others = {"numpy": numpy_results, "torch": torch_results} if work.layout == "NCHW" else {"numpy": numpy_results}
    for name, function in others.items():
        with np.errstate(all="ignore"):
            if found := errors(wanted, function(problem, given)):
                rows.append({**shared, "contender": name, "tile": None, "results": found})
    return rows


def works(only: str = "") -> Iterator[Work]:
    """Everything there is to do, the longest first."""
    for length, op in itertools.product(sorted(LENGTHS, reverse=True), ACTIVE):
        if op.startswith(only):
            for layout in ("NCHW",) if op.startswith("layer_norm") else ("NCHW", "NHWC"):
                for dtype, kind in itertools.product(DTYPES_SHOWN, KINDS_SHOWN):
                    yield Work(op, layout, dtype, kind, length)


def measure(only: str = "") -> list[dict[str, Any]]:
    """All rows, in order; the executor on one core in each of as many processes as there are."""
    from tqdm import tqdm

    os.environ["CUNORM_CPU_CORES"] = "1"
    planned = list(works(only))
    with multiprocessing.get_context("spawn").Pool() as pool:
        found = list(tqdm(pool.imap(rows_of, planned), total=len(planned), unit="problem"))
    return sorted(itertools.chain(*found), key=lambda row: json.dumps(row, sort_keys=True))


def beside_numpy(rows: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], str, float]]:
    """(row, statistic, its error over NumPy's, or over what rounding it once costs) of every strategy."""
    key = ("op", "layout", "dtype", "kind", "length")
    of_numpy = {tuple(row[k] for k in key): row["results"] for row in rows if row["contender"] == "numpy"}
    for row in rows:
        if row["contender"] in ("numpy", "torch"):
            continue
        for name in STATISTICS:
            if name in row["results"]:
                own, other = row["results"][name], of_numpy[tuple(row[k] for k in key)][name]
                yield row, name, own["error"] / max(other["error"], other["rounding"], 1e-300)


# ---- the page -------------------------------------------------------------------------------------------------------

HEAD = """# Accuracy

How far the results of every strategy are from the exact ones, counted on the CPU executor. Written by
`python benchmarks/accuracy.py` from `benchmarks/results/accuracy.json`.

**{verdict}** {worst}

![Errors of mean and rstd over NumPy's, by kind of data, a point for each strategy and tile](accuracy.svg)

## What is compared

- **Exact** is the float64 oracle (`cunorm.reference`) on the same rounded inputs.
- **numpy** is the formula written in NumPy's float32, which adds in pairs. **torch** is {torch}.
- **Data**: N(0, 1); the same plus {offset:g} ("far from zero"); with one element of {outlier:g}, the first or the
  second ("outlier first", "outlier second"); times {width:g} ("wide"); all elements {constant:g} ("constant").
- **Slices** of {lengths} elements, of which there are {counts}: groups of GroupNorm, rows of LayerNorm, channels of
  BatchNorm. bfloat16 results of torch are of its float32 parameters too.
- Each strategy runs with its default tile on an {device}, and with the tile of the fewest threads, whose chains of
  additions are the longest. The CPU executor has neither fused multiply-adds nor flushed denormals; a GPU has both.

A cell is the largest error over all lengths and tiles: in units in the last place of the exact value (ulp), then, in
brackets, as a share of the bound that the tests and the tuner allow (`tuning/tolerance.py`). The ulp of a value near
zero, such as the mean of N(0, 1), is far smaller than any rounding of its terms: there the bound tells more. In bold,
what is more than {goal:g} times as far off as NumPy.
"""
TITLES = {"float32": "float32", "bfloat16": "bfloat16, statistics and parameters float32"}


def _worst(rows: list[dict[str, Any]], name: str) -> tuple[float, float] | None:
    """The largest ulp, and the largest share of the bound, of a result."""
    found = [row["results"][name] for row in rows if name in row["results"]]
    return (max(one["ulp"] for one in found), max(one["bound"] for one in found)) if found else None


def _number(value: float) -> str:
    return "inf" if value >= 1e99 else f"{value:.2g}" if value < 100 else f"{value:,.0f}"


def _table(rows: list[dict[str, Any]], name: str, over: Mapping[tuple[Any, ...], float]) -> Iterator[str]:
    """One result of one op in one dtype: a line for each contender, a column for each kind of data."""
    yield f"| {name} | " + " | ".join(KINDS_SHOWN) + " |"
    yield "|---|" + "---|" * len(KINDS_SHOWN)
    layouts = sorted({row["layout"] for row in rows})
    contenders = dict.fromkeys((row["contender"], row["layout"]) for row in rows if row["tile"] is not None)
    for contender, layout in (*contenders, ("numpy", "NCHW"), ("torch", "NCHW")):
        own = [row for row in rows if (row["contender"], row["layout"]) == (contender, layout)]
        cells = []
        for kind in KINDS_SHOWN:
            of_kind = [row for row in own if row["kind"] == kind]
            worst = _worst(of_kind, name)
            cell = "–" if worst is None else f"{_number(worst[0])} ({_number(worst[1])})"
            bold = any(over.get((id(row), name), 0.0) > GOAL for row in of_kind)
            cells.append(f"**{cell}**" if bold else cell)
        if any(cell != "–" for cell in cells):
            of_layout = f" {layout}" if len(layouts) > 1 and contender not in ("numpy", "torch") else ""
            yield f"| {contender}{of_layout} | " + " | ".join(cells) + " |"


def _summary(rows: list[dict[str, Any]]) -> str:
    ratio, row, name = max(((ratio, row, name) for row, name, ratio in beside_numpy(rows)), key=lambda one: one[0])
    return (
        f"The largest error of a mean or rstd, over NumPy's of the same data, is {ratio:.1f}: {name} of {row['op']} "
        f"{row['layout']} `{row['contender']}`, {row['dtype']}, {row['kind']}, {row['length']:,} elements."
    )


def page(document: Mapping[str, Any]) -> str:
    """The page of some results."""
    rows = document["rows"]
    over = {(id(row), name): ratio for row, name, ratio in beside_numpy(rows)}
    missed = sum(ratio > GOAL for ratio in over.values())
    verdict = f"Mean and rstd are never more than {GOAL:g} times as far off as NumPy's pairwise float32."
    if missed:
        verdict = (
            f"Mean and rstd are more than {GOAL:g} times as far off as NumPy's in {missed} of {len(over)} results."
        )
    facts = {
        "torch": f"PyTorch {document['torch']} on the CPU" if document["torch"] else "not among these results",
        "lengths": " and ".join(f"{length:,}" for length in LENGTHS),
        "counts": ", ".join(map(str, LENGTHS.values())),
        "offset": OFFSET, "outlier": OUTLIER, "width": WIDTH, "constant": CONSTANT, "device": DEVICE, "goal": GOAL,
    }  # fmt: skip
    lines = [HEAD.format(verdict=verdict, worst=_summary(rows), **facts)]
    for op in ACTIVE:
        lines.append(f"## {op}\n")
        for dtype in DTYPES_SHOWN:
            own = [row for row in rows if (row["op"], row["dtype"]) == (op, dtype)]
            if own:
                lines.append(f"### {op}, {TITLES[dtype]}\n")
                for name in dict.fromkeys(name for row in own for name in row["results"]):
                    lines += [*_table(own, name, over), ""]
    return "\n".join(lines)


def draw(document: Mapping[str, Any], path: Path) -> None:
    """The picture: errors over NumPy's of mean and rstd, by kind of data, a point for each strategy and tile."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    mpl.rcParams["svg.hashsalt"] = "cunorm"  # the same bytes every time
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    names = {"mean": ("mean",), "rstd": ("rstd", "invstd")}
    families = {"group_norm": "tab:blue", "layer_norm": "tab:green", "batch_norm_stats": "tab:orange"}
    found = list(beside_numpy(document["rows"]))
    for axis, (title, wanted) in zip(axes, names.items(), strict=True):
        for shift, (op, colour) in enumerate(families.items()):
            points = [(row, ratio) for row, name, ratio in found if name in wanted and row["op"] == op]
            # Side by side by length, so that points of equal height do not hide each other.
            wide = [KINDS_SHOWN.index(row["kind"]) + 0.26 * (shift - 1) for row, _ in points]
            spread = [0.07 * (list(LENGTHS).index(row["length"]) - 1) for row, _ in points]
            where = [x + dx for x, dx in zip(wide, spread, strict=True)]
            axis.scatter(where, [max(ratio, 0.01) for _, ratio in points], s=9, color=colour, alpha=0.5, label=op)
        axis.axhline(1, color="black", linewidth=1)
        axis.axhline(GOAL, color="tab:red", linewidth=1, linestyle="--")
        axis.annotate("NumPy, pairwise float32", (5.45, 1), (0, 3), textcoords="offset points", ha="right", fontsize=8)
        axis.annotate(f"{GOAL:g} times", (5.45, GOAL), (0, 3), textcoords="offset points", ha="right", fontsize=8)
        axis.set(title=title, yscale="log", xlim=(-0.5, 5.5))
        axis.set_xticks(range(len(KINDS_SHOWN)), KINDS_SHOWN, rotation=20, ha="right")
        axis.grid(axis="y", alpha=0.3)
    axes[0].set_ylabel("largest error over NumPy's")
    axes[0].legend(loc="lower left", fontsize=8)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true", help="write the page and its picture from the kept results")
    parser.add_argument("--check", action="store_true", help="say whether the page is what the kept results give")
    parser.add_argument("--only", default="", metavar="OP", help="run ops that begin so; keep the others' results")
    asked = parser.parse_args(argv)
    document = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"rows": []}
    if asked.check:
        same = bool(document["rows"]) and PAGE.exists() and PAGE.read_text(encoding="utf-8") == page(document)
        print(
            f"{PAGE.name}: {'as the results give it' if same else 'stale; type: python benchmarks/accuracy.py --page'}"
        )
        return 0 if same else 1
    if not asked.page:
        kept = [row for row in document["rows"] if not row["op"].startswith(asked.only)]
        torch = importlib.metadata.version("torch") if importlib.util.find_spec("torch") else None
        rows = sorted(kept + measure(asked.only), key=lambda row: ACTIVE.index(row["op"]))
        document = {"device": DEVICE, "torch": torch, "numpy": np.__version__, "rows": rows}
        lines = ",\n".join(json.dumps(row) for row in rows)
        facts = json.dumps({key: value for key, value in document.items() if key != "rows"})
        write_whole(RESULTS, f'{facts[:-1]}, "rows": [\n{lines}\n]}}\n')
    write_whole(PAGE, page(document))
    draw(document, PICTURE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
