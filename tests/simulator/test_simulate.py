"""benchmarks/simulate.py: what it prints, stores and refuses, and the page that is written from the results."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import simulate
from benchmarks.simulator import simulated_page
from benchmarks.simulator.clock import GPUS
from benchmarks.simulator.goals import GOALS, Goal, key_of
from benchmarks.simulator.problems import simulate as simulated
from cunorm.ops.registry import problem_of

pytestmark = pytest.mark.usefixtures("tools")
SMALL = ["layer_norm", "--shape", "256,128"]


def test_a_problem_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main([*SMALL, "--profile"]) == 0
    out, err = capsys.readouterr()
    assert re.search(r"^layer_norm_\w+: \d+ blocks", err, re.MULTILINE)
    assert "NVIDIA H200, simulated, not measured; Tile('" in out
    assert re.search(r"\d+\.\d us; a copy of the floor's bytes takes \d+\.\d us: \d+%", out)
    assert re.search(r"^ +\d+\.\d\d +\d+%  [\w/]+\.cuh?:\d+ +\S", out, re.MULTILINE)  # a line of the profile


def test_a_tile_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    tile = "threads=64,lanes=32,packs_per_thread=1,rows_per_team=1"
    assert simulate.main([*SMALL, "--strategy", "warp", "--tile", tile]) == 0
    assert "threads=64" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["layer_norm", "--shape", "256"], "--shape: '256' has 1 numbers"),
        (["nope", "--shape", "256,128"], "nope"),
        ([*SMALL, "--device", "A100"], "--device: 'A100', expected H100 or H200"),
        ([*SMALL, "--tile", "threads=64"], "--strategy and --tile: received one of them, expected both or none"),
        (["--goals", "--workload", "quick"], "--goals: received an op, --shape, --workload or --from-trace too"),
        (["--workload", "quick", "--profile"], "--strategy, --tile and --profile: only valid"),
        ([*SMALL, "--activation", "silu"], "activation: 'silu', expected None for layer_norm"),
        (["layer_norm", "--shape", "1048576,256"], "268435456 elements, expected at most 134217728"),
        (
            [*SMALL, "--strategy", "warp", "--tile", "threads=33,lanes=32,packs_per_thread=1,rows_per_team=1"],
            "threads is 33",
        ),
        ([], "--shape, --workload or --from-trace: received none"),
    ],
)
def test_a_wrong_argument_is_one_sentence(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate.main(arguments) == 2
    out, err = capsys.readouterr()
    assert not out and message in err and err.startswith("simulate.py: ") and err.count("\n") == 1


def test_the_same_problem_has_the_same_time() -> None:
    """The stored results can be compared with a later run, in another process too."""
    problem = problem_of("layer_norm", shape=(256, 128), dtype="bfloat16", normalized_shape=128)
    first, second = (simulated(problem, GPUS["H200"]) for _ in range(2))
    assert first.seconds == second.seconds
    assert first.floor < first.seconds
    assert first.instructions == sum(first.classes().values()) > 10


def test_a_workload_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RESULTS", "PAGE", "PICTURE"):
        monkeypatch.setattr(simulated_page, name, tmp_path / getattr(simulated_page, name).name)
    problems = [
        problem_of("layer_norm", shape=(rows, 128), dtype="bfloat16", normalized_shape=128) for rows in (64, 128)
    ]
    assert simulate.run_all(problems, "H200", "small") == 0
    rows = json.loads(simulated_page.RESULTS.read_text())["workloads"]["small"]
    assert list(rows) == [simulate.key_of(problem) for problem in problems]
    again = simulate.row_of(simulated(problems[0], GPUS["H200"]))
    assert rows[simulate.key_of(problems[0])] == json.loads(json.dumps(again))
    assert "layer_norm rows=64 length=128" in simulated_page.PAGE.read_text()


def row(**changes: Any) -> dict[str, Any]:
    launch = {"kernel": "k", "us": 1.0, "issue": 0.1, "dram": 0.2, "pipes": {}, "waits": {"FIXED": 0.6, "MEMORY": 0.4}}
    return launch | changes


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "fixed"),
        ({"dram": 0.9}, "DRAM"),
        ({"issue": 0.8, "dram": 0.75}, "issue"),
        ({"waits": {"BARRIER": 1.0}}, "barrier"),
    ],
)
def test_what_binds_a_launch(changes: dict[str, Any], expected: str) -> None:
    assert simulated_page.bound_by(row(**changes)) == expected


# ---- the committed page ---------------------------------------------------------------------------------------------


def test_the_page_is_written_from_the_results() -> None:
    assert simulated_page.PAGE.read_text(encoding="utf-8") == simulated_page.page(simulated_page.read())


def test_the_page_says_at_once_that_nothing_was_measured() -> None:
    lines = simulated_page.PAGE.read_text(encoding="utf-8").splitlines()
    assert lines[0] == "# Simulated speed" and lines[2].startswith("**Simulated, not measured.**")
    assert re.search(r"median ratio \d\.\d\d, from \d\.\d\d to \d\.\d\d", lines[2])


def test_the_remarks_on_published_times_are_notes_below_the_tables() -> None:
    page = simulated_page.PAGE.read_text(encoding="utf-8")
    section = page.partition("## Beside published times\n")[2].partition("\n## ")[0]
    rows = [
        line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ") and "us" not in line
    ]
    (line,) = [
        line for line in section.splitlines() if line.startswith("| Liger layer_norm_backward | 4096\u00a0x\u00a04096")
    ]
    tables, _, notes = section.partition("Notes:\n")
    number = line.strip("| ").split(" | ")[-1]
    assert len(rows) == 25 and "remark" not in tables and "launches" not in tables.partition("| kernel |")[2]
    assert f"\n{number}. not explained. The host's launches" in notes


def test_no_simulated_time_stands_among_measured_ones() -> None:
    """The measured pages and the README's section on speed come from the results of `cunorm bench`."""
    folder = simulated_page.ROOT / "docs" / "speed"
    pages = [*folder.glob("measured*.md"), folder / "index.md", simulated_page.ROOT / "README.md"]
    assert len(pages) > 5
    for page in pages:
        for line in page.read_text(encoding="utf-8").splitlines():
            assert "simulated" not in line.lower() or not re.search(r"\d us\b|GB/s", line), line


