"""The inputs and the oracle of the bench's next problems, which other processes prepare."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cunorm.tuning.bench import ahead
from cunorm.tuning.bench.ahead import prepared, prepared_in_turn
from cunorm.tuning.problems.workloads import problems

from cunorm.core.problem import Problem

SMALL = [replace(one, N=2, C=64, HxW=4) for _, one in problems() if one.op in ("group_norm", "group_norm_backward")][:3]


@pytest.mark.parametrize("processes", [0, 2])
def test_problems_come_in_their_order_with_the_same_values(processes: int) -> None:
    asked = [replace(one, N=number) for number, one in enumerate(SMALL, 2)]
    found = [wait() for wait in prepared_in_turn(asked, 3, processes)]
    assert len(found) == len(asked)
    for problem, (given, wanted) in zip(asked, found, strict=True):
        same, _ = prepared(problem, 3)
        assert {name: values.tobytes() for name, values in given.items()} == {
            name: values.tobytes() for name, values in same.items()
        }
        assert [one.name for one in wanted] == [name for name in problem.outputs if name in {w.name for w in wanted}]
        assert all(np.isfinite(one.exact).all() for one in wanted)


def test_an_error_belongs_to_its_problem_alone() -> None:
    broken: Problem = replace(SMALL[0], N=-1)
    turns = prepared_in_turn([SMALL[0], broken, SMALL[1]], 0, 1)
    first, second, third = turns
    first()
    with pytest.raises(ValueError, match="negative"):
        second()
    third()


def test_all_functions_can_be_taken_before_the_first_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = []  # a pool that is still referenced cancels its waiting problems at once, one that is not may forget to

    def kept(*arguments: Any) -> ProcessPoolExecutor:
        pools.append(ProcessPoolExecutor(*arguments))
        return pools[-1]

    monkeypatch.setattr(ahead, "ProcessPoolExecutor", kept)
    taken = list(prepared_in_turn(SMALL * 3, 3, 1))
    assert len([wait() for wait in taken]) == len(SMALL * 3)


def test_problems_that_nobody_takes_are_not_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    cancelled = []

    class Watched(ProcessPoolExecutor):
        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            cancelled.append(cancel_futures)
            super().shutdown(wait, cancel_futures=cancel_futures)

    monkeypatch.setattr(ahead, "ProcessPoolExecutor", Watched)
    turns = prepared_in_turn(SMALL * 3, 3, 1)
    next(turns)()
    turns.close()
    assert cancelled == [True]
