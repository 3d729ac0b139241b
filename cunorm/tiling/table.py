"""The tiling table, which stores the tuned tile of each problem: its file format, reading, merging and writing.

A table is a JSON file for one device. Each entry is one line, and the lines are sorted, which keeps diffs readable::

    {"schema": "cunorm-tiling/1",
     "device": {"name": "NVIDIA H200", "compute_capability": "9.0", "multiprocessors": 132, ...},
     "software": {"cunorm": "0.1.0", ...},
     "entries": [
      {"op": "group_norm_backward", "dtype": "bfloat16", "gamma_dtype": "bfloat16", "layout": "NCHW",
       "outputs": "dx,dgamma,dbeta", "N": 2, "C": 320, "HxW": 4096, "group": 32, "strategy": "split",
       "tile": {"chunk": 1024, "threads": 512}, "source": "measured", "kernel": "9f2c1a7be01d4c33", "time_us": ...},
      ...]}

The sizes have the names in the op's `OpSpec.sizes`: LayerNorm has rows and length. The key of an entry contains
everything that selects code. ``gamma_dtype``, ``beta_dtype``, ``types``, ``activation`` and ``extras`` are stored if
the problem has them, ``layout`` if the op has several, and ``stats_dtype`` if it is not the accumulator's dtype.
``source`` is "measured" (on that device), "simulated" (the machine code ran on a simulated clock) or "model" (predicted
by the cost model). ``text`` says which of the kernels' texts was measured or simulated, "generic" or "specialised"; in
tables of older versions it is absent, which means "generic". When a table is rewritten, fields that this version does
not know and entries that it cannot read are kept.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from cunorm.core.devices import Device
from cunorm.core.errors import TableError
from cunorm.core.opspec import OPS, OpSpec
from cunorm.core.problem import ACTIVATIONS, ITEMSIZE, LAYOUTS, MOST_ELEMENTS, Problem, accumulator
from cunorm.core.strategy import Tile
from cunorm.jit.sources import TEXTS, Text

from . import table_file

#: The part of a problem without its sizes and the dtypes of parameters and statistics.
Kind = tuple[str, str, str, tuple[str, ...], str | None, tuple[str, ...], tuple[tuple[str, str], ...]]
#: N, C, HxW and group.
Sizes = tuple[int, int, int, int]

MEASURED, SIMULATED, MODEL = "measured", "simulated", "model"
#: The sources of entries, the best evidence first, each with the field that contains its time.
SOURCES = {MEASURED: "time_us", SIMULATED: "simulated_us", MODEL: "predicted_us"}
#: The words for users of each source.
WORDS = {MEASURED: "measured", SIMULATED: "simulated, not measured", MODEL: "modelled, not measured"}
MOST_MICROSECONDS = 1e15
COUNTS = ("int32", "int64")  # integer dtypes
#: The legal characters of names in a file. Names are printed, so they must not contain terminal escape sequences.
_WORDS = re.compile(r"[A-Za-z0-9_,]*")
_KEY = ("op", "dtype", "gamma_dtype", "beta_dtype", "stats_dtype", "types", "layout", "outputs", "activation", "extras")
#: Fields besides the key's that the library and its tuner define. Other fields are foreign and are kept.
FACTS = (
    "strategy", "tile", "source", "kernel", "time_us", "q25_us", "q75_us", "samples", "default_us", "simulated_us",
    "predicted_us", "gigabytes_per_s", "roofline", "trials", "runner_up", "default", "verified", "text",
)  # fmt: skip


def shown(value: object, most: int = 80) -> str:
    """A value from a file as printable ASCII text of limited length, without terminal escape sequences."""
    text = value if isinstance(value, str) else repr(value)
    return ascii(text[:most])[1:-1] + ("..." if len(text) > most else "")


def quoted(value: object, most: int = 80) -> str:
    """See `shown`; a str is put in quotes."""
    return f"'{shown(value, most)}'" if isinstance(value, str) else shown(value, most)


def microseconds(value: object) -> float | None:
    """A time from a file; None if it is absent or not a valid time."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < MOST_MICROSECONDS:
        return None
    return float(value)


@dataclass(frozen=True)
class Entry:
    """A tuned problem.

    Attributes
    ----------
    problem : Problem
        The key, in its canonical form.
    tile : Tile
    source : {"measured", "simulated", "model"}
    kernel : str
        Digest of the kernels that were tuned, see `cunorm.jit.sources.kernel_digest`.
    facts : mapping
        The other fields of the entry, such as times in microseconds.
    """

    problem: Problem
    tile: Tile
    source: str
    kernel: str
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def microseconds(self) -> float | None:
        """The measured, simulated or predicted time; None if the entry has none."""
        return microseconds(self.facts.get(SOURCES[self.source]))

    @property
    def rank(self) -> int:
        """The rank of the source: 0 for the best evidence, see `SOURCES`."""
        return rank_of(self.source)

    @property
    def text(self) -> Text | None:
        """Which of the kernels' texts was measured or simulated; None if neither was."""
        found: Text = self.facts.get("text", "generic")
        return None if self.source == MODEL else found


