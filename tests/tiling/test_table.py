"""The tiling table: round trips of problems, malformed files, several writers, killed writers, merging."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cunorm.tuning.problems.workloads import problems

from cunorm import TableError, Tile
from cunorm.core.devices import KNOWN
from cunorm.core.problem import Problem
from cunorm.ops.registry import OPS, plan
from cunorm.tiling import table, table_file
from cunorm.tiling.table import MEASURED, MODEL, SIMULATED, Entry, entry_of, key_of, problem_of, raw_of
from tests.support.paths import ROOT

H200, A100 = KNOWN["H200"], KNOWN["A100"]
SUMS = ("dx", "dgamma", "dbeta")
PROBLEM = Problem(
    op="group_norm_backward",
    dtype="bfloat16",
    gamma_dtype="bfloat16",
    beta_dtype=None,
    stats_dtype="float32",
    layout="NCHW",
    N=2,
    C=320,
    HxW=4096,
    group=32,
    outputs=SUMS,
)
TILE = Tile("split", threads=128, chunk=1024)


def entry(problem: Problem = PROBLEM, tile: Tile = TILE, source: str = MEASURED, **facts: Any) -> Entry:
    return Entry(problem, tile, source, "0123456789abcdef", facts or {"time_us": 12.5})


def write(path: Path, *entries: Entry, device: Any = H200) -> Path:
    table.update(path, device, {"cunorm": "0"}, entries)
    return path


def every_problem() -> list[Problem]:
    """A problem of each op, dtype and layout, and problems with all optional fields of a key."""
    found = {}
    for dtype in ("bfloat16", "float32", "float64"):
        for _, one in problems(dtype):
            found.setdefault((one.op, one.dtype, one.layout), one)
    gather = plan("batch_norm_gather_stats", shape=(8, 96), dtype="float32", device="cpu").problem
    masked = replace(PROBLEM, outputs=("dbeta",))
    plain = replace(PROBLEM, gamma_dtype=None)
    own = replace(PROBLEM, stats_dtype="bfloat16")
    reduced = replace(found["batch_norm_backward_reduce", "bfloat16", "NHWC"], gamma_dtype=None)
    return [*found.values(), gather, masked, plain, own, reduced]


# ---- entries --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("problem", every_problem(), ids=lambda one: one.describe())
def test_the_key_of_a_problem_round_trips(problem: Problem) -> None:
    key = json.loads(json.dumps(key_of(problem)))
    assert problem_of(key) == problem
    made = entry(problem, Tile("anything", threads=32))
    assert entry_of(json.loads(json.dumps(raw_of(made)))) == made


def test_different_problems_have_different_keys() -> None:
    keys = [json.dumps(key_of(one), sort_keys=True) for one in every_problem()]
    assert len(set(keys)) == len(keys) == len(set(every_problem()))


def test_the_fields_of_a_table(tmp_path: Path) -> None:
    """The names of the fields are fixed, because other programs may read them."""
    raw = raw_of(entry())
    assert raw == {
        "op": "group_norm_backward", "dtype": "bfloat16", "gamma_dtype": "bfloat16", "layout": "NCHW",
        "outputs": "dx,dgamma,dbeta", "N": 2, "C": 320, "HxW": 4096, "group": 32, "strategy": "split",
        "tile": {"chunk": 1024, "threads": 128}, "source": "measured", "kernel": "0123456789abcdef", "time_us": 12.5,
    }  # fmt: skip
    rows = Problem(
        op="layer_norm",
        dtype="float32",
        gamma_dtype=None,
        beta_dtype=None,
        stats_dtype="float32",
        layout="NCHW",
        N=7,
        C=100,
        HxW=1,
        group=1,
        outputs=("y", "mean", "rstd"),
    )
    assert {"rows": 7, "length": 100}.items() <= raw_of(entry(rows)).items()
    assert not {"N", "C", "HxW", "group", "layout"} & raw_of(entry(rows)).keys()
    whole = json.loads(write(tmp_path / "t.json", entry()).read_text())
    assert whole["schema"] == "cunorm-tiling/1"
    assert whole["device"] == {
        "name": "NVIDIA H200", "compute_capability": "9.0", "multiprocessors": 132, "l2_bytes": 60 << 20,
        "shared_memory_per_block": 227 << 10,
    }  # fmt: skip


def test_entries_are_sorted_one_per_line(tmp_path: Path) -> None:
    many = [entry(replace(PROBLEM, N=N)) for N in (16, 2, 128, 1)]
    path = write(tmp_path / "t.json", *many)
    lines = [json.loads(line.strip().rstrip(",")) for line in path.read_text().splitlines() if '"op"' in line]
    assert [line["N"] for line in lines] == [1, 2, 16, 128]
    before = path.read_bytes()
    write(path, *many[::-1])
    assert path.read_bytes() == before


BROKEN_ENTRIES: dict[str, Any] = {
    "no object": [1, 2],
    "no tile": {"tile": None},
    "a tile of text": {"tile": {"threads": "256"}},
    "a tile of nothing": {"tile": {"threads": 0}},
    "a tile with a strategy in it": {"tile": {"strategy": 3}},
    "no size": {"N": None},
    "a size of text": {"HxW": "64x64"},
    "a negative size": {"C": -320},
    "a bool for a size": {"N": True},
    "groups that do not divide": {"group": 33},
    "an unknown dtype": {"dtype": "float8"},
    "an unknown layout": {"layout": "CHWN"},
    "an unknown source": {"source": "guessed"},
    "no kernel": {"kernel": None},
    "no strategy": {"strategy": None},
    "types that are none": {"types": ["float32"]},
    "an unknown text": {"text": "fast"},
    "a text that is none": {"text": None},
}


@pytest.mark.parametrize("name", BROKEN_ENTRIES)
def test_an_unreadable_entry_is_kept_and_reported(name: str, tmp_path: Path) -> None:
    good = raw_of(entry(replace(PROBLEM, N=3)))
    broken = BROKEN_ENTRIES[name]
    raw = broken if isinstance(broken, list) else raw_of(entry()) | broken
    path = tmp_path / "t.json"
    head = {"schema": table.SCHEMA, "device": table.device_facts(H200), "entries": [good, raw]}
    path.write_text(json.dumps(head))
    found = table.read(path)
    assert len(found.faults) == 1
    assert found.faults[0].startswith("entry 2: ")
    assert [one.N for one in found.entries] == [3]
    write(path, entry(replace(PROBLEM, N=5)))
    again = table.read(path)
    assert again.kept == [raw]
    assert sorted(one.N for one in again.entries) == [3, 5]


def test_an_entry_of_an_unknown_op_is_kept_without_a_fault(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    raw = {"op": "unit_norm", "rows": 7, "anything": {"a": [1]}}
    path.write_text(json.dumps({"schema": table.SCHEMA, "device": table.device_facts(H200), "entries": [raw]}))
    assert (table.read(path).faults, table.read(path).kept) == ([], [raw])
    write(path, entry())
    assert table.read(path).kept == [raw]


# ---- files ----------------------------------------------------------------------------------------------------------

FILES = {
    "empty": (b"", "empty"),
    "cut short": (b'{"schema": "cunorm-tiling/1", "device": {', "cut short"),
    "binary": (bytes(range(256)), "not JSON"),
    "a list": (b"[]", "not a tiling table"),
    "no schema": (b"{}", "not a tiling table"),
    "a newer schema": (b'{"schema": "cunorm-tiling/2", "device": {}, "entries": {}}', "cunorm-tiling/2"),
    "no device": (b'{"schema": "cunorm-tiling/1", "entries": []}', "not a tiling table"),
    "entries that are no list": (b'{"schema": "cunorm-tiling/1", "device": {}, "entries": {}}', "not a tiling table"),
    "deep": (b"[" * 100_000, "not JSON"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_not_a_table_is_refused(name: str, tmp_path: Path) -> None:
    """The message contains the path and the reason. A writer does not change the file."""
    data, words = FILES[name]
    path = tmp_path / "t.json"
    path.write_bytes(data)
    with pytest.raises(TableError, match=f"^{path}: .*{words}"):
        table.read(path)
    with pytest.raises(TableError, match=words):
        write(path, entry())
    assert path.read_bytes() == data


def test_a_table_of_another_device_is_not_written(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", entry())
    before = path.read_bytes()
    with pytest.raises(TableError, match="a table of NVIDIA H200, expected one of NVIDIA A100"):
        write(path, entry(), device=A100)
    with pytest.raises(TableError):
        write(path, entry(), device=replace(H200, multiprocessors=66))  # as a MIG slice of it
    assert path.read_bytes() == before


def test_unknown_fields_are_kept(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", entry(), entry(replace(PROBLEM, N=9)))
    raw = json.loads(path.read_text())
    raw["comment"], raw["device"]["serial"] = "mine", 7
    for one in raw["entries"]:
        one["note"] = {"N": one["N"]}
    path.write_text(json.dumps(raw))
    write(path, entry(tile=Tile("split", threads=256, chunk=64), time_us=9.0))
    again = json.loads(path.read_text())
    assert (again["comment"], again["device"]["serial"]) == ("mine", 7)
    assert [(one["N"], one["note"], one["time_us"]) for one in again["entries"]] == [
        (2, {"N": 2}, 9.0),
        (9, {"N": 9}, 12.5),
    ]


def test_a_new_measurement_removes_the_facts_of_the_old_one(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", entry(time_us=9.0, default=True, runner_up={"strategy": "x"}))
    write(path, entry(time_us=8.0))
    assert table.read(path).entries[PROBLEM].facts == {"time_us": 8.0}


def test_a_modelled_entry_never_replaces_a_measured_one(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", entry(source=MODEL, predicted_us=3.0))
    write(path, entry(time_us=12.0))
    assert table.read(path).entries[PROBLEM].source == MEASURED
    write(path, entry(source=MODEL, predicted_us=1.0))
    assert table.read(path).entries[PROBLEM].source == MEASURED
    write(path, entry(time_us=13.0))  # a new measurement replaces an old one, even a faster one
    assert table.read(path).entries[PROBLEM].microseconds == 13.0


@pytest.mark.parametrize("old", [MEASURED, SIMULATED, MODEL])
@pytest.mark.parametrize("new", [MEASURED, SIMULATED, MODEL])
def test_an_entry_is_replaced_only_by_one_with_as_good_evidence(old: str, new: str, tmp_path: Path) -> None:
    """The order is measured, simulated, modelled. The times do not matter."""
    order = [MEASURED, SIMULATED, MODEL]
    slow = entry(source=old, **{table.SOURCES[old]: 9.0})
    fast = entry(source=new, **{table.SOURCES[new]: 1.0})
    path = write(tmp_path / "t.json", slow)
    write(path, fast)
    replaced = order.index(new) <= order.index(old)
    assert table.read(path).entries[PROBLEM] == (fast if replaced else slow)
    best = fast if replaced else slow
    assert table.better(slow, fast) is table.better(fast, slow) is best


def test_the_text_of_an_entry(tmp_path: Path) -> None:
    """Absent in older tables, it means generic. A new entry without it does not keep the old one's."""
    assert entry_of(raw_of(entry())).text == "generic"
    made = entry(time_us=3.0, text="specialised")
    assert entry_of(json.loads(json.dumps(raw_of(made)))) == made
    assert made.text == "specialised"
    path = write(tmp_path / "t.json", made)
    assert table.read(path).entries[PROBLEM].text == "specialised"
    write(path, entry(time_us=4.0))
    assert table.read(path).entries[PROBLEM].text == "generic"
    with pytest.raises(ValueError, match=r"^text is 'fast', expected one of generic, specialised$"):
        entry_of(raw_of(entry(time_us=3.0, text="fast")))
    assert entry(source=MODEL, predicted_us=1.0).text is None


