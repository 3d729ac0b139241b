"""Strategy and Tile: who owns one slice of statistics, with which numbers, and whether that is legal."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from cunorm.core.locks import lazy

from .devices import Device
from .problem import Problem

#: A word among a tile's fields; in the kernel it is an enumerator.
_WORD = re.compile(r"[a-z][a-z0-9_]*")
#: Most blocks in the x direction of a grid.
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
        As the strategy's search space names them, numbers or words; also attributes of the tile.
    """

    strategy: str
    fields: tuple[tuple[str, Any], ...]

    def __init__(self, strategy: str, **fields: int | str) -> None:
        if not isinstance(strategy, str):
            raise TypeError(f"tile: strategy {strategy!r}, expected the name of one")
        for name, value in fields.items():
            number = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            if not number and not (isinstance(value, str) and _WORD.fullmatch(value)):
                raise ValueError(f"tile: {name}={value!r}, expected a whole number from 1 up, or a word")
        self.strategy = strategy
        self.fields = tuple(sorted(fields.items()))
        self.__dict__.update(fields)  # found without a call: a ranking asks for them a hundred thousand times
        self._hash = hash((strategy, self.fields))

    @classmethod
    def of(cls, given: Tile | Mapping[str, object]) -> Tile:
        """A tile from a tile or from ``{"strategy": "block", "threads": 256, ...}``.

        Raises
        ------
        TypeError, ValueError
            If it is neither, or names no strategy.
        """
        if isinstance(given, Tile):
            return given
        if not isinstance(given, Mapping):
            raise TypeError(f"tile: a {type(given).__name__}, expected a cunorm.Tile, a mapping or None")
        fields: dict[Any, Any] = dict(given)
        if not all(isinstance(name, str) for name in fields):
            raise TypeError(f"tile: {fields!r}, expected names of fields as keys")
        strategy = fields.pop("strategy", None)
        if not isinstance(strategy, str):
            raise ValueError(f'tile: {dict(given)!r}, expected a "strategy" in it')
        return cls(strategy, **fields)

    def as_dict(self) -> dict[str, Any]:
        """The fields, without the strategy."""
        return dict(self.fields)

    def __getattr__(self, name: str) -> int:
        raise AttributeError(f"a tile has no {name}")

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.strategy, self.as_dict())

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tile) and (self.strategy, self.fields) == (other.strategy, other.fields)

    def __repr__(self) -> str:
        return f"Tile({self.strategy!r}{''.join(f', {name}={value!r}' for name, value in self.fields)})"


def _rebuild(strategy: str, fields: dict[str, Any]) -> Tile:
    return Tile(strategy, **fields)


#: What a kernel takes, by the names of its parameters; see `Launch`.
Arguments = Mapping[str, str | int | float]


def by_name(*names: str, **wanted: bool) -> Arguments:
    """Arguments under the names that they have in a call: those that are there, and those that are wanted or absent."""
    return dict(zip(names, names, strict=True)) | {name: name if kept else 0 for name, kept in wanted.items()}


