"""The cost model's choices: which tile and strategy it chooses as problems grow, and what it predicts for them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import pytest
from cunorm.tuning.problems import workloads

from cunorm import Tile
from cunorm.core.devices import KNOWN, Device, known
from cunorm.core.problem import Problem
from cunorm.core.strategy import Strategy
from cunorm.ops.group_norm.strategies import BACKWARD, FORWARD
from cunorm.ops.registry import OPS as ALL_OPS
from cunorm.tiling import costmodel
from tests.support.problems import TILES, norm_problem

OPS = ("group_norm", "group_norm_backward")
#: Minimum number of tensors that an op reads and writes.
TENSORS = {
    "group_norm": 2,
    "group_norm_backward": 3,
    "instance_norm": 2,
    "instance_norm_backward": 3,
    "layer_norm": 2,
    "layer_norm_backward": 3,
    "rms_norm": 2,
    "rms_norm_backward": 3,
    "batch_norm_stats": 1,
    "batch_norm_elemt": 2,
    "batch_norm_backward_reduce": 2,
    "batch_norm_backward_elemt": 3,
}
#: The tensors besides these, if a call adds one: residual and h, or dh.
ADDED = {"residual": 2, "dh": 1}

#: Only the H200 is tested in the quick suite. A test with another device takes as long and is marked long.
QUICK_DEVICES = [name if name == "H200" else pytest.param(name, marks=pytest.mark.long) for name in KNOWN]


def strategies_of(problem: Problem) -> Mapping[str, Strategy]:
    return ALL_OPS[problem.op].strategies


def suite() -> list[Problem]:
    """The problems of every workload in bfloat16, and every seventh of them in float32."""
    half, single = ([problem for _, problem in workloads.problems(dtype)] for dtype in ("bfloat16", "float32"))
    return [*half, *single[::7]]


@pytest.mark.parametrize("device", QUICK_DEVICES)
def test_the_default_tile_of_every_workload(device: str, pytestconfig: pytest.Config) -> None:
    """The default tile is legal and near the byte floor, and its predicted time is among the shortest.

    Among these, no tile keeps more multiprocessors busy, counted up to the share BUSY_ENOUGH. The quick suite takes
    each eighth problem.
    """
    facts, step = known(device), 1 if pytestconfig.getoption("--long") else 8
    for problem in suite()[::step]:
        ranked = costmodel.ranked(problem, strategies_of(problem).values(), facts)
        default = ranked[0]
        assert default.strategy.refuses(problem, default.tile, facts) is None
        assert default.seconds == pytest.approx(costmodel.predict(problem, default.strategy, default.tile, facts))
        tensors = TENSORS[problem.op] + sum(ADDED[name] for name in problem.extras)
        floor = tensors * problem.nbytes / facts.bandwidth
        assert floor < default.seconds < 6 * floor + 25e-6, (problem.describe(), default)
        fastest = min(one.seconds for one in ranked)
        near = [one for one in ranked if one.seconds <= costmodel.NEAR_TIE * fastest]
        assert default in near
        most = max(costmodel.busy(one.launches, facts) for one in near)
        assert costmodel.busy(default.launches, facts) >= most, (problem.describe(), default.tile)
        assert all(one.seconds <= after.seconds * (1 + 1e-8) for one, after in itertools.pairwise(ranked[1:]))


#: GPUs of the architecture on which the model's times were measured; the order of predictions that differ by less than
#: a tenth says nothing on others.
FITTED, LOOSE_TIE = ("H100", "H200"), 1.1


def near_ties(problem: Problem, device: Device, within: float) -> set[str]:
    """Strategies with a tile whose predicted time is within a factor of the shortest."""
    found = list(costmodel.legal(problem, strategies_of(problem).values(), device))
    least = min(one.seconds for one in found)
    return {one.strategy.name for one in found if one.seconds <= within * least}


def in_order(ties: Sequence[set[str]], place: Mapping[str, int]) -> list[str]:
    """The first strategy of each set whose place is not before that of the last set, or else its first."""
    chosen, last = [], 0
    for names in ties:
        ordered = sorted(names, key=place.__getitem__)
        chosen.append(next((name for name in ordered if place[name] >= last), ordered[0]))
        last = place[chosen[-1]]
    return chosen


@pytest.mark.parametrize("device", QUICK_DEVICES)
def test_strategies_change_in_one_order_as_sizes_grow(device: str) -> None:
    """As groups or rows grow, the chosen strategy changes only in the order of the list below.

    The elements stay in registers, then in a block's shared memory, in that of a cluster, in the L2 cache. `split` also
    reads from the L2 cache, while a tensor fits there: on a GPU without clusters it may come before `grid`. Strategies
    whose predictions are near ties count as equal, as they do for the cost model.
    """
    facts, fitted = known(device), device in FITTED
    place = {"warp": 0, "block": 1, "cluster": 2, "grid": 3, "split": 4 if fitted else 3}
    within = costmodel.NEAR_TIE if fitted else LOOSE_TIE
    scans: list[list[Problem]] = []
    for dtype, N in (("bfloat16", 2), ("float32", 256)):
        for op in OPS:
            for layout in ("NCHW", "NHWC"):
                scans.append([norm_problem(op, dtype, layout, N, 320, 2**power, 32, dtype) for power in range(18)])
        for op in ("layer_norm", "layer_norm_backward"):
            # There are enough rows that no strategy is chosen only because the others would have too few blocks.
            scans.append([norm_problem(op, dtype, "NCHW", 1024 * N, 2**power, 1, 1, dtype) for power in range(20)])
    for scan in scans:
        chosen = [costmodel.choose(one, strategies_of(one).values(), facts).strategy.name for one in scan]
        if chosen != sorted(chosen, key=place.__getitem__):  # unless the predictions are near ties
            chosen = in_order([near_ties(one, facts, within) for one in scan], place)
        assert chosen == sorted(chosen, key=place.__getitem__), (scan[0].describe(), chosen)
        assert chosen[0] == "warp" and chosen[-1] in ("grid", "split"), scan[0].describe()
        assert all(one.group_length <= 4096 for one, name in zip(scan, chosen, strict=True) if name == "warp")


def test_every_problem_has_a_strategy() -> None:
    """`split` is the fallback: it is legal for every problem, small, huge or odd."""
    for device in KNOWN.values():
        for op, strategies in ((OPS[0], FORWARD), (OPS[1], BACKWARD)):
            for dtype in ("float16", "float64"):
                for layout in ("NCHW", "NHWC"):
                    for sizes in ((1, 1, 1, 1), (1, 1, 2**33, 1), (2**33, 2, 1, 2), (3, 33, 65537, 1)):
                        problem = norm_problem(op, dtype, layout, *sizes)
                        choice = costmodel.choose(problem, strategies.values(), device)
                        for launch in choice.strategy.launches(problem, choice.tile):
                            assert 1 <= launch.grid <= 2**31 - 1
                            assert launch.shared_bytes <= device.shared_memory_per_block
                            assert launch.threads % 32 == 0
                            assert 32 <= launch.threads <= 1024
                        assert (
                            strategies["split"].refuses(problem, Tile("split", threads=128, chunk=4096), device) is None
                        )


def test_predicted_time_depends_monotonically_on_work_and_device() -> None:
    """A larger N never shortens the predicted time of a tile. It is never longer on the H200 than on the A100."""
    for op, strategies in ((OPS[0], FORWARD), (OPS[1], BACKWARD)):
        for tile in (TILES["block"], Tile("split", threads=256, chunk=1024)):
            before = 0.0
            for N in (1, 2, 4, 8, 64, 512, 4096):
                problem = norm_problem(op, "bfloat16", "NCHW", N, 64, 1024, 8)
                seconds = costmodel.predict(problem, strategies[tile.strategy], tile, known("A100"))
                assert seconds >= before
                before = seconds
                assert costmodel.predict(problem, strategies[tile.strategy], tile, known("H200")) <= seconds
