"""The child process of test_leaks.py: makes many calls and prints, as JSON, the resources in use before and after.

``python leaks_worker.py COUNT WARM`` makes each call WARM times, measures, makes it COUNT times, and measures again.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import cunorm
from cunorm.ops.registry import OPS
from cunorm.runtime import checked_call, plans
from tests.ops.batch_norm.test_batch_norm import GATHER
from tests.support.problems import BATCH_OPS, batch_arrays, group_arrays, instance_arrays, layer_arrays

#: Maximum number of cached signatures and plans. A few hundred new ones fill the caches, which are then emptied.
KEPT = 64
LARGE_EVERY = 100  # one large call, which uses several threads, per this many small calls

Action = Callable[[int], Any]


def caches() -> dict[str, int]:
    """Sizes of all containers and function caches at the top level of cunorm's modules, and of the ops' call caches."""
    found = {f"{name}.calls": len(op.calls) for name, op in OPS.items()}
    for module, content in list(sys.modules.items()):
        if not module.startswith("cunorm"):
            continue
        for name, value in list(vars(content).items()):
            if hasattr(value, "cache_info"):
                found[f"{module}.{name}"] = value.cache_info().currsize
            elif isinstance(value, (dict, list, set)) and not name.startswith("__"):
                found[f"{module}.{name}"] = len(value)
    return found


def held() -> str:
    """The resources that this process uses, as JSON: a text takes less memory than the numbers that it contains."""
    for _ in range(3):
        gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    found = {
        "blocks": sys.getallocatedblocks(),
        "resident": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "caches": caches(),
    }
    return json.dumps(found)


def right() -> dict[str, Action]:
    """Name of every op -> a valid call of it."""
    a, b, c, i = group_arrays(), batch_arrays(), layer_arrays(), instance_arrays()
    gathered = np.zeros((2, 8), np.float32), np.ones((2, 8), np.float32), [3, 4]
    made: dict[str, Action] = {
        "group_norm": lambda _: cunorm.group_norm(a.x, 2, a.gamma, a.beta),
        "group_norm_backward": lambda _: cunorm.group_norm_backward(a.dy, a.x, a.mean, a.rstd, a.gamma, num_groups=2),
        "instance_norm": lambda _: cunorm.instance_norm(i.x, i.gamma, i.beta),
        "instance_norm_backward": lambda _: cunorm.instance_norm_backward(i.dy, i.x, i.mean, i.rstd, i.gamma),
        "layer_norm": lambda _: cunorm.layer_norm(c.x, (3, 3), c.gamma, c.beta),
        "layer_norm_backward": lambda _: cunorm.layer_norm_backward(c.dy, c.x, (3, 3), c.mean, c.rstd, c.gamma),
        "rms_norm": lambda _: cunorm.rms_norm(c.x, (3, 3), c.gamma, residual=c.dy),
        "rms_norm_backward": lambda _: cunorm.rms_norm_backward(c.dy, c.x, (3, 3), c.rstd, c.gamma, dh=c.x),
        "batch_norm_gather_stats": lambda _: cunorm.batch_norm_gather_stats(*gathered, tile=GATHER),
    }
    for op in BATCH_OPS:
        made[op] = lambda _, op=op: getattr(cunorm, op)(**b.given(op))
    assert {*made} == {*OPS}
    return made


def refused() -> dict[str, Action]:
    """Refused calls of every op: a wrong shape, a wrong dtype, a wrong ``out``, an illegal tile."""
    a, b, c = group_arrays(), batch_arrays(), layer_arrays()
    short = np.ones(3, np.float32)
    calls: dict[str, Action] = {
        "group_norm": lambda _: cunorm.group_norm(a.x, 2, short),
        "group_norm: tile": lambda _: cunorm.group_norm(a.x, 2, tile={"strategy": "warp"}),
        "group_norm_backward": lambda _: cunorm.group_norm_backward(a.dy, a.x, short, a.rstd, num_groups=2),
        "instance_norm": lambda _: cunorm.instance_norm(b.x, short),
        "instance_norm_backward": lambda _: cunorm.instance_norm_backward(b.dy, b.x, short, short),
        "layer_norm": lambda _: cunorm.layer_norm(c.x, (3, 4)),
        "layer_norm: out": lambda _: cunorm.layer_norm(c.x, (3, 3), out=(short, None, None)),
        "layer_norm_backward": lambda _: cunorm.layer_norm_backward(c.dy, c.x, (3, 3), c.mean, short),
        "rms_norm": lambda _: cunorm.rms_norm(c.x, (3, 3), residual=short),
        "rms_norm_backward": lambda _: cunorm.rms_norm_backward(c.dy, c.x, (3, 3), short),
        "batch_norm_stats": lambda _: cunorm.batch_norm_stats(b.x.astype(np.int32)),
        "batch_norm_gather_stats": lambda _: cunorm.batch_norm_gather_stats(short, short, [1]),
        "batch_norm_elemt": lambda _: cunorm.batch_norm_elemt(b.x, short, b.invstd),
        "batch_norm_backward_reduce": lambda _: cunorm.batch_norm_backward_reduce(b.dy, b.x, b.mean, short),
        "batch_norm_backward_elemt": lambda _: cunorm.batch_norm_backward_elemt(
            b.dy, b.x, b.mean, b.invstd, short, b.sum_dy, b.sum_dy_xmu, b.count
        ),
    }  # fmt: skip

    def caught(action: Action) -> Action:
        def run(number: int) -> None:
            try:
                action(number)
            except (TypeError, ValueError):
                return
            raise AssertionError("the call was not refused")

        return run

    return {f"{name}, refused": caught(action) for name, action in calls.items()}


def new() -> dict[str, Action]:
    """Calls and plans of shapes that were not used before. Their kernels are not run."""
    tile = cunorm.Tile("split", threads=128, chunk=16)  # a call with a mapping would not be cached
    x = np.zeros((1, 1_000_000), np.float32)
    # The interpreter caches ints up to 256, and a plan also contains sizes divided by the chunk.
    base = iter(range(10_000, 110_000))

    def new_call(_: int) -> None:
        cunorm.group_norm(x[:, : 8 * next(base)].reshape(1, 8, -1), 2, tile=tile)

    def new_plan(_: int) -> None:
        cunorm.plan("group_norm", shape=(7, 8, next(base)), dtype="float32", num_groups=2, tile=tile)

    return {"calls of new shapes": new_call, "plans of new shapes": new_plan}


def large(action: Action) -> Action:
    return lambda number: action(number) if number % LARGE_EVERY == 0 else None


def main() -> None:
    count, warm = map(int, sys.argv[1:])
    plans.KEPT_PLANS = checked_call.KEPT_CALLS = KEPT
    rows = np.ones((512, 512), np.float32)
    actions = right() | refused() | {"large calls": large(lambda _: cunorm.layer_norm(rows, 512))}
    found = {}
    for kind in (actions, new()):
        if kind is not actions:
            plans.Plan.run = lambda *_: None  # type: ignore[method-assign]
        for name, action in kind.items():
            for number in range(warm):
                action(number)
            before = held()
            for number in range(count):
                action(number)
            found[name] = (before, held())
    print(json.dumps({name: [json.loads(one) for one in pair] for name, pair in found.items()}))


if __name__ == "__main__":
    main()
