"""Measure the errors of every strategy of every op, beside those of NumPy's float32 and of PyTorch on the CPU.

Example: ``python benchmarks/accuracy.py`` runs all problems on all cores (half an hour on two), and writes the results,
docs/speed/accuracy.md and its picture. ``--page`` writes the page and the picture from the stored results. ``--check``
reports whether the page agrees with the stored results. ``--only group_norm`` runs some of the ops and keeps the
results of the others.

The kernels run on the CPU executor with the limits and tiles of an H200. It rounds like a GPU, except that it has no
fused multiply-adds and does not flush float32 denormals. The exact values are those of the float64 oracle for the same
rounded inputs. NumPy sums float32 pairwise (``numpy.mean``, ``numpy.sum``). Few GPU kernels do so.
"""

import argparse
import functools
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
from accuracy_others import numpy_results, torch_results
from accuracy_page import ACTIVE, DEVICE, DTYPES_SHOWN, KINDS_SHOWN, LENGTHS, draw, page
from cunorm.tuning.verify.inputs import inputs_of
from cunorm.tuning.verify.oracle import Expected, expected
from cunorm.tuning.verify.verifier import Verifier

from cunorm.core.arrays import DTYPES
from cunorm.core.devices import known
from cunorm.core.files import write_whole
from cunorm.core.problem import Problem, accumulator
from cunorm.core.strategy import Strategy, Tile, main_launch
from cunorm.ops import registry
from cunorm.ops.common.tolerance import UNIT, stored
from cunorm.ops.registry import OPS
from cunorm.runtime.plans import Target, plan_for
from cunorm.tiling import costmodel
from docs.drawings.themes import in_both

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "accuracy.json"
PAGE, PICTURE = ROOT / "docs" / "speed" / "accuracy.md", ROOT / "docs" / "pictures" / "accuracy.svg"
CHANNELS = 8  # channels per group in GroupNorm, samples in BatchNorm
GROUPS = 2

Values = np.ndarray[Any, Any]


def problem_of(op: str, layout: str, dtype: str, length: int, slices: int) -> Problem:
    """Return a problem with `slices` slices of `length` elements; parameters have the dtype of the statistics."""
    spec, sums = OPS[op], accumulator(dtype)
    options: dict[str, Any] = {name: sums for name in ("gamma_dtype", "beta_dtype") if name in spec.takes}
    if spec.is_backward:
        options.pop("beta_dtype", None)
    if "normalized_shape" in spec.takes:
        return registry.problem_of(op, shape=(slices, length), dtype=dtype, normalized_shape=length, **options)
    N, C, HxW = CHANNELS, slices, length // CHANNELS
    if "num_groups" in spec.takes:
        N, C, options["num_groups"] = slices // GROUPS, GROUPS * CHANNELS, GROUPS
    shape = (N, C, HxW) if layout == "NCHW" else (N, HxW, C)
    return registry.problem_of(op, shape=shape, dtype=dtype, data_format=layout, **options)


def tiles_of(problem: Problem, strategy: Strategy) -> Iterator[Tile]:
    """Yield the best tile of each of the strategy's kernels, and that with the fewest threads (the longest chains)."""
    choices = costmodel.ranked(problem, [strategy], known(DEVICE))
    main = {one.tile: main_launch(one.launches) for one in choices}
    best = {main[one.tile].kernel: one.tile for one in reversed(choices)}
    fewest = min(main, key=lambda tile: main[tile].grid * main[tile].threads)
    yield from dict.fromkeys([*best.values(), fewest])


def errors(wanted: list[Expected], came: Mapping[str, Values]) -> dict[str, dict[str, float]]:
    """Return the largest errors of each result, and the largest error of rounding its exact values.

    "ulp" is in units in the last place of the exact value, "bound" is a share of the bound, and "error" is absolute.
    "rounding" is the error of rounding once.
    """
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
    return float(f"{value:.3g}") if math.isfinite(value) else 1e99  # larger than every finite error


@dataclass(frozen=True)
class Work:
    """One work item of a process: a problem and a kind of data."""

    op: str
    layout: str
    dtype: str
    kind: str
    length: int


def rows_of(work: Work) -> list[dict[str, Any]]:
    """Return the results of one work item, one row per strategy and tile, then one row per other library."""
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
            plan = plan_for(problem, OPS[work.op].strategies, OPS[work.op].names, Target("cpu", 0, device), tile)
            found = errors(wanted, verifier.results(plan, given))
            rows.append({**shared, "contender": name, "tile": tile.as_dict(), "results": found})
    others = {"numpy": numpy_results, "torch": torch_results} if work.layout == "NCHW" else {"numpy": numpy_results}
    for name, function in others.items():
        with np.errstate(all="ignore"):
            if found := errors(wanted, function(problem, given)):
                rows.append({**shared, "contender": name, "tile": None, "results": found})
    return rows


def works(only: str = "") -> Iterator[Work]:
    """Yield all work items, those with the longest slices first."""
    for length, op in itertools.product(sorted(LENGTHS, reverse=True), ACTIVE):
        if op.startswith(only):
            for layout in OPS[op].layouts:
                for dtype, kind in itertools.product(DTYPES_SHOWN, KINDS_SHOWN):
                    yield Work(op, layout, dtype, kind, length)


def measure(only: str = "") -> list[dict[str, Any]]:
    """Return all rows, sorted. One process per core runs work items, each with the CPU executor on one core."""
    from tqdm import tqdm

    os.environ["CUNORM_CPU_CORES"] = "1"
    planned = list(works(only))
    with multiprocessing.get_context("spawn").Pool() as pool:
        found = list(tqdm(pool.imap(rows_of, planned), total=len(planned), unit="problem"))
    return sorted(itertools.chain(*found), key=lambda row: json.dumps(row, sort_keys=True))


def main(argv: list[str] | None = None) -> int:
    """Run the command and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true", help="write the page and its picture from the stored results")
    parser.add_argument("--check", action="store_true", help="report whether the page agrees with the stored results")
    parser.add_argument("--only", default="", metavar="OP", help="run only ops named OP*; keep the other results")
    asked = parser.parse_args(argv)
    document = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"rows": []}
    if asked.check:
        same = bool(document["rows"]) and PAGE.exists() and PAGE.read_text(encoding="utf-8") == page(document)
        print(
            f"{PAGE.name}: {'agrees with the results' if same else 'stale; run: python benchmarks/accuracy.py --page'}"
        )
        return 0 if same else 1
    if not asked.page:
        new = measure(asked.only)
        with_torch = any(row["contender"] == "torch" for row in new)
        torch = importlib.metadata.version("torch") if with_torch else document.get("torch")

        def stays(row: Mapping[str, Any]) -> bool:  # without PyTorch here, its results stay
            return not row["op"].startswith(asked.only) or (row["contender"] == "torch" and not with_torch)

        rows = sorted([*filter(stays, document["rows"]), *new], key=lambda row: ACTIVE.index(row["op"]))
        document = {"device": DEVICE, "torch": torch, "numpy": np.__version__, "rows": rows}
        lines = ",\n".join(json.dumps(row) for row in rows)
        facts = json.dumps({key: value for key, value in document.items() if key != "rows"})
        write_whole(RESULTS, f'{facts[:-1]}, "rows": [\n{lines}\n]}}\n')
    write_whole(PAGE, page(document))
    in_both(functools.partial(draw, document), PICTURE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
