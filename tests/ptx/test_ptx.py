"""Kernels whose PTX runs on the CPU executor: the battery, the kernels of tests/kernels, and the inline PTX.

The quick suite runs a case of every third strategy, `--long` all cases. The pair of an architecture and an NVRTC
rotates over the cases. A case that the device of an architecture refuses takes the next pair.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from functools import cache

import pytest

from cunorm.core.errors import UnsupportedTile
from cunorm.jit import sources
from cunorm.jit.nvrtc import ARCHITECTURES, Nvrtc
from cunorm.ops.registry import OPS
from tests.battery import cases as battery
from tests.battery.case import Case
from tests.kernels.kernel_checks import CHECKS
from tests.ptx.route import MISSING, PAIRS, through_ptx
from tests.support.covering import every
from tests.support.paths import KERNELS

pytestmark = pytest.mark.skipif(not PAIRS, reason=MISSING)
Pair = tuple[str, Nvrtc]
#: Strategies with kernels of their own. The kernels of the others run in the cases of another op.
STRATEGIES = [(name, key) for name, op in OPS.items() for key, one in op.strategies.items() if one.kernels_of is None]
#: The quick suite runs each third strategy.
STEP = 3


@pytest.fixture(autouse=True)
def _checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUNORM_CPU_BUILD", "checked")
    monkeypatch.setenv("CUNORM_CPU_ORDER", "random:3")


# ---- the battery ----------------------------------------------------------------------------------------------------


def pair_of(case: Case, pairs: Iterable[Pair]) -> Pair:
    """The first of some pairs whose device accepts the case."""
    for pair in pairs:
        with through_ptx(*pair):
            try:
                case.plan()
            except UnsupportedTile:
                continue
        return pair
    raise AssertionError(f"{case}: no device accepts it")


def from_index(first: int) -> list[Pair]:
    """All pairs, from an index on."""
    return [PAIRS[(first + step) % len(PAIRS)] for step in range(len(PAIRS))]


@cache
def quick() -> dict[tuple[str, str], tuple[Case, Pair]]:
    """A case per strategy, from another part of the list for each, and its pair, of those that accept it the rarest.

    Cases with the fewest packs per thread have the shortest code, and so the fastest builds. The pairs of the quick
    suite's strategies are counted apart, so that these use all of them.
    """
    chosen, used = {}, [Counter[Pair]() for _ in range(STEP)]
    for index, (op, strategy) in enumerate(STRATEGIES):
        cases = battery.cases(op, strategy)
        fewest = min(case.tile.get("packs_per_thread", 0) for case in cases)
        cases = [case for case in cases if case.tile.get("packs_per_thread", 0) == fewest]
        case, count = cases[index % len(cases)], used[index % STEP]
        pair = pair_of(case, sorted(PAIRS, key=count.__getitem__))
        count[pair] += 1
        chosen[op, strategy] = case, pair
    return chosen


def run(case: Case, pair: Pair) -> None:
    with through_ptx(*pair) as ptx:
        try:
            case.run()
        except AssertionError as error:
            raise AssertionError(f"{case}, {pair[0]}, NVRTC {pair[1].version}: {error}") from None
    assert ptx


@pytest.mark.parametrize(
    ("op", "strategy"), every(STEP, STRATEGIES), ids=[f"{op}-{strategy}" for op, strategy in STRATEGIES]
)
def test_a_case_per_strategy_is_right(op: str, strategy: str) -> None:
    run(*quick()[op, strategy])


def test_the_quick_cases_use_every_pair() -> None:
    """The strategies that the quick suite runs are enough."""
    assert {quick()[one][1] for one in STRATEGIES[::STEP]} == {*PAIRS}
    if len({version for _, version in PAIRS}) == 2:
        assert len(PAIRS) == 2 * len(ARCHITECTURES)


@pytest.mark.long
@pytest.mark.parametrize(("op", "strategy"), STRATEGIES, ids=[f"{op}-{strategy}" for op, strategy in STRATEGIES])
def test_every_case_is_right(op: str, strategy: str) -> None:
    """Cases of one tile and dtype share builds, and so a pair."""
    builds: dict[str, int] = {}
    for case in battery.cases(op, strategy):
        build = f"{sorted(case.tile.items())} {case.dtype}"
        run(case, pair_of(case, from_index(builds.setdefault(build, STRATEGIES.index((op, strategy)) + len(builds)))))


# ---- test kernels ---------------------------------------------------------------------------------------------------

#: Test kernels that PTX cannot run here. The window of shared memory has no static arrays.
STATIC = {"statics"}


@cache
def pairs_of(stem: str) -> list[Pair]:
    """A pair per NVRTC, of two architectures that the kernel supports."""
    marked = re.match(r"// gate: (sm_\d+)\n", (KERNELS / f"{stem}.cu").read_text(encoding="utf-8"))
    least = ARCHITECTURES.index(marked[1]) if marked else 0
    found = [pair for pair in PAIRS if ARCHITECTURES.index(pair[0]) >= least]
    return [next(pair for pair in found if pair[1] == version) for version in dict.fromkeys(one for _, one in found)]


CHECKED = sorted({*CHECKS} - STATIC)


@pytest.mark.parametrize("stem", CHECKED)
def test_a_test_kernel_is_right(stem: str) -> None:
    for pair in pairs_of(stem):
        with through_ptx(*pair) as ptx:
            CHECKS[stem]((KERNELS / f"{stem}.cu").read_text(encoding="utf-8"))
        assert ptx


def test_every_statement_of_inline_ptx_runs() -> None:
    """Each opcode that inline PTX contains is in the PTX of a test kernel."""
    statements = {
        opcode
        for path in sources.folder().rglob("*.cuh")
        for text in re.findall(r"\basm(?: volatile)?\(((?:[^()]|\([^()]*\))*)\)", path.read_text(encoding="utf-8"))
        for opcode in re.findall(r'"([a-z]\w*(?:(?:\.|::)\w+)+)[ ;]', text)
    }
    assert len(statements) > 20
    ran = set()
    for stem in CHECKED:
        with through_ptx(*pairs_of(stem)[-1]) as ptx:
            CHECKS[stem]((KERNELS / f"{stem}.cu").read_text(encoding="utf-8"))
        ran |= {opcode for opcode in statements if any(opcode in text for text in ptx)}
    assert ran == statements


# ---- mapa -----------------------------------------------------------------------------------------------------------


def test_mapa_stays_after_the_guard_of_the_rank() -> None:
    """Without volatile, NVRTC 12.8 and 13.5 move mapa before the guard, where lanes have ranks past the cluster."""
    case = next(case for case in battery.CASES if case.strategy == "cluster" and case.op == "layer_norm")
    for pair in PAIRS:
        if pair[0] == "sm_90":
            run(case, pair)
