"""The tuner's report: the text of its page, which loads no other file. Results are built by hand without compiling."""

from __future__ import annotations

import base64
import math
import random
import re
import subprocess
import sys
import threading
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib.image
import pytest
from cunorm.tuning.measure.race import Timing
from cunorm.tuning.measure.result import Trial, TuningResult, measured_entry, modelled_entry
from cunorm.tuning.progress import Progress
from cunorm.tuning.report import figures
from cunorm.tuning.report import page as report
from cunorm.tuning.search.importance import importances
from cunorm.tuning.search.space import Space

from cunorm.core.devices import KNOWN
from cunorm.core.problem import Problem, laid_out
from cunorm.core.strategy import Tile
from cunorm.ops.registry import OPS

DEVICE = KNOWN["H200"]


@lru_cache
def space_of(rows: int = 267, length: int = 513) -> Space:
    results = ("y", "mean", "rstd")
    problem = Problem(
        op="layer_norm",
        **dict.fromkeys(("dtype", "gamma_dtype", "beta_dtype"), "bfloat16"),
        stats_dtype="float32",
        **laid_out("NCHW", rows, length, 1, 1),
        outputs=results,
    )
    return Space.of(problem, OPS["layer_norm"].strategies, DEVICE)


def timing(seconds: float) -> Timing:
    return Timing(seconds, 0.98 * seconds, 1.03 * seconds, 23)


def measured(count: int = 20, rows: int = 267, seed: int = 0) -> TuningResult:
    """The result of a run that timed the first `count` tiles. The winner is not the default."""
    space, chance = space_of(rows), random.Random(seed)
    times = {tile: space.predicted(tile) * math.exp(chance.gauss(0.1, 0.2)) for tile in space.tiles[:count]}
    winner = min(times, key=lambda tile: times[tile])
    times[winner] *= 0.8
    trials = [Trial(tile, seconds) for tile, seconds in times.items()]
    timings = {tile: timing(times[tile]) for tile in (winner, space.default)}
    facts = {"measures": True, "bandwidth": 4e12, "trials": count, "default": winner == space.default}
    facts["text"] = "specialised"
    entry = measured_entry(space, winner, timings, **facts)  # type: ignore[arg-type]
    return TuningResult(space, "measured", winner, entry, timings, trials, bandwidth=4e12, software={"driver": 13000})


def modelled(count: int = 20) -> TuningResult:
    space = space_of()
    trials = [Trial(tile, space.predicted(tile)) for tile in space.tiles[:count]]
    entry = modelled_entry(space, space.default, trials=count, verified="cpu executor, rows=267 length=513")
    seconds = space.predicted(space.default)
    timings = {space.default: Timing(seconds, seconds, seconds, 1)}
    return TuningResult(space, "model", space.default, entry, timings, trials)


def page(results: list[TuningResult], folder: Path, title: str = "A run") -> str:
    path = report.write(results, folder, title=title)
    assert path == folder / "index.html"
    assert [one.name for one in folder.iterdir()] == ["index.html"]  # no temporary file is left
    return path.read_text(encoding="utf-8")


def words(text: str) -> str:
    """Return the page without its pictures."""
    return re.sub(r"base64,[^\"]*", "", text)


def pictures(text: str) -> list[bytes]:
    return [base64.b64decode(found) for found in re.findall(r'src="data:image/png;base64,([^"]*)"', text)]


def size_of(png: bytes) -> tuple[int, int]:
    return int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")


def test_the_page_is_one_file_and_names_the_winner(tmp_path: Path) -> None:
    result = measured()
    text = page([result], tmp_path / "new" / "folder")
    assert result.winner not in (None, result.space.default)
    assert result.winner is not None
    assert text.startswith("<!DOCTYPE html>")
    assert text.rstrip().endswith("</html>")
    assert not re.search(r"http|<script|<link|@import|url\(|//", words(text))
    sources = re.findall(r'src="([^"]*)"', text)
    assert len(sources) == 4  # summary, history, strategies, importance
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert all(png.startswith(b"\x89PNG") for png in pictures(text))
    plain = words(text)
    fields = ", ".join(f"{name}={value}" for name, value in result.winner.fields)
    assert f"Winner: <code>{result.winner.strategy} ({fields})</code>" in plain
    assert "Default: <code>" in plain
    gain = result.timings[result.space.default].seconds / result.timings[result.winner].seconds
    assert f"Gain: <b>{gain:.3f} times</b>" in plain
    assert "MEASURED." in plain
    assert "NVIDIA H200" in plain
    assert "driver 13000" in plain
    assert "23 samples" in plain
    floor = 2 * result.space.problem.nbytes / 4e12
    assert f"Floor: {floor * 1e6:.2f} µs" in plain
    assert "20 trials in a space of" in plain


