"""Tuning one problem by measurement with a fake worker: the winner, its table entry, budgets, a second run."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from cunorm.tuning.measure.errors import Failed, Lost, Stopped
from cunorm.tuning.measure.result import MORE, Budget, TuningResult
from cunorm.tuning.problem_tuner import Measuring, Modelling
from cunorm.tuning.search.space import SWEPT, Space
from cunorm.tuning.search.study import ProblemStudy

from cunorm import Tile
from cunorm.core.devices import KNOWN
from cunorm.core.problem import Problem
from cunorm.ops.registry import OPS
from cunorm.tiling.table import entry_of, raw_of
from cunorm.traffic.sampling import floor_bytes

DEVICE = KNOWN["H200"]
SMALL = Problem(
    op="group_norm_backward",
    dtype="bfloat16",
    gamma_dtype="bfloat16",
    beta_dtype=None,
    stats_dtype="float32",
    layout="NCHW",
    N=2,
    C=320,
    HxW=16384,
    group=32,
    outputs=("dx", "dgamma", "dbeta"),
)
LARGE = Problem(
    op="layer_norm_backward",
    dtype="bfloat16",
    gamma_dtype="bfloat16",
    beta_dtype=None,
    stats_dtype="float32",
    layout="NCHW",
    N=65536,
    C=96,
    HxW=1,
    group=1,
    outputs=("dx", "dgamma", "dbeta"),
)


def space_of(problem: Problem) -> Space:
    return Space.of(problem, OPS[problem.op].strategies, DEVICE)


class FakeWorker:
    """Answers as a worker on a GPU does, with planted times, and records its requests."""

    def __init__(self, microseconds: dict[Tile, float], noise: float = 0.004, measures: bool = True) -> None:
        self.microseconds, self.noise, self.measures = microseconds, noise, measures
        self.random = random.Random(0)
        self.spawned, self.alive = 0, False
        self.opened: list[Problem] = []
        self.asked: Counter[str] = Counter()
        self.wrong: set[Tile] = set()
        self.text = "specialised"  # the text that calls run once a plan is compiled
        self.dies: set[Tile] = set()
        self.stop_after: float = float("inf")

    def open(self, problem: Problem, seconds: float) -> None:
        self._start()
        self.opened.append(problem)

    def _start(self) -> None:
        if not self.alive:
            self.alive, self.spawned = True, self.spawned + 1

    def ask(self, what: str, *arguments: Any, seconds: float) -> Any:
        self._start()
        self.asked[what] += 1
        if sum(self.asked.values()) > self.stop_after:
            raise Stopped
        if what == "facts":
            return {"cunorm": "0", "driver": 13000}, self.measures, 4e12
        assert self.opened, "a problem"
        if what == "verify":
            return "dx: too far" if arguments[0] in self.wrong else None
        if what == "compile":
            return self.text
        if what == "round":
            for index, tile in enumerate(arguments[0]):
                if tile in self.dies:
                    self.alive = False
                    raise Lost("crash", "SIGSEGV", index)
            return [self.microseconds[one] * 1e-6 * self.random.gauss(1, self.noise) for one in arguments[0]]
        return None


def times_of(space: Space, default: float = 10.0, others: float = 20.0) -> dict[Tile, float]:
    """Microseconds of each tile: `default` for the default tile, `others` or more for all other tiles."""
    found = {tile: others + index / 10 for index, tile in enumerate(space.tiles)}
    return found | {space.default: default}


def measured(
    space: Space, worker: FakeWorker, study: ProblemStudy | None = None, incumbent: Tile | None = None, **budget: Any
) -> TuningResult:
    study = study or ProblemStudy(space, None, [incumbent] if incumbent else [], 0)
    return Measuring(space, study, worker, Budget(**budget), incumbent, lambda _: None).run()  # type: ignore[arg-type]


def test_a_faster_tile_is_stored_with_all_facts_of_an_entry() -> None:
    space = space_of(SMALL)
    best, second = space.tiles[7], space.tiles[3]
    times = times_of(space) | {best: 8.0, second: 8.9}
    result = measured(space, FakeWorker(times))
    assert result.source == "measured"
    assert result.winner == best
    entry = result.entry
    assert entry is not None
    assert entry.source == "measured"
    assert entry.kernel == space.kernel(best)
    facts = entry.facts
    assert facts["time_us"] == pytest.approx(8.0, rel=0.01)
    assert facts["default_us"] == pytest.approx(10.0, rel=0.01)
    assert facts["q25_us"] <= facts["time_us"] <= facts["q75_us"]
    assert facts["samples"] >= 20
    assert facts["trials"] == len(space)
    assert facts["gigabytes_per_s"] == pytest.approx(floor_bytes(SMALL) / facts["time_us"] / 1e3, rel=0.001)
    assert facts["roofline"] == pytest.approx(facts["gigabytes_per_s"] / 4000, abs=0.001)
    assert facts["runner_up"]["time_us"] > facts["time_us"]
    assert "default" not in facts
    assert entry.text == facts["text"] == "specialised"
    assert entry_of(raw_of(entry)) == entry
    assert {trial.tile for trial in result.trials} == set(space.tiles)


def test_an_entry_records_the_text_that_was_measured() -> None:
    """If the specialised kernels are not compiled, calls and the race run the generic ones."""
    space = space_of(SMALL)
    worker = FakeWorker(times_of(space))
    worker.text = "generic"
    result = measured(space, worker, trials=10)
    assert result.entry is not None
    assert result.entry.facts["text"] == "generic"


@pytest.mark.parametrize(("gain", "stored"), [(1.005, False), (1.014, False), (1.03, True), (1.2, True)])
def test_a_gain_below_two_per_cent_keeps_the_default(gain: float, stored: bool) -> None:
    """If no tile is 2 % faster, the default is stored and marked as such. The mark prevents useless tuning again."""
    space = space_of(SMALL)
    other = space.tiles[5]
    result = measured(space, FakeWorker(times_of(space) | {other: 10 / gain}, noise=0.001))
    assert result.entry is not None
    assert (result.winner == other) == stored
    assert result.winner in (other, space.default)
    assert result.entry.facts.get("default", False) is not stored


def test_a_tie_is_won_by_the_tile_of_the_table_then_by_the_simplest() -> None:
    """The tile of the table wins a tie, otherwise the simplest tile: another tile has another order of summation."""
    space = space_of(SMALL)
    one, other = space.tiles[4], space.tiles[6]
    times = times_of(space) | {one: 8.0, other: 8.0}
    assert measured(space, FakeWorker(times), incumbent=one).winner == one
    assert measured(space, FakeWorker(times), incumbent=other).winner == other
    found = {measured(space, FakeWorker(times)).winner for _ in range(3)}
    assert found == {min((one, other), key=space.simplicity)}


def test_spaces_of_up_to_200_tiles_are_tried_whole_and_larger_ones_in_part() -> None:
    small, large = space_of(SMALL), space_of(LARGE)
    assert len(small) <= SWEPT < len(large)
    assert len(measured(small, FakeWorker(times_of(small))).trials) == len(small)
    tried = [trial.tile for trial in measured(large, FakeWorker(times_of(large))).trials]
    assert len(tried) == len(set(tried)) == MORE
    assert set(large.tiles[:20]) <= set(tried[:20])


def test_a_good_tile_is_found_in_a_large_space_against_the_model() -> None:
    """The planted best tile is the last but one in the order of the model. Tiles nearer to it are faster."""
    space = space_of(LARGE)
    goal = space.tiles[-2]
    fields = goal.as_dict()

    def steps(tile: Tile) -> float:
        return 3.0 * (tile.strategy != goal.strategy) + sum(
            tile.as_dict().get(name) != value for name, value in fields.items()
        )

    times = {tile: 10.0 + 2 * steps(tile) for tile in space.tiles}
    result = measured(space, FakeWorker(times))
    assert result.winner is not None
    assert times[result.winner] <= 12.0


def test_a_tile_that_fails_in_the_final_does_not_win() -> None:
    space = space_of(SMALL)
    best = space.tiles[7]
    worker = FakeWorker(times_of(space) | {best: 5.0, space.tiles[3]: 8.0})
    real = worker.ask

    def ask(what: str, *arguments: Any, seconds: float) -> Any:
        if what == "round" and worker.asked["round"] > 40:
            worker.dies = {best}
        return real(what, *arguments, seconds=seconds)

    worker.ask = ask  # type: ignore[method-assign]
    result = measured(space, worker)
    assert result.winner == space.tiles[3]
    assert [(trial.tile, trial.failure) for trial in result.failures] == [(best, "crash")]
    assert worker.spawned == 2
    assert worker.opened == [SMALL] * 2


def test_no_winner_if_every_tile_is_wrong() -> None:
    space = space_of(SMALL)
    worker = FakeWorker(times_of(space))
    worker.wrong = set(space.tiles)
    result = measured(space, worker)
    assert (result.winner, result.entry) == (None, None)
    assert result.sentence == f"{len(space)} of {len(space)} tiles failed"
    assert worker.asked["round"] == 0  # nothing was timed


def test_no_winner_if_the_worker_cannot_open_the_problem() -> None:
    space = space_of(SMALL)

    class Broken(FakeWorker):
        def open(self, problem: Problem, seconds: float) -> None:
            raise Failed("memory", "out of memory")

    result = measured(space, Broken(times_of(space)))
    assert result.winner is None
    assert "memory: out of memory" in result.sentence
    assert result.failures == []  # the error is not the fault of a tile


@pytest.mark.long
def test_a_run_can_be_stopped_at_any_request() -> None:
    """No exception is raised. A stored tile has enough samples and is the best tile or the default."""
    space = space_of(SMALL)
    best = space.tiles[2]
    times = times_of(space) | {best: 8.0}
    whole = FakeWorker(times)
    measured(space, whole)
    winners = set()
    for stop in range(0, sum(whole.asked.values()), 5):
        worker = FakeWorker(times)
        worker.stop_after = stop
        result = measured(space, worker)
        assert result.interrupted
        winners.add(result.winner)
        if result.entry is not None:
            assert result.winner in (best, space.default)
            assert result.entry.facts["samples"] >= 5
    assert winners == {None, best} or winners == {None, best, space.default}
    # In the last rounds the best tile is known and kept. The worker gets no request after the stop.
    for stop in (1, 5, 10, 15):
        worker = FakeWorker(times)
        worker.stop_after = sum(whole.asked.values()) - stop
        result = measured(space, worker)
        assert (result.interrupted, result.winner) == (True, best)
        assert result.entry is not None
        assert sum(worker.asked.values()) == worker.stop_after + 1


def test_a_process_that_dies_between_candidates_is_no_failure_of_a_tile() -> None:
    space = space_of(SMALL)
    best = space.tiles[2]
    for deaths in (2, 9):
        worker = FakeWorker(times_of(space) | {best: 8.0})
        real, left = worker.ask, iter(range(deaths))

        def ask(what: str, *arguments: Any, seconds: float, real: Any = real, left: Any = left, w: Any = worker) -> Any:
            if what == "round" and w.asked["round"] > 2 and next(left, None) is not None:
                w.alive = False
                raise Lost("crash", "killed", None)
            return real(what, *arguments, seconds=seconds)

        worker.ask = ask  # type: ignore[method-assign]
        result = measured(space, worker)
        assert result.failures == []
        if deaths == 2:
            assert result.winner == best
        else:
            assert (result.winner, result.sentence) == (None, "crash: killed")


def test_a_second_run_races_the_best_of_the_first_again() -> None:
    """Times of the first run select the tiles to race. They are never compared with times of the second run."""
    space = space_of(SMALL)
    study = ProblemStudy(space, None, [], 0)
    best, then = space.tiles[7], space.tiles[3]
    first = measured(space, FakeWorker(times_of(space) | {best: 7.0, then: 8.0}), study)
    assert first.winner == best
    worker = FakeWorker({tile: 2 * value for tile, value in times_of(space).items()} | {best: 19.0, then: 12.0})
    again = measured(space, worker, study)
    assert again.trials == []
    assert again.winner == then
    assert again.entry is not None
    assert again.entry.facts["time_us"] == pytest.approx(12.0, rel=0.02)
    assert worker.asked["verify"] <= 20


def test_tuning_by_the_model_times_nothing() -> None:
    space = space_of(SMALL)
    worker = FakeWorker({}, measures=False)
    study = ProblemStudy(space, None, [], 0)
    result = Modelling(space, study, worker, Budget(trials=5), None, lambda _: None).run()  # type: ignore[arg-type]
    assert result.winner == space.default
    assert len(result.trials) == 5
    assert worker.asked["round"] == 0
    assert worker.asked["verify"] == 1


@pytest.mark.parametrize("last", [0, 1, 7, 20, 35, 50, 55])
def test_a_default_that_fails_is_not_stored(last: int) -> None:
    """After an early failure another tile becomes the control. After a late failure nothing is stored."""
    space = space_of(SMALL)
    worker = FakeWorker(times_of(space) | {space.tiles[3]: 8.0})
    real = worker.ask
    rounds = Counter[str]()

    def ask(what: str, *arguments: Any, seconds: float) -> Any:
        rounds[what] += 1
        if rounds["round"] > last:
            worker.dies = {space.default}
        return real(what, *arguments, seconds=seconds)

    worker.ask = ask  # type: ignore[method-assign]
    result = measured(space, worker)
    assert rounds["round"] > last
    assert result.winner != space.default
    assert (result.winner is None) == (result.entry is None) == bool(result.sentence)
    assert (space.default, "crash") in [(trial.tile, trial.failure) for trial in result.failures]
    if last < 7:
        assert result.winner == space.tiles[3]
