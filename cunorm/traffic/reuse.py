"""Reuse distances of a kernel's memory accesses, which show whether a second read can still hit in a cache."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cunorm.core import settings
from cunorm.executors.cpu.checked import SECTOR_BYTES as SECTOR_BYTES
from cunorm.jit import cpu_builds, cxx

#: The shares of the second reads for which `Reuse` stores a distance.
LEVELS: NDArray[Any] = np.linspace(0.0, 1.0, 201)


@dataclass(frozen=True)
class Reuse:
    """Second reads of tensors: loads of a 32-byte sector that was loaded or stored before.

    The distance of a second read is the bytes of all other sectors that are accessed in between. It is the stack
    distance of Mattson et al., "Evaluation techniques for storage hierarchies", IBM Systems Journal 9, 1970: a cache of
    that size with LRU replacement still contains the sector.

    Attributes
    ----------
    reads : int
        Sectors that loads of tensors request.
    again : int
        The number of these sectors that were accessed before.
    distances : tuple of float
        Quantiles of the distances at the shares `LEVELS`, bytes; empty if there are no second reads.
    """

    reads: int
    again: int
    distances: tuple[float, ...]

    @classmethod
    def of(cls, reads: int, sectors: NDArray[Any]) -> Reuse:
        """Make it from the distances of all second reads, in sectors."""
        if not len(sectors):
            return cls(reads, 0, ())
        found = np.quantile(sectors, LEVELS) * SECTOR_BYTES
        return cls(reads, len(sectors), tuple(found.tolist()))

    def extended(
        self, other: Reuse, line: Callable[[Any, Any], Any], apart: Callable[[Any, Any], Any] | None = None
    ) -> Reuse:
        """Extrapolate to a larger problem, from this problem and a second, larger one.

        ``line`` extrapolates the counts. ``apart``, or ``line`` if it is None, extrapolates the distance of each share.
        """
        again = round(line(self.again, other.again))
        few, many = (np.asarray(one.distances or (0.0,) * len(LEVELS)) for one in (self, other))
        distances = np.maximum.accumulate(np.maximum((apart or line)(few, many), 0.0))
        return Reuse(round(line(self.reads, other.reads)), again, tuple(distances.tolist()) if again else ())

    def within(self, nbytes: int) -> float:
        """The share of the second reads whose distance is at most ``nbytes``; 1 if there are none."""
        found = np.asarray(self.distances)
        below = int(np.searchsorted(found, nbytes, side="right"))
        if below == len(found):
            return 1.0
        if below == 0:
            return 0.0
        between = (nbytes - found[below - 1]) / (found[below] - found[below - 1])
        return float(LEVELS[below - 1] + between * (LEVELS[below] - LEVELS[below - 1]))

    def at(self, share: float) -> float:
        """The quantile of the distances at that share of the second reads, bytes; 0 if there are none."""
        return float(np.interp(share, LEVELS, self.distances)) if self.distances else 0.0


@dataclass(frozen=True)
class Replay:
    """The results of replaying the traces of a plan's launches.

    Attributes
    ----------
    fetched : list of numpy.ndarray
        For each launch, by 2 * array + is_store: sectors that blocks access, each counted once per block.
    asked : list of numpy.ndarray
        For each launch, by the same index: bytes that requests ask for, each counted once per request.
    distances : numpy.ndarray
        Distances of the second reads in the order of the reads, in sectors.
    """

    fetched: list[NDArray[Any]]
    asked: list[NDArray[Any]]
    distances: NDArray[Any]


@cache
def _library(folder: Path) -> Any:
    source = Path(__file__).with_name("reuse.cpp").read_text(encoding="utf-8")
    compiler = cxx.chosen()
    library, _ = cpu_builds.load(source, "reuse.cpp", compiler, cxx.flags(compiler))
    library.cunorm_reuse_new.restype = ctypes.c_void_p
    library.cunorm_reuse_free.argtypes = [ctypes.c_void_p]
    library.cunorm_reuse_launch.restype = ctypes.c_int64
    pointer, count = ctypes.c_void_p, ctypes.c_uint64
    library.cunorm_reuse_launch.argtypes = [pointer, pointer, *[count] * 3, *[pointer] * 4]
    return library


def by_ticket(trace: NDArray[Any], sector: int) -> NDArray[Any]:
    """Renumber the trace of blocks that draw tickets, as if the work of each ticket were a block with its number.

    A block draws its next ticket in the phase in which it begins the work of the previous one. Therefore the accesses
    from one of these phases to the next belong to the ticket that was drawn before. Within a phase, other warps and
    lanes may come before the one that draws.

    Parameters
    ----------
    trace : numpy.ndarray
        See `cunorm.executors.cpu.checked.Count.trace`.
    sector : int
        The sector to which a block stores when it draws a ticket.
    """
    order = np.argsort(trace["block"], kind="stable")
    found = trace[order]
    drawn = (trace["sector"] == sector) & (trace["region"] % 2 == 1)
    number = (np.cumsum(drawn) - 1)[order]  # of the ticket that an access draws
    draws = np.flatnonzero(drawn[order])
    begins = np.append(True, (np.diff(found["block"]) != 0) | (np.diff(found["phase"]) != 0))
    phase = np.flatnonzero(begins)[np.cumsum(begins) - 1]  # index of the first access of the phase
    held = np.searchsorted(phase[draws], np.arange(len(found)), side="right") - 2  # the draw before the latest
    first = np.searchsorted(found["block"], found["block"])  # index of the first access of the block
    held = np.maximum(held, np.searchsorted(draws, first))  # accesses before the second draw belong to the first ticket
    found["block"] = number[draws[held]]
    return found[np.argsort(found["block"], kind="stable")]


def replay(traces: Sequence[NDArray[Any]], resident: Sequence[int], wanted: Sequence[bool]) -> Replay:
    """Replay the traces of launches in order, as if a device ran ``resident`` of their blocks at a time.

    Parameters
    ----------
    traces : sequence of numpy.ndarray
        See `cunorm.executors.cpu.checked.Count.trace`.
    resident : sequence of int
        For each launch, the number of blocks that run at a time. They make one access each in turn, and the next block
        replaces a block that ends.
    wanted : sequence of bool
        For each array, whether its second reads are counted.

    Raises
    ------
    CompileError
        If there is no C++ compiler, or the cache folder cannot be used.
    MemoryError
        If there is not enough memory for the distances.
    """
    library = _library(settings.cache_dir())
    flags = np.repeat(np.asarray(wanted, np.uint8), 2)
    made = Replay([], [], np.empty(0, np.uint32))
    found = []
    state = library.cunorm_reuse_new()
    try:
        for trace, alive in zip(traces, resident, strict=True):
            trace = np.ascontiguousarray(trace)
            fetched, asked = np.zeros((2, len(flags)), np.uint64)
            distances = np.empty(len(trace), np.uint32)
            blocks = int(trace["block"].max()) + 1 if len(trace) else 0
            arrays = [array.ctypes.data for array in (fetched, asked, flags, distances)]
            count = -1
            if state is not None:
                size = len(trace)
                count = library.cunorm_reuse_launch(state, trace.ctypes.data, size, blocks, min(alive, blocks), *arrays)
            if count < 0:
                raise MemoryError(f"not enough memory for the reuse distances of {len(trace)} sectors")
            made.fetched.append(fetched)
            made.asked.append(asked)
            found.append(distances[:count].copy())
    finally:
        library.cunorm_reuse_free(state)
    return replace(made, distances=np.concatenate([made.distances, *found]))
