"""Count the bytes that the default tile of each shape of the workloads moves over the byte floor.

Example: ``python benchmarks/byte_floor.py`` counts on all cores (an hour on two) and writes the results and the page,
docs/speed/byte-floor.md. ``--page`` only writes the page, from the stored results. ``--only group_norm --workload vae``
counts some of the problems and keeps the results of the others.

Nothing here is timed. Each problem is planned for an H200 in bfloat16 and counted on the CPU executor. If a problem is
too large for that, two smaller problems are counted (`cunorm.traffic.traffic`). The tests show that this is exact.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

from cunorm.tuning.problems.workloads import WORKLOADS, problems

from cunorm.core import settings
from cunorm.core.devices import known
from cunorm.core.problem import ITEMSIZE, Problem
from cunorm.core.strategy import main_launch
from cunorm.ops.registry import OPS
from cunorm.runtime.plans import Plan, Target, plan_for
from cunorm.tiling import costmodel
from cunorm.traffic import sampling
from cunorm.traffic.traffic import measure

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "byte_floor.json", ROOT / "docs" / "speed" / "byte-floor.md"
DEVICE, DTYPE = "H200", "bfloat16"
#: Byte floor above which the rest and the number of busy multiprocessors are limited, and the limit of the rest as a
#: share of the byte floor. With keep=shared, every piece reads the moments or sums of all pieces of its sample.
LARGE, MOST_REST, MOST_REST_KEPT = 20e6, 0.10, 0.35
#: Rows that may exceed a limit, and why. "Takes longer": on the simulated clock (benchmarks/simulate.py), or on an H100
#: where it says so (benchmarks/results/measured_tiles-*.jsonl).
EXCUSED = {
    "sd15-unet: group_norm_backward NHWC N=2 C=960 HxW=4096 group=32": "`cluster` takes longer",
    "sdxl-unet: group_norm NHWC N=4 C=1920 HxW=4096 group=32": "longer chunks and `cluster` take longer on an H100",
    "vae: group_norm_backward NHWC N=1 C=512 HxW=16384 group=32": "longer chunks and `cluster` take longer on an H100",
    "video-vae: group_norm NHWC N=1 C=512 HxW=28800 group=32": "shorter chunks take longer",
    "video-vae: group_norm_backward NHWC N=1 C=512 HxW=28800 group=32": "`grid` takes longer",
    "nnunet: group_norm NHWC N=2 C=128 HxW=32768 group=128": "`cluster` takes longer",
    "nnunet: group_norm_backward NHWC N=2 C=128 HxW=32768 group=128": "`grid`, with half the rest, takes longer",
    "nnunet-in: instance_norm NHWC N=2 C=128 HxW=32768": "longer chunks and `cluster` take longer",
    "nnunet-in: instance_norm_backward NHWC N=2 C=128 HxW=32768": "longer chunks take longer",
    "llm: layer_norm_backward rows=2048 length=4096": "fewer partial rows take longer",
    "llm: layer_norm_backward rows=1024 length=12288": "fewer partial rows take longer",
    "llm-rms: rms_norm_backward rows=512 length=8192": "fewer partial rows take longer",
    "llm-rms: rms_norm_backward rows=512 length=16384": "fewer partial rows take longer",
    "llm-rms: rms_norm_backward rows=512 length=5120 with dh": "fewer partial rows take longer",
    "llm-rms: rms_norm_backward rows=512 length=8192 with dh": "fewer partial rows take longer",
    "llm-rms: rms_norm_backward rows=512 length=16384 with dh": "fewer partial rows take longer",
    "llm: layer_norm_backward rows=2048 length=65536": "fewer partial rows take longer on an H100",
    "odd: layer_norm rows=67 length=123479": "`grid` takes longer",
    "odd: layer_norm rows=1024 length=33333": "`cluster`, which reads misaligned rows once, takes longer",
    "odd: layer_norm_backward rows=1024 length=33333": "clusters of 8 blocks take longer",
    "mobile-bn: batch_norm_backward_reduce NHWC N=128 C=1152 HxW=49": "longer chunks take longer",
    "mobile-bn: batch_norm_stats NHWC N=128 C=672 HxW=196": "longer chunks take longer",
    "mobile-bn: batch_norm_backward_reduce NHWC N=128 C=672 HxW=196": "a wrong prediction: longer chunks are faster",
}
#: Values of `sampling.WHOLE`, the maximum elements of a sample, in the order in which they are tried. `grid` skips the
#: first: its second reads are counted, so its samples need at least two waves of blocks.
SAMPLED = (2**20, 2**22, 2**24, 2**26)
HEAD = """# Bytes over the floor

