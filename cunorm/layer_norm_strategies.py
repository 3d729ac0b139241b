"""The strategies of LayerNorm, forward and backward: tiles, legality, launches, workspace. No kernel text here.

A problem of LayerNorm has its rows as samples, the length of a row as channels, one position and one group.
"""

from __future__ import annotations

from typing import Any

from .devices import Device
from .layer_norm_split import (
    gradient_arguments,
    owners,
    refuses_split,
    split_launches,
    split_workspace,
    split_workspace_traffic,
)
from .problem import Problem
from .strategy import Launch, Strategy, Tile, ceil_div, refuses_threads
from .strategy_common import (
    WARP,
    blocks_for,
    is_backward,
    pair_bytes,
    parameter_launches,
    parameter_workspace,
    refuses_registers,
    refuses_resident,
    refuses_shared,
    round_up,
    tensors_read,
    written_and_read,
)

__all__ = ["BACKWARD", "FORWARD"]

#: Elements a lane of a `warp` backward may hold if the sums of their columns are to be in registers too; most_kept in
#: layer_norm_backward_warp.cu.
MOST_KEPT = 32


def _traffic(problem: Problem, partial_rows: int) -> int:
    """Bytes that one sweep over the tensors reads and writes, with the partial rows of parameter gradients."""
    written = "y" in problem.outputs or "dx" in problem.outputs
    partial = partial_rows * problem.C * pair_bytes(problem) * problem.wants_parameters
    return (tensors_read(problem) + written) * problem.nbytes + partial


def _one_sweep(
    problem: Problem, tile: Tile, blocks: int, partial_rows: int, owners: int, **facts: Any
) -> tuple[Launch, ...]:
    """The launches of a strategy that reads every byte once: one kernel, and the parameter sums behind it."""
    entry = f"{problem.op}_{tile.strategy}"
    if not is_backward(problem):
        arguments: tuple[str | int, ...] = ("x", "gamma", "beta", "y", "mean", "rstd", problem.N, problem.C, "eps")
    else:
        direct = problem.wants_parameters and partial_rows == 1
        arguments = (
            *gradient_arguments(problem),
            "dx",
            "workspace" if problem.wants_parameters and not direct else 0,
            *(("dgamma", "dbeta") if direct else (0, 0)),
            problem.N,
            problem.C,
            owners,
        )
    traffic = _traffic(problem, partial_rows)
    main = Launch(entry, entry, blocks_for(blocks), tile.threads, arguments, traffic=traffic, **facts)
    second = problem.wants_parameters and partial_rows > 1
    return (main, *parameter_launches(problem, partial_rows)) if second else (main,)


def _refuses_capacity(problem: Problem, lanes: int, tile: Tile) -> str | None:
    capacity = lanes * tile.packs * problem.pack
    if capacity < problem.C:
        return f"a row has {problem.C} elements, {lanes} threads of {tile.packs} packs hold {capacity}"
    return None


# ---- warp -----------------------------------------------------------------------------------------------------------


def _keeps_in_registers(problem: Problem, tile: Tile) -> bool:
    """Whether the sums of columns are in registers: in_registers in layer_norm_backward_warp.cu."""
    return tile.packs * problem.pack <= MOST_KEPT


def _warp_registers(problem: Problem, tile: Tile) -> int:
    """An estimate, high enough that no tile that it lets pass spills; the compile gate proves it."""
    widened = problem.pack * problem.sum_itemsize // 4
    if is_backward(problem):
        kept = 2 * widened if _keeps_in_registers(problem, tile) else 0
        return 56 + tile.packs * (8 + widened + kept)
    return 48 + tile.packs * (6 + widened)