def rank_of(source: str) -> int:
    """The rank of a source: 0 for the best evidence, see `SOURCES`."""
    return list(SOURCES).index(source)


def sizes_of(op: str) -> Mapping[str, str]:
    """The sizes of an op's entries: name in the file -> field of `Problem`; empty for an unknown op."""
    return OPS[op].sizes if op in OPS else {}


def is_unknown(raw: Any) -> bool:
    """Whether an entry is for an op that only another version has. That is not a fault of the table."""
    op = raw.get("op") if isinstance(raw, dict) else None
    return isinstance(op, str) and _WORDS.fullmatch(op) is not None and op not in OPS


# ---- look-up keys of entries ----------------------------------------------------------------------------------------


def place_of(problem: Problem) -> tuple[Kind, Sizes]:
    """The look-up key of a problem's entries: everything except the dtypes of parameters and statistics."""
    tensors = tuple(one for one in problem.others if one[0] in problem.spec.tensor_types)
    kind = (problem.op, problem.dtype, problem.layout, problem.outputs, problem.activation, problem.extras, tensors)
    return kind, (problem.N, problem.C, problem.HxW, problem.group)


@functools.lru_cache(maxsize=1024)
def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


@functools.lru_cache(maxsize=256)
def _columns(spec: OpSpec) -> tuple[str | None, ...]:
    """The names of the fields that contain N, C, HxW and group in an entry of the op; None: the size is 1."""
    names = {attribute: name for name, attribute in spec.sizes.items()}
    if spec.one_channel_per_group:
        names["group"] = names["C"]
    return tuple(names.get(attribute) for attribute in ("N", "C", "HxW", "group"))


def raw_place(raw: Any) -> tuple[Kind, Sizes]:
    """The look-up key of an entry of a file. To be fast, no other field of the entry is checked.

    Raises
    ------
    TypeError, ValueError, KeyError
        If the entry has no valid key; the message of `entry_of` says why.
    """
    op, dtype, layout, activation = raw["op"], raw["dtype"], raw.get("layout", LAYOUTS[0]), raw.get("activation")
    extras = raw.get("extras", "")
    if {type(dtype), type(layout), type(extras)} != {str} or type(activation) not in (str, type(None)):
        raise TypeError
    N, C, HxW, group = (1 if name is None else raw[name] for name in _columns(OPS[op]))
    for size in (N, C, HxW, group):
        if type(size) is not int or not 1 <= size <= MOST_ELEMENTS:
            raise ValueError
    if C % group:
        raise ValueError
    if layout == LAYOUTS[1] and (HxW == 1 or C == 1):  # see Problem.canonical
        layout = LAYOUTS[0]
    types = raw.get("types", {})
    tensors = [(name, types[name[:-2]]) for name in OPS[op].tensor_types if name[:-2] in types]
    if any(type(named) is not str for _, named in tensors):
        raise TypeError
    return (op, dtype, layout, _names(raw["outputs"]), activation, _names(extras), tuple(tensors)), (N, C, HxW, group)


# ---- reading and writing an entry -----------------------------------------------------------------------------------


def _text(raw: Mapping[str, Any], name: str, allowed: Iterable[str] | None = None) -> str:
    value = raw.get(name)
    if not isinstance(value, str) or (allowed is not None and value not in allowed):
        expected = "" if allowed is None else f", expected one of {', '.join(allowed)}"
        raise ValueError(f"{name} is {quoted(value)}{expected}")
    if not _WORDS.fullmatch(value):
        raise ValueError(f"{name} is {quoted(value)}, expected letters, digits and commas")
    return value


