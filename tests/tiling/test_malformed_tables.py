"""Malformed tables: huge files, damaged contents, killed writers and terminal escape sequences."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cunorm
from cunorm import TableError, TableWarning
from cunorm.cli import tables
from cunorm.cli.main import main
from cunorm.core.devices import KNOWN
from cunorm.core.problem import Problem
from cunorm.tiling import choose_tile, table, table_file, table_index
from cunorm.tiling.table import Entry, entry_of, place_of, raw_of, raw_place
from tests.support.paths import ROOT
from tests.tiling.test_choose_tile import OP, PROBLEM, STRATEGIES, TUNED, entry, plan
from tests.tiling.test_table import every_problem

H200 = KNOWN["H200"]
ESCAPE = "\x1b[2J\x1b]0;owned\x07\u202e\nsecond line"


def head(**change: Any) -> dict[str, Any]:
    return {"schema": table.SCHEMA, "device": table.device_facts(H200), "entries": [], **change}


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that CUNORM_TILING_TABLE names. It does not exist yet."""
    path = tmp_path / "named.json"
    monkeypatch.setenv("CUNORM_TILING_TABLE", str(path))
    return path


def said(path: Path, data: bytes, problem: Problem = PROBLEM) -> list[str]:
    """The warnings of look-ups in a file with these contents."""
    path.unlink(missing_ok=True)
    path.write_bytes(data)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for one in (problem, replace(problem, N=3), replace(problem, gamma_dtype=None)):
            choose_tile.exact(one, STRATEGIES, H200)
            choose_tile.nearest(one, STRATEGIES, H200)
    assert all(one.category is TableWarning for one in caught), [str(one.message) for one in caught]
    return [str(one.message) for one in caught]


# ---- large ----------------------------------------------------------------------------------------------------------


