"""An index of a tiling table for calls: entries are found by sizes and checked on first use."""

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
    """Issue a `TableWarning`, once per state of the file."""
    warnings.warn(f"{sentence}; calls go on without it", TableWarning, stacklevel=2)


class Indexed:
    """An index of a table. An entry is checked on first use, because most entries of a large table are never used.

    Attributes
    ----------
    device : dict
        The field ``device`` of the file.
    kinds : dict
        Indices of entries by the key that `table.raw_place` returns: first by kind, then by sizes.
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
        """The whole table with every entry checked."""
        found = table.checked(self._loaded)
        if found.faults:
            more = f" and {len(found.faults) - 1} more" if len(found.faults) > 1 else ""
            warn(self._stamped, f"{self._stamped[0]}: {found.faults[0]}{more}")
        return found

    def _entry(self, number: int) -> Entry | None:
        """An entry, checked on first use; None if it is unreadable. The first unreadable entry causes a warning."""
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
        """The entries with these sizes; of several entries of one problem, the best."""
        found: dict[Problem, Entry] = {}
        for number in self.kinds.get(kind, {}).get(sizes, ()):
            if (entry := self._entry(number)) is not None:
                found[entry.problem] = table.better(found.get(entry.problem, entry), entry)
        return list(found.values())