def problem_of(raw: Mapping[str, Any]) -> Problem:
    """The problem of an entry's key (ValueError if the key is wrong)."""
    op, dtype = _text(raw, "op"), _text(raw, "dtype", ITEMSIZE)
    if not sizes_of(op):
        raise ValueError(f"op is {quoted(op)}, which this version does not know; expected one of {', '.join(OPS)}")
    found: dict[str, Any] = {"N": 1, "C": 1, "HxW": 1, "group": 1}
    for name, attribute in sizes_of(op).items():
        value = raw.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_ELEMENTS:
            raise ValueError(f"{name} is {quoted(value, 40)}, expected a whole number from 1 to 2^60")
        found[attribute] = value
    if OPS[op].one_channel_per_group:
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
        raise ValueError(f"types is {quoted(types)}, expected an object from names of arrays to names of dtypes")
    others = tuple((f"{name}_t", value) for name, value in types.items())
    activation = _text(raw, "activation", ACTIVATIONS) if "activation" in raw else None
    if activation is not None and not OPS[op].activations:
        raise ValueError(f"activation is {quoted(activation)}, which {op} does not have")
    extras = _names(_text(raw, "extras")) if "extras" in raw else ()
    if extras != tuple(name for name in OPS[op].extras if name in extras):
        known = ",".join(OPS[op].extras) or "none"
        raise ValueError(f"extras is {quoted(raw['extras'])}, expected some of {known} for {op}")
    outputs = _names(_text(raw, "outputs"))
    facts: dict[str, Any] = {"outputs": outputs, "others": others, "activation": activation, "extras": extras}
    return Problem(
        op=op, dtype=dtype, gamma_dtype=gamma, beta_dtype=beta, stats_dtype=stats, layout=layout, **found, **facts
    ).canonical()


def key_of(problem: Problem) -> dict[str, Any]:
    """The key of a problem's entry: the fields that `problem_of` reads."""
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
    if problem.extras:
        key["extras"] = ",".join(problem.extras)
    return key | {name: getattr(problem, attribute) for name, attribute in sizes_of(problem.op).items()}


def entry_of(raw: Any) -> Entry:
    """The entry that a JSON object of a file contains (ValueError if it is wrong)."""
    if not isinstance(raw, dict):
        raise ValueError(f"a {type(raw).__name__}, expected an object")
    problem = problem_of(raw)
    tile = raw.get("tile")
    if not isinstance(tile, dict) or not all(map(_WORDS.fullmatch, tile)):
        raise ValueError(f"tile is {quoted(tile)}, expected an object with the fields of the tile")
    source, kernel = _text(raw, "source", SOURCES), _text(raw, "kernel")
    if "text" in raw:
        _text(raw, "text", TEXTS)
    named = {*_KEY, *sizes_of(problem.op), "strategy", "tile", "source", "kernel"}
    facts = {name: value for name, value in raw.items() if name not in named}
    return Entry(problem, Tile(_text(raw, "strategy"), **tile), source, kernel, facts)


def raw_of(entry: Entry) -> dict[str, Any]:
    """The JSON object of an entry."""
    chosen = {"strategy": entry.tile.strategy, "tile": entry.tile.as_dict(), "source": entry.source}
    return key_of(entry.problem) | chosen | {"kernel": entry.kernel} | dict(entry.facts)


def order_of(entry: Entry) -> tuple[Any, ...]:
    """The sort key of the entries in a file: op, dtype, layout, sizes, then the rest of the key."""
    one = entry.problem
    sizes = (one.N, one.C, one.HxW, one.group)
    dtypes = [one.gamma_dtype or "", one.beta_dtype or "", one.stats_dtype]
    return one.op, one.dtype, one.layout, sizes, dtypes, one.outputs, one.others, one.activation or "", one.extras


SCHEMA = "cunorm-tiling/1"


@dataclass
class Table:
    """The contents of a file.

    Attributes
    ----------
    device, software : dict
        The fields of that name in the file.
    entries : dict of Problem to Entry
    kept : list
        Unchanged entries that this version cannot read.
    faults : list of str
        Error messages for the faulty entries in ``kept``.
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
    """The field ``device`` of a table for that device."""
    return {
        "name": device.name,
        "compute_capability": "{}.{}".format(*device.compute_capability),
        "multiprocessors": device.multiprocessors,
        "l2_bytes": device.l2_bytes,
        "shared_memory_per_block": device.shared_memory_per_block,
    }


#: The facts that identify a device. A slice of a GPU (MIG) has fewer multiprocessors, so it is another device.
_IDENTITY = ("name", "compute_capability", "multiprocessors")


class _OfDevice(Protocol):
    """An object with the field ``device`` of a table."""

    @property
    def device(self) -> dict[str, Any]: ...


def for_device(table: _OfDevice, device: Device) -> bool:
    """Whether the table is for that device. Calls never use a table for another device."""
    facts = device_facts(device)
    return all(table.device.get(name) == facts[name] for name in _IDENTITY)


def slug(device: Device) -> str:
    """The file name of a device's table, without suffix: ``nvidia_h200_sm_90_132``."""
    words = "".join(letter if letter.isalnum() else " " for letter in device.name.lower()).split()
    return "_".join([*words, device.architecture, str(device.multiprocessors)])


# ---- files ----------------------------------------------------------------------------------------------------------


