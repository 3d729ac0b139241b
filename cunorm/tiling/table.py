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

The sizes have the names of the op's `OpSpec.sizes`: LayerNorm has rows and length. What selects code is in an entry's
key: ``beta_dtype``, ``stats_dtype`` and ``types`` stand there where they are not what the op would have
anyway. An entry says what it rests on: ``source`` is "measured" (on that device) or "model" (predicted, never timed).
Fields that this version does not know are kept on a rewrite, and so are entries that it cannot read.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from cunorm.core.devices import Device
from cunorm.core.errors import TableError
from cunorm.core.opspec import OPS, OpSpec
from cunorm.core.problem import ACTIVATIONS, ITEMSIZE, LAYOUTS, Problem, accumulator
from cunorm.core.strategy import Tile

from . import table_file

#: What two problems have in common that differ in sizes and dtypes of parameters alone.
Kind = tuple[str, str, str, tuple[str, ...], str | None]
#: N, C, HxW and group.
Sizes = tuple[int, int, int, int]

MEASURED, MODEL = "measured", "model"
MOST_MICROSECONDS = 1e15
LARGEST = 2**60  # a size; what kernels can count
COUNTS = ("int32", "int64")  # dtypes of whole numbers
#: What names in a file are made of: they are printed, and none may steer a terminal.
_WORDS = re.compile(r"[A-Za-z0-9_,]*")
_KEY = ("op", "dtype", "gamma_dtype", "beta_dtype", "stats_dtype", "types", "layout", "outputs", "activation")
#: Fields that the library and its tuner give a meaning, besides the key's; others are somebody else's, and kept.
FACTS = (
    "strategy", "tile", "source", "kernel", "time_us", "q25_us", "q75_us", "samples", "default_us", "predicted_us",
    "gigabytes_per_s", "roofline", "trials", "runner_up", "default", "verified",
)  # fmt: skip


def shown(value: object, most: int = 80) -> str:
    """What a file says, for people: cut short, and without anything that steers a terminal."""
    text = value if isinstance(value, str) else repr(value)
    return ascii(text[:most])[1:-1] + ("..." if len(text) > most else "")


def _quoted(value: object) -> str:
    """The same with the quotes of a text."""
    return f"'{shown(value)}'" if isinstance(value, str) else shown(value)


def microseconds(value: object) -> float | None:
    """A time of a file: None if it is none, or no time at all."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < MOST_MICROSECONDS:
        return None
    return float(value)


@dataclass(frozen=True)
class Entry:
    """A tuned problem.

    Attributes
    ----------
    problem : Problem
        In its canonical form: the key.
    tile : Tile
    source : {"measured", "model"}
    kernel : str
        Digest of the text that was tuned, see `cunorm.jit.sources.kernel_digest`.
    facts : mapping
        The other fields: times in microseconds, what else the file had.
    """

    problem: Problem
    tile: Tile
    source: str
    kernel: str
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def microseconds(self) -> float | None:
        """The time that was measured, or predicted; None if the file does not say."""
        return microseconds(self.facts.get("time_us" if self.source == MEASURED else "predicted_us"))


def sizes_of(op: str) -> Mapping[str, str]:
    """The sizes of an op's entries: name in the file -> name in the problem; none for an op of another version."""
    return OPS[op].sizes if op in OPS else {}


def is_unknown(raw: Any) -> bool:
    """Whether an entry is of an op of another version, which is nobody's fault."""
    op = raw.get("op") if isinstance(raw, dict) else None
    return isinstance(op, str) and _WORDS.fullmatch(op) is not None and op not in OPS


# ---- where an entry is found ----------------------------------------------------------------------------------------


def place_of(problem: Problem) -> tuple[Kind, Sizes]:
    """What the entries of a problem are found by: all of it but the dtypes of parameters and statistics."""
    kind = (problem.op, problem.dtype, problem.layout, problem.outputs, problem.activation)
    return kind, (problem.N, problem.C, problem.HxW, problem.group)


