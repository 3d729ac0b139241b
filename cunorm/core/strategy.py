"""Strategy, Tile and Tiling: how a problem is divided among threads, with which parameters, and what is legal."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from cunorm.core.locks import lazy

from .devices import MOST_THREADS, WARP, Device
from .problem import Problem

#: A word as the value of a tile's field; in the kernel it is an enumerator.
_WORD = re.compile(r"[a-z][a-z0-9_]*")
#: Maximum number of blocks in the x direction of a grid.
MAX_GRID = 2**31 - 1


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


class Tile:
    """The choices of one strategy, by name: ``Tile("block", threads=256, groups=1, load="bulk")``.

    Parameters
    ----------
    strategy : str
    **fields : int or str
        Numbers or words, named as in the strategy's search space. They are also attributes of the tile.

    Examples
    --------
    >>> import numpy as np
    >>> import cunorm
    >>> tile = cunorm.Tile("warp", threads=128, lanes=32, packs_per_thread=1, rows_per_team=1)
    >>> tile.strategy, tile.lanes
    ('warp', 32)
    >>> y, mean, rstd = cunorm.layer_norm(np.eye(4, dtype=np.float32), 4, tile=tile)
    >>> mean.ravel()
    array([0.25, 0.25, 0.25, 0.25], dtype=float32)
    """

    strategy: str
    fields: tuple[tuple[str, Any], ...]

    def __init__(self, /, strategy: str, **fields: int | str) -> None:
        if not isinstance(strategy, str):
            raise TypeError(f"tile: strategy {strategy!r}, expected the name of a strategy")
        for name, value in fields.items():
            if name in _RESERVED or name.startswith("_"):
                raise ValueError(f"tile: {name}={value!r}: no strategy has a field of this name")
            number = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            if not number and not (isinstance(value, str) and _WORD.fullmatch(value)):
                raise ValueError(f"tile: {name}={value!r}, expected an int of at least 1, or a lower-case word")
        found = tuple(sorted(fields.items()))
        # Instance attributes: a ranking reads the fields 100,000 times.
        self.__dict__.update(fields, strategy=strategy, fields=found, _hash=hash((strategy, found)))

    @classmethod
    def of(cls, given: Tile | Mapping[str, object]) -> Tile:
        """A tile from a tile or from ``{"strategy": "block", "threads": 256, ...}``.

        Raises
        ------
        TypeError, ValueError
            If it is neither a tile nor such a mapping.
        """
        if isinstance(given, Tile):
            return given
        if not isinstance(given, Mapping):
            raise TypeError(f"tile: a {type(given).__name__}, expected a cunorm.Tile, a mapping or None")
        fields: dict[Any, Any] = dict(given)
        if not all(isinstance(name, str) for name in fields):
            raise TypeError(f"tile: {fields!r}, expected keys that are names of fields")
        strategy = fields.pop("strategy", None)
        if not isinstance(strategy, str):
            raise ValueError(f'tile: {dict(given)!r}, expected a key "strategy"')
        return cls(strategy, **fields)

    def as_dict(self) -> dict[str, Any]:
        """The fields by name, without the strategy."""
        return dict(self.fields)

    def __getattr__(self, name: str) -> int:
        raise AttributeError(f"the tile has no field {name}")

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name}: a tile cannot be changed, because plans and tables share it; make another Tile")

    def __delattr__(self, name: str) -> None:
        self.__setattr__(name, None)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.strategy, self.as_dict())

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tile) and (self.strategy, self.fields) == (other.strategy, other.fields)

    @property
    def text(self) -> str:
        """The tile as text for users and results."""
        fields = ", ".join(f"{name}={value}" for name, value in self.fields)
        return f"{self.strategy} ({fields})" if fields else self.strategy

    def __repr__(self) -> str:
        return f"Tile({self.strategy!r}{''.join(f', {name}={value!r}' for name, value in self.fields)})"


#: Names that are no fields of a tile.
_RESERVED = frozenset(("fields", *vars(Tile)))


def _rebuild(strategy: str, fields: dict[str, Any]) -> Tile:
    return Tile(strategy, **fields)


#: The arguments of a kernel by the names of its parameters; see `Launch`.
Arguments = Mapping[str, str | int | float]


def by_name(*names: str, **wanted: bool) -> Arguments:
    """Arguments for kernel parameters that have the same names as the arrays and numbers of the call.

    ``names`` are always passed. A keyword argument is passed if its flag is true; else the array is absent (0).
    """
    return dict(zip(names, names, strict=True)) | {name: name if kept else 0 for name, kept in wanted.items()}


@dataclass(frozen=True)
class Launch:
    """One kernel launch of a plan.

    Attributes
    ----------
    kernel : str
        Name of the file in a folder of ``kernels_cu``, without its suffix.
    entry : str
        Name of the kernel in the file.
    grid : int
        Number of blocks.
    threads : int
        Threads per block.
    arguments : mapping of str to str, int or float
        Arguments by the names of the kernel's parameters, in any order. A str is the name of an array or number of the
        call, an int or a float is passed as it is, and 0 is passed for an absent array.
    shared_bytes : int
        Dynamic shared memory per block.
    traffic : int
        Bytes of global memory that the launch reads and writes, for the cost model.
    registers : int
        32-bit registers per thread, an upper estimate.
    phases : int
        Exposed memory latencies per block: 1 for a streaming kernel, more if the block computes sums in between.
    streams : float
        Tensors whose loads a thread has in flight at the same time, with four packs in flight for each.
    cached : int
        Bytes that the launch reads from the L2 cache, in addition to ``traffic``.
    repeated : int
        Bytes of parameters that a block reads although it or another block has read them before, in addition to
        ``traffic``. Most of them are in the L1 cache.
    reread : int
        Of ``traffic``, the bytes that an earlier launch of the call has accessed too. They come from the L2 cache if
        all that the call has accessed since then fits into it.
    packs : int
        Packs of a tensor, 16 bytes each, that the threads process, idle lanes of their warps counted. 0: as many as
        ``traffic`` and ``cached`` have.
    rounds : float
        Reductions that a warp makes one after another.
    items : float
        Independent parts of the problem that a team processes one after another: rows, tiles, samples.
    variant : str
        The variant of the kernel, if it has several that differ in their costs: how it copies to shared memory, or
        that it has no loop over rows.
    uneven : bool or None
        Whether the parts that blocks process, or the groups, are no whole number of packs, or begin between packs.
        None: the problem's.
    layout : str or None
        The layout that the kernel is compiled for; None: the problem's.
    takes_tile : bool
        Whether the kernel is compiled with the tile's constants. False for a kernel that all strategies share: it is
        compiled with its number of threads.
    cluster : int
        Blocks per thread-block cluster.
    prepares : bool
        Whether the launch only initialises the workspace of the next launch. It runs whenever the next launch runs.
    roams : bool
        Whether the warps of a block advance independently, without limit, between two reads of the same memory.
    tickets : int or None
        Byte offset of the tickets in the workspace, if blocks draw tickets and wait for blocks with earlier tickets.
    constants : mapping of str to int
        Further compile-time constants in ``struct Tile``. They follow from the fields of the tile and the problem.
    """

    kernel: str
    entry: str
    grid: int
    threads: int
    arguments: Arguments = field(hash=False)
    shared_bytes: int = 0
    traffic: int = 0
    registers: int = 64
    phases: int = 1
    streams: float = 1
    cached: int = 0
    repeated: int = 0
    reread: int = 0
    packs: int = 0
    rounds: float = 1
    items: float = 1
    variant: str = ""
    uneven: bool | None = None
    layout: str | None = None
    takes_tile: bool = True
    cluster: int = 1
    prepares: bool = False
    roams: bool = False
    tickets: int | None = None
    constants: Mapping[str, int] = field(default_factory=dict, hash=False)

    @property
    def waits(self) -> bool:
        """Whether blocks wait for other blocks."""
        return self.tickets is not None


class Tiling:
    """The division of a problem by a tile. Each strategy has its own subclass; each size is computed once.

    Attributes
    ----------
    problem : Problem
    tile : Tile
        A tile with the fields of the strategy's space.
    """

    def __init__(self, problem: Problem, tile: Tile) -> None:
        self.problem, self.tile = problem, tile

    def refuses(self, device: Device) -> str | None:
        """Return the error message for a tile that is illegal on this device, or None; its only source."""
        raise NotImplementedError

    @lazy
    def launches(self) -> tuple[Launch, ...]:
        """The launches, in order."""
        raise NotImplementedError

    @lazy
    def workspace(self) -> int:
        """Bytes of workspace that a call needs."""
        return 0

    @lazy
    def workspace_traffic(self) -> int:
        """Upper bound of the bytes of workspace that the launches of a call read and write, counted by warp request.

        An address that all lanes of a warp read counts once. By default each byte is written once and read once.
        """
        return 2 * self.workspace

    @lazy
    def worth(self) -> bool:
        """Whether a legal tile is worth trying; False if another tile does the same with fewer resources."""
        return True


@dataclass(frozen=True)
class Strategy:
    """A way to compute an op: its kernels, their parameters and their legality.

    Attributes
    ----------
    name : str
        warp, block, cluster, grid, split or column.
    op : str
    space : mapping of str to tuple
        The values that are worth trying for each field of the tile. Other numbers may be legal too; for words, these
        are all legal values.
    constants : tuple of str
        The fields that are compile-time constants of the kernel, in ``struct Tile``.
    of : callable
        ``(problem, tile)`` -> its `Tiling`.
    example : callable
        ``(tile, elements per pack)`` -> N, C, HxW and group of a problem that the tile accepts.
    in_place : bool
        Whether the op's result may be the same array as its input.
    kernels_of : str or None
        The op whose kernels it launches, if they are not of its own op. They are compiled for that op in the gate.
    """

    name: str
    op: str
    space: Mapping[str, tuple[Any, ...]]
    constants: tuple[str, ...]
    of: Callable[[Problem, Tile], Tiling]
    example: Callable[[Tile, int], tuple[int, int, int, int]]
    in_place: bool = True
    kernels_of: str | None = None

    def refuses(self, problem: Problem, tile: Tile, device: Device) -> str | None:
        """See `Tiling.refuses`; also the error message for a tile whose fields are not those of this strategy."""
        if (sentence := self.refuses_fields(tile)) is not None:
            return sentence
        sentence = self.of(problem, tile).refuses(device)
        return None if sentence is None else f"{self.name}: {sentence}"

    def refuses_fields(self, tile: Tile) -> str | None:
        """Return the error message for a tile whose fields are not those of this strategy, or None."""
        names = {name for name, _ in tile.fields}
        if names != set(self.space):
            return f"{self.name}: fields {', '.join(sorted(names)) or 'none'}, expected {', '.join(sorted(self.space))}"
        for name, value in tile.fields:
            known = self.space[name]
            words = isinstance(known[0], str)
            if value not in known if words else isinstance(value, str):
                return f"{self.name}: {name} is {value}, expected {' or '.join(known) if words else 'a number'}"
        return None

    def launches(self, problem: Problem, tile: Tile) -> tuple[Launch, ...]:
        """The launches of a tile for a problem."""
        return self.of(problem, tile).launches

    @lazy
    def _tiles(self) -> tuple[Tile, ...]:
        every = itertools.product(*self.space.values())
        return tuple(Tile(self.name, **dict(zip(self.space, values, strict=True))) for values in every)

    def tiles(self) -> Iterator[Tile]:
        """All tiles of the search space, legal or not."""
        return iter(self._tiles)


def main_launch(launches: Iterable[Launch]) -> Launch:
    """The launch with the most traffic."""
    return max(launches, key=lambda launch: launch.traffic)


def refuses_threads(tile: Tile) -> str | None:
    """The legality rule of all strategies: whole warps, and at most the threads that a block can have."""
    if tile.threads % WARP or tile.threads > MOST_THREADS:
        return f"threads is {tile.threads}, expected a multiple of {WARP} up to {MOST_THREADS}"
    return None
