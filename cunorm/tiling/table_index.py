"""A tiling table as calls ask it: found by sizes, and checked where somebody looks."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path

from cunorm.core.errors import TableWarning
from cunorm.core.locks import lazy
from cunorm.core.problem import Problem

from . import table
from .table import Entry, Kind, Sizes, Table, entry_of, is_unknown, raw_place

#: Path, time of the last change in nanoseconds, size.
Stamp = tuple[Path, int, int]


@functools.lru_cache(maxsize=1024)
def warn(stamped: Stamp, sentence: str) -> None:
    """Say it, once for each state of the file."""
    warnings.warn(f"{sentence}; calls go on without it", TableWarning, stacklevel=2)


class Indexed:
    """A table as calls ask it. An entry is checked when somebody looks at it: most of a large table never are.

    Attributes
    ----------
    device : dict
        As in the file.
    kinds : dict
        Numbers of entries by what `table.raw_place` finds them by: first the kind, then the sizes.
    """

    def __init__(self, stamped: Stamp, loaded: Table) -> None:
        self.device, self._stamped, self._loaded = loaded.device, stamped, loaded
        self._entries: dict[int, Entry | None] = {}
        self._faulty = False
        self.kinds: dict[Kind, dict[Sizes, list[int]]] = {}
        for number, raw in enumerate(loaded.kept):
            try:
                kind, sizes = raw_place(raw)
            except (AttributeError, KeyError, TypeError, ValueError):
                if not self._faulty and not is_unknown(raw):
                    self._entry(number)
                continue
            self.kinds.setdefault(kind, {}).setdefault(sizes, []).append(number)

    @lazy
    def table(self) -> Table:
        """The whole table, every entry checked."""
        found = table.checked(self._loaded)
        if found.faults:
            more = f" and {len(found.faults) - 1} more" if len(found.faults) > 1 else ""
            warn(self._stamped, f"{self._stamped[0]}: {found.faults[0]}{more}")
        return found

    def _entry(self, number: int) -> Entry | None:
        """An entry, checked at the first look; None if it cannot be read, with a word if it is the first of them."""
        if number not in self._entries:
            try:
                self._entries[number] = entry_of(self._loaded.kept[number])
            except (TypeError, ValueError) as error:
                self._entries[number] = None
                if not self._faulty:
                    self._faulty = True
                    warn(self._stamped, f"{self._stamped[0]}: entry {number + 1}: {error}")
        return self._entries[number]

    def entries(self, kind: Kind, sizes: Sizes) -> list[Entry]:
        """The entries of these sizes: of several of one problem the best."""
        found: dict[Problem, Entry] = {}
        for number in self.kinds.get(kind, {}).get(sizes, ()):
            if (entry := self._entry(number)) is not None:
                found[entry.problem] = table.better(found.get(entry.problem, entry), entry)
        return list(found.values())