def test_a_rewrite_keeps_links_and_permissions(tmp_path: Path) -> None:
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    write(real, entry())
    real.chmod(0o640)
    link.symlink_to(real)
    write(link, entry(replace(PROBLEM, N=4)))
    assert link.is_symlink()
    assert len(table.read(real).entries) == 2
    assert real.stat().st_mode & 0o777 == 0o640
    assert {path.name for path in tmp_path.iterdir()} <= {"real.json", "link.json", "real.json.lock"}


# ---- several writers ------------------------------------------------------------------------------------------------


def _put(path: str, first: int, count: int) -> None:
    for N in range(first, first + count):
        table.update(path, H200, {}, [entry(replace(PROBLEM, N=N))])


def test_concurrent_writers_lose_no_entry(tmp_path: Path) -> None:
    path, count = tmp_path / "t.json", 30
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_put, args=(str(path), 1 + index * count, count)) for index in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert sorted(one.N for one in table.read(path).entries) == list(range(1, 3 * count + 1))


def test_a_writer_that_is_killed_leaves_a_readable_table(tmp_path: Path) -> None:
    """After a SIGKILL at any moment, the table is complete, and the next writer can take the lock."""
    path = write(tmp_path / "t.json", *(entry(replace(PROBLEM, N=N)) for N in range(1, 300)))
    script = (
        "import sys, itertools; sys.path.insert(0, sys.argv[2])\n"
        "from tests.tiling.test_table import _put\nprint('ready', flush=True)\n"
        "for first in itertools.count(1000, 10): _put(sys.argv[1], first, 10)\n"
    )
    known = 0
    for attempt in range(4):
        command = [sys.executable, "-c", script, str(path), str(ROOT)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            time.sleep(0.05 + 0.037 * attempt)
            os.kill(writer.pid, signal.SIGKILL)
        found = len(table.read(path).entries)
        assert found >= max(299, known)
        known = found
    assert known > 299
    write(path, entry(replace(PROBLEM, N=999)))
    assert len(table.read(path).entries) == known + 1
    assert {one.name for one in tmp_path.iterdir()} == {"t.json", "t.json.lock"}


def test_a_lock_that_is_not_released_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import filelock

    path = tmp_path / "t.json"
    monkeypatch.setattr(table_file, "LOCK_SECONDS", 0.1)
    with (
        filelock.FileLock(f"{path}.lock"),
        multiprocessing.get_context("fork").Pool(1) as pool,  # one process may take a lock twice
        pytest.raises(TableError, match=r"another process has held .*t.json.lock"),
    ):
        pool.apply(_put, (str(path), 1, 1))
    assert not path.exists()


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import filelock

    def refuse(self: Any) -> None:
        raise NotImplementedError("FileSystem does not appear to support flock")

    monkeypatch.setattr(filelock.FileLock, "_acquire", refuse)
    assert len(table.read(write(tmp_path / "t.json", entry())).entries) == 1
    assert not (tmp_path / "t.json.lock").exists()


def test_a_full_disk_leaves_the_table_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "t.json", entry())
    before = path.read_bytes()

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=f"No space left on device: '{path}'$"):
        write(path, entry(replace(PROBLEM, N=77)))
    assert path.read_bytes() == before
    assert {one.name for one in tmp_path.iterdir()} <= {"t.json", "t.json.lock"}


