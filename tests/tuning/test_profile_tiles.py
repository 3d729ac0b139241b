"""benchmarks/profile_tiles.py: what it keeps of a report of Nsight Compute."""

from __future__ import annotations

import csv
import importlib
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from cunorm.core.strategy import Tile
from cunorm.ops.registry import OPS
from tests.support.paths import ROOT

PAST = "smsp__average_warps_issue_stalled_"
WAITED = {"selected": "1", "not_selected": "9", "barrier": "2", "long_scoreboard": "4", "wait": "0.5", "drain": "0"}
METRICS = {
    "Kernel Name": "",
    "device__attribute_display_name": "some GPU",
    "gpu__time_duration.sum": "12,500",
    "dram__bytes.sum.per_second": "1,000,000,000,000.00",
    "smsp__issue_active.avg.pct_of_peak_sustained_active": "25",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "50",
    **{f"{PAST}{reason}_per_issue_active.ratio": cycles for reason, cycles in WAITED.items()},
}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.profile_tiles")


def report(names: list[str]) -> str:
    """A report of some kernels, between the lines that the program itself prints."""
    out = io.StringIO()
    rows = csv.DictWriter(out, METRICS, quoting=csv.QUOTE_ALL)
    rows.writeheader()
    rows.writerow(dict.fromkeys(METRICS, "unit"))
    for number, name in enumerate(names):
        rows.writerow(METRICS | {"Kernel Name": name, "gpu__time_duration.sum": f"{1000 * (number + 1):,}"})
    return f"==PROF== Connected\nlayer_norm: a tile\n{out.getvalue()}"


def test_the_second_run_of_each_problem_is_kept(script: ModuleType, tmp_path: Path) -> None:
    drawn = importlib.import_module("benchmarks.measure_tiles")
    tiles = tmp_path / "tiles.jsonl"
    drawn.main(["draw", "--workloads", "mlp", "--problems", "2", "--out", str(tiles)])
    problems = [*script.first_tiles(tiles)]
    entries = [
        [launch.entry for launch in OPS[problem.op].strategies[tile.strategy].launches(problem, tile)]
        for problem, tile in problems
    ]
    assert all(isinstance(tile, Tile) for _, tile in problems)
    names = [name for each in entries for name in 2 * each]
    (tmp_path / "report.csv").write_text(report(names), encoding="utf-8")
    script.main(["keep", str(tiles), str(tmp_path / "report.csv"), "--json", str(tmp_path / "out.json")])
    document = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert document["device"] == "some GPU"
    assert [one["kernel"] for one in document["kernels"]] == [name for each in entries for name in each]
    first = document["kernels"][0]
    assert first["us"] == len(entries[0]) + 1  # not the first run
    assert (first["gigabytes_per_s"], first["issue"], first["warps"]) == (1000.0, 0.25, 0.5)
    assert first["waits"] == {"long_scoreboard": 4.0, "barrier": 2.0, "wait": 0.5}


def test_a_report_of_other_problems_is_refused(script: ModuleType, tmp_path: Path) -> None:
    drawn = importlib.import_module("benchmarks.measure_tiles")
    tiles = tmp_path / "tiles.jsonl"
    drawn.main(["draw", "--workloads", "mlp", "--problems", "1", "--out", str(tiles)])
    (tmp_path / "report.csv").write_text(report(["one"]), encoding="utf-8")
    with pytest.raises(SystemExit, match="1 kernels, expected"):
        script.main(["keep", str(tiles), str(tmp_path / "report.csv"), "--json", str(tmp_path / "out.json")])
    assert not (tmp_path / "out.json").exists()


def test_the_large_problems_furthest_from_the_copy_are_drawn_each_with_its_fastest_tile(
    script: ModuleType, tmp_path: Path
) -> None:
    """One of each op, layout and strategy; neither small problems nor those whose times are of other kernels."""
    measure = importlib.import_module("benchmarks.measure_tiles")
    path = tmp_path / "tiles.jsonl"
    measure.main(["draw", "--workloads", "llm", "--out", str(path)])
    drawn = [(problem, [Tile.of(one) for one in raw["tiles"][:2]]) for problem, raw in measure.lines_of(path)]
    facts = {"device": {"name": "some GPU"}, "copy": 1e12, "rounds": 9}
    lines, wanted = [json.dumps(facts)], {}
    for share, (problem, tiles) in zip((0.5, 0.4, 0.3, 0.9, 0.2, 0.8, 0.7, 0.6), drawn, strict=False):
        floor = 1e6 if share == 0.2 else 1e8
        best = floor / share / 1e12 * 1e6
        times = [
            {
                "tile": measure.raw_of(tile), "us": us, "q25": us, "q75": us, "off": 0.0,
                "kernel": "0" * 16 if share == 0.3 else measure.digest(problem, tile),
            }
            for tile, us in zip(tiles, (2 * best, best), strict=True)
        ]  # fmt: skip
        lines.append(measure.line_of(problem, floor=floor, tiles=times))
        if share not in (0.2, 0.3):
            wanted[share] = problem, tiles[1]
    (tmp_path / "measured.jsonl").write_text("\n".join(lines), encoding="utf-8")
    script.main(["draw", str(tmp_path / "measured.jsonl"), "--problems", "3", "--out", str(tmp_path / "out.jsonl")])
    kinds, expected = set(), []
    for _, (problem, tile) in sorted(wanted.items(), key=lambda one: one[0]):
        kind = problem.op, problem.layout, tile.strategy
        expected += [(problem, tile)] if kind not in kinds else []
        kinds.add(kind)
    assert len(expected) > 1 and [*script.first_tiles(tmp_path / "out.jsonl")] == expected[:3]


def run_ncu(script: ModuleType, folder: Path, commands: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the tiles under a program that consists of some commands; return what is in the report."""
    program = folder / "ncu"
    program.write_text(f"#!/bin/sh\n{commands}\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    script.main(["ncu", "tiles.jsonl", "--csv", str(folder / "report.csv")])
    return (folder / "report.csv").read_text(encoding="utf-8")


def test_ncu_runs_the_tiles_and_its_output_is_the_report(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = run_ncu(script, tmp_path, 'echo "$@"', monkeypatch)
    assert said.startswith("--clock-control none --csv --page raw") and "--section WarpStateStats" in said
    assert said.endswith("benchmarks/profile_tiles.py run tiles.jsonl\n")


def test_a_failed_ncu_is_an_error_that_names_the_report(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match=r"^ncu ended with exit code 9: read .*report\.csv, which has its messages$"):
        run_ncu(script, tmp_path, "echo ==ERROR== ERR_NVGPUCTRPERM; exit 9", monkeypatch)
    assert "ERR_NVGPUCTRPERM" in (tmp_path / "report.csv").read_text(encoding="utf-8")


def test_without_ncu_the_error_says_what_to_install(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match=r"^ncu is not in PATH: install Nsight Compute, or add its folder to PATH$"):
        script.main(["ncu", "tiles.jsonl", "--csv", str(tmp_path / "report.csv")])
    assert not (tmp_path / "report.csv").exists()
