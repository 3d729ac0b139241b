"""The tuner's sampler on the spaces of real problems with synthetic times; and the benchmark of the sampler."""

from __future__ import annotations

import importlib
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import optuna
import pytest
from cunorm.tuning.measure.result import MORE
from cunorm.tuning.search.sampler import BEST, FAILURE, PRIOR, ValidSetSampler, params_of, tile_of
from cunorm.tuning.search.space import SWEPT, Space
from optuna.trial import TrialState

from cunorm.core.devices import KNOWN
from cunorm.core.problem import Problem
from cunorm.core.strategy import Tile, Tiling
from cunorm.ops.registry import OPS
from tests.support.covering import every
from tests.support.paths import ROOT

KEPT = ROOT / "benchmarks" / "results" / "tuner_sampler.json"
LARGE = ("layer_norm_backward bfloat16 rows=8192", "batch_norm_backward")
SMALL = ("batch_norm_backward_reduce bfloat16 NCHW N=256", "batch_norm_stats bfloat16 NCHW N=32")


@pytest.fixture(scope="module")
def benchmark() -> Iterator[ModuleType]:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield importlib.import_module("tuner_sampler")
    sys.path.remove(str(ROOT / "benchmarks"))


def _all_worth(of: Any, problem: Problem, tile: Tile) -> Tiling:
    """A tiling that is marked as worth trying."""
    made: Tiling = of(problem, tile)
    made.__dict__["worth"] = True
    return made


@lru_cache
def space_of(start: str) -> Space:
    """The space of the benchmark's problem whose name begins with `start`.

    A space of `LARGE` also contains the tiles that are not worth trying.
    """
    problems = importlib.import_module("tuner_sampler").problems()
    problem = next(one for name, one in problems.items() if name.startswith(start))
    strategies = OPS[problem.op].strategies
    if start in LARGE:
        strategies = {name: replace(one, of=partial(_all_worth, one.of)) for name, one in strategies.items()}
    return Space.of(problem, strategies, KNOWN["H200"])


def proposed(
    sampler: ValidSetSampler, count: int, told: Callable[[Tile], float | str | None], study: Any = None
) -> list[Tile]:
    """At most `count` proposals. `told` returns a tile's seconds or kind of failure, or None if its run breaks off."""
    study = study or optuna.create_study(sampler=sampler)
    found: list[Tile] = []
    while len(found) < count and not sampler.exhausted(study):
        trial = study.ask(fixed_distributions=sampler.distributions)
        tile = tile_of(trial.params)
        found.append(tile)
        outcome = told(tile)
        if isinstance(outcome, float):
            study.tell(trial, math.log(outcome))
            continue
        if outcome is not None:
            trial.set_user_attr(FAILURE, outcome)
        study.tell(trial, state=TrialState.PRUNED)
    return found


def shipped(space: Space, seed: int = 0, **settings: Any) -> ValidSetSampler:
    return ValidSetSampler(space.tiles, [space.default], seed, **settings)


@pytest.mark.parametrize("start", every(2, LARGE[::-1]))
def test_a_good_tile_that_the_model_ranks_low_is_found(benchmark: ModuleType, start: str) -> None:
    """No good tile is among the first 40 in the order of the cost model. The sampler must find one for 7 of 8 seeds."""
    space = space_of(start)
    assert len(space) > SWEPT

    def is_found(seed: int) -> bool:
        lands = (benchmark.landscape(space, number, 0.6) for number in range(100 * seed, 100 * seed + 100))
        first = {*space.tiles[:40]}
        land = next(one for one in lands if not {tile for tile in first if one.truth[tile] <= one.enough})
        found = proposed(shipped(space, seed), MORE, land.truth.__getitem__)
        return bool(min(land.truth[tile] for tile in found) <= land.enough)

    assert sum(is_found(seed) for seed in range(8)) >= 7


