"""The public contract of GroupNorm alone. tests/ops/test_contract.py tests the contract that all ops share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cunorm
from cunorm.ops.registry import OPS
from tests.conftest import Executor
from tests.ops.group_norm.contract import BACKWARD, CONTRACTS, FORWARD
from tests.support.contract import Contract, refused
from tests.support.problems import TILES, group_arrays, invoke


class Sub(np.ndarray):
    """A subclass that changes nothing."""


def test_the_error_of_a_tile_contains_the_message_of_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    from cunorm.core.devices import known
    from cunorm.ops.group_norm.strategies import BACKWARD as STRATEGIES

    tile = cunorm.Tile("warp", threads=128, lanes=1, packs_per_thread=1, samples_per_team=1)
    problem = group_arrays().plan(BACKWARD, TILES["block"]).problem
    sentence = STRATEGIES["warp"].refuses(problem, tile, known("H200"))
    assert sentence is not None
    given = {**CONTRACTS[1].right(), "tile": tile}
    assert sentence in refused(monkeypatch, BACKWARD, given, "tile", cunorm.UnsupportedTile)


@pytest.mark.parametrize("device", ["A100", "H100"])
def test_the_cache_distinguishes_the_devices_that_the_cpu_executor_emulates(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changing CUNORM_CPU_DEVICE adds a cached call, here of an array subclass."""
    x = group_arrays().x.view(Sub)
    cunorm.group_norm(x, 2)
    monkeypatch.setenv("CUNORM_CPU_DEVICE", device)
    known = len(OPS[FORWARD].calls)
    cunorm.group_norm(x, 2)
    assert len(OPS[FORWARD].calls) == known + 1


def test_wrong_arguments_of_empty_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    x, statistics = np.zeros((0, 8, 3), np.float32), np.zeros((0, 2), np.float32)
    right = {"dy": x, "x": x, "mean": statistics, "rstd": statistics, "gamma": np.ones(8, np.float32)}
    right.update(num_groups=2, beta=None)
    invoke(BACKWARD, right)
    changes: list[tuple[str, Any]] = [("num_groups", 3), ("data_format", "NC"), ("gamma", np.ones(7, np.float32))]
    changes += [("mean", np.zeros((1, 2), np.float32)), ("dy", x.astype(np.float64)), ("dy", x[:, :4])]
    changes += [
        ("tile", cunorm.Tile("nope")),
        (
            "tile",
            {"strategy": "block", "threads": 33, "groups": 1, "stages": 2, "load": "cp_async", "packs_per_thread": 1},
        ),
    ]
    changes += [("out", (None, None)), ("out", (None, np.ones(3, np.float32), None)), ("workspace", [1])]
    for name, value in changes:
        refused(monkeypatch, BACKWARD, {**right, name: value}, name)


@pytest.mark.parametrize("one", CONTRACTS, ids=[one.op for one in CONTRACTS])
def test_a_workspace_contains_one_pair_per_group_or_chunk(one: Contract) -> None:
    for made, tile, layout in one.large.values():
        a: Any = made()
        split = isinstance(tile, cunorm.Tile)
        needed = a.plan(one.op, tile if split else TILES["block"], layout is not None).workspace_nbytes
        most = 8 if one.op == FORWARD else 4  # moments of chunks, or pairs of sums
        assert needed <= 2 * 4 * 2 * 16 * (most if split else 1)


def test_the_cache_of_calls_distinguishes_groups_and_formats(executor: Executor) -> None:
    """Alternate calls of the same tensors with different num_groups and data_format."""
    a, b = group_arrays((4, 4, 4, 4)), group_arrays((4, 4, 4, 4), data_format="NHWC")
    x = executor.put(a.x)
    for _ in range(2):
        for groups in (2, 4, 1):
            for same in (a, b):
                replace(same, groups=groups).checked(FORWARD, executor, x=x, tile=TILES["block"])


@pytest.mark.parametrize("strategy", [5, None, []])
def test_the_strategy_of_a_tile_must_be_a_string(strategy: Any) -> None:
    with pytest.raises(TypeError, match=r"^tile: strategy"):
        cunorm.Tile(strategy)
