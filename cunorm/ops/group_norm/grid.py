"""GroupNorm's strategy `grid`: tiles by ticket, sums first, outputs while the data is in the L2 cache."""

from __future__ import annotations

from cunorm.core.devices import Device
from cunorm.core.locks import lazy
from cunorm.core.strategy import Arguments, Launch, Tiling, by_name, ceil_div
from cunorm.ops.common.building_blocks import (
    LINE_WORDS,
    WARP,
    WORD,
    blocks_for,
    bound_registers,
    clear_launch,
    parameter_launches,
    parameter_workspace,
    refuses_shared,
    round_up,
    words_at,
)
from cunorm.ops.common.geometry import Sweep, groups_asked, refuses_sweep

#: Of equals the model takes the first: two blocks of 256 threads on a multiprocessor wait less for each other than one,
#: and keep to the order of tickets more closely than four, so that more comes back from the cache.
GRID_SPACE = {
    "threads": (256, 128, 512),
    "chunk": (64, 120, 256, 1024, 2048, 4096),
    "groups": (1, 2, 4, 8, 16, 32),
    "prefetch_tiles": (1, 256),
}
#: Tickets are counted in 32 bits; blocks draw a few more than there are.
MOST_TICKETS = 2**32 - 2**22
#: Threads of a launch: as many as the largest device has resident, or more; blocks that find no ticket end at once.
RESIDENT_THREADS, MULTIPROCESSORS = 512, 192
#: Least bytes of a row of a team, channels-last: two sectors, which DRAM fetches together.
NARROWEST = 64