def test_a_call_checks_few_entries_of_a_large_table(named: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = raw_of(entry())
    many = [base | {"N": 1 + number % 50, "HxW": 1 + number // 50} for number in range(5000)]
    named.write_text(json.dumps(head(entries=many)))
    looks: list[Any] = []
    monkeypatch.setattr(table_index, "entry_of", lambda raw: (looks.append(raw), entry_of(raw))[1])
    assert plan(shape=(7, 320, 3, 3)).tile == TUNED
    assert len(looks) == 1
    found = choose_tile.nearest(replace(PROBLEM, N=70, HxW=99), STRATEGIES, H200)
    assert found is not None
    assert (found.entry.problem.N, found.entry.problem.HxW) == (50, 99)
    assert len(looks) <= 10


@pytest.mark.long
def test_a_table_of_100000_entries(named: Path) -> None:
    """To check every entry at the first call took 12 s; to read the file takes 1 s."""
    line = json.dumps(raw_of(entry(time_us=12.5, q25_us=12.25, samples=23)))
    many = [line.replace('"N": 2', f'"N": {1 + number}') for number in range(100_000)]
    text = json.dumps(head(entries=["here"])).replace('"here"', ",\n".join(many))
    named.write_text(text)
    began = time.process_time()
    json.loads(text)
    parsed = time.process_time() - began
    began = time.process_time()
    assert plan(shape=(77_777, 320, 64, 64)).tile == TUNED
    assert time.process_time() - began < 4 * parsed + 1


def test_a_file_above_the_maximum_size_is_not_read(named: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with named.open("wb") as file:
        file.truncate(100 << 20)
    monkeypatch.setattr(json, "loads", lambda *a, **b: pytest.fail("parsed"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for N in (2, 3, 5):
            assert plan(shape=(N, 320, 64, 64)).reason.startswith("the cost model")
    assert [str(one.message) for one in caught] == [f"{named}: 100 MiB, expected at most 64; calls go on without it"]


def test_a_table_above_the_maximum_size_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.json"
    table.update(path, H200, {}, [entry()])
    before = path.read_bytes()
    monkeypatch.setattr(table_file, "MOST_BYTES", len(before) + 10)
    with pytest.raises(TableError, match=f"^{path}: would be"):
        table.update(path, H200, {}, [entry(replace(PROBLEM, N=9))])
    assert path.read_bytes() == before


def test_an_entry_has_the_look_up_key_of_its_problem() -> None:
    """`raw_place`, which is fast and checks little, returns the same key as `place_of` the checked problem."""
    for problem in every_problem():
        raw = raw_of(Entry(problem.canonical(), TUNED, "model", "x"))
        assert raw_place(raw) == place_of(table.problem_of(raw))
        assert raw_place(raw | {"layout": "NHWC"}) == place_of(table.problem_of(raw | {"layout": "NHWC"}))
        assert raw_place(raw | {"outputs": f",{raw['outputs']},"}) == raw_place(raw)


# ---- broken ---------------------------------------------------------------------------------------------------------

VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1.5, 2**63, 10**400, "", "x", ESCAPE, "\ud800", [], [[]], {}, {"a": {}}, "1", [1], -0.0,
    "NHWC", "bfloat16", 1e308, "a" * 1000,
)  # fmt: skip


def mutated(raw: Any, random: np.random.Generator) -> Any:
    """A copy of a JSON value in which one value is replaced, or one field is removed or added."""
    if isinstance(raw, dict) and raw and random.random() < 0.9:
        name = list(raw)[random.integers(len(raw))]
        kind = random.random()
        if kind < 0.1:
            return {key: value for key, value in raw.items() if key != name}
        if kind < 0.2:
            return raw | {str(VALUES[random.integers(len(VALUES))]): VALUES[random.integers(len(VALUES))]}
        return raw | {name: mutated(raw[name], random)}
    if isinstance(raw, list) and raw and random.random() < 0.9:
        number = int(random.integers(len(raw)))
        return [*raw[:number], mutated(raw[number], random), *raw[number + 1 :]]
    return VALUES[random.integers(len(VALUES))]


def torn(data: bytes, random: np.random.Generator) -> bytes:
    """A copy of the bytes in which a few are changed, removed or doubled, or that is cut short."""
    first, last = sorted(random.integers(0, len(data), 2))
    last = min(last, first + 30)
    kind = random.integers(4)
    if kind == 0:
        return data[:first] + data[last:]
    if kind == 1:
        return data[:last] + data[first:]
    if kind == 2:
        return data[:first] + random.bytes(last - first) + data[last:]
    return data[:first]


@pytest.mark.parametrize("name", [*raw_of(entry()), "beta_dtype", "stats_dtype", "types", "activation", "anything"])
def test_every_field_with_every_bad_value(name: str, named: Path) -> None:
    """There is at most one warning, and other entries are still found. An unreadable entry that matches causes one.

    If op, dtype, layout, outputs or activation is another text, no look-up matches the entry: no warning is needed.
    """
    other = replace(PROBLEM, N=9)
    for value in VALUES:
        raw = raw_of(entry()) | {name: value}
        found = said(named, json.dumps(head(entries=[raw, raw_of(entry(other))])).encode())
        assert len(found) <= 1, (value, found)
        assert all(text.isascii() and text.isprintable() for text in found)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TableWarning)
            beside = choose_tile.exact(other, STRATEGIES, H200)
            assert beside is not None
            assert beside.entry.problem == other
            tables.listing(H200)
        try:
            entry_of(raw)
        except (TypeError, ValueError):
            hidden = name in ("op", "dtype", "layout", "outputs", "activation") and isinstance(value, str)
            assert len(found) == 1 or hidden, (value, found)


def test_a_table_with_only_broken_entries_causes_one_warning(named: Path) -> None:
    """The broken fields are tiles, which do not affect the look-up key, and sizes, which are part of it."""
    asked = (PROBLEM, replace(PROBLEM, N=3), replace(PROBLEM, N=4))
    tiles = [raw_of(entry(one)) | {"tile": [number]} for number, one in enumerate(asked)]
    sizes = [raw_of(entry(one)) | {"N": [number]} for number, one in enumerate(asked)]
    for entries in (tiles, sizes, [*tiles, *sizes], [*sizes, *tiles]):
        (text,) = said(named, json.dumps(head(entries=entries)).encode())
        assert text.startswith(f"{named}: entry ")


@pytest.mark.parametrize("count", [150, pytest.param(2000, marks=pytest.mark.long)])
def test_randomly_damaged_tables_cause_at_most_one_warning(count: int, named: Path, capsys: Any) -> None:
    """No contents raise an exception. There is at most one warning, in printable ASCII, and the table can be listed."""
    problems = [PROBLEM, replace(PROBLEM, N=8), replace(PROBLEM, HxW=1024)]
    good = head(entries=[raw_of(entry(one)) for one in problems], software={"cunorm": "0"})
    random = np.random.default_rng(11)
    warned = 0
    for number in range(count):
        changed = mutated(good, random) if number % 3 else good
        data = json.dumps(changed).encode()
        found = said(named, data if number % 3 else torn(data, random))
        assert len(found) <= 1, (number, found)
        assert all(text.isascii() and text.isprintable() for text in found), (number, found)
        warned += len(found)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TableWarning)
            text = tables.listing(H200)
        assert all(line.isprintable() for line in text.splitlines()), (number, text)
        assert "\x1b" not in text
    assert warned > count / 4
    assert not said(named, json.dumps(good).encode())


def test_an_accepted_mutated_entry_has_the_look_up_key_of_its_problem() -> None:
    """If `entry_of` accepts an entry, then `raw_place` does, and returns the same look-up key."""
    random, taken = np.random.default_rng(3), 0
    problems = list(every_problem())
    for _ in range(3000):
        problem = problems[random.integers(len(problems))].canonical()
        raw = mutated(raw_of(Entry(problem, TUNED, "model", "x")), random)
        try:
            found = entry_of(raw)
        except (TypeError, ValueError):
            continue
        taken += 1
        assert raw_place(raw) == place_of(found.problem)
    assert taken > 300


# ---- terminal output ------------------------------------------------------------------------------------------------


def test_texts_of_a_table_are_printed_without_escape_sequences(named: Path, capsys: Any, tmp_path: Path) -> None:
    """Commands print control characters in device names, faults and schemas as printable text."""
    facts = table.device_facts(H200) | {"name": ESCAPE}
    evil, other, kept = tmp_path / "evil.json", tmp_path / "other.json", tmp_path / "kept.json"
    bad = [
        raw_of(entry()) | change
        for change in ({"dtype": ESCAPE}, {"N": ESCAPE}, {"tile": {ESCAPE: 1}}, {"types": ESCAPE})
    ]
    evil.write_text(json.dumps(head(device=facts, entries=[])))
    other.write_text(json.dumps(head(entries=[])))
    kept.write_text(json.dumps(head(device=facts, entries=[*bad, raw_of(entry()) | {"kernel": ESCAPE}])))
    named.write_text(json.dumps(head(schema=ESCAPE)))
    commands = [
        ["merge", str(evil), str(evil), "-o", str(tmp_path / "out.json")],
        ["merge", str(evil), str(other), "-o", str(tmp_path / "out.json")],
        ["merge", str(kept), "-o", str(tmp_path / "out2.json")],
        ["merge", str(named), "-o", str(tmp_path / "out3.json")],
        ["tune", OP, "--shape", "2,8,9,2", "--table", str(evil)],
        ["tune", OP, "--shape", "2,8,9,2", "--table", str(named)],
        ["show", "--device", "H200"],
        ["show", "--device", "H200", "--table", str(evil)],
        ["show", "--device", "H200", "--table", str(kept), "--json"],
    ]
    for command in commands:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            main(command)
        out, err = capsys.readouterr()
        text = "\n".join([out, err, *(str(one.message) for one in caught)])
        assert text.strip(), command
        assert all(line.isprintable() for line in text.split("\n")), (command, text)
        assert not any(line.startswith("second line") for line in text.split("\n")), (command, text)
    with pytest.raises(TableError) as raised:
        table.update(evil, H200, {}, [])
    assert str(raised.value).isprintable()


# ---- writers --------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_fifty_killed_writers_leave_a_complete_table(tmp_path: Path) -> None:
    """Fifty writers are killed by SIGKILL at random moments. Each time the table is complete and has lost no entry."""
    path = tmp_path / "t.json"
    table.update(path, H200, {}, [entry(replace(PROBLEM, N=N)) for N in range(1, 100)])
    script = (
        "import sys, itertools; sys.path.insert(0, sys.argv[2])\n"
        "from tests.tiling.test_table import _put\nprint('ready', flush=True)\n"
        "for first in itertools.count(int(sys.argv[3]), 5): _put(sys.argv[1], first, 5)\n"
    )
    random, known = np.random.default_rng(9), 0
    for attempt in range(50):
        command = [sys.executable, "-c", script, str(path), str(ROOT), str(1000 * (attempt + 1))]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            time.sleep(random.random() * 0.3)
            os.kill(writer.pid, signal.SIGKILL)
        found = table.read(path)
        assert found.faults == []
        assert len(found.entries) >= max(99, known)
        known = len(found.entries)
    assert known > 99
    table.update(path, H200, {}, [])
    assert {one.name for one in tmp_path.iterdir()} == {"t.json", "t.json.lock"}


def test_a_lock_file_that_is_a_link_is_refused(tmp_path: Path) -> None:
    """Another user may point the link at a file of this user. Old versions of filelock emptied that file."""
    path, victim = tmp_path / "t.json", tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "t.json.lock").symlink_to(victim)
    with pytest.raises(TableError, match=r"t\.json\.lock is a link, expected a regular lock file; delete it"):
        table.update(path, H200, {}, [entry()])
    assert victim.read_text() == "precious"
    assert not path.exists()


def test_the_installed_filelock_follows_no_link(tmp_path: Path) -> None:
    """Not even a link that appears after cunorm has checked for one. pyproject.toml sets the minimum version."""
    import filelock

    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "lock").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"):
        filelock.FileLock(tmp_path / "lock", timeout=0.1).acquire()
    assert victim.read_text() == "precious"


def test_a_table_in_the_cache_that_others_can_write_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "user.json"
    monkeypatch.setattr(choose_tile, "user_table", lambda device: path)
    table.update(path, H200, {}, [entry()])
    assert plan().tile == TUNED
    path.chmod(0o666)
    os.utime(path, (1, 1))
    with pytest.warns(
        TableWarning, match=rf"^{path}: may be written by other users \(mode 0666\), expected a file .*; calls go on"
    ):
        assert plan().reason.startswith("the cost model")
    assert cunorm.TableWarning is TableWarning
