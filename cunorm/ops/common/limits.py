"""Limits of a block that several strategies share: registers, shared memory, clusters, grids."""

from __future__ import annotations

from cunorm.core.devices import Device
from cunorm.core.problem import Problem
from cunorm.core.strategy import MAX_GRID, Tile, ceil_div

#: 16-byte packs per 32-byte sector; equals Run::sector_packs in team.cuh.
SECTOR_PACKS = 2
#: Registers per thread in kernels whose launch bounds require 512 resident threads, blocks_of(512) in reduce.cuh. The
#: compile gate proves that none of these kernels spills.
RESIDENT_REGISTERS = 128
#: Registers per thread in kernels whose launch bounds require 384 resident threads.
ACTIVATED_REGISTERS = 168


def bound_registers(problem: Problem, layout: str) -> int:
    """Registers per thread of a kernel whose threads hold no packs.

    The launch bounds of the kernel set this limit: gradient_threads in backward_sweep.cuh and slab_threads in
    backward_slab.cuh.
    """
    wide = problem.is_backward and problem.activation is not None and layout == "NHWC" and problem.pack >= 8
    return ACTIVATED_REGISTERS if wide else RESIDENT_REGISTERS


def round_up(value: int, step: int) -> int:
    """Smallest multiple of ``step`` that is not less than ``value``."""
    return ceil_div(value, step) * step


def blocks_for(items: int) -> int:
    """Blocks for ``items`` work items. Any cap is correct, because kernels loop over items with the grid as stride."""
    return min(items, MAX_GRID)


def whole_clusters(blocks: int, cluster: int) -> int:
    """Blocks of a grid for ``blocks`` blocks of work, in whole clusters of ``cluster`` blocks; see `blocks_for`."""
    return max(1, blocks_for(blocks) // cluster) * cluster


def refuses_shared(needed: int, device: Device) -> str | None:
    """Return the error message if a block needs more shared memory than the device has, or None."""
    if needed > device.shared_memory_per_block:
        return f"needs {needed} bytes of shared memory per block, {device.name} has {device.shared_memory_per_block}"
    return None


def refuses_cluster_size(tile: Tile, device: Device) -> str | None:
    """Return the error message if the device does not support clusters of this size, or None."""
    if tile.cluster in (2, 4, 8, 16) and tile.cluster <= device.largest_cluster:
        return None
    most = device.largest_cluster
    expected = f"a power of two from 2 to {most}" if most > 1 else "no clusters"
    return f"cluster is {tile.cluster}, but {device.name} supports {expected}"


def refuses_resident(needed: int, tile: Tile, device: Device) -> str | None:
    """Return the error message if a thread needs more registers than `RESIDENT_REGISTERS` or the device allow."""
    if needed > RESIDENT_REGISTERS:
        return f"needs up to {needed} registers per thread, its launch bounds allow {RESIDENT_REGISTERS}"
    return refuses_registers(RESIDENT_REGISTERS, tile, device)


def refuses_registers(registers: int, tile: Tile, device: Device) -> str | None:
    """Return the error message if a thread needs more registers than the device has for it, or None."""
    limit = min(255, device.registers_per_multiprocessor // tile.threads)
    if registers > limit:
        return f"needs up to {registers} registers per thread, blocks of {tile.threads} threads allow {limit}"
    return None