The bytes that the default tile moves for each shape of the named workloads, on an {device} in {dtype}. They are counted
on the CPU executor; nothing here is timed. The byte floor of a problem is the fewest bytes that it has to move: dy, x
and dx of a backward, x and y of a forward; with a residual also the residual and h, and with dh also dh.
`python benchmarks/byte_floor.py` writes this page. A test compares the page with the stored counts, and the counted
tiles with the present choice of the cost model.

{counted} of the suite's {shapes} shapes have been counted.

- **MB**: the byte floor.
- **tensors**: bytes of tensors that warps request, over the byte floor.
- **sectors**: bytes of the tensors' 32-byte sectors that blocks touch, over the byte floor. A sector counts once per
  block and direction.
- **rest**: bytes of parameters, of mean and rstd, and of the workspace, over the byte floor, without those reloaded.
- **reloaded**: bytes of gamma and beta that LayerNorm and RMSNorm load although this or another block has loaded them
  before, over the byte floor. They come from the L1 and L2 caches. The tile's formula gives this number.
- **wide**: requested bytes of 16-byte accesses to tensors, over the bytes of the sectors that these accesses touch.
- **in L2**: share of the second reads whose reuse distance is at most half the L2 cache. It is empty if there are no
  second reads.
- **busy**: multiprocessors, of {multiprocessors}, that get a block of the main launch.
"""


LIMITS = """The limits:

- tensors: at most 1.02 if the strategy reads once; if it reads twice, at most 5/3 for a backward and 3/2 for a forward;
- rest: at most 0.10 if the byte floor is above 20 MB. One access to mean and rstd is not counted in it, because the
  problem requires it. At most 0.35 for GroupNorm's `grid` with `keep="shared"`: every piece reads the moments of all
  pieces of its slab (in a backward, their sums), from the L2 cache;
- reloaded: no limit. A tile with one row per block loads the parameters once per row;
- in L2: at least 0.95 for `grid`;
- busy: at least 90 % of the multiprocessors (rounded down) if the byte floor is above 20 MB. On the simulated clock,
  smaller problems take 3 to 12 us, most of it latency, and large blocks on half of the multiprocessors are as fast."""


@functools.cache
def suite(only: str = "", workload: str = "") -> list[tuple[str, Problem]]:
    """Return the workloads' problems without duplicates, each with the first workload that contains it."""
    found: dict[Problem, str] = {}
    for name, problem in problems(DTYPE):
        if problem.op.startswith(only) and workload in ("", name):
            found.setdefault(problem, name)
    return [(name, problem) for problem, name in found.items()]


@functools.cache
def planned(problem: Problem) -> Plan:
    """Return the plan with the tile that the cost model chooses, independent of tiling tables."""
    device = known(DEVICE)
    choice = costmodel.choose(problem, OPS[problem.op].strategies.values(), device)
    return plan_for(problem, OPS[problem.op].strategies, OPS[problem.op].names, Target("cpu", 0, device), choice.tile)


def key_of(name: str, problem: Problem) -> str:
    """Return the readable name of a row: workload, op, layout, sizes and what the op adds."""
    layout = f" {problem.layout}" if len(problem.spec.layouts) > 1 else ""
    return f"{name}: {problem.op}{layout} {problem.sizes_text}{problem.extras_text}"


