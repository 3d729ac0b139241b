"""The inputs and the oracle of the bench's next problems, which other processes prepare."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
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
