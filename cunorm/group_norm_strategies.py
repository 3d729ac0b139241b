"""The strategies of GroupNorm, forward and backward: tiles, legality, launches, workspace. No kernel text here."""

from __future__ import annotations

from typing import Any

from .devices import Device
from .geometry import slab_packs, slab_parts
from .group_norm_grid import grid_launches, grid_workspace, grid_workspace_traffic, refuses_grid
from .group_norm_split import refuses_split, split_launches, split_workspace, split_workspace_traffic
from .problem import Problem
from .strategy import Launch, Strategy, Tile, ceil_div, refuses_threads
from .strategy_common import (
    RESIDENT_REGISTERS,
    blocks_for,
    is_backward,
    pair_bytes,
    parameter_launches,
    parameter_workspace,
    refuses_registers,
    refuses_shared,
    round_up,
    tensors_read,
    written_and_read,
)

__all__ = ["BACKWARD", "FORWARD"]

SECTOR_BYTES = 32  # what DRAM and L2 move at least


def _sector_bytes(problem: Problem, tile: Tile) -> int:
    """Bytes of the 32-byte sectors that reading x once touches: rows of few channels share sectors with neighbours."""
    if problem.layout == "NCHW":
        return problem.nbytes
    row = tile.groups * problem.group_channels * problem.itemsize
    pitch = problem.C * problem.itemsize
    sectors = ceil_div(row, SECTOR_BYTES) + (1 if row % SECTOR_BYTES or pitch % SECTOR_BYTES else 0)
    return problem.nbytes * sectors * SECTOR_BYTES // row


def _one_sweep(problem: Problem, tile: Tile, rows: int, **facts: Any) -> tuple[Launch, ...]:
    """The launches of a strategy that reads every byte once: one kernel, and the parameter sums behind it."""
    shape: tuple[str | int | float, ...] = (problem.N, problem.C, problem.HxW, problem.group)
    extra = (tile.groups,) if tile.strategy == "block" else ()
    tensors = _sector_bytes(problem, tile)
    items = facts.pop("items")
    if not is_backward(problem):
        entry = f"group_norm_{tile.strategy}"
        arguments = ("x", "gamma", "beta", "y", "mean", "rstd", *shape, *extra, "eps")
        traffic = 2 * tensors
    else:
        entry = f"group_norm_backward_{tile.strategy}"
        direct = problem.wants_parameters and rows == 1
        arguments = (
            *("dy", "x" if problem.reads_x else 0, "mean", "rstd", "gamma", "dx"),
            "workspace" if problem.wants_parameters and not direct else 0,
            *(("dgamma", "dbeta") if direct else (0, 0)),
            *shape,
            *extra,
        )
        traffic = (tensors_read(problem) + ("dx" in problem.outputs)) * tensors
        traffic += rows * problem.C * pair_bytes(problem) * problem.wants_parameters
    facts["streams"] = tensors_read(problem)
    main = Launch(entry, entry, blocks_for(items), tile.threads, arguments, traffic=traffic, **facts)
    second = problem.wants_parameters and rows > 1
    return (main, *parameter_launches(problem, rows)) if second else (main,)


# ---- warp -----------------------------------------------------------------------------------------------------------


def _warp_capacity(problem: Problem, tile: Tile) -> int:
    return tile.lanes * tile.packs * problem.pack


def _samples(tile: Tile) -> int:
    return tile.as_dict().get("samples", 1)


def _warp_registers(problem: Problem, tile: Tile) -> int:
    """What a thread needs so as not to spill, from above: addresses and statistics; then for each pack its data, its
    values widened, and the sums kept over samples. The compile gate proves it.
    """
    base = 64 if is_backward(problem) else 48
    base += 8 if problem.dtype == "float64" else 0
    widened = problem.pack * problem.sum_itemsize // 4
    each = 9 + widened if is_backward(problem) else 5 + 2 * widened
    kept = 2 * widened if _samples(tile) > 1 else 0
    return base + tile.packs * (each + kept)


def _refuses_warp(problem: Problem, tile: Tile, device: Device) -> str | None:
    if (sentence := refuses_threads(tile)) is not None:
        return sentence
    if tile.lanes not in (1, 2, 4, 8, 16, 32):
        return f"lanes is {tile.lanes}, expected 1, 2, 4, 8, 16 or 32"
    if problem.layout != "NCHW":
        return "a group of channels-last data is not one run"
    capacity = _warp_capacity(problem, tile)
    if problem.group_length > capacity:
        return f"a group has {problem.group_length} elements, {tile.lanes} lanes of {tile.packs} packs hold {capacity}"
    if problem.wants_parameters and problem.HxW > 1 and problem.group_channels > 1:
        return f"dgamma and dbeta of channels of {problem.HxW} elements do not lie whole in a lane or a team"
    if _samples(tile) > 1 and not (problem.wants_parameters and problem.HxW == 1):
        return "more than one sample a team only serves dgamma and dbeta with HxW = 1"
    return refuses_registers(_warp_registers(problem, tile), tile, device)


