"""benchmarks/measure_tiles.py: which tiles are measured, the file of times, and the table of the fastest tiles."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cunorm.core import settings
from cunorm.core.devices import KNOWN
from cunorm.core.problem import Problem
from cunorm.core.strategy import Tile
from cunorm.executors.choose import executor
from cunorm.jit import cubins
from cunorm.ops.registry import OPS
from cunorm.runtime import plans
from cunorm.tiling import costmodel, table
from tests.support.compilers import needs_nvrtc
from tests.support.paths import ROOT
from tests.support.problems import forget_calls

H100 = KNOWN["H100"]
FACTS = {"device": asdict(H100), "software": {"cupy": "14.2"}, "copy": 3e12, "rounds": 9}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.measure_tiles")


def drawn(script: ModuleType, folder: Path, *more: str) -> list[tuple[Problem, list[Tile]]]:
    out = folder / "tiles.jsonl"
    script.main(["draw", "--device", "H100", "--workloads", "mlp", "--out", str(out), *more])
    return [(problem, [Tile.of(one) for one in raw["tiles"]]) for problem, raw in script.lines_of(out)]


def test_the_default_is_drawn_first_and_no_tile_twice(script: ModuleType, tmp_path: Path) -> None:
    for problem, tiles in drawn(script, tmp_path, "--drawn", "4"):
        strategies = OPS[problem.op].strategies
        assert tiles[0] == costmodel.choose(problem, strategies.values(), H100).tile
        assert len(set(tiles)) == len(tiles) > 5
        assert all(strategies[tile.strategy].refuses(problem, tile, H100) is None for tile in tiles)


def test_drawn_tiles_depend_on_the_seed_alone(script: ModuleType, tmp_path: Path) -> None:
    first, second, other = (drawn(script, tmp_path, "--drawn", "4", "--seed", seed) for seed in "112")
    assert first == second != other


def test_stale_entries_are_drawn_with_their_tile(script: ModuleType, tmp_path: Path) -> None:
    """Of three entries one is fresh, and the tile of another is not legal."""
    found = drawn(script, tmp_path)[:3]
    worst = [
        costmodel.ranked(problem, OPS[problem.op].strategies.values(), H100)[-1].tile for problem, _ in found
    ]  # which is not drawn otherwise
    large = Tile.of({**worst[2].as_dict(), "strategy": worst[2].strategy, "threads": 2048})
    entries = [
        table.Entry(problem, tile, table.MODEL, kernel, {"predicted_us": 1.0})
        for (problem, _), tile, kernel in zip(
            found, [*worst[:2], large], ["0" * 16, script.digest(found[1][0], worst[1]), "0" * 16], strict=True
        )
    ]
    path = tmp_path / "t.json"
    table.update(path, H100, {}, entries)
    again = dict(drawn(script, tmp_path, "--stale", str(path)))
    assert again == {found[0][0]: [*found[0][1], worst[0]], found[2][0]: found[2][1]}


def test_without_a_device_the_tiles_are_those_of_the_gpu_here(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a GPU that is not in the list of known devices too."""
    other = replace(KNOWN["H200"], name="another")
    monkeypatch.setattr(script, "gpu_present", lambda: True)
    monkeypatch.setattr(script, "executor", lambda kind: SimpleNamespace(current=lambda: 0, limits=lambda at: other))
    assert script.device_named(None) == other and script.device_named("A100") == KNOWN["A100"]
    monkeypatch.setattr(script, "gpu_present", lambda: False)
    assert script.device_named(None) == H100


