"""Strategies of BatchNorm's five ops: tiles, legality, launches, workspace. The kernels are in kernels_cu."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from cunorm.core.devices import WARP, Device
from cunorm.core.locks import lazy
from cunorm.core.problem import ITEMSIZE, Problem
from cunorm.core.strategy import Launch, Strategy, Tile, Tiling, by_name, ceil_div, refuses_threads
from cunorm.ops.common.folds import fold_launches, fold_rows
from cunorm.ops.common.limits import (
    RESIDENT_REGISTERS,
    SECTOR_PACKS,
    blocks_for,
    refuses_cluster_size,
    refuses_registers,
    refuses_shared,
    round_up,
    whole_clusters,
)
from cunorm.ops.common.slab_sweep import LARGEST_CHUNK, Slab, Sweep, refuses_sweep

SUMS = ("sum_dy", "sum_dy_xmu", "dgamma", "dbeta")
#: Registers per thread of kernels whose launch bounds require 768 resident threads: batch_norm_backward_reduce_sweep.cu
#: and those of `cluster`.
FEWER_REGISTERS = 80
#: Packs per lane up to which `block` is worth trying, in a forward and in a backward; longer planes are faster with
#: `split`.
SHORT_PLANE_STEPS = (8, 2)
#: Packs per plane below which `block` is faster than `cluster` if planes are not whole packs: `cluster` then compares
#: the position of every element.
SHORT_RAGGED_PLANE = 64
#: Maximum of the elements of a plane and of the packs of a channel in `cluster`, whose kernels count both in 32 bits,
#: past the last one.
LARGEST_COUNT = 2**30
#: Values in Affine (norm.cuh), with padding, and in ChannelGradient (channel_coefficients.cuh).
LINEAR_VALUES = 4


class View(NamedTuple):
    """Sizes of a tensor for the kernels: N * C planes of HxW positions, or HxW rows of C channels with N = 1."""

    layout: str
    N: int
    C: int
    HxW: int


def view_of(problem: Problem) -> View:
    """Return the view of a problem's tensors.

    A tensor with one channel is viewed as one plane, and a tensor with HxW = 1 as rows. The bytes are the same, and the
    order is better.
    """
    rows = problem.N * problem.HxW
    if problem.C == 1:
        return View("NCHW", 1, 1, rows)
    if problem.HxW == 1 or problem.layout == "NHWC":
        return View("NHWC", 1, problem.C, rows)
    return View("NCHW", problem.N, problem.C, problem.HxW)


def refuses_layout(problem: Problem, layout: str) -> str | None:
    """Return the error message if kernels of that layout cannot process the problem, or None."""
    if view_of(problem).layout == layout:
        return None
    return "channels-last data has no planes" if layout == "NCHW" else "channels-first data has no rows of channels"


# ---- sweeps: `split`, and `column` of tensors ------------------------------------------------------------------------


def _wide(problem: Problem) -> int:
    """Rows per wide row: the fewest rows that are whole sectors."""
    unit = SECTOR_PACKS * problem.pack
    return unit // math.gcd(problem.C, unit)


def columns_of(problem: Problem) -> int:
    """Packs per wide row."""
    return _wide(problem) * problem.C // problem.pack


class _Viewed(Tiling):
    """Tiling with a view of the tensors: base of all tilings except `_Gather`."""

    @lazy
    def view(self) -> View:
        """View of the tensors."""
        return view_of(self.problem)


class _Swept(_Viewed):
    """Tiling with a sweep: chunks of planes, or chunks of wide rows and a few rows left over."""

    #: Layout of the strategy's kernels.
    own_layout = "NHWC"

    @lazy
    def columns(self) -> int:
        """Columns of packs per block: at most the tile's number, evenly divided, in whole sectors."""
        columns = columns_of(self.problem)
        even = round_up(ceil_div(columns, ceil_div(columns, self.tile.columns)), SECTOR_PACKS)
        return min(even, self.tile.columns)

    @lazy
    def sweep(self) -> Sweep:
        """Sweep without the rows left over."""
        problem, tile, view = self.problem, self.tile, self.view
        if view.layout == "NCHW":
            return Sweep(*view, tile.chunk, problem.pack, tile.threads)
        wide = _wide(problem)
        return Sweep("NHWC", 1, wide * view.C, view.HxW // wide, tile.chunk, problem.pack, tile.threads, self.columns)

    @lazy
    def left(self) -> int:
        """Rows left over, which do not make up a wide row."""
        return 0 if self.view.layout == "NCHW" else self.view.HxW % _wide(self.problem)

    @lazy
    def sizes(self) -> dict[str, int]:
        """Members of struct Batch in joined_rows.cuh, by name."""
        swept = {"columns" if name == "C" else name: size for name, size in self.sweep.arguments.items()}
        most = {"most_columns": self.sweep.most_columns or 1, "sweeps": self.sweep.items, "items": self.items}
        return {**swept, "C": self.problem.C, "left": self.left * self.view.C, **most}

    @lazy
    def items(self) -> int:
        """Work items for blocks: those of the sweep, followed by those of the rows left over."""
        return self.sweep.items + ceil_div(self.left * self.view.C, self.tile.threads)

    @lazy
    def partial_rows(self) -> int:
        """Rows of partial results [rows, C]. A single row is the final results."""
        if self.view.layout == "NCHW":
            return self.view.N * self.sweep.chunks
        return self.sweep.chunks * _wide(self.problem) + self.left

    @lazy
    def grid(self) -> int:
        """Blocks of the launch."""
        return blocks_for(self.items)

    @lazy
    def met(self) -> int:
        """Channels that the warps of all blocks process, each counted once per warp."""
        view, warps = self.view, self.tile.threads // WARP
        if view.layout == "NCHW":
            return view.N * view.C * self.sweep.chunks
        return self.sweep.items * warps * min(self.columns, WARP) * self.problem.pack + self.left * view.C

    def refuses(self, device: Device) -> str | None:
        """See `Tiling.refuses`. No problem of the right layout is refused for its sizes."""
        tile = self.tile
        if (sentence := refuses_layout(self.problem, self.own_layout)) is not None:
            return sentence
        if (sentence := refuses_sweep(self.sweep, self.problem, tile, device)) is not None:
            return sentence
        if self.own_layout == "NHWC" and tile.columns > tile.threads:
            return f"columns is {tile.columns}, expected at most threads, {tile.threads}"
        return None

    @lazy
    def worth(self) -> bool:
        """Whether no smaller number of columns in the search space covers a whole wide row."""
        return all(columns >= self.tile.columns or columns < columns_of(self.problem) for columns in _ROWS["columns"])


# ---- stats and backward_reduce: partial results, then their fold -----------------------------------------------------


class _Reducing(_Viewed):
    """Tiling with a kernel that stores rows of partial results, and their fold."""

    #: Whether the kernel has a workspace for rows of partial results.
    has_workspace = True

    @lazy
    def partial_rows(self) -> int:
        """Rows of partial results [rows, C]. A single row is the final results."""
        raise NotImplementedError

    @lazy
    def workspace(self) -> int:
        """Bytes of the partial results."""
        rows, C = self.partial_rows, self.problem.C
        return 0 if rows == 1 else fold_rows(rows, C) * C * self.problem.part

    def reducing(self, kind: str, grid: int, sizes: Mapping[str, int], **facts: Any) -> tuple[Launch, ...]:
        """Launches of the kernel, whose arguments include ``sizes``, and of the fold."""
        problem, rows = self.problem, self.partial_rows
        if problem.is_backward:
            given = by_name("dy", "mean", "invstd", x=problem.reads_x)
            wanted = by_name(**{name: name in problem.outputs for name in SUMS})
            fold_given = by_name("invstd", "workspace")
        else:
            given, wanted = by_name("x", "eps"), by_name("mean", "invstd")
            fold_given = by_name("workspace", "eps")
        results = wanted if rows == 1 else dict.fromkeys(wanted, 0)
        if self.has_workspace:
            results = {**results, **by_name(workspace=rows > 1)}
        traffic = self.problem.read * problem.nbytes + (rows > 1) * rows * problem.C * self.problem.part
        entry, fold = f"{problem.op}_{kind}", f"{problem.op}_fold"
        arguments = {**given, **results, **sizes}
        facts = {"registers": RESIDENT_REGISTERS, **facts, "traffic": traffic, "layout": self.view.layout}
        main = Launch(entry, entry, grid, self.tile.threads, arguments, **facts)
        if rows == 1:
            return (main,)
        return (main, *fold_launches(problem, fold, rows, self.problem.part, fold_given, wanted))


class _ReducingSlabs(_Reducing):
    """Tiling of `block`: slabs of a few channels. A thread sweeps one pack of several samples."""

    @lazy
    def slab(self) -> Slab:
        """Slab of one sample."""
        view = self.view
        channels = min(self.tile.channels, view.C)
        return Slab(view.layout, channels, view.HxW, self.problem.pack, self.tile.threads)

    @lazy
    def samples(self) -> int:
        """Most samples of a block."""
        return min(self.view.N, self.tile.samples_per_block)

    @lazy
    def partial_rows(self) -> int:
        """Rows of partial results [rows, C]. A single row is the final results."""
        return ceil_div(self.view.N, self.tile.samples_per_block)

    @lazy
    def columns(self) -> int:
        """Columns of packs that a block processes at a time, for the worst alignment."""
        return min(self.slab.packs, self.tile.threads)

    @lazy
    def shared(self) -> int:
        """Bytes of shared memory per block: a partial result per channel, and per thread and element of its pack.

        Moments are padded, so that neighbouring elements are in different banks (SlotMoments in sample_moments.cuh).
        """
        part, pack = self.problem.part, self.problem.pack
        padding = 0 if self.problem.is_backward else 16 // pack - 1
        return round_up(self.slab.channels * part, 16) + (self.tile.threads + padding) * pack * part

    def refuses(self, device: Device) -> str | None:
        """See `Tiling.refuses`."""
        sentence = refuses_threads(self.tile) or refuses_layout(self.problem, "NCHW")
        if sentence is None and self.slab.channels * self.view.HxW > LARGEST_CHUNK:
            sentence = f"channels is {self.tile.channels}, expected slabs of at most {LARGEST_CHUNK} elements"
        if sentence is None and self.samples > LARGEST_CHUNK:
            sentence = f"samples_per_block is {self.tile.samples_per_block}, expected at most {LARGEST_CHUNK}"
        sentence = sentence or refuses_shared(self.shared, device)
        return sentence or refuses_registers(RESIDENT_REGISTERS, self.tile, device)

    @lazy
    def worth(self) -> bool:
        """Whether a sweep of a plane would be short, and the slabs are one range of whole packs if they can be."""
        view, pack = self.view, self.problem.pack
        unit = pack // math.gcd(view.HxW, pack)
        even = self.tile.channels % unit == 0 or unit > view.C
        steps = SHORT_PLANE_STEPS[self.problem.is_backward]
        return even and self.slab.packs <= self.tile.threads and view.HxW <= steps * WARP * pack

    @lazy
    def waits(self) -> int:
        """Phases of a block: it sweeps one range of columns after another."""
        return ceil_div(self.slab.packs, self.columns)

    @lazy
    def launches(self) -> tuple[Launch, ...]:
        """Launches of the slab kernel and the fold."""
        view, columns = self.view, self.columns
        sizes = {
            "N": view.N,
            "C": view.C,
            "HxW": view.HxW,
            "channels": self.slab.channels,
            "samples": self.samples,
        }
        blocks = blocks_for(ceil_div(view.C, self.tile.channels) * self.partial_rows)
        # Packs that the threads of a block process, idle lanes of their warps counted.
        packs = self.waits * ceil_div(self.samples, self.tile.threads // columns) * self.tile.threads
        facts = {"packs": blocks * packs, "rounds": self.waits, "phases": self.waits, "items": self.samples}
        return self.reducing("block", blocks, sizes, shared_bytes=self.shared, **facts)


class _ReducingChannels(_Reducing):
    """Tiling of `cluster`: a cluster of blocks per channel."""

    has_workspace = False

    @lazy
    def partial_rows(self) -> int:
        """One row: a cluster sums all samples of its channel."""
        return 1

    @lazy
    def most_packs(self) -> int:
        """Upper bound of the packs of a channel, wherever tensors start."""
        return self.view.N * ceil_div(self.view.HxW + self.problem.pack - 1, self.problem.pack)

    @lazy
    def channel_packs(self) -> int:
        """Upper bound of the packs of a channel, if tensors start at multiples of 16 bytes."""
        whole = self.view.HxW % self.problem.pack == 0
        return self.view.N * self.view.HxW // self.problem.pack if whole else self.most_packs

    @lazy
    def shared(self) -> int:
        """Bytes of shared memory per block: a partial result per warp of the cluster."""
        return self.tile.cluster * self.tile.threads // WARP * self.problem.part

    def refuses(self, device: Device) -> str | None:
        """See `Tiling.refuses`. A cluster of one block needs no support for clusters."""
        sentence = refuses_threads(self.tile) or refuses_layout(self.problem, "NCHW")
        if sentence is None and self.tile.cluster != 1:
            sentence = refuses_cluster_size(self.tile, device)
        if sentence is None and self.view.HxW > LARGEST_COUNT:
            sentence = f"HxW is {self.view.HxW}, expected planes of at most {LARGEST_COUNT} elements"
        if sentence is None and self.most_packs > LARGEST_COUNT:
            sentence = f"a channel has up to {self.most_packs} packs, expected at most {LARGEST_COUNT}"
        return sentence or refuses_registers(FEWER_REGISTERS, self.tile, device)

    @lazy
    def worth(self) -> bool:
        """Whether threads have enough packs and not too many, and planes are whole packs or long."""
        threads, packs, pack = self.tile.threads * self.tile.cluster, self.channel_packs, self.problem.pack
        enough = threads < 2 * packs or threads == min(_CHANNELS["threads"])
        short = packs // threads <= LARGEST_CHUNK // (WARP * pack)  # the longest sum of a lane of `split`
        return enough and short and (self.view.HxW % pack == 0 or self.view.HxW >= SHORT_RAGGED_PLANE * pack)

    @lazy
    def launches(self) -> tuple[Launch, ...]:
        """Launch of the only kernel."""
        view, tile = self.view, self.tile
        sizes = {"N": view.N, "C": view.C, "HxW": view.HxW}
        packs = ceil_div(self.channel_packs, tile.cluster * tile.threads)  # of a thread
        facts = {"packs": view.C * tile.cluster * tile.threads * packs, "phases": 2, "items": packs}
        facts |= {"shared_bytes": self.shared, "registers": FEWER_REGISTERS, "cluster": tile.cluster}
        return self.reducing("cluster", whole_clusters(view.C * tile.cluster, tile.cluster), sizes, **facts)


class _ReducingRows(_Swept, _Reducing):
    """Tiling of `column`: chunks of wide rows."""

    @lazy
    def launches(self) -> tuple[Launch, ...]:
        """Launches of the sweep and the fold."""
        facts = {"shared_bytes": self.sweep.shared(self.problem.part), "rounds": self.sweep.rounds}
        facts["packs"] = self.sweep.processed
        if self.problem.is_backward:
            facts |= {"cached": self.met * self.problem.sum_itemsize, "registers": FEWER_REGISTERS}
        return self.reducing("sweep", self.grid, self.sizes, **facts)


class _ReducingPlanes(_ReducingRows):
    """Tiling of `split`: chunks of planes."""

    own_layout = "NCHW"

    @lazy
    def worth(self) -> bool:
        """Every tile is worth trying."""
        return True


# ---- elemt and backward_elemt: one stream ----------------------------------------------------------------------------


class _Streaming(_Viewed):
    """Tiling with a kernel that reads and writes every byte once."""

    def streaming(self, grid: int, sizes: Mapping[str, int], **facts: Any) -> tuple[Launch, ...]:
        """Launch of the kernel, whose arguments include ``sizes``."""
        problem, spec, entry = self.problem, self.problem.spec, f"{self.problem.op}_{self.tile.strategy}"
        facts |= {"traffic": sum(map(problem.nbytes_of, spec.tensors)), "registers": RESIDENT_REGISTERS}
        arguments = {**by_name(*spec.arrays, *spec.numbers, *spec.measures), **sizes}
        return (Launch(entry, entry, grid, self.tile.threads, arguments, layout=self.view.layout, **facts),)


class _StreamingRuns(_Streaming):
    """Tiling of `block`: runs of a channels-first tensor."""

    @lazy
    def shared(self) -> int:
        """Bytes of shared memory per block: Affine (norm.cuh) or ChannelGradient of the planes its run touches."""
        planes = min(self.view.N * self.view.C, self.tile.chunk // self.view.HxW + 2)
        return planes * LINEAR_VALUES * self.problem.sum_itemsize

    def refuses(self, device: Device) -> str | None:
        """See `Tiling.refuses`."""
        tile, pack = self.tile, self.problem.pack
        if (sentence := refuses_threads(tile) or refuses_layout(self.problem, "NCHW")) is not None:
            return sentence
        if tile.chunk % pack or tile.chunk > LARGEST_CHUNK:
            return f"chunk is {tile.chunk}, expected a multiple of {pack} up to {LARGEST_CHUNK} elements"
        return refuses_shared(self.shared, device) or refuses_registers(RESIDENT_REGISTERS, tile, device)

    @lazy
    def launches(self) -> tuple[Launch, ...]:
        """Launch of the stream."""
        problem, chunk = self.problem, self.tile.chunk
        elements = problem.N * problem.C * problem.HxW
        sizes = {"elements": elements, "C": self.view.C, "HxW": self.view.HxW, "chunk": chunk}
        # A block waits for the values of its channels, then for the stream.
        return self.streaming(blocks_for(ceil_div(elements, chunk)), sizes, shared_bytes=self.shared, phases=2)


class _StreamingRows(_Swept, _Streaming):
    """Tiling of `column`: chunks of wide rows."""

    @lazy
    def channel_bytes(self) -> int:
        """Bytes that a thread reads per channel: statistics, parameters, and the sums of a backward."""
        problem, count = self.problem, 4 if self.problem.is_backward else 2
        given = (dtype for dtype in (problem.gamma_dtype, problem.beta_dtype) if dtype is not None)
        return count * problem.sum_itemsize + sum(ITEMSIZE[dtype] for dtype in given)

    @lazy
    def launches(self) -> tuple[Launch, ...]:
        """Launch of the stream."""
        return self.streaming(self.grid, self.sizes, cached=self.met * self.channel_bytes, packs=self.sweep.processed)


# ---- gather_stats: one thread per channel ----------------------------------------------------------------------------


class _Gather(Tiling):
    """Tiling with one thread per channel."""

    def refuses(self, device: Device) -> str | None:
        """See `Tiling.refuses`."""
        return refuses_threads(self.tile)

    @lazy
    def launches(self) -> tuple[Launch, ...]:
        """Launch of the only kernel."""
        problem, spec, entry = self.problem, self.problem.spec, f"{self.problem.op}_column"
        return (
            Launch(
                entry,
                entry,
                blocks_for(ceil_div(problem.C, self.tile.threads)),
                self.tile.threads,
                {**by_name(*spec.arrays, *spec.numbers, *spec.measures), "world": problem.N, "C": problem.C},
                traffic=2 * problem.nbytes,
                phases=1 + problem.N // 2,  # a thread loads two ranks at a time
                layout="NCHW",  # the kernel does not depend on the layout
            ),
        )


# ---- search spaces --------------------------------------------------------------------------------------------------

_CHUNKS = {"threads": (128, 256, 512), "chunk": (64, 256, 1024, 2048, 4096, 16384, 65536)}
#: 512 threads would only divide the same columns into more parts. 8 columns of packs are 128 bytes of a row. A thread
#: adds values one after another, so longer chunks, and longer ranges of samples in `_SLABS`, would lose accuracy.
_ROWS = {
    "threads": (128, 256),
    "columns": (8, 32, 128),
    "chunk": (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048),
}
_SLABS = {
    "threads": (64, 128, 256, 512),
    "channels": (1, 2, 4, 8, 16, 32, 64),
    "samples_per_block": (1, 2, 4, 8, 16, 32, 64),
}
_CHANNELS = {"threads": (64, 128, 256, 512), "cluster": (1, 2, 4, 8, 16)}
_RUNS = {"threads": (128, 256, 512), "chunk": (2048, 8192, 32768)}


def _example(tile: Tile, pack: int) -> tuple[int, int, int, int]:
    return 8, 64, 64, 64


def _strategies(op: str, *made: tuple[str, Mapping[str, tuple[int, ...]], type[Tiling]]) -> dict[str, Strategy]:
    constants = ("threads", "cluster")
    return {
        name: Strategy(name, op, space, tuple(field for field in constants if field in space), tiling, _example)
        for name, space, tiling in made
    }


def _reducing(op: str) -> dict[str, Strategy]:
    slabs, channels = ("block", _SLABS, _ReducingSlabs), ("cluster", _CHANNELS, _ReducingChannels)
    rows, planes = ("column", _ROWS, _ReducingRows), ("split", _CHUNKS, _ReducingPlanes)
    return _strategies(op, slabs, channels, planes, rows)


def _streaming(op: str) -> dict[str, Strategy]:
    return _strategies(op, ("block", _RUNS, _StreamingRuns), ("column", _ROWS, _StreamingRows))


STATS: dict[str, Strategy] = _reducing("batch_norm_stats")
GATHER_STATS: dict[str, Strategy] = {
    "column": Strategy(
        "column",
        "batch_norm_gather_stats",
        {"threads": (64, 128)},
        ("threads",),
        _Gather,
        lambda tile, pack: (8, 64, 1, 64),
    )
}
ELEMT: dict[str, Strategy] = _streaming("batch_norm_elemt")
BACKWARD_REDUCE: dict[str, Strategy] = _reducing("batch_norm_backward_reduce")
BACKWARD_ELEMT: dict[str, Strategy] = _streaming("batch_norm_backward_elemt")
