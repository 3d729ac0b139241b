"""Strategies `warp`, `block` and `cluster` of LayerNorm and RMSNorm, which hold rows in registers."""

from __future__ import annotations

from cunorm.core.devices import WARP, Device
from cunorm.core.locks import lazy
from cunorm.core.problem import ITEMSIZE, PACK_BYTES
from cunorm.core.strategy import Arguments, Launch, Strategy, Tile, by_name, ceil_div, refuses_threads

from .folds import parameter_launches, parameter_workspace
from .limits import (
    refuses_cluster_size,
    refuses_registers,
    refuses_resident,
    refuses_shared,
    round_up,
    whole_clusters,
)
from .register_rows import SIDE_BY_SIDE, BlockRows, ClusterRows, WarpRows, parameter_bytes, present
from .strips import arguments_of_forward, arguments_of_gradient, owners, results_of_parameters

#: Rows per team. A team adds its rows one after another, so more rows would lose accuracy of dgamma and dbeta.
_ROWS = {"rows_per_team": (1, 2, 4, 8, 16, 32, 64)}
#: Of equal predictions the first is selected: few packs, so that many lanes read side by side, and no idle lanes.
WARP_SPACE = {
    "packs_per_thread": (1, 2, 3, 4, 6, 8, 12, 16),
    "lanes": (1, 2, 4, 8, 16, 32),
    "threads": (128, 256),
    **_ROWS,
}
#: `stages` is the number of rows in shared memory, or on their way there; 1: rows are in registers.
_STAGES = {"stages": (1, 2)}
WARP_BACKWARD_SPACE = {**WARP_SPACE, "packs_per_thread": (1, 2, 3, 4, 6, 8), **_STAGES}
#: Teams per block. They share the parameters of their columns and, in a backward, fold their sums.
_TEAMS = {"teams_per_block": (1, 2, 4)}
BLOCK_SPACE = {"threads": (64, 128, 256, 512), "packs_per_thread": (1, 2, 3, 4, 6, 8), **_ROWS, **_TEAMS}
#: `cluster` is the number of blocks that fold their sums together.
BLOCK_BACKWARD_SPACE = {**BLOCK_SPACE, "packs_per_thread": (1, 2, 3, 4, 6), "cluster": (1, 2, 4, 8), **_STAGES}
CLUSTER_SPACE = {
    "threads": (256, 384, 512),
    "packs_per_thread": (1, 2, 3, 4, 6, 8),
    "cluster": (2, 4, 8, 16),
    **_ROWS,
    **_TEAMS,
}


