"""benchmarks/profile_tiles.py: what it keeps of a report of Nsight Compute."""

from __future__ import annotations

import csv
import importlib
import io
import json
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
