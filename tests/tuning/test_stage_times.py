"""benchmarks/stage_times.py: the calls that it leaves out are in the kernels, and its tiles run on an H100."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest

from cunorm.core.devices import KNOWN
from cunorm.core.problem import Problem
from cunorm.core.strategy import Tile
from cunorm.ops.registry import OPS
from cunorm.runtime import plans
from cunorm.runtime.plans import Target
from tests.support.paths import ROOT

H100 = Target("cpu", 0, KNOWN["H100"])


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.stage_times")


def texts(problem: Problem, tile: Tile) -> list[str]:
    op = OPS[problem.op]
    plan = plans.plan_for(problem, op.strategies, op.names, H100, tile)
    return [text for text, _ in plan.texts("specialised")]


def test_each_stage_is_left_out_of_the_slab_kernel_and_of_no_other(script: ModuleType) -> None:
    for problem, tile in script.problems_and_tiles():
        assert OPS[problem.op].strategies[tile.strategy].refuses(problem, tile, H100.device) is None
        main, *others = texts(problem, tile)
        for stage, (call, instead) in script.CALLS.items():
            assert main.count(call) == 1, stage
            assert script.without([stage])(main) == main.replace(call, instead)
        edit = script.without([*script.CALLS])
        assert edit(main).count("if (HxW < 0) slab.") == len(script.CALLS)
        assert [edit(one) for one in others] == others


def test_the_whole_kernel_is_timed_too(script: ModuleType) -> None:
    assert script.LEFT_OUT[0] == ()
    assert script.without(())("text") == "text"
