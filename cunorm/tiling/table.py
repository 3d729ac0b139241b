"""The tiling table: which tile a problem was tuned to. The whole format, in one file: read, merge, write.

A table is a JSON file for one device, one line for each entry, sorted, so that a diff reads well::

    {"schema": "cunorm-tiling/1",
     "device": {"name": "NVIDIA H200", "compute_capability": "9.0", "multiprocessors": 132, ...},
     "software": {"cunorm": "0.1.0", ...},
     "entries": [
      {"op": "group_norm_backward", "dtype": "bfloat16", "gamma_dtype": "bfloat16", "layout": "NCHW",
       "outputs": "dx,dgamma,dbeta", "N": 2, "C": 320, "HxW": 4096, "group": 32, "strategy": "split",
       "tile": {"chunk": 1024, "threads": 512}, "source": "measured", "kernel": "9f2c1a7be01d4c33", "time_us": ...},
      ...]}

LayerNorm has rows and length for sizes, BatchNorm N, C and HxW, gathered statistics world and C. What selects code is
in an entry's key: ``beta_dtype``, ``stats_dtype`` and ``types`` stand there where they are not what the op would have
anyway. An entry says what it rests on: ``source`` is "measured" (on that device) or "model" (predicted, never timed).
Fields that this version does not know are kept on a rewrite, and so are entries that it cannot read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from cunorm.core.devices import Device
from cunorm.core.errors import TableError
from cunorm.core.problem import Problem

from . import table_file
from .table_entry import FACTS, MEASURED, Entry, entry_of, is_unknown, order_of, raw_of, shown

__all__ = [
    "SCHEMA",
    "Table",
    "better",
    "checked",
    "device_facts",
    "for_device",
    "load",
    "merge_files",
    "merged",
    "read",
    "slug",
    "update",
]

SCHEMA = "cunorm-tiling/1"


@dataclass
class Table:
    """What a file holds.

    Attributes
    ----------
    device, software : dict
        As in the file.
    entries : dict of Problem to Entry
    kept : list
        Entries that this version cannot read, as they came.
    faults : list of str
        What is wrong with them.
    rest : dict
        Fields of the file that this version does not know.
    """

    device: dict[str, Any]
    software: dict[str, Any] = field(default_factory=dict)
    entries: dict[Problem, Entry] = field(default_factory=dict)
    kept: list[Any] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    rest: dict[str, Any] = field(default_factory=dict)


def device_facts(device: Device) -> dict[str, Any]:
    """What a table says of its device."""
    return {
        "name": device.name,
        "compute_capability": "{}.{}".format(*device.compute_capability),
        "multiprocessors": device.multiprocessors,
        "l2_bytes": device.l2_bytes,
        "shared_memory_per_block": device.shared_memory_per_block,
    }


#: What makes a device that device: a slice of one has fewer multiprocessors.
_IDENTITY = ("name", "compute_capability", "multiprocessors")


class _OfDevice(Protocol):
    """Whatever says which device it is of."""

    @property
    def device(self) -> dict[str, Any]: ...


def for_device(table: _OfDevice, device: Device) -> bool:
    """Whether the table is of that device; a table of another is never launched from."""
    facts = device_facts(device)
    return all(table.device.get(name) == facts[name] for name in _IDENTITY)


def slug(device: Device) -> str:
    """The stem of a device's table in a folder: ``nvidia_h200_sm_90_132``."""
    words = "".join(letter if letter.isalnum() else " " for letter in device.name.lower()).split()
    return "_".join([*words, device.architecture, str(device.multiprocessors)])


# ---- files ----------------------------------------------------------------------------------------------------------


def load(path: str | Path) -> Table:
    """The table in a file with its entries as they came: all of them are in `Table.kept`, and none is checked.

    Raises
    ------
    OSError
        If the file cannot be read.
    TableError
        If it is no table, too large for one, or one of a newer schema; the sentence names the file.
    """
    path = Path(path)
    data = table_file.contents(path)
    try:
        raw = json.loads(data, parse_constant=lambda _: None)  # NaN and infinity are no JSON, and no times
    except (RecursionError, ValueError) as error:
        state = "empty" if not data.strip() else "no JSON, or cut short"
        raise TableError(f"{path}: {state}: {error}") from None
    if not isinstance(raw, dict) or not isinstance(raw.get("schema"), str):
        raise TableError(f'{path}: no tiling table: it has no "schema"')
    if raw["schema"] != SCHEMA:
        raise TableError(f"{path}: schema '{shown(raw['schema'])}', this version of cunorm reads {SCHEMA!r}")
    device, software, entries = (raw.get(name) for name in ("device", "software", "entries"))
    if not isinstance(device, dict) or not isinstance(entries, list):
        raise TableError(f'{path}: no tiling table: it needs a "device" and a list of "entries"')
    rest = {name: raw[name] for name in raw if name not in ("schema", "device", "software", "entries")}
    return Table(device, software if isinstance(software, dict) else {}, kept=entries, rest=rest)