@pytest.mark.parametrize("start", LARGE)
def test_every_proposed_tile_is_legal_and_new(benchmark: ModuleType, start: str) -> None:
    space = space_of(start)
    land = benchmark.landscape(space, 1, 0.6)
    found = proposed(shipped(space), MORE, land.truth.__getitem__)
    assert len(set(found)) == len(found) == MORE
    for tile in found:
        assert tile in land.truth
        assert space.strategy(tile).refuses(space.problem, tile, space.device) is None


@pytest.mark.parametrize("start", SMALL)
def test_a_small_space_is_proposed_in_the_order_of_the_model(benchmark: ModuleType, start: str) -> None:
    space = space_of(start)
    assert len(space) <= SWEPT
    assert proposed(shipped(space), len(space) + 1, lambda _: 1e-6) == list(space.tiles)


def test_the_first_proposals_of_a_large_space_are_given_tiles_and_then_the_model_order(benchmark: ModuleType) -> None:
    space = space_of(LARGE[0])
    first = [space.tiles[300], Tile("no such strategy"), space.tiles[7]]
    sampler = ValidSetSampler(space.tiles, first)
    known = [space.tiles[300], space.tiles[7], *(tile for tile in space.tiles if tile != space.tiles[7])]
    assert proposed(sampler, PRIOR, lambda _: 1e-6) == known[:PRIOR]


@pytest.mark.parametrize("settings", [{}, {"prior": 0, "local": 0.0}, {"prior": 0, "local": 1.0}], ids=str)
def test_every_tile_is_proposed_once_until_the_space_is_exhausted(
    benchmark: ModuleType, settings: dict[str, Any]
) -> None:
    """Each way of choosing proposes every tile exactly once: the order of the model, TPE, and neighbours.

    The space is exhausted after the last tile and not before.
    """
    space = space_of(SMALL[0])
    sampler = shipped(space, **settings)
    study = optuna.create_study(sampler=sampler)
    for number in range(len(space)):
        assert not sampler.exhausted(study)
        assert len(proposed(sampler, 1, lambda tile: space.predicted(tile), study)) == 1, number
    assert sampler.exhausted(study)
    assert {tile_of(trial.params) for trial in study.trials} == set(space.tiles)


def test_failed_tiles_are_not_proposed_again_but_broken_off_ones_are(benchmark: ModuleType) -> None:
    space = space_of(SMALL[0])
    failing, broken = set(space.tiles[::3]), {space.tiles[1], space.tiles[4]}
    times: dict[Tile, int] = {}

    def told(tile: Tile) -> float | str | None:
        times[tile] = times.get(tile, 0) + 1
        if tile in failing:
            return "wrong"
        return None if tile in broken and times[tile] == 1 else 1e-6

    found = proposed(shipped(space), 2 * len(space), told)
    assert len(found) == len(space) + len(broken)
    assert {tile for tile, count in times.items() if count == 2} == broken


def share(tiles: Sequence[Tile], bad: set[Tile]) -> float:
    return statistics.fmean(tile in bad for tile in tiles)


@pytest.mark.parametrize("local", [0.0, 0.5])
@pytest.mark.parametrize("start", LARGE[:1])
def test_the_sampler_learns_to_avoid_failing_tiles(benchmark: ModuleType, start: str, local: float) -> None:
    """About half of the space fails. The cost model does not rate these tiles lower than others.

    After the proposals in the order of the model, their share is less than 0.6 times their share of the space.
    """
    space = space_of(start)
    threads = sorted({tile.threads for tile in space.tiles})
    bad = {tile for tile in space.tiles if tile.threads == threads[threads.index(256)]}
    assert 0.3 < share(space.tiles, bad) < 0.6
    shares = []
    for seed in range(4):
        land = benchmark.landscape(space, seed, 0.6)
        sampler = shipped(space, seed, local=local)
        found = proposed(sampler, 80, lambda tile, truth=land.truth: "hang" if tile in bad else truth[tile])  # type: ignore[misc]
        shares.append(share(found[PRIOR:], bad))
    assert statistics.fmean(shares) < 0.6 * share(space.tiles, bad)


