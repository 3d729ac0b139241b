"""The page of speeds, which contains only measured results; and a dry run of the script that measures them."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from cunorm.tuning.bench.result import DEFAULT, TABLE

from benchmarks import measured_sections, speed_summary
from cunorm.core.devices import known
from cunorm.jit import sources
from cunorm.ops.registry import OPS
from cunorm.tiling import costmodel, table
from tests.support.paths import ROOT
from tests.tuning.bench.test_bench import shown


@pytest.fixture
def speed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """benchmarks/speed_page.py with results, pages and README in a temporary folder."""
    spec = importlib.util.spec_from_file_location("speed", ROOT / "benchmarks" / "speed_page.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    monkeypatch.setattr(module, "PAGES", tmp_path)
    monkeypatch.setattr(module, "PICTURES", tmp_path)
    monkeypatch.setattr(module, "README", tmp_path / "README.md")
    for page in ("README.md", "index.md"):
        (tmp_path / page).write_text(f"before\n{module.BEGIN}old\n{module.END}after\n", encoding="utf-8")
    return module


def keep(folder: Path, name: str, **others: Any) -> None:
    (folder / f"bench-{name}.json").write_text(json.dumps(shown() | others), encoding="utf-8")


def test_the_page_is_what_its_results_generate() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "speed_page.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_without_results_the_page_says_so(speed: ModuleType, tmp_path: Path) -> None:
    assert speed.main([]) == 0
    assert "Nothing has been measured" in (tmp_path / "measured.md").read_text(encoding="utf-8")
    for page in ("README.md", "index.md"):
        text = (tmp_path / page).read_text(encoding="utf-8")
        assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
        assert "Nothing has been measured on a GPU yet." in text


def test_the_readme_contains_the_speedups(speed: ModuleType, tmp_path: Path) -> None:
    keep(tmp_path, "new", date="2026-02-01T00:00:00+00:00", workload="llm")
    assert speed.main([]) == 0
    readme = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "on NVIDIA H200, 2026-02-01; workloads llm." in readme
    assert "| layer_norm | 1.97 (1.97), 3 |" in readme
    assert speed.main(["--check"]) == 0
    (tmp_path / "README.md").write_text(readme.replace("1.97", "2.97"), encoding="utf-8")
    assert speed.main(["--check"]) == 1
    (tmp_path / "README.md").write_text(readme.replace(speed.END, ""), encoding="utf-8")
    assert speed.main([]) == 2


def test_the_newest_result_per_device_and_workload_is_published(speed: ModuleType, tmp_path: Path) -> None:
    keep(tmp_path, "old", date="2026-01-01T00:00:00+00:00", workload="llm", copy_bandwidth=1e12)
    keep(tmp_path, "new", date="2026-02-01T00:00:00+00:00", workload="llm", copy_bandwidth=4e12)
    keep(tmp_path, "other", date="2026-01-15T00:00:00+00:00", workload="vision", copy_bandwidth=2e12)
    assert speed.main([]) == 0
    listed = (tmp_path / "measured.md").read_text(encoding="utf-8")
    assert "| [llm](measured-llm.md) | layer_norm | 3 | NVIDIA H200, 2026-02-01 |" in listed
    assert "| [vision](measured-vision.md) | layer_norm | 3 | NVIDIA H200, 2026-01-15 |" in listed
    page = (tmp_path / "measured-llm.md").read_text(encoding="utf-8")
    assert [line for line in page.splitlines() if line.startswith("## ")] == ["## NVIDIA H200"]
    assert "Measured on 2026-02-01." in page
    assert "Copy 4000 GB/s" in page and "Copy 1000 GB/s" not in page
    assert "`layer_norm bfloat16 (statistics float32) -> y`" in page
    assert (
        "| rows | length | cunorm, default tile | cunorm, table tile | torch | torch.compile | liger | spread |" in page
    )
    row = next(line for line in page.splitlines() if line.startswith("| 16384 | 4096 |"))
    assert row == "| 16384 | 4096 | 75.0, 89% | **71.0**, 95% | 140.0, 48% | 90.0, 75% | wrong | 20.0% |"
    assert "Without this operator or layout: quack." in page
    assert "Did not run: apex." in page  # apex has no column
    assert "](../pictures/speed-nvidia-h200-llm.svg)" in page
    assert (tmp_path / "speed-nvidia-h200-llm.svg").read_text(encoding="utf-8").startswith("<?xml")
    assert "| layer_norm | 1.97 (1.97), 3 |" in page
    assert "Incomplete" not in page


def test_of_an_interrupted_run_the_newer_results_are_used(speed: ModuleType, tmp_path: Path) -> None:
    """The other problems come from the run before it, with that run's copy. Together they are a complete workload."""
    results = shown()["results"]
    fields = [{name: value for name, value in one["problem"].items() if value != ()} for one in results]
    before = [{**one, "problem": problem} for one, problem in zip(results, fields, strict=True)]
    assert before != results  # a file of a version whose problems had fewer fields
    keep(tmp_path, "old", date="2026-01-01T00:00:00+00:00", workload="llm", copy_bandwidth=4e12, results=before)
    part = {"results": results[1:2], "interrupted": True, "problems": len(results)}
    keep(tmp_path, "part", date="2026-02-01T00:00:00+00:00", workload="llm", copy_bandwidth=2e12, **part)
    assert speed.main([]) == 0
    listed = (tmp_path / "measured.md").read_text(encoding="utf-8")
    assert "| [llm](measured-llm.md) | layer_norm | 1 | NVIDIA H200, 2026-02-01 |" in listed
    assert f"| [llm](measured-llm.md) | layer_norm | {len(results) - 1} | NVIDIA H200, 2026-01-01 |" in listed
    page = (tmp_path / "measured-llm.md").read_text(encoding="utf-8")
    assert page.index("Measured on 2026-02-01.") < page.index("Copy 2000 GB/s") < page.index("Measured on 2026-01-01.")
    assert "Incomplete" not in page and "](../pictures/" not in page
    index = (tmp_path / "index.md").read_text(encoding="utf-8")
    assert "NVIDIA H200, 2026-01-01 to 2026-02-01; workloads llm." in index and "Incomplete" not in index