def checked(loaded: Table) -> Table:
    """A table from `load` with every entry checked. Those that cannot be read stay in `Table.kept`."""
    table = replace(loaded, entries={}, kept=[], faults=[])
    for number, one in enumerate(loaded.kept, 1):
        if is_unknown(one):
            table.kept.append(one)
            continue
        try:
            entry = entry_of(one)
        except (TypeError, ValueError) as error:
            table.faults.append(f"entry {number}: {error}")
            table.kept.append(one)
        else:
            # Twice the same problem: as a merge of two texts leaves it.
            table.entries[entry.problem] = better(table.entries.get(entry.problem, entry), entry)
    return table


def read(path: str | Path) -> Table:
    """The table in a file. Entries that cannot be read are kept aside, see `Table.faults`.

    Raises
    ------
    OSError, TableError
        As `load`.
    """
    return checked(load(path))


def _lines(table: Table) -> Iterator[str]:
    head = {"schema": SCHEMA, "device": table.device, "software": table.software, **table.rest}
    for number, (name, value) in enumerate(head.items()):
        yield f"{' ' if number else '{'}{json.dumps(name)}: {json.dumps(value)},"
    ordered = map(raw_of, sorted(table.entries.values(), key=order_of))
    lines = [json.dumps(one) for one in (*ordered, *table.kept)]
    yield ' "entries": ['
    yield from (f"  {line}{',' if number < len(lines) else ''}" for number, line in enumerate(lines, 1))
    yield " ]}"


# ---- merging --------------------------------------------------------------------------------------------------------


def better(one: Entry, other: Entry, stale: Callable[[Entry], bool] = lambda _: False) -> Entry:
    """The one of two entries of a problem to keep: measured before modelled, fresh before stale, then the faster."""

    def rank(entry: Entry) -> tuple[bool, bool, float]:
        return entry.source != MEASURED, stale(entry), entry.microseconds or float("inf")

    return other if rank(other) < rank(one) else one


def merged(tables: Iterable[Table], stale: Callable[[Entry], bool] = lambda _: False) -> Table:
    """Tables of one device as one: of each problem the better entry, see `better`.

    Raises
    ------
    TableError
        If they are of several devices.
    """
    first, *others = tables
    found = Table(first.device, first.software, dict(first.entries), [*first.kept], [*first.faults], first.rest)
    for table in others:
        if any(table.device.get(name) != first.device.get(name) for name in _IDENTITY):
            names = " and ".join(shown(one.device.get("name")) for one in (first, table))
            raise TableError(f"tables of different devices: {names}; a table has one, merge those of each apart")
        for problem, entry in table.entries.items():
            old = found.entries.get(problem)
            found.entries[problem] = entry if old is None else better(old, entry, stale)
        found.kept += [one for one in table.kept if one not in found.kept]
        found.faults += table.faults
        found.rest = {**table.rest, **found.rest}
    return found


def merge_files(
    paths: Sequence[str | Path], output: str | Path, stale: Callable[[Entry], bool] = lambda _: False
) -> tuple[Table, int]:
    """Merge the tables of some files into another, which may be one of them; see `merged`.

    Returns the table as it was written, and how many entries all the files had.

    Raises
    ------
    OSError, TableError
        If a file cannot be read or written, is no table (the output too), or they are of several devices.
    """
    path = table_file.target(output)
    if not path.parent.is_dir():
        raise TableError(f"{output}: no folder {path.parent}")
    files = [*paths, *([path] if path.exists() else [])]
    merged(map(read, files), stale)  # whether it can be done, before anything is made
    with table_file.locked(path):  # which may be among them, and a tuner's
        tables = [read(one) for one in paths]
        made = merged(tables, stale)
        table_file.write(path, _lines(made))
    return made, sum(len(table.entries) for table in tables)


def update(path: str | Path, device: Device, software: Mapping[str, Any], entries: Iterable[Entry]) -> Table:
    """Put entries into the table of a file, which is made if there is none; returns the table as it is now.

    A fresh measurement replaces what is there; a modelled entry never replaces a measured one. What others wrote in
    the meantime stays.

    Raises
    ------
    OSError
        If the file cannot be read or written.
    TableError
        If it is no table, of another device, or another process does not let go of it: it is left as it is.
    """
    path = table_file.target(path)
    with table_file.locked(path):
        table = read(path) if path.exists() else Table(device_facts(device))
        if not for_device(table, device):
            raise TableError(f"{path}: a table of {shown(table.device.get('name'))}, expected one of {device.name}")
        for entry in entries:
            old = table.entries.get(entry.problem)
            if old is not None and old.source == MEASURED and entry.source != MEASURED:
                continue
            foreign = {} if old is None else {name: old.facts[name] for name in old.facts if name not in FACTS}
            facts = {**foreign, **entry.facts}
            table.entries[entry.problem] = Entry(entry.problem, entry.tile, entry.source, entry.kernel, facts)
        table.software = {**table.software, **software}
        table_file.write(path, _lines(table))
    return table
