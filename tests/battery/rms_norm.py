"""Hostile problems of RMSNorm's strategies, and of the tensors that RMSNorm and LayerNorm add."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from tests.battery.case import ALL_OFF, MIXED, NO_PARAMETERS, SAME_OFF, Case, Named
from tests.battery.layer_norm import CLUSTER_TEAMS, LAYER, LAYER_CLUSTER, LAYER_LONG, LAYER_SPLIT, LAYER_STAGED, made

#: Problems whose tensor, the residual or dh, is added in the same pass.
ADDED: Named = {
    "a tensor is added": {"shape": (5, 16)},
    "a tensor is added, every alignment": {"shape": (21, 21), "shifts": SAME_OFF},
    "a tensor is added, each array misaligned differently": {"shape": (11, 28), "shifts": ALL_OFF},
    "a tensor is added, two blocks for all": {"shape": (70, 20), "grid": 2},
    "a tensor is added in place": {"shape": (9, 28), "in_place": True},
    "a tensor is added to 16 bits": {"shape": (11, 72), "shifts": ALL_OFF, **MIXED},
    "a tensor is added without parameters": {"shape": (9, 28), **NO_PARAMETERS},
}
OFFSET: Named = {
    "an offset of gamma": {"shape": (9, 30), "gamma_offset": 1.0, "shifts": SAME_OFF},
    "an offset without gamma": {"shape": (9, 30), "gamma_offset": 1.0, "gamma": None},
    "NaN in another row": {"shape": (5, 30), "nan": (2, 17)},
}
#: The masks of the gradients.
MASKS: Named = {"dx alone": {"mask": (True, False)}, "dgamma alone": {"mask": (False, True)}}


def _masked(named: Named, *labels: str) -> Named:
    return {f"{label}, {mask}": named[label] | flags for label in labels for mask, flags in MASKS.items()}


def added_cases(op: str) -> Iterator[Case]:
    """Problems of an op on rows that adds a tensor."""
    backward = op.endswith("backward")
    made_here = functools.partial(made, op, extra=True)
    rows, one = {"rows_per_team": 4}, {"cluster": 1, "stages": 1} if backward else {}
    named = dict(ADDED)
    if backward:
        named["a tensor is added, dgamma alone"] = ADDED["a tensor is added"] | {"mask": (False, True, False)}
        whole = {label: facts for label, facts in ADDED.items() if facts["shape"][1] % 4 == 0}
        for strategy, tile in (("warp", {"lanes": 8}), ("block", {"cluster": 1, "teams_per_block": 1})):
            staged = {f"staged, {label}": facts for label, facts in whole.items()}
            yield from made_here(strategy, staged, threads=64, packs_per_thread=2, stages=2, **tile, **rows)
    held = {"stages": 1} if backward else {}
    yield from made_here("warp", named, threads=64, lanes=8, packs_per_thread=3, **held, **rows)
    yield from made_here("block", named, threads=128, packs_per_thread=1, teams_per_block=2, **one, **rows)
    ahead = {f"not ahead, {label}": facts for label, facts in named.items()}
    packs = 3 if backward else 6
    yield from made_here("block", ahead, threads=64, packs_per_thread=packs, teams_per_block=1, **one, **rows)
    slices = {label: facts for label, facts in named.items() if facts["shape"][1] > 16}
    yield from made_here("cluster", slices, threads=64, packs_per_thread=1, cluster=2, teams_per_block=1, **rows)
    chunk = {"chunk": 64} if op == "layer_norm" else {}
    long = {"a tensor is added to strips": {"shape": (9, 300), "shifts": ALL_OFF}}
    yield from made_here("split", named | long, threads=64, packs_per_thread=1, **chunk, **rows)


def rms_norm_cases(op: str) -> Iterator[Case]:
    """Problems of RMSNorm. Those of LayerNorm that have a constant would test the mean, which RMSNorm has not."""
    backward = op.endswith("backward")
    made_here = functools.partial(made, op)
    rows, held = {"rows_per_team": 4}, {"stages": 1} if backward else {}
    one, alone = {"cluster": 1, **held} if backward else {}, {"teams_per_block": 1}
    short = {label: facts for label, facts in LAYER.items() if "constant" not in facts} | OFFSET
    if backward:
        short |= _masked(LAYER, "every alignment", "two blocks for all")
        short["rows of sums in slices"] = {"shape": (133, 3), "rows_per_team": 1}
        short["one row of results"] = {"shape": (5, 6), "rows_per_team": 100}
    long = short | LAYER_LONG
    yield from made_here("warp", short, threads=64, lanes=8, packs_per_thread=2, **held, **rows)
    yield from made_here("block", long, threads=64, packs_per_thread=2, **one, **alone, **rows)
    teams = {f"teams: {label}": facts for label, facts in long.items()}
    yield from made_here("block", teams, threads=128, packs_per_thread=2, teams_per_block=2, **one, **rows)
    cluster = {label: facts for label, facts in LAYER_CLUSTER.items() if "constant" not in facts}
    slices = {label: facts for label, facts in CLUSTER_TEAMS.items() if "constant" not in facts}
    if backward:
        cluster |= _masked(LAYER_CLUSTER, "slices of every alignment")
        slices["teams of a cluster, one row of results"] = {"shape": (5, 28), "rows_per_team": 100}
    yield from made_here("cluster", cluster, threads=64, packs_per_thread=1, cluster=2, **alone, **rows)
    yield from made_here("cluster", slices, threads=128, packs_per_thread=1, cluster=2, teams_per_block=2, **rows)
    strips = short | LAYER_SPLIT
    if backward:
        strips |= _masked(LAYER_SPLIT, "two blocks for long rows")
    yield from made_here("split", strips, threads=64, packs_per_thread=1, **rows)
    if backward:
        yield from _gradients_of_sums(op, short)
    yield from added_cases(op)


def _gradients_of_sums(op: str, short: Named) -> Iterator[Case]:
    """Problems whose sums of columns are in shared memory, are merged by a cluster, or have staged rows."""
    rows, made_here = {"rows_per_team": 4}, functools.partial(made, op)
    in_memory = {label: facts | {"dtype": "bfloat16"} for label, facts in short.items() if "16 bits" not in label}
    in_memory["as many elements as the team holds"] = {"shape": (9, 384), "shifts": SAME_OFF, "dtype": "bfloat16"}
    yield from made_here("warp", in_memory, threads=64, lanes=4, packs_per_thread=12, stages=1, **rows)
    labels = ("every alignment", "each array misaligned differently", "in place", "16 bits", "whole packs")
    merged = {label: short[label] for label in labels}
    merged["one row of results of a cluster"] = {"shape": (9, 6), "rows_per_team": 100}
    one = {"stages": 1, "teams_per_block": 1}
    yield from made_here("block", merged, threads=64, packs_per_thread=2, cluster=4, **one, **rows)
    from_memory = {"merged from memory": short["every alignment"] | {"dtype": "bfloat16"}}
    yield from made_here("block", from_memory, threads=64, packs_per_thread=6, cluster=2, **one, **rows)
    staged = {label: facts for label, facts in LAYER_STAGED.items() if not {"constant", "infinite"} & facts.keys()}
    yield from made_here("warp", staged, threads=64, lanes=8, packs_per_thread=2, stages=2, **rows)
    of_block = {"threads": 64, "packs_per_thread": 1, "cluster": 1, "stages": 3, "teams_per_block": 1}
    yield from made_here("block", staged, **of_block, **rows)