class RowsWarp(WarpRows):
    """Tiling of `warp`, and base of the tilings with teams of several warps."""

    #: Values of packs_per_thread in the search space.
    packs_tried = WARP_SPACE["packs_per_thread"]

    @lazy
    def teams(self) -> int:
        """Teams of the grid."""
        return owners(self.problem, self.tile.rows_per_team, self.teams_of_block * self.merged)

    @lazy
    def shares_parameters(self) -> bool:
        """See `WarpRows.shares_parameters`."""
        return self.teams_of_block > 1

    @lazy
    def base_registers(self) -> int:
        """See `WarpRows.base_registers`. A kernel without a loop over rows needs fewer.

        RMSNorm with a residual needs 8 fewer again: h has replaced x and the residual when gamma is used. LayerNorm
        with a residual needs as many as with a loop; otherwise it would spill.
        """
        added, has_mean = bool(self.problem.extras), self.problem.has_mean
        if self.single_row and not (added and has_mean):
            return 24 + 8 * (self.slices > 1) - 8 * added
        return super().base_registers

    @lazy
    def partial_rows(self) -> int:
        """Partial rows of column sums: one per block, or one per cluster whose blocks fold their sums together."""
        return self.teams // (self.teams_of_block * self.merged)

    @lazy
    def shared(self) -> int:
        """Bytes of shared memory per block: the sums, the parameters that several teams share, and staged rows."""
        rows = self.sums_shared() + self.staged_bytes
        if not self.shares_parameters:
            return rows
        return rows + sum(round_up(self.columns * ITEMSIZE[dtype], PACK_BYTES) for dtype in present(self.given))

    # ---- legality ---------------------------------------------------------------------------------------------------

    def refuses(self, device: Device) -> str | None:
        """See `Tiling.refuses`."""
        sentence = self.refuses_team() or self.refuses_halves() or self.refuses_capacity() or self.refuses_stages()
        sentence = sentence or refuses_shared(self.shared, device)
        return sentence or refuses_registers(self.registers, self.tile, device)

    @lazy
    def worth(self) -> bool:
        """See `Tiling.worth`.

        The tile has the fewest packs of the search space that hold a row, counted from the 16-byte boundary before it.
        No more rows are staged than a team has. At least half of the threads have elements of a slice. The lanes of a
        team read whole DRAM transfers side by side, or whole rows. Sums in shared memory are slow: the lanes are then
        those of a whole warp, which need the fewest packs.
        """
        problem, threads = self.problem, self.lanes * self.slices
        if self.stages > self.rows_of_team:
            return False
        ahead = problem.pack - 1 if problem.C % problem.pack else 0
        needed = ceil_div(problem.C + ahead, threads * problem.pack)
        enough = min((count for count in self.packs_tried if count >= needed), default=max(self.packs_tried))
        busy = self.slices == 1 or 2 * self.columns >= self.lanes * problem.pack
        slow = self.of_warp and problem.wants_parameters and not self.sums_in_registers and self.lanes < WARP
        together = self.lanes * PACK_BYTES >= min(SIDE_BY_SIDE, problem.C * problem.itemsize)
        return self.tile.packs_per_thread == enough and busy and together and not slow

    # ---- launches ---------------------------------------------------------------------------------------------------

    @lazy
    def workspace(self) -> int:
        """Bytes of the partial rows of column sums."""
        return parameter_workspace(self.problem, self.partial_rows)

    @lazy
    def _variant(self) -> str:
        """The variant of the kernel, see `Launch.variant`."""
        if self.single_row:
            return "one row, shared parameters" if self.shares_parameters else "one row"
        return "staged" if self.staged else ""

    @lazy
    def _parameters_read(self) -> int:
        """Bytes of gamma and beta that are loaded.

        They are loaded once per block if its teams share them or if they stay in registers. Otherwise they are loaded
        for every row, and in a backward once for the sums and once for dx.
        """
        problem, blocks = self.problem, self.teams // self.teams_of_block
        of_rows = problem.N * (1 + ("dx" in problem.outputs))
        asked = ((dtype, self.shares_parameters or self.resident(dtype)) for dtype in present(self.given))
        return sum(problem.C * ITEMSIZE[dtype] * (blocks if once else of_rows) for dtype, once in asked)

    @lazy
    def _arguments(self) -> Arguments:
        problem = self.problem
        shape = {"rows": problem.N, "length": problem.C, "teams": self.teams}
        if not problem.is_backward:
            return {**arguments_of_forward(problem), **shape}
        direct = problem.wants_parameters and self.partial_rows == 1
        kept = by_name("dx", "dh", workspace=problem.wants_parameters and not direct)
        return {**arguments_of_gradient(problem), **kept, **results_of_parameters(problem, direct), **shape}

    @lazy
    def launches(self) -> tuple[Launch, ...]:
        """Launch of the kernel, which reads every byte once, and the launches that fold the parameter sums."""
        problem, entry = self.problem, f"{self.problem.op}_{self.tile.strategy}"
        blocks, cluster = self.teams // self.teams_of_block * self.slices, self.slices * self.merged
        once = parameter_bytes(problem)
        traffic = problem.read * problem.nbytes + problem.written + once
        traffic += self.partial_rows * problem.C * problem.row_sums * problem.wants_parameters
        grid, rows = whole_clusters(blocks, cluster), ceil_div(problem.N, self.teams)
        main = Launch(
            entry,
            entry,
            grid,
            self.tile.threads,
            self._arguments,
            traffic=traffic,
            repeated=max(0, self._parameters_read - once),
            packs=grid * self.tile.threads * rows * self.tile.packs_per_thread,
            rounds=rows,
            items=rows,
            registers=self.registers,
            shared_bytes=self.shared,
            phases=self.phases(rows),
            streams=self.streams,
            variant=self._variant,
            cluster=cluster,
            constants=self.constants,
        )
        second = problem.wants_parameters and self.partial_rows > 1
        return (main, *parameter_launches(problem, self.partial_rows)) if second else (main,)


class RowsWarpBackward(RowsWarp):
    """Tiling of `warp` in a backward, with fewer packs in the search space."""

    packs_tried = WARP_BACKWARD_SPACE["packs_per_thread"]