def test_of_a_day_the_result_with_most_contenders_is_used(speed: ModuleType, tmp_path: Path) -> None:
    results = shown()["results"]
    fewer = [{**one, "contenders": one["contenders"][:2]} for one in results]
    keep(tmp_path, "many", date="2026-01-01T08:00:00+00:00", workload="llm", copy_bandwidth=4e12)
    keep(tmp_path, "few", date="2026-01-01T09:00:00+00:00", workload="llm", copy_bandwidth=2e12, results=fewer)
    assert speed.main([]) == 0
    page = (tmp_path / "measured-llm.md").read_text(encoding="utf-8")
    assert "Copy 4000 GB/s" in page and "Copy 2000 GB/s" not in page


@pytest.mark.parametrize("name", [
    "README.md", "index.md", "measured.md", "measured-llm.md",
    "speed.svg", "speed-dark.svg", "speed-nvidia-h200-llm.svg",
])  # fmt: skip
def test_a_changed_page_or_picture_is_stale(speed: ModuleType, tmp_path: Path, name: str) -> None:
    keep(tmp_path, "new", workload="llm")
    assert speed.main([]) == 0 and speed.main(["--check"]) == 0
    path = tmp_path / name
    text = path.read_text(encoding="utf-8")
    changed_text = text.replace("layer_norm", "layer_worm", 1)
    assert changed_text != text
    path.write_text(changed_text, encoding="utf-8")
    assert speed.main(["--check"]) == 1
    assert speed.main([]) == 0
    assert "layer_worm" not in path.read_text(encoding="utf-8")


def test_the_page_of_a_workload_without_results_is_removed(speed: ModuleType, tmp_path: Path) -> None:
    keep(tmp_path, "new", workload="llm")
    assert speed.main([]) == 0
    (tmp_path / "measured-gone.md").write_text("old", encoding="utf-8")
    assert speed.main(["--check"]) == 1
    assert speed.main([]) == 0 and speed.main(["--check"]) == 0
    assert not (tmp_path / "measured-gone.md").exists()


