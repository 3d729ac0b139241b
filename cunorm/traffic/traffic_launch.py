"""What one launch moved and did."""

from __future__ import annotations

from dataclasses import dataclass, fields

from .reuse import SECTOR_BYTES

__all__ = ["COUNTED", "LaunchTraffic", "Moves"]


@dataclass(frozen=True)
class Moves:
    """What kernels asked of global memory.

    Attributes
    ----------
    loaded, stored : int
        Bytes that warps ask for, each counted once a request: what all lanes load from one place counts once.
    lane_loaded, lane_stored : int
        Bytes that lanes ask for through load and store.
    raw_loaded, raw_stored : int
        The same as the compiler's hooks saw it.
    load_requests, store_requests : int
        Of warps.
    load_sectors, store_sectors : int
        32-byte sectors that those requests touch.
    wide_bytes, wide_sectors : int
        Bytes and sectors of 16-byte accesses alone.
    load_fetched, store_fetched : int
        32-byte sectors that blocks touch, each counted once a block and direction.
    """

    loaded: int = 0
    stored: int = 0
    lane_loaded: int = 0
    lane_stored: int = 0
    raw_loaded: int = 0
    raw_stored: int = 0
    load_requests: int = 0
    store_requests: int = 0
    load_sectors: int = 0
    store_sectors: int = 0
    wide_bytes: int = 0
    wide_sectors: int = 0
    load_fetched: int = 0
    store_fetched: int = 0

    def __add__(self, other: Moves) -> Moves:
        return Moves(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(Moves)))

    @property
    def nbytes(self) -> int:
        """Bytes that warps ask for, both ways."""
        return self.loaded + self.stored

    @property
    def lane_nbytes(self) -> int:
        """Bytes that lanes ask for, both ways."""
        return self.lane_loaded + self.lane_stored

    @property
    def raw_nbytes(self) -> int:
        """Bytes that the compiler's hooks saw, both ways."""
        return self.raw_loaded + self.raw_stored

    @property
    def fetched_nbytes(self) -> int:
        """Bytes of the sectors that blocks touch, each once a block and direction."""
        return SECTOR_BYTES * (self.load_fetched + self.store_fetched)

    @property
    def efficiency(self) -> float:
        """Bytes asked for, over those of the sectors that requests touch; 1 if there are none."""
        sectors = self.load_sectors + self.store_sectors
        return self.nbytes / (SECTOR_BYTES * sectors) if sectors else 1.0

    @property
    def wide_efficiency(self) -> float:
        """Bytes of 16-byte accesses, over those of the sectors that they touch; 1 if there are none."""
        return self.wide_bytes / (SECTOR_BYTES * self.wide_sectors) if self.wide_sectors else 1.0


@dataclass(frozen=True)
class LaunchTraffic:
    """What one launch did.

    Attributes
    ----------
    entry : str
        The kernel.
    blocks, threads, resident : int
        Of the grid; of a block; blocks that run at a time on the whole device.
    roles : dict of str to Moves
        By tensor, parameter, workspace.
    barriers : int
        ``__syncthreads`` of all blocks.
    shuffles : int
        Shuffles, votes and ``__syncwarp`` of all warps.
    shared_requests, shared_wavefronts, shared_ideal : int
        Requests of warps to shared memory; turns of its banks that they take; the fewest that they could.
    """

    entry: str
    blocks: int
    threads: int
    resident: int
    roles: dict[str, Moves]
    barriers: int
    shuffles: int
    shared_requests: int
    shared_wavefronts: int
    shared_ideal: int

    @property
    def barriers_per_block(self) -> float:
        """Barriers of a block, on average."""
        return self.barriers / self.blocks

    @property
    def shuffles_per_block(self) -> float:
        """Shuffles of all warps of a block, on average."""
        return self.shuffles / self.blocks


#: The counters of a launch beside its moves.
COUNTED = ("barriers", "shuffles", "shared_requests", "shared_wavefronts", "shared_ideal")
