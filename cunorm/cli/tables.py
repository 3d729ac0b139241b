"""``cunorm show`` without a problem, which lists tiling tables, and ``cunorm merge``."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from typing import Any

from cunorm.core.devices import Device, known
from cunorm.core.errors import TableError, about_file
from cunorm.core.terminal import columns
from cunorm.ops.parse_problem import refuse_without_shape
from cunorm.ops.registry import is_legal, is_stale, place_named
from cunorm.tiling import choose_tile, table, table_file
from cunorm.tiling.table import WORDS, Entry, microseconds, order_of, raw_of, shown

TITLES = ("op", "dtype", "layout", "sizes", "outputs", "tile", "time us", "default us", "text", "state")


def _state(entry: Entry, device: Device) -> str:
    words = [WORDS[entry.source], *choose_tile.remarks(entry)]
    if not is_legal(entry, device):
        words.append("not legal on this device, never used")
    elif is_stale(entry):
        words.append(f"STALE: {choose_tile.CHANGED}")
    return "; ".join(words)


def _row(entry: Entry, device: Device) -> tuple[str, ...]:
    one, default = entry.problem, microseconds(entry.facts.get("default_us"))
    fields = ",".join(f"{name}={value}" for name, value in entry.tile.fields)
    return (
        one.op,
        one.dtype,
        one.layout if len(one.spec.layouts) > 1 else "",
        one.sizes_text + one.options_text,
        ",".join(one.outputs),
        f"{entry.tile.strategy} {fields}",
        "-" if entry.microseconds is None else f"{entry.microseconds:.1f}",
        "-" if default is None else f"{default:.1f}",
        entry.text or "-",
        _state(entry, device),
    )


def listing(device: Device) -> str:
    """Return a list of the entries in a device's tables, as text."""
    lines = [f"device     {device.name}"]
    for path, read in choose_tile.tables(device):
        entries = sorted(read.table.entries.values(), key=order_of)
        lines += ["", f"{path}: {len(entries)} entries"]
        if not entries:
            continue
        rows = [TITLES, *(_row(entry, device) for entry in entries)]
        lines += columns(rows, len(TITLES))
    for _, sentence in choose_tile.unreadable(device):
        lines += ["", f"{sentence}; the table is not used: delete it, or name another with CUNORM_TILING_TABLE"]
    if len(lines) == 1:
        looked = "\n  ".join(str(place.path) for place in choose_tile.places(device))
        lines += ["", f"no tiling table; looked for\n  {looked}\n`cunorm tune` writes one"]
    return "\n".join(lines)


def _document(device: Device) -> dict[str, Any]:
    found = []
    for path, read in choose_tile.tables(device):
        entries = [
            raw_of(entry) | {"text": entry.text, "stale": is_stale(entry), "legal": is_legal(entry, device)}
            for entry in sorted(read.table.entries.values(), key=order_of)
        ]
        found.append({"path": str(path), "entries": entries})
    unreadable = [sentence for _, sentence in choose_tile.unreadable(device)]
    return {"schema": "cunorm-tables/1", "device": device.name, "tables": found, "unreadable": unreadable}


def run(asked: argparse.Namespace) -> int:
    """Run ``cunorm show`` without a problem; return the exit code."""
    try:
        refuse_without_shape(asked, "dtype", "layout", "strategy", "tile", "traffic")
        device = place_named(None).device if asked.device is None else known(asked.device, "--device")
    except ValueError as error:
        print(f"cunorm show: {error}", file=sys.stderr)
        return 2
    print(json.dumps(_document(device), indent=1) if asked.json else listing(device))
    return 0


def _check_output(name: str) -> None:
    """Check that the output of a merge can be written (TableError). That its folder exists is checked later."""
    path = table_file.target(name)
    if path.parent.is_dir():
        try:
            table_file.check_writable(path)
        except TableError as error:
            raise TableError(f"-o: {error}") from None


def merge(asked: argparse.Namespace) -> int:
    """Run ``cunorm merge``; return the exit code."""
    try:
        _check_output(asked.output)
        made, count = table.merge_files(asked.tables, asked.output, is_stale)
    except (OSError, TableError) as error:
        print(f"cunorm merge: {about_file(error)}", file=sys.stderr)
        return 2
    for fault in made.faults:
        print(f"cunorm merge: kept unchanged: {fault}", file=sys.stderr)
    sources = Counter(entry.source for entry in made.entries.values())
    counts = ", ".join(f"{sources[source]} {words.partition(',')[0]}" for source, words in WORDS.items())
    both = count - len(made.entries)
    print(
        f"{asked.output}: {len(made.entries)} entries, {counts}, of {shown(made.device.get('name'))}; "
        f"{both} dropped for a better entry of the same problem"
    )
    return 0