# ---- merging --------------------------------------------------------------------------------------------------------


def test_better_prefers_measured_then_fresh_then_fast(tmp_path: Path) -> None:
    slow, fast = (
        entry(time_us=9.0),
        entry(tile=Tile("block", threads=64, groups=1, stages=2, load="cp_async", packs_per_thread=1), time_us=8.0),
    )
    model = entry(source=MODEL, predicted_us=1.0)
    for one, other, best in ((slow, fast, fast), (fast, slow, fast), (model, slow, slow), (slow, model, slow)):
        assert table.better(one, other) is best
    assert table.better(slow, replace(slow)) is slow
    assert table.better(fast, slow, stale=lambda found: found is fast) is slow
    assert table.better(model, slow, stale=lambda found: found is slow) is slow


def test_merging_tables(tmp_path: Path) -> None:
    a = table.read(write(tmp_path / "a.json", entry(time_us=9.0), entry(replace(PROBLEM, N=3))))
    b = table.read(write(tmp_path / "b.json", entry(time_us=8.0), entry(replace(PROBLEM, N=4))))
    both = table.merged([a, b])
    assert {one.N: found.microseconds for one, found in both.entries.items()} == {2: 8.0, 3: 12.5, 4: 12.5}
    other = table.read(write(tmp_path / "c.json", entry(), device=A100))
    with pytest.raises(TableError, match="NVIDIA H200 and NVIDIA A100"):
        table.merged([a, other])