def _warp_rows(problem: Problem, tile: Tile) -> int:
    return ceil_div(problem.N, _samples(tile))


def _warp_workspace(problem: Problem, tile: Tile) -> int:
    return parameter_workspace(problem, _warp_rows(problem, tile))


def _warp_launches(problem: Problem, tile: Tile) -> tuple[Launch, ...]:
    rows = _warp_rows(problem, tile)
    items = ceil_div(rows * problem.group, tile.threads // tile.lanes)
    registers = _warp_registers(problem, tile)
    return _one_sweep(problem, tile, rows, items=items, registers=registers, phases=_samples(tile))


# ---- block ----------------------------------------------------------------------------------------------------------


def _block_shared(problem: Problem, tile: Tile) -> int:
    """Shared memory of a block: the arrays in the order of the kernel, each from a 16-byte boundary."""
    channels = tile.groups * problem.group_channels
    sums, pair = problem.sum_itemsize, pair_bytes(problem)
    slab = (problem.layout, channels, problem.HxW, problem.pack)
    sizes = [16 * slab_packs(*slab)] * tensors_read(problem)
    parts = slab_parts(*slab, tile.threads)
    sizes += [channels * pair, channels * parts * pair if parts > 1 else 0]
    sizes += [channels * 2 * sums, tile.groups * 4 * sums] if is_backward(problem) else [channels * 4 * sums]
    return sum(round_up(size, 16) for size in sizes)


def _refuses_block(problem: Problem, tile: Tile, device: Device) -> str | None:
    if (sentence := refuses_threads(tile)) is not None:
        return sentence
    if problem.group % tile.groups:
        return f"slabs of {tile.groups} groups do not divide {problem.group} groups"
    if (sentence := refuses_shared(_block_shared(problem, tile), device)) is not None:
        return sentence
    return refuses_registers(RESIDENT_REGISTERS, tile, device)


def _block_workspace(problem: Problem, tile: Tile) -> int:
    return parameter_workspace(problem, problem.N)


def _block_launches(problem: Problem, tile: Tile) -> tuple[Launch, ...]:
    return _one_sweep(
        problem,
        tile,
        problem.N,
        items=problem.N * (problem.group // tile.groups),
        shared_bytes=_block_shared(problem, tile),
        registers=RESIDENT_REGISTERS,
        phases=3,
    )


#: Among equals the first is taken: few packs, so that many lanes read side by side, and no more lanes than have work.
_WARP_SPACE = {"packs": (1, 2, 4, 8), "lanes": (1, 2, 4, 8, 16, 32), "threads": (128, 256)}
_BLOCK_SPACE = {"threads": (32, 64, 128, 256, 512), "groups": (1, 2, 4, 8, 16, 32)}
_GRID_SPACE = {
    "threads": (128, 256, 512),
    "chunk": (64, 256, 1024, 2048, 4096),
    "groups": (1, 2, 4, 8, 16, 32),
    "lead": (1, 256),
}
_SPLIT_SPACE = {"threads": (128, 256, 512), "chunk": (16, 64, 256, 1024, 4096, 16384, 65536)}


def _strategies(op: str) -> dict[str, Strategy]:
    backward = op.endswith("backward")
    samples = {"samples": (1, 8, 64)} if backward else {}
    warp = Strategy(
        name="warp",
        op=op,
        space={**_WARP_SPACE, **samples},
        constants=("threads", "lanes", "packs", "samples"),
        legality=_refuses_warp,
        launches=_warp_launches,
        workspace=_warp_workspace,
        workspace_traffic=written_and_read(_warp_workspace),
    )
    block = Strategy(
        name="block",
        op=op,
        space=_BLOCK_SPACE,
        constants=("threads",),
        legality=_refuses_block,
        launches=_block_launches,
        workspace=_block_workspace,
        workspace_traffic=written_and_read(_block_workspace),
    )
    split = Strategy(
        name="split",
        op=op,
        space=_SPLIT_SPACE,
        constants=("threads",),
        legality=refuses_split,
        launches=split_launches,
        workspace=split_workspace,
        workspace_traffic=split_workspace_traffic,
    )
    grid = Strategy(
        name="grid",
        op=op,
        space=_GRID_SPACE,
        constants=("threads",),
        legality=refuses_grid,
        launches=grid_launches,
        workspace=grid_workspace,
        workspace_traffic=grid_workspace_traffic,
    )
    return {strategy.name: strategy for strategy in (warp, block, grid, split)}


FORWARD: dict[str, Strategy] = _strategies("group_norm")
BACKWARD: dict[str, Strategy] = _strategies("group_norm_backward")