# ---- goals ----------------------------------------------------------------------------------------------------------


def test_each_goal_is_a_problem_of_its_own() -> None:
    keys = [key_of(goal.problem) for goal in GOALS]
    assert len(set(keys)) == len(GOALS) == 25
    assert all((goal.share > 0) != (goal.us > 0) for goal in GOALS)
    assert "group_norm_backward NCHW N=2 C=320 HxW=4096 group=32 silu" in keys


def test_the_goals_that_are_not_met_say_why() -> None:
    rows = simulated_page.read()["workloads"][simulated_page.GOALS]
    for goal in GOALS:
        assert bool(goal.why) != goal.met(rows[key_of(goal.problem)]), key_of(goal.problem)


@pytest.mark.parametrize(("us", "met"), [(10.0, True), (10.1, False)])
def test_a_goal_is_met(us: float, met: bool) -> None:
    found = {"us": us, "floor_us": 5.0}
    assert Goal("layer_norm", "8,8", 20.0, share=0.5).met(found) is met
    assert Goal("layer_norm", "8,8", 20.0, us=10.0).met(found) is met


def test_the_page_shows_where_warps_wait_if_a_goal_is_not_met() -> None:
    launch = row(kernel="main", lines=[[0.25, 3.0, "common/norm.cuh:7", "text"]])
    found = {"strategy": "block", "us": 10.0, "floor_us": 1.0, "launches": [launch]}
    text = "\n".join(simulated_page.goals_section({key_of(GOALS[0].problem): found}))
    assert "| 15.8 | 10.0 | 10% | 55% | no |" in text
    assert f"{GOALS[0].why} main, 1.0 us: 25% `common/norm.cuh:7`." in text
    met = "\n".join(simulated_page.goals_section({key_of(GOALS[0].problem): found | {"floor_us": 9.0}}))
    assert "| 15.8 | 10.0 | 90% | 55% | yes |" in met and "norm.cuh" not in met