def counted(item: tuple[str, Problem]) -> tuple[str, dict[str, Any]]:
    """Count one problem, and return its name and its row of the table."""
    name, problem = item
    plan = planned(problem)
    assert plan.strategy is not None and plan.tile is not None
    main = main_launch(plan.launches)
    row: dict[str, Any] = {
        "strategy": plan.strategy.name,
        "tile": plan.tile.as_dict(),
        "floor_bytes": sampling.floor_bytes(problem),
        "statistics": statistics_share(problem),
        "busy": min(main.grid, plan.place.device.multiprocessors),
    }
    found = None
    for sampling.WHOLE in SAMPLED[plan.strategy.name == "grid" :]:
        try:
            found = measure(plan)
            break
        except ValueError as error:  # too large to count with this limit
            row["refused"] = str(error)
    if found is None:
        return key_of(name, problem), row
    row.pop("refused", None)
    reloaded = sum(launch.repeated for launch in plan.launches)
    tensors, rest = found.of("tensor"), found.of("parameter").nbytes + found.of("workspace").nbytes - reloaded
    assert rest >= 0, f"{plan.explain()}: fewer bytes of parameters are loaded than its launches say"
    row |= {
        "tensors": round(found.tensor_ratio, 4),
        "sectors": round(found.fetched_ratio, 4),
        "rest": round(found.over_floor(rest), 4),
        "reloaded": round(found.over_floor(reloaded), 4),
        "wide": round(tensors.wide_efficiency, 4),
        "again": found.reuse.again,
        "in_l2": round(found.reuse.within(plan.place.device.l2_bytes // 2), 4),
    }
    return key_of(name, problem), row


def statistics_share(problem: Problem) -> float:
    """Bytes of mean and rstd, each moved once, over the byte floor of the problem."""
    slices = problem.C if problem.spec.channelwise else problem.N * problem.group
    return round(2 * slices * ITEMSIZE[problem.stats_dtype] / sampling.floor_bytes(problem), 4)


def page(rows: dict[str, dict[str, Any]]) -> str:
    """Return the text of the page for the stored results."""
    device = known(DEVICE)
    counts = {"counted": len(rows), "shapes": len(suite())}
    lines = [HEAD.format(device=device.name, dtype=DTYPE, multiprocessors=device.multiprocessors, **counts)]
    titles = ("problem", "MB", "strategy", "tensors", "sectors", "rest", "reloaded", "wide", "in L2", "busy")
    tables: dict[str, list[str]] = {}  # a workload may be in the suite twice, the second time with residual and dh
    for key, row in rows.items():
        workload, _, problem = key.partition(": ")
        cells = [problem, f"{row['floor_bytes'] / 1e6:.1f}", row["strategy"]]
        if "refused" in row:
            cells += ["not counted", "", "", "", "", ""]
        else:
            again = f"{row['in_l2']:.2f}" if row["again"] else ""
            cells += [
                f"{row['tensors']:.3f}",
                f"{row['sectors']:.3f}",
                f"{row['rest']:.3f}",
                f"{row['reloaded']:.3f}" if row["reloaded"] else "",
                f"{row['wide']:.2f}",
                again,
            ]
        tables.setdefault(workload, []).append(f"| {' | '.join([*cells, str(row['busy'])])} |")
    for workload, table in tables.items():
        lines += [f"\n## {workload}\n", f"| {' | '.join(titles)} |", f"|---|{'---:|' * (len(titles) - 1)}", *table]
    over = [f"- {key}: {row['strategy']}, {', '.join(what)}" for key, row in rows.items() if (what := missed(key, row))]
    excused = [f"- {key}: {why}" for key, why in EXCUSED.items() if key in rows]
    over = over or ["No other row exceeds a limit."]
    return "\n".join([*lines, "\n## Over the limits\n", LIMITS, "", EXCUSE, "", *excused, "", *over, ""])


EXCUSE = """\
Rows that exceed a limit, each with the reason why its tile is kept. "Takes longer" means that a tile within the limits
takes longer, on the [simulated clock](simulated.md) or, where it says so, on an H100:"""


def missed(key: str, row: dict[str, Any]) -> list[str]:
    """List the limits that a row exceeds without an excuse."""
    return [] if key in EXCUSED else exceeded(key, row)


def exceeded(key: str, row: dict[str, Any]) -> list[str]:
    """List the limits that a row exceeds: tensors, rest, second reads from L2, busy multiprocessors."""
    if "refused" in row:
        return []
    kept = row["tile"].get("keep") == "shared"
    op = OPS[key.partition(": ")[2].partition(" ")[0]]
    # BatchNorm's ops compute sums or a tensor: none of them reads a tensor twice.
    twice = row["strategy"] in ("split", "grid") and op.family != "batch_norm" and not kept
    limit = (5 / 3 if op.is_backward else 3 / 2) if twice else 1.02
    found = [f"tensors {row['tensors']:.3f}"] if row["tensors"] > limit + 1e-3 else []
    most_rest = MOST_REST_KEPT if kept else MOST_REST
    if row["floor_bytes"] > LARGE and row["rest"] - row["statistics"] > most_rest:
        found.append(f"rest {row['rest']:.2f}")
    if row["strategy"] == "grid" and row["in_l2"] < 0.95:
        found.append(f"in L2 {row['in_l2']:.2f}")
    if row["floor_bytes"] > LARGE and row["busy"] < int(costmodel.BUSY_ENOUGH * known(DEVICE).multiprocessors):
        found.append(f"busy {row['busy']}")
    return found


def in_order(rows: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the rows of the suite's problems, in the order of the suite."""
    return {key: rows[key] for key in _keys() if key in rows}


@functools.cache
def _keys() -> tuple[str, ...]:
    return tuple(key_of(*item) for item in suite())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true", help="write the page from the stored results, count nothing")
    parser.add_argument("--only", default="", metavar="OP", help="count only ops whose names start with OP")
    parser.add_argument("--workload", default="", choices=("", *WORKLOADS))
    parser.add_argument("--missing", action="store_true", help="count only problems without a current row")
    chosen = parser.parse_args(arguments)
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"] if RESULTS.exists() else {}
    if not chosen.page:
        items = list(suite(chosen.only, chosen.workload))
        if chosen.missing:
            items = [item for item in items if stale(rows.get(key_of(*item)), item[1])]
        items.sort(key=lambda item: _strategy(item[1]) == "grid")  # last: many blocks at a time take longest
        with multiprocessing.get_context("spawn").Pool(settings.cores()) as pool:
            for number, (key, row) in enumerate(pool.imap_unordered(counted, items), 1):
                rows[key] = row
                print(
                    f"{number}/{len(items)} {key}: {row['strategy']} {row.get('tensors')}", file=sys.stderr, flush=True
                )
                rows = in_order(rows)
                document: dict[str, Any] = {
                    "schema": "cunorm-byte-floor/1",
                    "executor": "cpu executor: counted, not timed",
                }
                document |= {"device": DEVICE, "dtype": DTYPE, "rows": rows}
                RESULTS.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(rows), encoding="utf-8")
    return 0


def _strategy(problem: Problem) -> str:
    chosen = planned(problem).strategy
    return "" if chosen is None else chosen.name


def stale(row: dict[str, Any] | None, problem: Problem) -> bool:
    """Whether a stored row is missing, or has a tile other than the cost model's present choice."""
    plan = planned(problem)
    assert plan.strategy is not None and plan.tile is not None
    return row is None or (row["strategy"], row["tile"]) != (plan.strategy.name, plan.tile.as_dict())


if __name__ == "__main__":
    sys.exit(main())