@dataclass(frozen=True)
class Launch:
    """One kernel launch of a plan.

    Attributes
    ----------
    kernel : str
        Name of the file in a folder of ``kernels_cu``, without its ending.
    entry : str
        Name of the kernel in it.
    grid : int
        Blocks.
    threads : int
        In a block.
    arguments : mapping of str to str, int or float
        By the names of the kernel's parameters, whatever their order: a name stands for the array or number that the
        call brings, an int or a float for itself, 0 for an array that is absent.
    shared_bytes : int
        Dynamic shared memory of a block.
    traffic : int
        Bytes of global memory it reads and writes, for the cost model.
    registers : int
        32-bit registers a thread holds, an upper estimate.
    phases : int
        How often a block waits for memory with nothing else to do: 1 for a stream, more where sums lie between.
    streams : float
        Tensors whose loads a thread has in flight side by side, four packs of each.
    cached : int
        Bytes that it reads besides, but from the L2 cache.
    layout : str or None
        The layout that the kernel is compiled for; None: the problem's.
    takes_tile : bool
        Whether the kernel knows the tile's constants; False for one that serves all strategies and knows its threads.
    cluster : int
        Blocks of a thread-block cluster.
    abreast : int
        Pieces of work that keep step although each is its own: teams that pass a block's barriers together, blocks of a
        cluster that only put their results together.
    prepares : bool
        Whether it only makes the workspace ready for the next launch: where that runs, so does this.
    roams : bool
        Whether warps of a block go on without each other between two reads of the same memory, as far as they like.
    tickets : int or None
        Where blocks draw tickets, and wait for others with earlier ones: at which byte of the workspace.
    constants : mapping of str to int
        What else its kernel knows at compile time, in ``struct Tile``, besides the fields of the tile: what follows
        from them and the problem.
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
    layout: str | None = None
    takes_tile: bool = True
    cluster: int = 1
    abreast: int = 1
    prepares: bool = False
    roams: bool = False
    tickets: int | None = None
    constants: Mapping[str, int] = field(default_factory=dict, hash=False)

    @property
    def waits(self) -> bool:
        """Whether blocks wait for what other blocks do."""
        return self.tickets is not None


class Tiling:
    """A problem cut by a tile of a strategy. Each strategy has a class of its own; each size is worked out once.

    Attributes
    ----------
    problem : Problem
    tile : Tile
        With the fields of the strategy's space.
    """

    def __init__(self, problem: Problem, tile: Tile) -> None:
        self.problem, self.tile = problem, tile

    def refuses(self, device: Device) -> str | None:
        """Why the tile cannot solve the problem on this device; None if it can. The only legality text."""
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
        """Bytes of the workspace that the launches of a call read and write at most, counted as warps ask for them.

        What all lanes read from one place counts once. By default each byte is written once and read once.
        """
        return 2 * self.workspace

    @lazy
    def worth(self) -> bool:
        """Whether a legal tile of the space is worth trying: not where another does the same with less."""
        return True


@dataclass(frozen=True)
class Strategy:
    """A way to solve an op: kernels, their numbers, their legality.

    Attributes
    ----------
    name : str
        From the vocabulary of strategies: warp, block, cluster, grid, split, column.
    op : str
    space : mapping of str to tuple
        The values that are worth trying for each field of the tile: numbers, or words, of which it has all.
    constants : tuple of str
        The fields that the kernel knows at compile time, in ``struct Tile``.
    of : callable
        ``(problem, tile)`` -> its `Tiling`.
    example : callable
        ``(tile, elements of a pack)`` -> N, C, HxW and group of a problem that the tile takes.
    in_place : bool
        Whether the op's result may be exactly its input.
    """

    name: str
    op: str
    space: Mapping[str, tuple[Any, ...]]
    constants: tuple[str, ...]
    of: Callable[[Problem, Tile], Tiling]
    example: Callable[[Tile, int], tuple[int, int, int, int]]
    in_place: bool = True

    def refuses(self, problem: Problem, tile: Tile, device: Device) -> str | None:
        """Why this tile cannot solve this problem on this device, `Tiling.refuses`; or that it is none of its tiles."""
        names = {name for name, _ in tile.fields}
        if names != set(self.space):
            return f"{self.name}: a tile has {', '.join(sorted(self.space))}; came {', '.join(sorted(names)) or 'none'}"
        for name, value in tile.fields:
            known = self.space[name]
            words = isinstance(known[0], str)
            if value not in known if words else isinstance(value, str):
                return f"{self.name}: {name} is {value}, expected {' or '.join(known) if words else 'a number'}"
        sentence = self.of(problem, tile).refuses(device)
        return None if sentence is None else f"{self.name}: {sentence}"

    def launches(self, problem: Problem, tile: Tile) -> tuple[Launch, ...]:
        """What a tile launches for a problem."""
        return self.of(problem, tile).launches

    @lazy
    def _tiles(self) -> tuple[Tile, ...]:
        every = itertools.product(*self.space.values())
        return tuple(Tile(self.name, **dict(zip(self.space, values, strict=True))) for values in every)

    def tiles(self) -> Iterator[Tile]:
        """Every tile of the search space, legal or not."""
        return iter(self._tiles)


def main_launch(launches: Iterable[Launch]) -> Launch:
    """The launch that moves most."""
    return max(launches, key=lambda launch: launch.traffic)


def refuses_threads(tile: Tile) -> str | None:
    """The legality that every strategy shares: whole warps, and no more than a block may have."""
    if tile.threads % 32 or tile.threads > 1024:
        return f"threads is {tile.threads}, expected a multiple of 32 up to 1024"
    return None