def _teams(problem: Problem, tile: Tile) -> int:
    return owners(problem, tile, tile.threads // tile.lanes)


def _warp_shared(problem: Problem, tile: Tile) -> int:
    """A row of sums for each team of a block, or every second, where parameter gradients are wanted."""
    teams = tile.threads // tile.lanes // (2 if _keeps_in_registers(problem, tile) else 1)
    return teams * round_up(problem.C, problem.pack) * pair_bytes(problem) if problem.wants_parameters else 0


def _refuses_warp(problem: Problem, tile: Tile, device: Device) -> str | None:
    if (sentence := refuses_threads(tile)) is not None:
        return sentence
    if tile.lanes not in (1, 2, 4, 8, 16, 32):
        return f"lanes is {tile.lanes}, expected 1, 2, 4, 8, 16 or 32"
    if is_backward(problem) and tile.threads & (tile.threads - 1):
        return f"threads is {tile.threads}, expected a power of two: teams hand on their sums by halves"
    if (sentence := _refuses_capacity(problem, tile.lanes, tile)) is not None:
        return sentence
    if (sentence := refuses_shared(_warp_shared(problem, tile), device)) is not None:
        return sentence
    return refuses_registers(_warp_registers(problem, tile), tile, device)


def _warp_launches(problem: Problem, tile: Tile) -> tuple[Launch, ...]:
    in_block = tile.threads // tile.lanes
    registers = _warp_registers(problem, tile)
    if not is_backward(problem):
        return _one_sweep(problem, tile, ceil_div(problem.N, in_block), 0, 0, registers=registers, phases=2)
    teams = _teams(problem, tile)
    blocks, phases = teams // in_block, 1 + ceil_div(problem.N, teams)
    shared = round_up(_warp_shared(problem, tile), 16)
    return _one_sweep(problem, tile, blocks, blocks, teams, registers=registers, phases=phases, shared_bytes=shared)


def _warp_workspace(problem: Problem, tile: Tile) -> int:
    blocks = _teams(problem, tile) * tile.lanes // tile.threads if is_backward(problem) else 1
    return parameter_workspace(problem, blocks)


# ---- block ----------------------------------------------------------------------------------------------------------


def _block_registers(problem: Problem, tile: Tile) -> int:
    """As `_warp_registers`; the sums of columns are in shared memory."""
    widened = problem.pack * problem.sum_itemsize // 4
    if is_backward(problem):
        return 56 + tile.packs * (6 + widened)
    return 48 + tile.packs * (widened + (3 if problem.itemsize == 2 else 2))


def _block_shared(problem: Problem, tile: Tile) -> int:
    pair = pair_bytes(problem)
    columns = round_up(problem.C, problem.pack) if problem.wants_parameters else 0
    return 2 * (tile.threads // WARP) * pair + columns * pair


def _refuses_block(problem: Problem, tile: Tile, device: Device) -> str | None:
    if (sentence := refuses_threads(tile)) is not None:
        return sentence
    if tile.threads == WARP:
        return "threads is 32, expected at least 64: a row of one warp is strategy warp's"
    if (sentence := _refuses_capacity(problem, tile.threads, tile)) is not None:
        return sentence
    if (sentence := refuses_shared(_block_shared(problem, tile), device)) is not None:
        return sentence
    return refuses_resident(_block_registers(problem, tile), tile, device)


def _block_launches(problem: Problem, tile: Tile) -> tuple[Launch, ...]:
    registers, shared = _block_registers(problem, tile), _block_shared(problem, tile)
    if not is_backward(problem):
        return _one_sweep(problem, tile, problem.N, 0, 0, registers=registers, phases=3, shared_bytes=shared)
    blocks = ceil_div(problem.N, tile.rows)
    phases = 1 + 2 * ceil_div(problem.N, blocks)
    return _one_sweep(problem, tile, blocks, blocks, blocks, registers=registers, phases=phases, shared_bytes=shared)


def _block_workspace(problem: Problem, tile: Tile) -> int:
    return parameter_workspace(problem, ceil_div(problem.N, tile.rows) if is_backward(problem) else 1)


# ---- the strategies -------------------------------------------------------------------------------------------------

#: Rows an owner takes in turn. It adds them one after another, so more of them would cost digits of dgamma and dbeta.
_ROWS = {"rows": (1, 2, 4, 8, 16, 32, 64)}
#: Among equals the first is taken: few packs, so that many lanes read side by side, and no more lanes than have work.
_WARP_SPACE = {"packs": (1, 2, 4, 8, 16), "lanes": (1, 2, 4, 8, 16, 32), "threads": (128, 256)}
_BLOCK_SPACE = {"threads": (64, 128, 256, 512), "packs": (1, 2, 3, 4, 6)}
_SPLIT_SPACE = {"threads": (128, 256), "packs": (1, 2, 4), **_ROWS}


def _strategies(op: str) -> dict[str, Strategy]:
    backward = op.endswith("backward")
    rows = _ROWS if backward else {}
    warp = Strategy(
        name="warp",
        op=op,
        space={**_WARP_SPACE, **rows},
        constants=("threads", "lanes", "packs"),
        legality=_refuses_warp,
        launches=_warp_launches,
        workspace=_warp_workspace,
        workspace_traffic=written_and_read(_warp_workspace),
    )
    block = Strategy(
        name="block",
        op=op,
        space={**_BLOCK_SPACE, **rows} if backward else {**_BLOCK_SPACE, "packs": (1, 2, 3, 4, 6, 8, 12)},
        constants=("threads", "packs"),
        legality=_refuses_block,
        launches=_block_launches,
        workspace=_block_workspace,
        workspace_traffic=written_and_read(_block_workspace),
    )
    split = Strategy(
        name="split",
        op=op,
        space=_SPLIT_SPACE if backward else {**_SPLIT_SPACE, "chunk": (1024, 4096, 16384, 65536)},
        constants=("threads", "packs"),
        legality=refuses_split,
        launches=split_launches,
        workspace=split_workspace,
        workspace_traffic=split_workspace_traffic,
    )
    return {strategy.name: strategy for strategy in (warp, block, split)}


FORWARD: dict[str, Strategy] = _strategies("layer_norm")
BACKWARD: dict[str, Strategy] = _strategies("layer_norm_backward")