class GroupGrid(Tiling):
    """Tiles of teams: all chunks of some neighbouring groups of a sample."""

    @lazy
    def sweep(self) -> Sweep:
        """The sweep of a tensor."""
        return Sweep.of(self.problem, self.tile, self.problem.layout)

    @lazy
    def team(self) -> int:
        """Channels of a team."""
        return self.tile.groups * self.problem.group_channels

    @lazy
    def teams(self) -> int:
        """Teams in all."""
        return self.problem.N * (self.problem.group // self.tile.groups)

    @lazy
    def tiles(self) -> int:
        """Tiles of a team."""
        chunks = self.sweep.chunks
        return chunks if self.sweep.layout == "NHWC" else ceil_div(self.team * chunks, self.tile.threads // WARP)

    def _blocks(self, multiprocessors: int) -> int:
        """Blocks that are resident on so many multiprocessors."""
        return max(1, multiprocessors * RESIDENT_THREADS // self.tile.threads)

    @lazy
    def grid(self) -> int:
        """Blocks of the launch."""
        return blocks_for(min(self._blocks(MULTIPROCESSORS), self.tiles * self.teams))

    def reach(self, device: Device) -> int:
        """Bytes that are touched between the two reads of a sector, for 19 of 20 sectors: fitted to what the CPU
        executor counts, and checked against that by a test.

        Outputs go backwards, so a team's last sector waits for nothing and its first for all that the team reads and
        writes. Blocks that wait for a team hold tiles of those behind it, where it is small; and each tile that sums
        run ahead comes with the outputs of one before it.
        """
        team = self.problem.nbytes // self.teams
        read = self.problem.read * team
        both = read + team
        held = self._blocks(device.multiprocessors) * ceil_div(both, self.tiles)
        ahead = self.tile.prefetch_tiles * ceil_div(read, self.tiles)
        found = int(0.95 * both + 0.25 * held + max(0.0, 0.75 * held - 0.5 * read) + 2.5 * ahead)
        return min(found, both * self.teams)

    # ---- legality ---------------------------------------------------------------------------------------------------

    def _refuses_team(self) -> str | None:
        """Why a team cannot have so many groups, or None."""
        problem, team = self.problem, self.team
        if problem.layout == "NCHW":
            return "channels-first, a group is a team of its own: groups is 1" if self.tile.groups > 1 else None
        if team < problem.C:
            if team % problem.pack:
                return f"rows of {team} channels do not lie on 16-byte boundaries"
            if team * problem.itemsize < NARROWEST:
                return f"rows of {team * problem.itemsize} bytes are narrower than {NARROWEST}"
        if ceil_div(team, problem.pack) > self.tile.threads:
            return f"rows of {team} channels are more packs than {self.tile.threads} threads"
        return None

    def refuses(self, device: Device) -> str | None:
        """As `Tiling.refuses`."""
        problem, tile = self.problem, self.tile
        if (sentence := refuses_sweep(self.sweep, problem, tile, device)) is not None:
            return sentence
        if problem.is_backward and "dx" not in problem.outputs:
            return "without dx nothing is read twice, and split reads it once"
        if problem.HxW == 1:
            return "with HxW = 1 a warp would own one element"
        if problem.group % tile.groups:
            return f"teams of {tile.groups} groups do not divide {problem.group} groups"
        if (sentence := self._refuses_team() or refuses_shared(self.shared, device)) is not None:
            return sentence
        if 2 * self.tiles * self.teams + tile.prefetch_tiles > MOST_TICKETS:
            ahead = f"{tile.prefetch_tiles} ahead"
            return f"{self.tiles} tiles of {self.teams} teams, {ahead}, are more than tickets can count"
        if (between := self.reach(device)) > device.l2_bytes // 2:
            half = f"half the L2 cache of {device.name} is {device.l2_bytes // 2}"
            return f"{between} bytes lie between two reads, {half}"
        return None

    @lazy
    def shared(self) -> int:
        """Shared memory of a block, each array from a 16-byte boundary."""
        sizes = [4 * WORD, self.sweep.shared(self.problem.part)]
        sizes += [self.tile.threads * self.problem.part, self.team * self.problem.part]
        return sum(round_up(size, 16) for size in sizes)

    # ---- workspace --------------------------------------------------------------------------------------------------

    @lazy
    def parts(self) -> int:
        """Pairs that the sums leave: one for each channel, sample and chunk; two, moments, in a forward."""
        return self.problem.N * self.sweep.chunks * self.problem.C * (self.problem.part // self.problem.pair)

    @lazy
    def rows_bytes(self) -> int:
        """Bytes of the rows of dgamma and dbeta."""
        return parameter_workspace(self.problem, self.problem.N)

    @lazy
    def words(self) -> int:
        """The tickets' line, and a counter a team."""
        return LINE_WORDS + self.teams

    @lazy
    def words_at(self) -> int:
        """The pair from which the counters stand."""
        return words_at(self.parts + self.rows_bytes // self.problem.pair, self.problem.pair)

    @lazy
    def workspace(self) -> int:
        """The parts, the rows of dgamma and dbeta, the counters."""
        return self.words_at * self.problem.pair + round_up(self.words * WORD, 16)

    @lazy
    def parts_moved(self) -> int:
        """Bytes of the parts and of what is folded of them that move."""
        problem = self.problem
        if not problem.is_backward:
            return 2 * self.parts * self.problem.pair
        columns = ceil_div(self.team, problem.pack)
        readers = self.tile.threads // columns if problem.layout == "NHWC" else 1
        asked = readers * problem.N * self.sweep.chunks * groups_asked(problem.layout, problem)
        return (2 * self.parts + problem.N * problem.group + asked) * self.problem.pair

    @lazy
    def workspace_traffic(self) -> int:
        """With P = N * chunks * C parts and R bytes of rows of dgamma and dbeta. 2 P: written by the sums, read by the
        fold. Backward N * groups pairs more, written by the fold, and what the outputs read: the pair of its group for
        every channel (channels-last for every group of a pack), chunk and sample, channels-last for every part of a
        block's threads that sweeps the same columns; and 2 R. Then the counters, 4 bytes a time: each zeroed; a ticket
        drawn for each turn of a tile, for those that are nobody's, and by every block to find that there are no more; a
        tile's sums told, a team's fold told, and asked for by each tile, here once: a tile that waits asks again.
        """
        tiles = self.tiles * self.teams
        tickets = min(self.tiles + self.tile.prefetch_tiles, tiles) + 2 * tiles - self.tiles + self.grid
        words = self.words + tickets + 2 * tiles + self.teams
        return self.parts_moved + 2 * self.rows_bytes + words * WORD

    # ---- launches ---------------------------------------------------------------------------------------------------

    @lazy
    def _arguments(self) -> Arguments:
        problem = self.problem
        shape = {
            **self.sweep.arguments,
            "groups": problem.group,
            "team": self.team,
            "tiles": self.tiles,
            "teams": self.teams,
        }
        shape |= {"prefetch_tiles": self.tile.prefetch_tiles, "words": self.words_at}
        if not problem.is_backward:
            return {**by_name("x", "gamma", "beta", "y", "mean", "rstd", "workspace", "eps"), **shape}
        direct = problem.wants_parameters and not self.rows_bytes
        wanted = {"beta": problem.activation is not None, "dgamma": direct, "dbeta": direct}
        given = by_name("dy", "x", "mean", "rstd", "gamma", "dx", "workspace", **wanted)
        return {**given, **shape, "rows": self.parts if self.rows_bytes else 0}

    @lazy
    def launches(self) -> tuple[Launch, ...]:
        """The counters, the tiles, the rows of dgamma and dbeta."""
        problem, entry = self.problem, f"{self.problem.op}_grid"
        read = self.problem.read * problem.nbytes
        main = Launch(
            entry,
            entry,
            self.grid,
            self.tile.threads,
            self._arguments,
            shared_bytes=self.shared,
            traffic=read + problem.nbytes,
            cached=read + self.parts_moved,
            registers=bound_registers(problem, problem.layout),
            # Twice of each tile its data, and its parameters, which are in the L2 cache.
            phases=ceil_div(3 * self.tiles * self.teams, self.grid),
            streams=self.problem.read,
            tickets=self.words_at * self.problem.pair,
        )
        clear = clear_launch(self.words_at, self.words)
        return (clear, main, *(parameter_launches(problem, problem.N, self.parts) if self.rows_bytes else ()))