@functools.lru_cache(maxsize=1024)
def _outputs(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


@functools.lru_cache(maxsize=256)
def _columns(spec: OpSpec) -> tuple[str | None, ...]:
    """Where an entry of the op has N, C, HxW and group."""
    names = {attribute: name for name, attribute in spec.sizes.items()}
    if spec.channelwise:
        names["group"] = names["C"]
    return tuple(names.get(attribute) for attribute in ("N", "C", "HxW", "group"))


def raw_place(raw: Any) -> tuple[Kind, Sizes]:
    """The same of an entry of a file, as cheaply as it can be had: nothing else of the entry is looked at.

    Raises
    ------
    TypeError, ValueError, KeyError
        If it cannot be had; `entry_of` says why.
    """
    op, dtype, layout, activation = raw["op"], raw["dtype"], raw.get("layout", LAYOUTS[0]), raw.get("activation")
    if type(dtype) is not str or type(layout) is not str or type(activation) not in (str, type(None)):
        raise TypeError
    N, C, HxW, group = (1 if name is None else raw[name] for name in _columns(OPS[op]))
    for size in (N, C, HxW, group):
        if type(size) is not int or not 1 <= size <= LARGEST:
            raise ValueError
    if C % group:
        raise ValueError
    if layout == LAYOUTS[1] and (HxW == 1 or C == 1):  # as Problem.canonical
        layout = LAYOUTS[0]
    return (op, dtype, layout, _outputs(raw["outputs"]), activation), (N, C, HxW, group)


# ---- reading and writing one ----------------------------------------------------------------------------------------


def _text(raw: Mapping[str, Any], name: str, allowed: Iterable[str] | None = None) -> str:
    value = raw.get(name)
    if not isinstance(value, str) or (allowed is not None and value not in allowed):
        expected = "" if allowed is None else f", expected one of {', '.join(allowed)}"
        raise ValueError(f"{name} is {_quoted(value)}{expected}")
    if not _WORDS.fullmatch(value):
        raise ValueError(f"{name} is {_quoted(value)}, expected letters, digits and commas")
    return value


def problem_of(raw: Mapping[str, Any]) -> Problem:
    """The problem that the key of an entry names; ValueError says what is wrong with it."""
    op, dtype = _text(raw, "op"), _text(raw, "dtype", ITEMSIZE)
    if not sizes_of(op):
        raise ValueError(f"op is {_quoted(op)}, which this version does not know; it knows {', '.join(OPS)}")
    found: dict[str, Any] = {"N": 1, "C": 1, "HxW": 1, "group": 1}
    for name, attribute in sizes_of(op).items():
        value = raw.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LARGEST:
            raise ValueError(f"{name} is {shown(value, 40)}, expected a whole number from 1 to 2^60")
        found[attribute] = value
    if OPS[op].channelwise:
        found["group"] = found["C"]
    if found["C"] % found["group"]:
        raise ValueError(f"group is {found['group']}, expected a divisor of C, which is {found['C']}")
    layout = _text(raw, "layout", LAYOUTS) if "layout" in raw else LAYOUTS[0]
    gamma, beta = (_text(raw, name, ITEMSIZE) if name in raw else None for name in ("gamma_dtype", "beta_dtype"))
    stats = _text(raw, "stats_dtype", ITEMSIZE) if "stats_dtype" in raw else accumulator(dtype)
    types = raw.get("types", {})
    if not isinstance(types, dict) or not all(
        _WORDS.fullmatch(name) and value in (*ITEMSIZE, *COUNTS) for name, value in types.items()
    ):
        raise ValueError(f"types is {_quoted(types)}, expected names of dtypes by names of arrays")
    others = tuple((f"{name}_t", value) for name, value in types.items())
    activation = _text(raw, "activation", ACTIVATIONS) if "activation" in raw else None
    if activation is not None and not OPS[op].activations:
        raise ValueError(f"activation is {_quoted(activation)}, which {op} does not have")
    outputs = _outputs(_text(raw, "outputs"))
    facts: dict[str, Any] = {"outputs": outputs, "others": others, "activation": activation}
    return Problem(
        op=op, dtype=dtype, gamma_dtype=gamma, beta_dtype=beta, stats_dtype=stats, layout=layout, **found, **facts
    ).canonical()


def key_of(problem: Problem) -> dict[str, Any]:
    """The fields that name a problem, as `problem_of` reads them."""
    key: dict[str, Any] = {"op": problem.op, "dtype": problem.dtype}
    key |= {name: value for name in ("gamma_dtype", "beta_dtype") if (value := getattr(problem, name)) is not None}
    if problem.stats_dtype != accumulator(problem.dtype):
        key["stats_dtype"] = problem.stats_dtype
    if problem.others:
        key["types"] = {name.removesuffix("_t"): dtype for name, dtype in problem.others}
    if len(problem.spec.layouts) > 1:
        key["layout"] = problem.layout
    key["outputs"] = ",".join(problem.outputs)
    if problem.activation is not None:
        key["activation"] = problem.activation
    return key | {name: getattr(problem, attribute) for name, attribute in sizes_of(problem.op).items()}


def entry_of(raw: Any) -> Entry:
    """An entry of a file; ValueError says what is wrong with it."""
    if not isinstance(raw, dict):
        raise ValueError(f"a {type(raw).__name__}, expected an object")
    problem = problem_of(raw)
    tile = raw.get("tile")
    if not isinstance(tile, dict) or not all(map(_WORDS.fullmatch, tile)):
        raise ValueError(f"tile is {_quoted(tile)}, expected an object of fields and numbers")
    source, kernel = _text(raw, "source", (MEASURED, MODEL)), _text(raw, "kernel")
    named = {*_KEY, *sizes_of(problem.op), "strategy", "tile", "source", "kernel"}
    facts = {name: value for name, value in raw.items() if name not in named}
    return Entry(problem, Tile(_text(raw, "strategy"), **tile), source, kernel, facts)


def raw_of(entry: Entry) -> dict[str, Any]:
    """The line of an entry."""
    chosen = {"strategy": entry.tile.strategy, "tile": entry.tile.as_dict(), "source": entry.source}
    return key_of(entry.problem) | chosen | {"kernel": entry.kernel} | dict(entry.facts)


def order_of(entry: Entry) -> tuple[Any, ...]:
    """What a file's entries are sorted by: op, dtype, layout, sizes, then what else is in the key."""
    one = entry.problem
    sizes = (one.N, one.C, one.HxW, one.group)
    dtypes = [one.gamma_dtype or "", one.beta_dtype or "", one.stats_dtype]
    return one.op, one.dtype, one.layout, sizes, dtypes, one.outputs, one.others, one.activation or ""


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