def test_failures_are_listed_and_wrong_results_come_first(tmp_path: Path) -> None:
    result = measured()
    bad = result.space.tiles[20:40]
    result.trials += [Trial(tile, None, "compile", f"sentence {at}") for at, tile in enumerate(bad[:15])]
    result.trials += [Trial(tile, None, "hang", "took 20 s") for tile in bad[15:18]]
    result.trials.append(Trial(bad[18], None, "wrong", "dx is <script>alert(1)</script> & more"))
    text = words(page([result, modelled()], tmp_path, title="<b>A & B</b>"))
    assert "failed, compile: 15" in text
    assert all(f": sentence {at}</li>" in text for at in range(15))
    assert "<details><summary>failed, compile: 15" in text  # a long list is collapsed
    assert "<p>failed, hang: 3</p>" in text
    assert "WRONG RESULTS: 1 tiles compute wrong results" in text
    assert text.index("WRONG RESULTS: 1 tiles") < text.index("<table>")
    assert '<li class="wrong"><code>' in text
    assert text.index('<li class="wrong">') < text.index("failed, compile: 15")
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; more" in text
    assert "<script" not in text
    assert "<b>A" not in text
    assert "<title>&lt;b&gt;A &amp; B&lt;/b&gt;</title>" in text


def test_a_modelled_page_never_looks_measured(tmp_path: Path) -> None:
    result = modelled()
    result.instead = "measured"
    text = words(page([result], tmp_path))
    left = "Not stored: the table contains a measured entry, which is better evidence."
    assert left in text
    assert "measured" not in text.replace(left, "").lower().replace(report.CSS.lower(), "")
    assert "MODELLED. No kernel was timed" in text
    assert "quartiles" not in text
    assert "samples" not in text
    assert "predicted time <b>" in text
    assert "Verified: cpu executor, rows=267" in text
    floor = 2 * result.space.problem.nbytes / (0.9 * DEVICE.bandwidth)
    assert f"Floor: {floor * 1e6:.2f} µs" in text


def test_a_simulated_page_never_looks_measured(tmp_path: Path) -> None:
    result = measured()
    result.source, result.entry = "simulated", None
    text = words(page([result], tmp_path))
    assert "SIMULATED. No kernel ran on a GPU" in text
    assert "measured" not in text.lower().replace(report.CSS.lower(), "")
    assert "quartiles" not in text
    assert "4,000 to 4,000 GB/s on the simulated GPU" in text
    assert "simulated time <b>" in text


def test_the_page_of_a_rehearsal_is_marked_as_rehearsed(tmp_path: Path) -> None:
    result = measured()
    result.source, result.entry = "rehearsed", None
    text = words(page([result], tmp_path))
    assert "REHEARSED. The clock did not time a GPU" in text
    assert "measured" not in text.lower().replace(report.CSS.lower(), "")


def test_a_mixed_page_counts_its_sources(tmp_path: Path) -> None:
    text = words(page([measured(), modelled(), modelled()], tmp_path))
    assert "MEASURED. 1 of 3 problems." in text
    assert "MODELLED. 2 of 3 problems." in text
    assert text.count("; modelled, NVIDIA H200") == 2


def test_the_page_without_results(tmp_path: Path) -> None:
    text = page([], tmp_path)
    assert "No problem was tuned" in text
    assert "src=" not in text


@pytest.mark.parametrize("count", [0, 1, 7])
def test_few_trials_have_no_importances(tmp_path: Path, count: int) -> None:
    result = modelled(count)
    text = page([result], tmp_path)
    assert len(pictures(text)) == (3 if count else 1)
    assert ("No tile was tried" in text) if not count else (f"{count} trials have a time, expected at least 8" in text)


def test_parameters_with_one_value_have_no_importances(tmp_path: Path) -> None:
    result = modelled(0)
    result.trials = [Trial(result.space.default, 1e-6 * at) for at in range(5, 15)]
    assert "each parameter had one value in all trials" in page([result], tmp_path)


def test_equal_times_have_no_importances(tmp_path: Path) -> None:
    result = modelled()
    result.trials = [Trial(trial.tile, 5e-6) for trial in result.trials]
    assert "all trials took the same time" in page([result], tmp_path)


def test_the_parameter_that_sets_the_time_has_the_largest_importance() -> None:
    result = modelled(0)
    tiles = [tile for tile in result.space.tiles if tile.strategy == "split"]
    assert len({tile.threads for tile in tiles}) > 1
    assert len({tile.rows_per_team for tile in tiles}) > 2
    result.trials = [Trial(tile, 1e-6 * (1 + tile.rows_per_team)) for tile in tiles]
    found = importances(tiles, [(trial.tile, trial.seconds or math.nan) for trial in result.trials])
    assert isinstance(found, dict)
    assert max(found, key=lambda name: found[name]) == "rows_per_team"
    assert found["rows_per_team"] > 0.6
    assert "strategy" not in found  # the strategy has only one value