def test_shapes_for_which_a_peer_is_faster_are_named(speed: ModuleType, tmp_path: Path) -> None:
    document = shown() | {"workload": "llm"}
    for one in document["results"][1]["contenders"]:
        if one["name"] == "torch":
            one["kernels"]["seconds"] = 0.5 * 71e-6 * 1.1  # half of the table tile's time
    (tmp_path / "bench-new.json").write_text(json.dumps(document), encoding="utf-8")
    assert speed.main([]) == 0
    index = (tmp_path / "index.md").read_text(encoding="utf-8")
    assert "**Slower than a peer** in 1 of 6 comparisons." in index
    assert "| layer_norm | rows=8192 length=8192 | torch | llm | 0.50 |" in index
    assert "- layer_norm, liger: 3 shapes" in index  # its results are wrong
    assert "](../pictures/speed.svg)" in index


def test_an_incomplete_result_is_published_with_the_reason(speed: ModuleType, tmp_path: Path) -> None:
    """An incomplete result is published if no other result has the other problems of its device and workload."""
    keep(tmp_path, "part", workload="llm", interrupted=True, problems=9)
    keep(tmp_path, "lost", workload="vision", lost="apex left the GPU unusable", problems=4)
    assert speed.main([]) == 0
    page = (tmp_path / "measured-llm.md").read_text(encoding="utf-8")
    assert "Incomplete, 3 of 9 problems: interrupted." in page
    page = (tmp_path / "measured-vision.md").read_text(encoding="utf-8")
    assert "Incomplete, 3 of 4 problems: apex left the GPU unusable." in page


def test_the_result_of_a_killed_run_is_marked_as_interrupted(speed: ModuleType, tmp_path: Path) -> None:
    keep(tmp_path, "killed", workload="llm", problems=9)
    assert speed.main([]) == 0
    assert "Incomplete, 3 of 9 problems: interrupted." in (tmp_path / "measured-llm.md").read_text(encoding="utf-8")


