"""Strategy `grid` of GroupNorm: tiles by ticket, sums first, then outputs while the data is in the L2 cache."""

from __future__ import annotations

from cunorm.core.devices import WARP, Device
from cunorm.core.locks import lazy
from cunorm.core.strategy import Arguments, Launch, Tiling, by_name, ceil_div
from cunorm.ops.common.folds import LINE_WORDS, WORD, clear_launch, parameter_launches, parameter_workspace, words_at
from cunorm.ops.common.limits import (
    ACTIVATED_REGISTERS,
    blocks_for,
    bound_registers,
    refuses_registers,
    refuses_shared,
    round_up,
)
from cunorm.ops.common.slab_sweep import Sweep, groups_asked, refuses_sweep

#: Chunks for pieces that are kept in shared memory. With ``keep=l2`` they are not tried.
PIECES = (128, 144, 72, 32, 16)
#: Values of ``keep``: where the inputs stay between their sums and their outputs.
L2, SHARED = "l2", "shared"
#: Of tiles with equal predictions the cost model selects the first. Two blocks of 256 threads per multiprocessor wait
#: less for each other than one block of 512. They follow the order of tickets more closely than four blocks of 128, so
#: more second reads hit the L2 cache. The more prefetched tiles, the fewer blocks wait: none if there are half as many
#: as resident blocks. More than 96 would not leave the second reads of large groups in the L2 cache of an H200.
GRID_SPACE = {
    "threads": (256, 128, 512),
    "chunk": (64, 120, 256, 1024, 2048, 4096, *PIECES),
    "groups": (1, 2, 4, 8, 16, 32),
    "prefetch_tiles": (96, 32, 1),
    "keep": (L2, SHARED),
}
#: Tickets are counted in 32 bits. Blocks draw a few more tickets than there are work items.
MOST_TICKETS = 2**32 - 2**22
#: Resident threads per multiprocessor, and multiprocessors of the largest device or more. They bound the grid. A block
#: that finds no ticket ends at once.
RESIDENT_THREADS, MULTIPROCESSORS = 512, 192
#: Resident threads, and the registers per thread that they leave, of a specialised backward kernel with one channel per
#: thread, 32-bit sums and no activation: grid_threads in group_norm_backward_grid.cu.
LEAN_THREADS, LEAN_REGISTERS = 768, 80
#: Latencies of memory that a block waits for the sums of a slab before each output, if no tiles are prefetched.
#: Estimated with the simulator: 2.5 to 4 us for tiles of 1024 and 2048 elements per warp. A launch does not depend on
#: the device, so the blocks that wait are those of a GPU with USUAL_MULTIPROCESSORS.
WAITED_PHASES, USUAL_MULTIPROCESSORS = 5, 132
#: Least bytes of a channels-last row of a slab: two sectors, which DRAM fetches together.
NARROWEST = 64


