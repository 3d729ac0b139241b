"""The text of a kernel, and the arguments of a launch, which are matched to the kernel's parameters by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

import cunorm
from cunorm.core.strategy import Launch
from cunorm.gate import gate
from cunorm.jit import sources
from cunorm.runtime import plans

SHAPE: dict[str, Any] = {"shape": (2, 320, 64, 64), "dtype": "bfloat16", "num_groups": 32, "device": "H200"}


def launches() -> Iterator[Launch]:
    """Launches of every strategy of every op, dtype and layout."""
    for case in gate.cases():
        for problem, tile in gate.spread(case, "sm_90"):
            yield from case.solver.launches(problem, tile)


def test_every_launch_names_the_parameters_of_its_kernel() -> None:
    entries = set()
    for launch in launches():
        names = sources.parameters(launch.kernel, launch.entry, launch.arguments)
        assert sorted(names) == sorted(launch.arguments)
        entries.add(launch.entry)
    assert len(entries) > 30


def test_arguments_are_passed_in_the_order_of_the_kernels_parameters() -> None:
    """The executor receives each value at its parameter's place, whatever the order in the strategy's launch."""
    plan = cunorm.plan("group_norm_backward", **SHAPE)
    turned = tuple(replace(one, arguments=dict(reversed(one.arguments.items()))) for one in plan.launches)
    other = plans.Plan(
        plan.problem, plan.place, plan.strategy, plan.tile, "", turned, plan.workspace_nbytes, plan.names
    )
    values = tuple(range(1000, 1000 + len(plan.names)))
    found = []
    for one in (plan, other):
        steps, constants = one.steps(lambda text, entry: entry)
        found.append([(entry, pick((*values, *constants))) for entry, *_, pick, _, _ in steps])
    assert found[0] == found[1]
    entry, arguments = found[0][0]
    declared = sources._declared(plan.launches[0].kernel, entry)
    named = dict(zip(declared, arguments, strict=True))
    assert named["dx"] == values[plan.names.index("dx")]
    assert (named["N"], named["C"], named["HxW"], named["groups"]) == (2, 320, 4096, 32)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"x": None}, r"missing: \['x'\], unknown: \[\]"),
        ({"xs": "x"}, r"missing: \[\], unknown: \['xs'\]"),
        ({"groups": None, "group": 32}, r"missing: \['groups'\], unknown: \['group'\]"),
    ],
)
def test_an_argument_that_the_kernel_does_not_have(change: dict[str, Any], sentence: str) -> None:
    launch = cunorm.plan("group_norm_backward", **SHAPE).launches[0]
    given = {name: value for name, value in {**launch.arguments, **change}.items() if value is not None}
    with pytest.raises(ValueError, match=rf"^{launch.entry}: arguments {sentence}"):
        sources.parameters(launch.kernel, launch.entry, given)


def test_a_kernel_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match=r"group_norm/group_norm_split\.cu has no kernel group_norm_split_fold"):
        sources.parameters("group_norm_split", "group_norm_split_fold", ())