def test_every_known_device_has_its_own_file_name() -> None:
    assert len({table.slug(one) for one in KNOWN.values()}) == len(KNOWN)
    assert table.slug(H200) == "nvidia_h200_sm_90_132"
    assert set(OPS) == {one.op for one in every_problem()}


# ---- malformed values -----------------------------------------------------------------------------------------------


def rewritten(path: Path, **change: Any) -> Path:
    """Change fields of the first entry of a table; returns its path."""
    raw = json.loads(path.read_text())
    raw["entries"][0] |= change
    path.write_text(json.dumps(raw))
    return path


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -4, 0, 10**400, True, "5", None, [5]])
def test_an_invalid_time_is_ignored(value: Any, tmp_path: Path) -> None:
    """Such an entry loses every merge. A rewritten table is valid JSON, without NaN or infinity."""
    strange = rewritten(write(tmp_path / "a.json", entry(time_us=5.0)), time_us=value, default_us=value)
    plain = write(tmp_path / "b.json", entry(time_us=5.0))
    for order in ((strange, plain), (plain, strange)):
        both, count = table.merge_files(order, tmp_path / "c.json")
        assert both.entries[PROBLEM].microseconds == 5.0
        assert count == 2
        json.loads((tmp_path / "c.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert table.read(strange).entries[PROBLEM].microseconds is None
    write(strange, entry(replace(PROBLEM, N=3)))
    json.loads(strange.read_text(), parse_constant=lambda name: pytest.fail(name))


@pytest.mark.parametrize(
    "change",
    [
        {"N": 10**400},
        {"HxW": 2**61},
        {"strategy": "bl\ud800ock"},
        {"strategy": "\x1b[31mblock"},
        {"tile": {"thr\x1beads": 32}},
        {"op": "group_norm\x07"},
        {"types": {"sum": "float8"}},
        {"outputs": "dx\n"},
    ],
)
def test_an_entry_with_an_invalid_name_or_size_is_a_fault(change: dict[str, Any], tmp_path: Path) -> None:
    path = rewritten(write(tmp_path / "t.json", entry()), **change)
    found = table.read(path)
    assert found.entries == {}
    assert len(found.faults) == 1
    assert found.faults[0].isascii() or found.faults[0].isprintable()


def test_the_better_of_two_entries_of_a_problem_is_read(tmp_path: Path) -> None:
    """A textual merge of two files may leave two entries. A measured entry is kept, whatever their order."""
    path = write(tmp_path / "t.json", entry(time_us=5.0))
    raw = json.loads(path.read_text())
    model = raw["entries"][0] | {"source": "model", "predicted_us": 1.0}
    for entries in ([raw["entries"][0], model], [model, raw["entries"][0]]):
        path.write_text(json.dumps(raw | {"entries": entries}))
        write(path, entry(replace(PROBLEM, N=3)))
        assert table.read(path).entries[PROBLEM].source == MEASURED


def test_the_output_of_a_merge_may_be_one_of_its_inputs(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.json", entry()), write(tmp_path / "b.json", entry(replace(PROBLEM, N=3)))
    table.merge_files([a, b], a)
    assert len(table.read(a).entries) == 2
