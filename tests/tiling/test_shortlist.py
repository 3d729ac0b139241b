"""The shortlist compared with a ranking of all tiles, and the reuse of a tile for another N."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

import cunorm
from cunorm.core.devices import known
from cunorm.core.strategy import Strategy, Tile
from cunorm.ops.registry import OPS
from cunorm.tiling import choose_tile, costmodel, shortlist
from tests.support.covering import every
from tests.support.paths import ROOT

LISTED = [name for name in OPS if name != "batch_norm_gather_stats"]
STALE = "the cost model, a search space or the launches of a strategy have changed: run benchmarks/make_shortlist.py"


@pytest.fixture(scope="module")
def maker() -> Iterator[ModuleType]:
    """The module benchmarks/make_shortlist.py."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield importlib.import_module("make_shortlist")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start without cached plans."""
    monkeypatch.setattr("cunorm.runtime.plans._plans", {})


@pytest.mark.parametrize("op", LISTED)
def test_shortlisted_tiles_are_in_the_search_spaces(op: str, maker: ModuleType) -> None:
    for strategy in OPS[op].strategies.values():
        tiles = [tile for _, tile in shortlist.shortlist_of(strategy).tiles]
        assert {*tiles} <= {*strategy.tiles()}, STALE
        assert len({*tiles}) == len(tiles)
        assert [place for place, _ in shortlist.shortlist_of(strategy).tiles] == sorted(
            shortlist.place_in(strategy, tile) for tile in tiles
        )
    every = sum(len([*strategy.tiles()]) for strategy in OPS[op].strategies.values())
    listed = sum(len(shortlist.shortlist_of(one).tiles) for one in OPS[op].strategies.values())
    assert listed < every / 2 if op in shortlist._document() else listed == every <= maker.SMALL


@pytest.mark.parametrize("share", [4, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("op", LISTED)
def test_workloads_get_the_default_of_a_ranking_of_all_tiles(op: str, share: int, maker: ModuleType) -> None:
    """In bfloat16 on an H200 the tiles must be equal, because docs/speed/byte-floor.md reports their traffic.

    The quick suite ranks the tiles of every second workload.
    """
    for problem in maker.suite(op, maker.DTYPE)[::share]:
        case = problem, maker.DEVICE
        chosen = costmodel.choose(problem, OPS[op].strategies.values(), known(maker.DEVICE))
        assert maker.right(case, maker.of_all(case), chosen), f"{problem.describe()}: {STALE}"


def beside(maker: ModuleType, cases: list[Any]) -> list[float]:
    """For each case, the predicted time of the chosen tile over that of the default among all tiles."""
    found = []
    for case in cases:
        if (best := maker.of_all(case)) is not None:
            problem, device = case[0], known(case[1])
            found.append(costmodel.choose(problem, OPS[problem.op].strategies.values(), device).seconds / best.seconds)
    return found


@pytest.mark.parametrize(("share", "number"), [(8, 30), pytest.param(1, 800, marks=pytest.mark.long)])
@pytest.mark.parametrize("op", every(2, LISTED))
def test_other_problems_get_a_tile_within_2_percent_of_the_default(
    op: str, share: int, number: int, maker: ModuleType
) -> None:
    """For the shapes of the workloads in every dtype and on every device, 2 % of the problems may differ by more.

    For random problems, from which the shortlist was not made, 5 % may. No time differs by a factor of 2.
    """
    devices, dtypes = [*maker.KNOWN], [*maker.ITEMSIZE]
    own = [(one, device) for dtype in dtypes for one in maker.suite(op, dtype) for device in devices]
    ratios, others = beside(maker, own[:: 6 * share]), beside(maker, list(maker.drawn(op, number, seed=1)))
    for found, most in ((ratios, 0.02), (others, 0.05)):
        assert len(found) > 4
        assert [one for one in found if not 0.5 < one < 2.0] == [], STALE
        missed = [one for one in found if abs(one - 1) > maker.WITHIN]
        assert len(missed) <= 1 + most * len(found), STALE


def test_few_tiles_are_evaluated(maker: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Tile] = []
    real = costmodel.evaluated

    def evaluated(problem: Any, strategy: Strategy, tile: Tile, device: Any) -> Any:
        looked.append(tile)
        return real(problem, strategy, tile, device)

    monkeypatch.setattr(costmodel, "evaluated", evaluated)
    most = 0
    for op in LISTED:
        for problem in maker.suite(op, "float16")[::5]:
            looked.clear()
            costmodel.choose(problem, OPS[op].strategies.values(), known("H200"))
            most = max(most, len(looked))
            assert len({*looked}) == len(looked)
    assert 20 < most < 450


def test_all_tiles_of_a_strategy_without_a_shortlist_are_evaluated() -> None:
    known_, op = OPS["batch_norm_gather_stats"].strategies["column"], "batch_norm_gather_stats"
    assert op not in shortlist._document()
    assert [tile for _, tile in shortlist.shortlist_of(known_).tiles] == sorted(
        known_.tiles(), key=lambda tile: shortlist.place_in(known_, tile)
    )


# ---- problems that differ in N --------------------------------------------------------------------------------------


def plan(rows: int) -> cunorm.Plan:
    return cunorm.plan("layer_norm", shape=(rows, 4096), normalized_shape=4096, dtype="bfloat16", device="H200")


@pytest.mark.usefixtures("forgotten")
def test_a_tile_is_reused_for_another_n_if_no_tile_can_be_much_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tiles are ranked, and `explain` names the N from which the tile was reused."""
    first = plan(65536)
    monkeypatch.setattr(costmodel, "choose", lambda *_: pytest.fail("ranked"))
    second = plan(60001)
    assert (second.strategy, second.tile) == (first.strategy, first.tile)
    assert "same tile as for N=65536" in second.explain()
    assert "N=" not in first.reason


@pytest.mark.usefixtures("forgotten")
def test_a_tile_of_the_same_n_is_not_called_another_ns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan is made again, as after a change of a table."""
    first = plan(65536)
    monkeypatch.setattr("cunorm.runtime.plans._plans", {})
    again = plan(65536)
    assert again is not first
    assert again.reason == first.reason


@pytest.mark.usefixtures("forgotten")
def test_a_tile_is_not_reused_if_another_may_be_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """For few rows the bytes do not determine the time. The shortlist is evaluated, as without an earlier plan."""
    plan(65536)
    few = plan(128)
    assert "the tile of" not in few.explain()
    monkeypatch.setattr(choose_tile, "_chosen", {})
    monkeypatch.setattr("cunorm.runtime.plans._plans", {})
    assert plan(128).tile == few.tile


def test_least_seconds_is_a_lower_bound(maker: ModuleType) -> None:
    device = known("H200")
    for op in LISTED:
        for problem in maker.suite(op, "bfloat16")[::9]:
            for choice in costmodel.legal(problem, OPS[op].strategies.values(), device):
                least = costmodel.least_seconds(problem, choice.launches, device)
                assert choice.seconds >= least * (1 - 1e-9), (problem.describe(), choice.tile)