@needs_nvrtc
def test_built_kernels_are_those_that_run_loads(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """For the architecture of the device, in the cache folder. Of a kernel that does not compile the error is shown."""
    monkeypatch.setenv("CUNORM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(settings, "cores", lambda: 1)
    problem, tiles = drawn(script, tmp_path)[0]
    path = tmp_path / "one.jsonl"
    path.write_text(f"{script.line_of(problem, tiles=[script.raw_of(tiles[0])])}\n", encoding="utf-8")
    script.main(["build", str(path), "--device", "A100", "--seconds", "0"])
    assert "0 of 1 kernels compiled for sm_80" in capsys.readouterr().out
    script.main(["build", str(path), "--device", "A100"])
    assert "1 of 1 kernels compiled for sm_80" in capsys.readouterr().out
    gpu = executor("gpu")
    monkeypatch.setattr(gpu, "_machine_code", lambda *given: pytest.fail("compiled again"))
    plan = plans.plan_for(
        problem, OPS[problem.op].strategies, OPS[problem.op].names, plans.Target("gpu", 0, KNOWN["A100"]), tiles[0]
    )
    ((text, entry),) = plan.texts("specialised")
    assert gpu.build_for(text, entry, "sm_80").is_file()
    monkeypatch.setattr(script, "kernels_of", lambda path, device: {"nonsense": "entry"})
    with pytest.raises(SystemExit, match=r"(?s)entry with .*nonsense"):
        script.main(["build", str(path), "--device", "A100"])
    assert "0 of 1 kernels compiled" in capsys.readouterr().out


def measured(
    script: ModuleType, folder: Path, times: list[float], off: list[float]
) -> tuple[Path, Problem, list[Tile]]:
    """A file of times of one problem, its default first."""
    problem, tiles = drawn(script, folder)[0]
    lines = [
        {
            "tile": script.raw_of(tile),
            "off": away,
            "us": us,
            "q25": us,
            "q75": us,
            "kernel": script.digest(problem, tile),
        }
        for tile, us, away in zip(tiles, times, off, strict=False)
    ]
    out = folder / "measured.jsonl"
    out.write_text(f"{json.dumps(FACTS)}\n{script.line_of(problem, tiles=lines)}\n", encoding="utf-8")
    return out, problem, tiles


@pytest.mark.parametrize(
    ("times", "off", "chosen"),
    [
        ([10.0, 5.0, 7.0], [0.0, 0.0, 0.0], 1),
        ([10.0, 5.0, 7.0], [0.0, 0.5, 0.0], 2),  # its results differ from those of the default
        ([10.0, 9.9, 9.9], [0.0, 0.0, 0.0], 0),  # not enough faster
    ],
)
def test_the_table_has_the_fastest_tile(
    times: list[float], off: list[float], chosen: int, script: ModuleType, tmp_path: Path
) -> None:
    path, problem, tiles = measured(script, tmp_path, times, off)
    script.main(["table", str(path), "--table", str(tmp_path / "t.json")])
    entry = table.read(tmp_path / "t.json").entries[problem]
    assert (entry.tile, entry.source) == (tiles[chosen], table.MEASURED)


def test_other_processes_find_the_same_entries(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, problem, _ = measured(script, tmp_path, [10.0, 5.0, 7.0], [0.0, 0.0, 0.0])
    monkeypatch.setattr(settings, "cores", lambda: 1)
    tables = []
    for many in (2, 1):
        monkeypatch.setattr(script, "MANY", many)
        script.main(["table", str(path), "--table", str(tmp_path / f"{many}.json")])
        tables.append(table.read(tmp_path / f"{many}.json").entries)
    assert tables[0] == tables[1] and [*tables[0]] == [problem]


def test_an_op_anew_has_no_entry_whose_default_was_not_measured(script: ModuleType, tmp_path: Path) -> None:
    """Without ``--op`` the old entry stays. Entries of other ops stay in any case."""
    path, problem, tiles = measured(script, tmp_path, [10.0, 5.0, 7.0], [0.0, 0.0, 0.0])
    write = ["table", str(path), "--table", str(tmp_path / "t.json")]
    script.main(write)
    other = next(op for op in OPS if op != problem.op)
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(script.digest(problem, tiles[0]), "0" * 16), encoding="utf-8")  # the default's
    script.main(write)
    script.main([*write, "--op", other])
    assert problem in table.read(tmp_path / "t.json").entries
    script.main([*write, "--op", problem.op])
    assert problem not in table.read(tmp_path / "t.json").entries


def test_times_of_other_kernels_are_left_out(script: ModuleType, tmp_path: Path) -> None:
    path, problem, tiles = measured(script, tmp_path, [10.0, 5.0, 7.0], [0.0, 0.0, 0.0])
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(script.digest(problem, tiles[1]), "0" * 16), encoding="utf-8")
    ((_, raw),) = script.measured_in([path, path])
    kept = [Tile.of(one["tile"]) for one in raw["tiles"]]
    assert tiles[1] not in kept and len(kept) == len(set(kept)) > 0


class Clock:
    """Runs a tile twice and returns its number as its time."""

    def sets(self, nbytes: int, device: Any) -> int:
        return 2

    def bandwidth(self) -> float:
        return 3e12

    def sampler(self, tile: Tile, run: Any, sets: int) -> Any:
        for index in range(sets):
            run(index)
        return lambda: 2e-6


def test_run_measures_each_tile_and_continues_a_file(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU: NumPy arrays, and launches that write ones to dx or y."""
    launched: list[Any] = []
    numpy_gpu = SimpleNamespace(
        cupy=SimpleNamespace(**vars(np), cuda=SimpleNamespace(memory=SimpleNamespace(OutOfMemoryError=MemoryError))),
        build=lambda text, entry: (text, entry),
        load=lambda built, entry: executor("cpu").compile(*built),
        run=lambda steps, values, ordinal: launched.extend(step[4](values) for step in steps),
        synchronise=lambda ordinal: None,
        current=lambda: 0,
        limits=lambda ordinal: H100,
        allow_cluster=lambda kernel, blocks: None,
    )
    for module in (script, plans):
        monkeypatch.setattr(module, "executor", lambda kind: numpy_gpu)
    monkeypatch.setattr(cubins, "MOST_FILES", cubins.MOST_FILES)  # `run` changes it
    monkeypatch.setattr(script, "GraphClock", Clock)
    monkeypatch.setattr(script, "software", lambda kind: {})
    monkeypatch.setattr(numpy_gpu, "load", lambda built, entry: SimpleNamespace(ordinal=0))
    script._random_bytes.cache_clear()
    forget_calls()
    tiles = drawn(script, tmp_path, "--problems", "1")
    out = tmp_path / "measured.jsonl"
    with np.errstate(all="ignore"):
        script.main(["run", str(tmp_path / "tiles.jsonl"), "--out", str(out), "--rounds", "2"])
    ((problem, raw),) = script.lines_of(out)
    assert problem == tiles[0][0]
    assert [Tile.of(one["tile"]) for one in raw["tiles"]] == tiles[0][1]
    assert all(one["us"] == one["q25"] == 2.0 and one["predicted_us"] > 0 for one in raw["tiles"])
    assert all(isinstance(value, (int, float)) for values in launched for value in values)
    count = len(launched)
    script.main(["run", str(tmp_path / "tiles.jsonl"), "--out", str(out)])
    assert len(launched) == count  # the file already has the problem
    script._random_bytes.cache_clear()
    plans._plans.clear()