class GroupSlabs(Tiling):
    """Tiling with slabs that are cut into chunks. A slab is some neighbouring groups of one sample."""

    @lazy
    def sweep(self) -> Sweep:
        """Sweep of a tensor."""
        return Sweep.of(self.problem, self.tile, self.problem.layout)

    @lazy
    def slab_channels(self) -> int:
        """Channels per slab."""
        return self.tile.groups * self.problem.group_channels

    @lazy
    def slabs(self) -> int:
        """Number of slabs."""
        return self.problem.N * (self.problem.group // self.tile.groups)

    def refuses_groups(self) -> str | None:
        """Return the error message if the tensors cannot be cut into slabs of these groups, or None."""
        problem, tile = self.problem, self.tile
        if problem.is_backward and "dx" not in problem.outputs:
            return "expected output dx: without dx, split reads all data once"
        if problem.HxW == 1:
            return "HxW is 1, expected more: a channel would have one element"
        if problem.group % tile.groups:
            return f"groups is {tile.groups}, expected a divisor of the number of groups, {problem.group}"
        return self._refuses_channels()

    def _refuses_channels(self) -> str | None:
        problem, channels = self.problem, self.slab_channels
        if problem.layout == "NCHW":
            return "groups is above 1, expected 1 for channels-first data" if self.tile.groups > 1 else None
        if channels < problem.C:
            if channels % problem.pack:
                return f"rows of {channels} channels do not begin on 16-byte boundaries"
            if channels * problem.itemsize < NARROWEST:
                return f"rows of a slab have {channels * problem.itemsize} bytes, expected at least {NARROWEST}"
        if ceil_div(channels, problem.pack) > self.tile.threads:
            return f"rows of {channels} channels have more packs than a block has threads, {self.tile.threads}"
        return None


class GroupGrid(GroupSlabs):
    """Tiling with tiles that cover all chunks of all slabs."""

    @lazy
    def tiles(self) -> int:
        """Tiles per slab."""
        chunks = self.sweep.chunks
        return (
            chunks if self.sweep.layout == "NHWC" else ceil_div(self.slab_channels * chunks, self.tile.threads // WARP)
        )

    @lazy
    def lean(self) -> bool:
        """Whether the launch bound of the kernel is `LEAN_THREADS`."""
        problem = self.problem
        alone = problem.is_backward and problem.layout == "NCHW" and problem.activation is None
        return alone and problem.dtype != "float64"

    @lazy
    def registers(self) -> int:
        """Registers per thread that the launch bounds of the kernel allow: resident_threads in group_norm_grid.cu."""
        problem = self.problem
        if self.lean:
            return LEAN_REGISTERS
        wide = problem.wide_y and problem.activation is not None and problem.layout == "NHWC"
        return ACTIVATED_REGISTERS if wide else bound_registers(problem, problem.layout)

    def _blocks(self, multiprocessors: int) -> int:
        """Blocks that are resident on ``multiprocessors`` multiprocessors."""
        return max(1, multiprocessors * (LEAN_THREADS if self.lean else RESIDENT_THREADS) // self.tile.threads)

    @lazy
    def grid(self) -> int:
        """Blocks of the launch."""
        return blocks_for(min(self._blocks(MULTIPROCESSORS), self.tiles * self.slabs))

    def reach(self, device: Device) -> int:
        """Bytes that are accessed between the two reads of a sector, for 19 of 20 sectors.

        The formula is fitted to the counts of the CPU executor, and a test checks it against them. The outputs of a
        slab are written in reverse order. So its last sector is read again at once, and its first sector after all
        reads and writes of the slab. If the slab is small, blocks that wait for it hold tiles of later slabs. For each
        tile by which the sums run ahead, the outputs of an earlier tile are written too. The tiles by which they run
        ahead are the first of their slab and therefore its last outputs. If they are more than 1 in 20, the outputs of
        the slab before them count as well.
        """
        read = self.problem.read * self.problem.nbytes // self.slabs
        both = read + self.problem.written // self.slabs
        held = self._blocks(device.multiprocessors) * ceil_div(both, self.tiles)
        ahead = self.tile.prefetch_tiles * ceil_div(read, self.tiles)
        found = 0.95 * both + 0.25 * held + max(0.0, 0.75 * held - 0.5 * read) + 2.5 * ahead
        if 20 * self.tile.prefetch_tiles > self.tiles:
            found = max(found, 2.0 * both + 0.25 * held + ahead)
        return min(int(found), both * self.slabs)

    # ---- legality ---------------------------------------------------------------------------------------------------

    @lazy
    def worth(self) -> bool:
        """Whether the chunk is not one of those for pieces that are kept in shared memory."""
        return self.tile.chunk not in PIECES

    def refuses(self, device: Device) -> str | None:
        """See `Tiling.refuses`."""
        problem, tile = self.problem, self.tile
        sentence = refuses_sweep(self.sweep, problem, tile, device) or refuses_registers(self.registers, tile, device)
        if sentence is not None:
            return sentence
        if (sentence := self.refuses_groups() or refuses_shared(self.shared, device)) is not None:
            return sentence
        if 2 * self.tiles * self.slabs + tile.prefetch_tiles > MOST_TICKETS:
            ahead = f"prefetch_tiles = {tile.prefetch_tiles}"
            return f"{self.tiles} tiles in each of {self.slabs} slabs, {ahead}: the tickets exceed 32 bits"
        if (between := self.reach(device)) > device.l2_bytes // 2:
            half = f"half the L2 cache of {device.name} is {device.l2_bytes // 2}"
            return f"{between} bytes are accessed between two reads of a sector, {half}"
        return None

    @lazy
    def shared(self) -> int:
        """Bytes of shared memory per block, each array from a 16-byte boundary."""
        sizes = [4 * WORD, self.sweep.shared(self.problem.part)]
        sizes += [self.tile.threads * self.problem.part, self.slab_channels * self.problem.part]
        return sum(round_up(size, 16) for size in sizes)

    # ---- workspace --------------------------------------------------------------------------------------------------

    @lazy
    def parts(self) -> int:
        """Pairs of partial sums: per channel, sample and chunk one in a backward, and two (moments) in a forward."""
        return self.problem.N * self.sweep.chunks * self.problem.C * (self.problem.part // self.problem.pair)

    @lazy
    def rows_bytes(self) -> int:
        """Bytes of the partial rows of dgamma and dbeta."""
        return parameter_workspace(self.problem, self.problem.N)

    @lazy
    def words(self) -> int:
        """Counters: the line of the ticket counter, and one counter per slab."""
        return LINE_WORDS + self.slabs

    @lazy
    def words_at(self) -> int:
        """Index of the pair at which the counters begin."""
        return words_at(self.parts + self.rows_bytes // self.problem.pair, self.problem.pair)

    @lazy
    def workspace(self) -> int:
        """Bytes of the partial sums, the partial rows of dgamma and dbeta, and the counters."""
        return self.words_at * self.problem.pair + round_up(self.words * WORD, 16)

    @lazy
    def parts_moved(self) -> int:
        """Bytes of partial sums and folded sums that are written and read."""
        problem = self.problem
        if not problem.is_backward:
            return 2 * self.parts * self.problem.pair
        columns = ceil_div(self.slab_channels, problem.pack)
        readers = self.tile.threads // columns if problem.layout == "NHWC" else 1
        asked = readers * problem.N * self.sweep.chunks * groups_asked(problem.layout, problem)
        return (2 * self.parts + problem.N * problem.group + asked) * self.problem.pair

    @lazy
    def workspace_traffic(self) -> int:
        """See `Tiling.workspace_traffic`.

        The P = N * chunks * C partial sums are written once and read once by the fold: 2 P. The R bytes of partial rows
        of dgamma and dbeta are written once and read once: 2 R. In a backward, the fold writes N * groups pairs. The
        outputs read the pair of its group for every channel, chunk and sample; channels-last, for every group of a pack
        instead of every channel, and once for every part of a block's threads that sweeps the same columns.

        Each access to a counter is 4 bytes. Every counter is set to zero. A ticket is drawn for the sums and for the
        outputs of each tile, for each ticket that is a no-op, and by every block to find that no work is left. Each
        tile signals its sums, and each slab its fold. Each tile polls the fold: counted once, although a tile that
        waits polls again.
        """
        tiles = self.tiles * self.slabs
        tickets = min(self.tiles + self.tile.prefetch_tiles, tiles) + 2 * tiles - self.tiles + self.grid
        words = self.words + tickets + 2 * tiles + self.slabs
        return self.parts_moved + 2 * self.rows_bytes + words * WORD

    # ---- launches ---------------------------------------------------------------------------------------------------

    @lazy
    def _arguments(self) -> Arguments:
        problem = self.problem
        shape = {
            **self.sweep.arguments,
            "groups": problem.group,
            "slab_channels": self.slab_channels,
            "tiles": self.tiles,
            "slabs": self.slabs,
        }
        shape |= {"prefetch_tiles": self.tile.prefetch_tiles, "words": self.words_at}
        if not problem.is_backward:
            return {**by_name("x", "gamma", "beta", "y", "mean", "rstd", "workspace", "eps"), **shape}
        direct = problem.wants_parameters and not self.rows_bytes
        wanted = {"beta": problem.activation is not None, "dgamma": direct, "dbeta": direct}
        given = by_name("dy", "x", "mean", "rstd", "gamma", "dx", "workspace", **wanted)
        return {**given, **shape, "rows": self.parts if self.rows_bytes else 0}

    @lazy
    def phases(self) -> int:
        """Exposed memory latencies per block.

        Per tile, they are its data twice, and once its parameters, which are in the L2 cache. Before the outputs of a
        tile, a block waits for the sums of the slab, unless the resident blocks draw fewer tickets at a time than there
        are between these sums and outputs, which are two per prefetched tile (work_queue.cuh).
        """
        tiles, blocks = self.tiles * self.slabs, min(self.grid, self._blocks(USUAL_MULTIPROCESSORS))
        waiting = max(0, blocks - 2 * self.tile.prefetch_tiles)
        return ceil_div(3 * tiles, self.grid) + ceil_div(WAITED_PHASES * tiles * waiting, self.grid * blocks)

    @lazy
    def launches(self) -> tuple[Launch, ...]:
        """Launches that clear the counters, process the tiles, and fold the rows of dgamma and dbeta."""
        problem, entry = self.problem, f"{self.problem.op}_grid"
        read, tiles = self.problem.read * problem.nbytes, self.tiles * self.slabs / max(1, self.grid)
        main = Launch(
            entry,
            entry,
            self.grid,
            self.tile.threads,
            self._arguments,
            shared_bytes=self.shared,
            traffic=read + problem.written,
            cached=read + self.parts_moved,
            packs=self.sweep.processed,
            rounds=self.sweep.rounds * tiles,
            items=tiles,
            registers=self.registers,
            phases=self.phases,
            streams=self.problem.read,
            tickets=self.words_at * self.problem.pair,
        )
        clear = clear_launch(self.words_at, self.words)
        return (clear, main, *(parameter_launches(problem, problem.N, self.parts) if self.rows_bytes else ()))
