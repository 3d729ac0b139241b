"""The oracle of the tuner and the bench. It computes only a part of the expected values of a large problem."""

from __future__ import annotations

import numpy as np
import pytest
from cunorm.tuning.verify import oracle
from cunorm.tuning.verify.inputs import inputs_of

from cunorm import plan
from cunorm.ops.parse_problem import plan_options

SHAPES = {
    "layer_norm": "101,24", "layer_norm_backward": "101,24", "group_norm_backward": "5,24,7,6",
    "batch_norm_stats": "5,24,7", "batch_norm_backward_reduce": "5,24,7",
}  # fmt: skip


@pytest.mark.parametrize("hostile", [True, False])
@pytest.mark.parametrize("op", SHAPES)
def test_expected_values_of_a_part_equal_those_of_the_whole(
    op: str, hostile: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = plan(op, device="cpu", **plan_options(op, SHAPES[op], "float32")).problem
    given = inputs_of(problem, 3, hostile)
    whole = {one.name: one for one in oracle.expected(problem, given)}
    monkeypatch.setattr("cunorm.ops.common.oracles.WHOLE", 2**8)
    parts = {one.name: one for one in oracle.expected(problem, given)}
    assert set(parts) == set(whole) == set(problem.outputs)
    for name, part in parts.items():
        exact, bound = whole[name].exact[part.part], whole[name].bound[part.part]
        np.testing.assert_allclose(part.exact, exact, rtol=1e-12, atol=1e-12 * float(np.abs(exact).max()))
        np.testing.assert_allclose(part.bound, bound, rtol=1e-12)
    cut = {name for name, part in parts.items() if part.exact.size < whole[name].exact.size}
    sums = {"dgamma", "dbeta"} if op == "layer_norm_backward" else set()  # these sum over all rows and are not cut
    assert cut == set(problem.outputs) - sums