def load(path: str | Path) -> Table:
    """The table in a file with unchecked entries: all of them are in `Table.kept`.

    Raises
    ------
    OSError
        If the file cannot be read.
    TableError
        If the file is not a table, is too large, or has another schema; the text names the file.
    """
    path = Path(path)
    data = table_file.contents(path)
    try:
        raw = json.loads(data, parse_constant=lambda _: None)  # NaN and infinity are neither JSON nor valid times
    except (RecursionError, ValueError) as error:
        state = "empty" if not data.strip() else "not JSON, or cut short"
        raise TableError(f"{path}: {state}: {error}") from None
    if not isinstance(raw, dict) or not isinstance(raw.get("schema"), str):
        raise TableError(f'{path}: not a tiling table: it has no "schema"')
    if raw["schema"] != SCHEMA:
        raise TableError(f"{path}: schema '{shown(raw['schema'])}', expected {SCHEMA!r}; use the cunorm that wrote it")
    device, software, entries = (raw.get(name) for name in ("device", "software", "entries"))
    if not isinstance(device, dict) or not isinstance(entries, list):
        raise TableError(f'{path}: not a tiling table: expected an object "device" and a list "entries"')
    rest = {name: raw[name] for name in raw if name not in ("schema", "device", "software", "entries")}
    return Table(device, software if isinstance(software, dict) else {}, kept=entries, rest=rest)


def checked(loaded: Table) -> Table:
    """A table from `load` with every entry checked. Unreadable entries stay in `Table.kept`."""
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
            # A problem may occur twice, for example after a textual merge of two files.
            table.entries[entry.problem] = better(table.entries.get(entry.problem, entry), entry)
    return table


def read(path: str | Path) -> Table:
    """The table in a file, with its entries checked. For unreadable entries see `Table.kept` and `Table.faults`.

    Raises
    ------
    OSError, TableError
        See `load`.
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
    """The better of two entries of a problem: by the rank of the source, then fresh before stale, then the faster."""

    def order(entry: Entry) -> tuple[int, bool, float]:
        return entry.rank, stale(entry), entry.microseconds or float("inf")

    return other if order(other) < order(one) else one


def merged(tables: Iterable[Table], stale: Callable[[Entry], bool] = lambda _: False) -> Table:
    """Merge tables of one device into one table with the better entry of each problem, see `better`.

    Raises
    ------
    TableError
        If the tables are for different devices.
    """
    first, *others = tables
    found = Table(first.device, first.software, dict(first.entries), [*first.kept], [*first.faults], first.rest)
    for table in others:
        if any(table.device.get(name) != first.device.get(name) for name in _IDENTITY):
            names = " and ".join(shown(one.device.get("name")) for one in (first, table))
            raise TableError(f"tables of different devices: {names}; merge the tables of each device separately")
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
    """Merge the tables of some files into an output file, which may be one of them; see `merged`.

    Returns the table as it was written, and the number of entries in all the files.

    Raises
    ------
    OSError, TableError
        If a file cannot be read or written or is not a table (an existing output included), or if the tables are for
        different devices.
    """
    path = table_file.target(output)
    if not path.parent.is_dir():
        raise TableError(f"{output}: no folder {path.parent}")
    files = [*paths, *([path] if path.exists() else [])]
    merged(map(read, files), stale)  # raises its errors before anything is written
    with table_file.locked(path):  # files are read again: one may be the output, to which a tuner may write
        tables = [read(one) for one in paths]
        made = merged(tables, stale)
        table_file.write(path, _lines(made))
    return made, sum(len(table.entries) for table in tables)


def update(
    path: str | Path,
    device: Device,
    software: Mapping[str, Any],
    entries: Iterable[Entry],
    *,
    anew: Collection[str] = (),
) -> Table:
    """Add entries to the table in a file, which is created if missing; return the table as it was written.

    A new entry replaces the old one unless the source of the old one has a better rank: a measured entry is never
    replaced by a simulated one, nor either of them by a modelled one. Entries that other processes wrote in the
    meantime are kept, except those of the ops in ``anew``.

    Parameters
    ----------
    anew : collection of str
        Ops whose old entries are removed.

    Raises
    ------
    OSError
        If the file cannot be read or written.
    TableError
        If the file is not a table, is for another device, or is locked by another process. The file is not changed.
    """
    path = table_file.target(path)
    with table_file.locked(path):
        table = read(path) if path.exists() else Table(device_facts(device))
        if not for_device(table, device):
            raise TableError(f"{path}: a table of {shown(table.device.get('name'))}, expected one of {device.name}")
        table.entries = {problem: entry for problem, entry in table.entries.items() if problem.op not in anew}
        for entry in entries:
            old = table.entries.get(entry.problem)
            if old is not None and old.rank < entry.rank:
                continue
            foreign = {} if old is None else {name: old.facts[name] for name in old.facts if name not in FACTS}
            facts = {**foreign, **entry.facts}
            table.entries[entry.problem] = Entry(entry.problem, entry.tile, entry.source, entry.kernel, facts)
        table.software = {**table.software, **software}
        table_file.write(path, _lines(table))
    return table
