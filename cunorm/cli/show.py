"""``cunorm show``: print the plan of a problem and, with ``--traffic``, the bytes that it moves."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from cunorm.core.devices import known
from cunorm.core.errors import CompileError, KernelFault, TableError, UnsupportedTile, about_file
from cunorm.core.terminal import columns
from cunorm.executors.cpu.guarded_arrays import PARAMETER, TENSOR, WORKSPACE
from cunorm.ops.parse_problem import names_of, naming_options, tile_of, typed_options
from cunorm.ops.registry import OPS, plan
from cunorm.runtime.plans import Plan
from cunorm.tiling import costmodel
from cunorm.tiling.table import load
from cunorm.traffic.traffic import Traffic

from . import tables

TITLES = (
    "strategy", "launches", "bytes/floor", "fetched", "workspace", "parameters", "sectors 16B", "all", "read again",
    "in L2/2", "in L2", "banks",
)  # fmt: skip
LEGEND = """\
bytes/floor  bytes of tensors that warps request, over the byte floor; workspace, parameters: their bytes over the same
fetched      bytes of the tensors' 32-byte sectors, each counted once per block and direction, over the byte floor
sectors      requested bytes of tensors over bytes of the sectors touched: 16-byte accesses, then all accesses
read again   share of the tensors' loads that read a sector again; in L2/2, in L2: the share of those within that size
banks        wavefronts of shared memory, over the fewest possible"""


def _refusal(strategy: Any, problem: Any, device: Any) -> str:
    """Return why no tile of a strategy is legal: the message for the last tile worth trying, which is the largest."""
    worthy = [tile for tile in strategy.tiles() if strategy.of(problem, tile).worth]
    sentence = strategy.refuses(problem, worthy[-1], device) if worthy else None
    return sentence or f"{strategy.name}: no tile is worth trying for a problem of this size"


def _plans(asked: argparse.Namespace) -> tuple[list[Plan], list[str]]:
    """Return the requested plans, and one message for each strategy that has no legal tile."""
    if asked.shape is None:
        raise ValueError(f"--shape: missing, expected {','.join(names_of(asked.op))} for {asked.op}")
    if asked.device not in (None, "cpu"):
        known(asked.device, "--device")
    options = typed_options(asked) | {"device": asked.device}
    if asked.tile is not None and asked.strategy in (None, "all"):
        raise ValueError("--tile: requires --strategy NAME with the name of one strategy")
    if asked.tile is not None:
        return [plan(asked.op, tile=tile_of(asked.op, asked.strategy, asked.tile), **options)], []
    chosen = plan(asked.op, **options)
    if asked.strategy is None:
        return [chosen], []
    strategies, problem, device = OPS[asked.op].strategies, chosen.problem, chosen.place.device
    if asked.strategy != "all" and asked.strategy not in strategies:
        raise ValueError(
            f"--strategy: {asked.strategy!r}, expected all or one of {', '.join(strategies)} for {asked.op}"
        )
    made, refused = [], []
    for name in strategies if asked.strategy == "all" else (asked.strategy,):
        strategy = strategies[name]
        if any(costmodel.legal(problem, [strategy], device)):
            best = costmodel.choose(problem, [strategy], device)
            why = f"--strategy; its best tile by the cost model: predicted {best.seconds * 1e6:.1f} us, not measured"
            made.append(replace(plan(asked.op, tile=best.tile, **options), reason=why))
        else:
            refused.append(_refusal(strategy, problem, device))
    if not made:
        raise ValueError(f"--strategy: no tile of the search space is legal; for example, {refused[0]}")
    return made, refused


def _traffics(plans: list[Plan], refused: list[str]) -> list[Traffic]:
    """Count each plan. Of several plans, those that cannot be counted move from `plans` to `refused`."""
    found = []
    for made in tuple(plans):
        try:
            found.append(made.traffic())
        except ValueError as error:
            if len(plans) == 1:
                raise
            plans.remove(made)
            refused.append(f"{made.strategy.name if made.strategy else 'none'}: {error}")
    return found


def _row(found: Traffic) -> Iterator[str]:
    tensor, l2, reads = found.of(TENSOR), found.device.l2_bytes, found.reuse.reads
    again = found.reuse.again
    yield found.choice.partition(" ")[0]
    yield str(len(found.launches))
    yield f"{found.tensor_ratio:.3f}"
    yield f"{found.fetched_ratio:.3f}"
    for role in (WORKSPACE, PARAMETER):
        yield f"{found.over_floor(found.of(role).nbytes):.4f}"
    yield f"{tensor.wide_efficiency:.3f}" if tensor.wide_sectors else "-"
    yield f"{tensor.efficiency:.3f}"
    yield f"{again / reads:.3f}" if reads else "-"
    for nbytes in (l2 // 2, l2):
        yield f"{found.reuse.within(nbytes):.2f}" if again else "-"
    yield f"{found.bank_conflicts:.2f}"


def table(found: Sequence[Traffic], refused: Sequence[str] = ()) -> str:
    """Return a table of the traffic of several plans of one problem, one line per plan.

    Parameters
    ----------
    found : sequence of Traffic
    refused : sequence of str
        Messages of the strategies that have no legal tile or cannot be counted.
    """
    first = found[0]
    lines = [
        first.problem.describe(),
        "cpu executor: counted, not timed; with the limits and tiles of "
        f"{first.device.name}, L2 {first.device.l2_bytes >> 20} MiB",
        f"floor: {first.floor_bytes:,} bytes of tensors",
        "",
        *columns([TITLES, *(tuple(_row(one)) for one in found)], 1),
        "",
    ]
    lines += [f"tile       {one.choice}{f'; {one.sample}' if one.sample else ''}" for one in found]
    lines += [f"refused    {sentence}" for sentence in refused]
    return "\n".join([*lines, "", LEGEND])


def _document(made: Plan) -> dict[str, Any]:
    """Return a plan as a JSON object."""
    return {
        "problem": asdict(made.problem),
        "device": made.place.device.name,
        "executor": made.place.kind,
        "strategy": None if made.strategy is None else made.strategy.name,
        "tile": None if made.tile is None else made.tile.as_dict(),
        "reason": made.reason,
        "workspace_nbytes": made.workspace_nbytes,
        "launches": [asdict(launch) for launch in made.launches],
    }


def run(asked: argparse.Namespace) -> int:
    """Run the command with its parsed arguments; return the exit code."""
    before = os.environ.get("CUNORM_TILING_TABLE")
    if asked.table is not None:
        try:
            load(Path(asked.table))
        except (OSError, TableError) as error:
            print(f"cunorm show: --table: {about_file(error, asked.table)}", file=sys.stderr)
            return 2
        os.environ["CUNORM_TILING_TABLE"] = asked.table
    try:
        return _run(asked)
    finally:
        if asked.table is not None:
            os.environ.pop("CUNORM_TILING_TABLE")
            os.environ.update({} if before is None else {"CUNORM_TILING_TABLE": before})


def _run(asked: argparse.Namespace) -> int:
    if asked.op is None and asked.shape is None:
        return tables.run(asked)
    try:
        if asked.op is None:
            raise ValueError("OP: missing, expected the name of a function before --shape: group_norm_backward")
        plans, refused = _plans(asked)
        found = _traffics(plans, refused) if asked.traffic else []
    except (CompileError, KernelFault, MemoryError, TypeError, UnsupportedTile, ValueError) as error:
        print(f"cunorm show: {naming_options(error) or 'not enough memory'}", file=sys.stderr)
        return 1 if isinstance(error, (CompileError, KernelFault, MemoryError)) else 2
    if asked.json:
        documents = [_document(made) for made in plans]
        for document, one in zip(documents, found, strict=False):
            document["traffic"] = one.as_dict()
        print(json.dumps({"schema": "cunorm-show/1", "plans": documents, "refused": refused}, indent=1))
    elif found:
        print(table(found, refused))
    else:
        print("\n\n".join(made.explain() for made in plans))
        print("\n".join(f"refused    {sentence}" for sentence in refused), end="\n" if refused else "")
    return 0