def test_a_rehearsal_is_not_published(speed: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep(tmp_path, "quick", source="rehearsed")
    assert speed.main([]) == 2
    assert "bench-quick.json: it was rehearsed, not measured on a GPU" in capsys.readouterr().err
    assert not (tmp_path / "measured.md").exists()


def test_the_pages_show_the_newest_measurements_of_other_kinds(speed: ModuleType, tmp_path: Path) -> None:
    keep(tmp_path, "new", workload="llm")
    times = {name: {"median_us": us} for name, us in (("launches", 7.0), ("plan", 12.0), ("call", 13.0))}
    times["plan - launches"] = {"median_us": 5.25}
    for date, device in (("2026-01-01", "h1"), ("2026-02-01", "h1"), ("2026-01-15", "h2")):
        host = {"device": device, "date": date, "results": {"layer_norm": times}}
        (tmp_path / f"host_overhead_gpu-{device}-{date}.json").write_text(json.dumps(host), encoding="utf-8")
    model = {
        "dtypes": ["bfloat16"], "predicted_over_measured": {"layer_norm NCHW, warp": [7, 0.9, 1.0, 1.1]},
        "chosen": {"a": [10.0, 11.0], "b": [10.0, 20.0]}, "chosen_and_fastest": {"a": [11.0, 11.0], "b": [20.0, 15.0]},
    }  # fmt: skip
    (tmp_path / "cost_model.json").write_text(json.dumps({"h1": model, "h2": model}), encoding="utf-8")
    kernel = {"problem": "p", "kernel": "k", "us": 8.0, "gigabytes_per_s": 900.0, "issue": 0.5, "warps": 0.25}
    profile = {"device": "H", "date": "2026-02-01", "kernels": [{**kernel, "waits": {"barrier": 2.5}}]}
    (tmp_path / "profile-x.json").write_text(json.dumps(profile), encoding="utf-8")
    us = {"": 30.0, "sums": 28.0, "dx": 20.0, "sums+dx": 17.5}
    stages = {**profile, "kernels": [{"problem": "p", "tile": {"strategy": "block"}, "us": us}]}
    (tmp_path / "stage_times-x.json").write_text(json.dumps(stages), encoding="utf-8")
    assert speed.main([]) == 0
    page = "".join((tmp_path / f"measured-{name}.md").read_text() for name in ("host", "cost-model", "kernels"))
    assert "## h1\n\nMeasured on 2026-02-01.\n" in page and "## h2\n\nMeasured on 2026-01-15.\n" in page
    assert "2026-01-01" not in page
    assert "| layer_norm | 7.0 | 12.0 | 13.0 | 5.2 |" in page
    assert (
        "by at most 25% for 1 of 2 problems" in page
        and "at most 10% more than the fastest measured tile for 1 of 2" in page
    )
    assert "## h1\n\n2 problems, bfloat16." in page and "## h2\n\n2 problems, bfloat16." in page
    assert "| b | 10.0 | 20.0 |" in page and "| b | 20.0 | 15.0 |" in page and "| a |" not in page
    assert "| p | k | 8.0 | 900 | 50% | 25% | barrier 2.5 |" in page
    assert "| p | block | 30.0 | 2.0 | 10.0 | 17.5 | 29.5 |" in page


def test_goals_are_compared_with_the_results(speed: ModuleType, tmp_path: Path) -> None:
    """Two backwards above 50 MB, of 89 % and 95 % of the copy."""
    document = shown()
    for result, name, seconds in zip(
        document["results"], ("rows=16384 length=4096", "rows=1024 length=12288"), (1.0, 2.0), strict=False
    ):
        result["name"] = f"layer_norm_backward bfloat16 {name} (statistics float32)"
        result["problem"] |= {"op": "layer_norm_backward", "layout": "NCHW", "outputs": ["dx"]}
        result["floor_bytes"] = 1e8
        for one in result["contenders"]:
            if one["kernels"] is not None:
                one["kernels"]["seconds"] = seconds * 1e8 / document["copy_bandwidth"]
                one["sentence"] = "cluster (threads=64)"
    (tmp_path / "bench-goals.json").write_text(json.dumps(document), encoding="utf-8")
    assert speed.main([]) == 0
    page = (tmp_path / "measured.md").read_text(encoding="utf-8")
    assert "| 1 of 2 problems; the others are below | **not met** |" in page
    assert "rows=16384 length=4096: 92% of the copy | 100% | met |" in page
    assert "rows=1024 length=12288: 1.4 floors at most | 2.00 | **not met** |" in page
    assert "rows=1024 length=12288 | 100 | 50% | cluster |" in page
    assert "**A barrier of the cluster for every row**" in page
    assert "The reasons are from the [profiles and stage times](measured-kernels.md) of such kernels.\n" in page


def test_an_assumed_reason_is_marked_as_such() -> None:
    lines = measured_sections._far_off([("name", "group_norm_backward", "NHWC", 1e8, 0.5, "grid")])
    assert any("apart from those that begin with *Assumed*." in line for line in lines)
    assert "**Assumed: blocks wait for the sums of the others**\n" in lines


def with_tiles(default: str, tabled: str) -> dict[str, Any]:
    """A result of an H100 in which all problems ran with these tiles."""
    document = json.loads(json.dumps(shown() | {"workload": "llm"}))
    device = dataclasses.asdict(known("H100")) | {"name": "NVIDIA H100 80GB HBM3"}
    document["device"] = json.loads(json.dumps(device))
    for result in document["results"]:
        result["problem"]["outputs"] = ["y", "mean", "rstd"]
        for one in result["contenders"]:
            one["sentence"] = {DEFAULT: f"{default}; graph", TABLE: f"{tabled}; graph"}.get(one["name"], "")
    return document


def words(tile: Mapping[str, Any], strategy: str) -> str:
    return f"{strategy} ({', '.join(f'{name}={tile[name]}' for name in sorted(tile))})"


def test_the_tiles_that_calls_no_longer_get_are_counted(
    speed: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The present tiles are those of the cost model and of the package's table, whatever table the user names."""
    document = with_tiles("", "")
    problem = speed_summary.problem_of(document["results"][0])
    device = dataclasses.replace(known("H100"), name="NVIDIA H100 80GB HBM3")
    chosen = costmodel.choose(problem, OPS["layer_norm"].strategies.values(), device).tile
    raw = json.loads((ROOT / "tuning" / "tables" / "nvidia_h100_80gb_hbm3_sm_90_132.json").read_text())
    own = {"op": "layer_norm", "rows": 16384, "length": 4096, "dtype": "bfloat16", "outputs": "y,mean,rstd"}
    (entry,) = [one for one in raw["entries"] if own.items() <= one.items()]
    default = words(chosen.as_dict(), chosen.strategy)
    packaged = words(entry["tile"], entry["strategy"])
    entry["tile"] = entry["tile"] | {"threads": 128}
    (tmp_path / "named.json").write_text(json.dumps(raw), encoding="utf-8")
    monkeypatch.setenv("CUNORM_TILING_TABLE", str(tmp_path / "named.json"))
    for tabled, kept in ((packaged, True), (words(entry["tile"], entry["strategy"]), False)):
        document = with_tiles(default, tabled)
        document["results"][1:] = []
        (tmp_path / "bench-new.json").write_text(json.dumps(document), encoding="utf-8")
        assert speed.main([]) == 0
        page = (tmp_path / "measured-llm.md").read_text(encoding="utf-8")
        assert "Of 1 default tiles, the cost model still chooses 1." in page
        assert f"Of 1 tiles of the table, the package's table still has {kept:d}." in page
    document["results"][0]["contenders"][0]["sentence"] = "block (threads=32); graph"
    (tmp_path / "bench-new.json").write_text(json.dumps(document), encoding="utf-8")
    assert speed.main(["--check"]) == 1 and speed.main([]) == 0
    page = (tmp_path / "measured-llm.md").read_text(encoding="utf-8")
    assert "Of 1 default tiles, the cost model still chooses 0." in page


def test_a_problem_of_two_workloads_counts_once(speed: ModuleType, tmp_path: Path) -> None:
    for workload, ratio in (("llm", 0.5), ("quick", 0.98)):
        document = shown() | {"workload": workload}
        contenders = {one["name"]: one for one in document["results"][1]["contenders"]}
        contenders["torch"]["kernels"]["seconds"] = ratio * contenders[TABLE]["kernels"]["seconds"]
        (tmp_path / f"bench-{workload}.json").write_text(json.dumps(document), encoding="utf-8")
    assert speed.main([]) == 0
    readme, index = ((tmp_path / name).read_text(encoding="utf-8") for name in ("README.md", "index.md"))
    assert "| layer_norm | 1.40 (0.70), 3 | 1.27 (1.27), 3 |" in readme  # (0.7 * 1.97 ** 2) ** (1 / 3)
    assert "**Slower than a peer** in 1 of 6 comparisons." in index
    assert "| layer_norm | rows=8192 length=8192 | torch | llm, quick | 0.70 |" in index
    assert "- layer_norm, liger: 3 shapes." in index


def test_the_error_of_a_wrong_peer_is_beside_its_limit_and_the_own_error(speed: ModuleType, tmp_path: Path) -> None:
    document = json.loads(json.dumps(shown() | {"workload": "llm"}))
    for result, error in zip(document["results"], (0.063, 0.07, 0.081), strict=True):
        (liger,) = [one for one in result["contenders"] if one["name"] == "liger"]
        sentence = f"y is off by {error:.2g} of its largest value, expected at most 0.062"
        liger |= {"error": error, "sentence": sentence}
    (tmp_path / "bench-new.json").write_text(json.dumps(document), encoding="utf-8")
    assert speed.main([]) == 0
    index = (tmp_path / "index.md").read_text(encoding="utf-8")
    assert (
        "- layer_norm, liger: 3 shapes. y is off by 0.063 to 0.081, expected at most 0.062. cunorm was within every "
        "limit on all: its largest error is 0.001, of a result in bfloat16."
    ) in index
    assert "depends on the dtype of the result: 0.062 in bfloat16." in index


def test_each_device_has_its_own_goals_and_limits(speed: ModuleType, tmp_path: Path) -> None:
    """A shape that is slower on one device is not counted for the other."""
    for device, factor in (("A", 0.5), ("B", 2.0)):
        document = json.loads(json.dumps(shown() | {"workload": "llm"}))
        document["device"]["name"] = device
        for result in document["results"]:
            contenders = {one["name"]: one for one in result["contenders"]}
            contenders["torch"]["kernels"]["seconds"] = factor * contenders[TABLE]["kernels"]["seconds"]
        (tmp_path / f"bench-{device}.json").write_text(json.dumps(document), encoding="utf-8")
    assert speed.main([]) == 0
    index, page = ((tmp_path / name).read_text(encoding="utf-8") for name in ("index.md", "measured.md"))
    _, first, second = index.split("## Limits of these results, ")
    assert first.startswith("A\n\n**Slower than a peer** in 3 of 6 comparisons.") and "in bfloat16, on A." in first
    assert second.startswith("B\n\nNot compared") and "in bfloat16, on B." in second
    assert "## Goals, A\n" in page and "## Goals, B\n" in page


def test_what_was_not_measured_is_named(speed: ModuleType, tmp_path: Path) -> None:
    keep(tmp_path, "llm", workload="llm")
    keep(tmp_path, "part", workload="vision", interrupted=True, problems=9)
    document = json.loads((tmp_path / "bench-part.json").read_text(encoding="utf-8"))
    for result in document["results"]:
        result["contenders"] = [one for one in result["contenders"] if one["name"] != "torch.compile"]
    (tmp_path / "bench-part.json").write_text(json.dumps(document), encoding="utf-8")
    assert speed.main([]) == 0
    index = (tmp_path / "index.md").read_text(encoding="utf-8")
    assert "- All results are in bfloat16, on NVIDIA H200." in index
    (functions,) = [line for line in index.splitlines() if line.startswith("- Functions of cunorm without")]
    assert functions.split(": ")[1][:-1].split(", ") == [op for op in OPS if op != "layer_norm"]
    assert "- Peers that ran on some of the workloads only: torch.compile on llm." in index
    assert "- Peers that did not run: quack, flashinfer, apex." in index
    assert "- Incomplete workloads: vision with 3 of 9 problems." in index
    (workloads,) = [line for line in index.splitlines() if line.startswith("- Workloads without results")]
    assert "sdxl-unet" in workloads and "llm," not in workloads and "vision" not in workloads


def test_shapes_whose_kernels_have_changed_since_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    document, strategy = shown(), OPS["layer_norm"].strategies["block"]
    device = known("H200")
    document["device"] = json.loads(json.dumps(dataclasses.asdict(device)))
    tile, problems = next(strategy.tiles()), [*map(speed_summary.problem_of, document["results"])]
    digest = sources.kernel_digest(problems[0], strategy, tile)
    entries = {one: table.Entry(one, tile, "measured", digest) for one in problems[:2]}
    monkeypatch.setattr(
        speed_summary, "packaged", lambda problem, on: [entries[problem]] if problem in entries and on == device else []
    )
    assert speed_summary.changed([document]) == []
    entries[problems[1]] = table.Entry(problems[1], tile, "measured", "0123456789abcdef")
    assert speed_summary.changed([document]) == ["layer_norm (1 of 2)"]
    document["device"]["name"] = "another"
    assert speed_summary.changed([document]) == []


def test_shapes_whose_measured_tile_has_left_the_table_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only shapes that ran with a tile of the table count."""
    document, device = shown(), known("H200")
    document["device"] = json.loads(json.dumps(dataclasses.asdict(device)))
    first, second, *others = document["results"]
    for result in (first, second):
        result["contenders"][0]["name"] = speed_summary.TABLE
    for result in others:
        result["contenders"] = [one for one in result["contenders"] if one["name"] != speed_summary.TABLE]
    kept = speed_summary.problem_of(first)
    monkeypatch.setattr(speed_summary, "packaged", lambda problem, on: [object()] if problem == kept else [])
    assert speed_summary.dropped([document]) == ["layer_norm (1 of 2)"]


def test_no_heading_of_a_measured_page_has_a_date() -> None:
    """A heading with a date wraps within the date."""
    lines = [line for page in (ROOT / "docs" / "speed").glob("measured*.md") for line in page.read_text().splitlines()]
    headings = [line for line in lines if line.startswith("#")]
    assert len(headings) > 20 and not [line for line in headings if re.search(r"\d{4}-\d\d", line)]


# ---- the script -----------------------------------------------------------------------------------------------------

needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")


PROOF = ROOT / "benchmarks" / "gpu_proof.sh"


def proof(*given: str, script: Path = PROOF) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    command = ["bash", str(script), *given]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def changed(folder: Path, old: str, new: str) -> Path:
    """A copy of the script with one change. It runs in the same working directory as the script."""
    text = PROOF.read_text(encoding="utf-8")
    for before, after in ((old, new), ('cd "$(dirname "$0")/.."', f"cd {shlex.quote(str(ROOT))}")):
        assert text.count(before) == 1
        text = text.replace(before, after)
    copy = folder / PROOF.name
    copy.write_text(text, encoding="utf-8")
    return copy


def listing() -> list[Path]:
    return sorted(
        path
        for name in ("benchmarks/results", "tuning", "docs/speed", "docs/pictures")
        for path in (ROOT / name).rglob("*")
    )


@needs_bash
def test_a_dry_run_executes_every_step_and_leaves_no_files() -> None:
    before = listing()
    done = proof("--dry-run")
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [line[3:] for line in done.stdout.splitlines() if line.startswith("== ")]
    assert [step for step in steps if "does not run here" not in step] == [
        "doctor", "tests", "cases", "host cost", "draw", "compile", "tune", "bench", "speed",
    ]  # fmt: skip
    assert "cunorm, table tile      off by" in done.stdout  # the bench found the table that the tuner wrote
    assert "of copy" not in done.stdout
    assert listing() == before


@needs_bash
def test_steps_that_the_time_limit_excludes_are_named(tmp_path: Path) -> None:
    """The copy of the script has a time limit of zero minutes."""
    done = proof("--dry-run", "--part", "1", script=changed(tmp_path, "60 * minutes", "0 * minutes"))
    assert done.returncode == 1
    assert "not reached: doctor; tests; cases;" in done.stderr


@needs_bash
@pytest.mark.long
def test_the_page_is_generated_when_no_time_is_left_to_tune_and_bench(tmp_path: Path) -> None:
    """The copy of the script reserves all of its time for the page."""
    done = proof("--dry-run", "--part", "2", script=changed(tmp_path, "page_seconds=20", "page_seconds=100000"))
    assert done.returncode == 1
    assert "not reached: tune; bench;" in done.stderr
    assert "== speed" in done.stdout and "failed" not in done.stderr


@needs_bash
@pytest.mark.parametrize(("given", "sentence"), [
    (["--part", "3"], "--part: '3', expected 1 or 2"),
    (["--minutes", "0"], "--minutes: '0', expected a whole number"),
    (["--fast"], "unknown option: --fast"),
    (["--workloads"], "--workloads: empty, expected names"),
    (["--results"], "--results: empty, expected a folder"),
    (["--kernels", "nowhere"], "--kernels: 'nowhere' is no folder; write it with --prepare"),
    (["--prepare", "kernels"], "--prepare: without --device, expected a GPU, such as H200"),
])  # fmt: skip
def test_wrong_arguments_of_the_script(given: list[str], sentence: str) -> None:
    done = proof(*given)
    assert done.returncode == 2 and sentence in done.stderr