def test_equal_seeds_propose_equal_sequences(benchmark: ModuleType) -> None:
    space = space_of(LARGE[0])
    land = benchmark.landscape(space, 2, 0.6)
    runs = [proposed(shipped(space, seed), 60, land.truth.__getitem__) for seed in (5, 5, 6)]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_neighbours_differ_in_one_parameter_from_one_of_the_best(benchmark: ModuleType) -> None:
    space = space_of(LARGE[0])
    land = benchmark.landscape(space, 3, 0.6)
    sampler = shipped(space, prior=5, local=1.0)
    found = proposed(sampler, 40, land.truth.__getitem__)
    names = [name for name in sampler.distributions if name != "strategy"]
    for number in range(5, 40):
        best = sorted(found[:number], key=lambda tile: land.truth[tile])[:BEST]
        params = params_of(found[number], names)
        differ = [sum(value != params[name] for name, value in params_of(one, names).items()) for one in best]
        assert min(differ) == 1, number


# ---- the benchmark --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", [0.6, 0.0])
def test_a_landscape_has_the_wanted_correlation(benchmark: ModuleType, wanted: float) -> None:
    land = benchmark.landscape(space_of(LARGE[0]), 0, wanted)
    again = benchmark.landscape(space_of(LARGE[0]), 0, wanted)
    assert abs(land.rho - wanted) <= benchmark.TOLERANCE[wanted]
    assert land.truth == again.truth
    assert land.truth != benchmark.landscape(space_of(LARGE[0]), 1, wanted).truth


def test_equal_values_share_the_mean_of_their_ranks(benchmark: ModuleType) -> None:
    import numpy as np

    assert list(benchmark.ranks(np.array([3.0, 1.0, 3.0, 2.0]))) == [3.5, 1.0, 3.5, 2.0]
    assert benchmark.correlation(np.arange(9.0), -(np.arange(9.0) ** 3)) == pytest.approx(-1)


def test_trials_are_counted_until_one_is_good_enough(benchmark: ModuleType) -> None:
    land = benchmark.landscape(space_of(SMALL[0]), 0, 0.6)
    ordered = sorted(land.truth, key=lambda tile: land.truth[tile])
    late = lambda land, seed: iter([None, ordered[-1], None, ordered[-2], ordered[0]])  # noqa: E731
    never = lambda land, seed: iter([None, *ordered[:-10:-1]])  # noqa: E731
    beyond = lambda land, seed: iter([*[None] * land.budget, ordered[0]])  # noqa: E731
    assert [benchmark.needed(way, land, 0) for way in (late, never, beyond)] == [5, math.inf, math.inf]
    assert benchmark.summary([1, 2, 3, 4, math.inf]) == {"median": 3, "p90": None, "found": 0.8}


@pytest.mark.long
def test_the_benchmark_runs(tmp_path: Path) -> None:
    script, found = ROOT / "benchmarks" / "tuner_sampler.py", tmp_path / "found.json"
    command = [sys.executable, str(script), "--quick", "--json", str(found)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    document, kept = (json.loads(path.read_text(encoding="utf-8")) for path in (found, KEPT))
    assert document.keys() == kept.keys()
    assert document["results"].keys() == kept["results"].keys()
    assert "synthetic" in document["times"]
    assert "synthetic" in done.stdout


def test_the_kept_result_supports_the_choice_of_the_sampler(benchmark: ModuleType) -> None:
    document = json.loads(KEPT.read_text(encoding="utf-8"))
    assert "synthetic" in document["times"]
    rhos = [rho for land in document["landscapes"] if land["wanted"] == 0.6 for rho in land["rho"]]
    assert all(abs(rho - 0.6) <= 0.02 for rho in rhos)
    for size, ways in document["results"]["0.6"].items():
        assert set(ways) == set(benchmark.WAYS)
        medians = {way: math.inf if one["median"] is None else one["median"] for way, one in ways.items()}
        assert medians[benchmark.SHIPPED] == min(medians.values()), size