class _Blocks(BlockRows, RowsWarp):
    """Base of the tilings with teams of several warps."""

    def refuses(self, device: Device) -> str | None:
        """See `Tiling.refuses`."""
        problem, tile = self.problem, self.tile
        if (sentence := refuses_threads(tile)) is not None:
            return sentence
        if tile.teams_per_block not in (1, 2, 4, 8):
            return f"teams_per_block is {tile.teams_per_block}, expected 1, 2, 4 or 8"
        if tile.teams_per_block > 1 and problem.dtype == "float64":
            return f"teams_per_block is {tile.teams_per_block}, expected 1: float64 leaves no registers for more"
        if tile.teams_per_block > 1 and tile.packs_per_thread > self.most_packs_ahead and not self.staged:
            return (
                f"packs_per_thread is {tile.packs_per_thread}, expected at most {self.most_packs_ahead} if "
                f"teams_per_block is {tile.teams_per_block}: teams wait for each other, so each must load its next "
                f"row ahead"
            )
        if self.lanes % WARP or self.lanes == WARP:
            least = f"a multiple of {WARP * tile.teams_per_block} from {2 * WARP * tile.teams_per_block} up"
            return f"threads is {tile.threads}, expected {least}: use strategy warp for a warp per row"
        sentence = self.refuses_capacity() or self.refuses_stages() or refuses_shared(self.shared, device)
        return sentence or refuses_resident(self.registers, tile, device)

    @lazy
    def worth(self) -> bool:
        """See `RowsWarp.worth`. Several teams per block also share parameters or sums, and have a row each."""
        several = self.tile.teams_per_block
        shared = self.problem.wants_parameters or any(present(self.given))
        if several > 1 and (not shared or several > self.problem.N):
            return False
        return super().worth


class RowsBlock(_Blocks):
    """Tiling of `block`. In a backward, the blocks of a cluster fold their column sums together."""

    packs_tried = BLOCK_SPACE["packs_per_thread"]

    @lazy
    def merged(self) -> int:
        """Blocks that fold their column sums together."""
        return int(self.tile.as_dict().get("cluster", 1))

    def refuses(self, device: Device) -> str | None:
        """See `Tiling.refuses`."""
        if self.merged > 1 and (sentence := refuses_cluster_size(self.tile, device)) is not None:
            return sentence
        if self.merged > 1 and not self.problem.wants_parameters:
            return f"cluster is {self.tile.cluster}, expected 1, because neither dgamma nor dbeta is wanted"
        return super().refuses(device)


class RowsBlockBackward(RowsBlock):
    """Tiling of `block` in a backward, with fewer packs in the search space: the packs of two tensors must fit."""

    packs_tried = BLOCK_BACKWARD_SPACE["packs_per_thread"]


class RowsCluster(ClusterRows, _Blocks):
    """Tiling of `cluster`: teams across the blocks of a cluster."""

    packs_tried = CLUSTER_SPACE["packs_per_thread"]

    def refuses(self, device: Device) -> str | None:
        """See `Tiling.refuses`."""
        problem, tile = self.problem, self.tile
        if (sentence := refuses_cluster_size(tile, device)) is not None:
            return sentence
        if (tile.cluster - 1) * self.columns >= problem.C:
            return f"a row of {problem.C} elements is too short for {tile.cluster} slices"
        if tile.teams_per_block > 1 and problem.C % problem.pack:
            return (
                f"teams_per_block is {tile.teams_per_block}, expected 1: rows of {problem.C} elements differ in "
                f"misalignment, so their slices have different columns"
            )
        return super().refuses(device)


#: Compile-time constants of the kernels that hold rows in registers.
_HELD = ("threads", "lanes", "packs_per_thread", "cluster", "teams_per_block")


def short_rows(tile: Tile, pack: int) -> tuple[int, int, int, int]:
    """Example sizes with rows that every tile accepts."""
    return 256, 32, 1, 1


def _fills_team(tile: Tile, pack: int) -> tuple[int, int, int, int]:
    """Example sizes whose rows fill a team: of lanes, of a block, or of all blocks of a cluster."""
    blocks = tile.cluster if tile.strategy == "cluster" else 1
    lanes = tile.lanes if tile.strategy == "warp" else blocks * tile.threads // tile.teams_per_block
    return 256, lanes * tile.packs_per_thread * pack, 1, 1


def held_strategies(op: str, backward: bool) -> tuple[Strategy, ...]:
    """The strategies of an op on rows that hold rows in registers."""
    warp = (WARP_BACKWARD_SPACE, _HELD, RowsWarpBackward) if backward else (WARP_SPACE, _HELD, RowsWarp)
    block = (BLOCK_BACKWARD_SPACE, _HELD, RowsBlockBackward) if backward else (BLOCK_SPACE, _HELD, RowsBlock)
    return (
        Strategy("warp", op, *warp, _fills_team),
        Strategy("block", op, *block, _fills_team),
        Strategy("cluster", op, CLUSTER_SPACE, _HELD, RowsCluster, _fills_team),
    )