def test_the_page_if_every_tile_failed(tmp_path: Path) -> None:
    space = space_of()
    trials = [Trial(tile, None, "crash", "the worker died") for tile in space.tiles[:5]]
    result = TuningResult(space, "measured", trials=trials, sentence="5 of 5 tiles failed", interrupted=True)
    text = page([result], tmp_path)
    assert "No tile was chosen." in text
    assert "5 of 5 tiles failed" in text
    assert "Interrupted." in text
    assert "failed, crash: 5" in text
    assert "Floor: unknown" in text
    assert len(pictures(text)) == 2  # no strategy has a time to show


def test_an_interrupted_problem_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    """Of four problems one was tuned, and one was interrupted: --resume continues three."""
    options: Any = SimpleNamespace(table="t.json", device=SimpleNamespace(name="H200"))
    progress = Progress(options, 4)
    for interrupted in (False, True):
        progress.ends(TuningResult(space_of(), "model", sentence="none", interrupted=interrupted))
    progress.summary([], [], interrupted=True)
    assert "3 problems are left" in capsys.readouterr().out


def test_a_tile_that_fails_later_is_not_in_the_figures() -> None:
    result = measured()
    fastest = min(result.trials, key=lambda trial: trial.seconds or math.inf).tile
    count = len(figures.timed(result))
    result.trials.append(Trial(fastest, None, "wrong", "later"))
    assert len(figures.timed(result)) == count - 1
    assert fastest not in {trial.tile for trial in figures.timed(result)}


def test_the_page_of_many_problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = pictures(page([measured(10)], tmp_path))
    for name in ("history", "strategies", "importance"):  # drawn once above; drawing 40 of each is too slow
        monkeypatch.setattr(figures, name, lambda *_: few[1])
    results = [measured(10, rows, seed=rows) for rows in range(100, 140)]
    text = page(results, tmp_path)
    plain = words(text)
    many = pictures(text)
    assert len(many) == 1 + 3 * 40
    assert size_of(many[0])[1] > size_of(few[0])[1] + 39 * 20  # the summary has one row per problem
    links, anchors = re.findall(r'<a href="#(p\d+)">', plain), re.findall(r'<h2 id="(p\d+)">', plain)
    assert links == anchors == [f"p{number}" for number in range(1, 41)]
    gains = [float(found) for found in re.findall(r'<td class="number">(\d+\.\d\d)</td>', plain)]
    assert len(gains) == 40
    assert gains == sorted(gains, reverse=True)


def test_a_page_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page([modelled()], tmp_path, title="the first")
    text = page([modelled()], tmp_path, title="the second")
    assert "the first" not in text
    assert "the second" in text

    def broken(*_: object) -> bytes:
        raise RuntimeError("no figure")

    monkeypatch.setattr(figures, "strategies", broken)
    with pytest.raises(RuntimeError, match="no figure"):
        report.write([modelled()], tmp_path, title="the third")
    assert (tmp_path / "index.html").read_text(encoding="utf-8") == text
    assert [one.name for one in tmp_path.iterdir()] == ["index.html"]


def test_pages_can_be_written_by_threads(tmp_path: Path) -> None:
    failed: list[BaseException] = []

    def one(number: int) -> None:
        try:
            report.write([measured(10, seed=number)], tmp_path / str(number), title=f"run {number}")
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert all(f"run {number}" in (tmp_path / str(number) / "index.html").read_text() for number in range(3))


@pytest.mark.parametrize("span", [1.0, 1.001, 1.3, 4.0, 30.0, 1e3, 1e6])
def test_a_log_axis_has_a_few_ticks(span: float) -> None:
    figure, axes = figures._new(6.4, 3.7, "a title")
    axes.plot([1, 2], [7.0, 7.0 * span], "o")
    figures._log_axis(axes, "y", [7.0, 7.0 * span])
    figure.draw_without_rendering()
    low, high = axes.get_ylim()
    inside = [
        text.get_text() for at, text in zip(axes.get_yticks(), axes.get_yticklabels(), strict=True) if low <= at <= high
    ]
    assert 3 <= len(inside) <= 10
    assert len(set(inside)) == len(inside)


def test_pictures_are_not_blank(tmp_path: Path) -> None:
    path = tmp_path / "one.png"
    path.write_bytes(figures.history(measured(), "time"))
    pixels = matplotlib.image.imread(path)
    assert pixels[..., :3].std() > 0.05


def test_the_tuner_does_not_import_the_report() -> None:
    code = "import sys, cunorm.tuning.tuner; print('matplotlib' in sys.modules, 'cunorm.tuning.report' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_the_report_does_not_import_pyplot() -> None:
    code = "import sys, cunorm.tuning.report.page; print('matplotlib.pyplot' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_names_of_tiles_are_escaped(tmp_path: Path) -> None:
    result = modelled(1)
    result.trials.append(Trial(Tile("<i>"), None, "launch", "odd"))
    assert "<code>&lt;i&gt;</code>: odd" in page([result], tmp_path)
