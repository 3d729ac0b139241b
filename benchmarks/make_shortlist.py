"""Write cunorm/tiling/shortlist.json: the tiles that the cost model evaluates first for a new problem.

``python benchmarks/make_shortlist.py`` ranks all tiles for the problems of the named workloads and for random problems,
for every known device (some minutes on two cores). It stores the tiles that are necessary for the right choice. For the
workloads on an H200 in bfloat16, the right choice is the tile that the ranking selects. For all other problems, it is a
tile whose predicted time differs by at most 2 % from that of the selected tile, and that keeps as many multiprocessors
busy. ``--random N`` draws N problems per op.

Run this script after a change of the cost model, of a search space or of a strategy's launches.
tests/tiling/test_shortlist.py fails if it is necessary.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import multiprocessing
import random
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from cunorm.tuning.problems.workloads import problems

from cunorm.core.devices import KNOWN, known
from cunorm.core.files import write_whole
from cunorm.core.problem import ITEMSIZE, Problem, laid_out
from cunorm.core.strategy import Tile
from cunorm.ops.registry import OPS
from cunorm.tiling import costmodel, shortlist

DEVICE, DTYPE = "H200", "bfloat16"
WITHIN = 0.02
RANDOM = 2500
#: Rows and their length of further problems, by op. Random problems leave gaps, here for rows of odd length that are
#: longer than a block holds.
NAMED = {"layer_norm_backward": ((512, 33333),)}
SMALL = 100  # an op with at most this many tiles has no shortlist: all are evaluated
LARGEST = 1 << 28  # maximum elements of a random problem
Case = tuple[Problem, str]


@functools.cache
def suite(op: str, dtype: str) -> tuple[Problem, ...]:
    """Return the workloads' problems of an op, without duplicates."""
    return tuple(problem for problem in dict.fromkeys(one for _, one in problems(dtype)) if problem.op == op)


def drawn(op: str, number: int, seed: int) -> Iterator[Case]:
    """Yield problems with random sizes, dtypes, layouts, outputs and devices; sizes are log-uniform."""
    draw, added, spec = random.Random(f"{op} {seed}"), random.Random(f"{op} {seed} added"), OPS[op]
    like = {dtype: suite(op, dtype)[0] for dtype in ITEMSIZE}

    def size(least: int, most: int) -> int:
        return round(math.exp(draw.uniform(math.log(least), math.log(most))))

    while number:
        layout = draw.choice(("NCHW", "NHWC"))
        if "normalized_shape" in spec.takes:
            few = draw.random() < 0.5  # long rows, for which the best strategy varies
            rows, length = (size(1, 600), size(1 << 11, 1 << 18)) if few else (size(1, 1 << 18), size(2, 1 << 17))
            sizes = laid_out("NCHW", rows, length, 1, 1)
        elif "num_groups" in spec.takes:
            groups = draw.choice((1, 2, 4, 8, 16, 32, 32, 64))
            sizes = laid_out(layout, size(1, 256), groups * size(1, 128), size(1, 1 << 17), groups)
        else:
            channels = size(1, 4096)
            sizes = laid_out(layout, size(1, 1024), channels, size(1, 1 << 17), channels)
        if sizes["N"] * sizes["C"] * sizes["HxW"] > LARGEST:
            continue
        number -= 1
        made = replace(like[draw.choice([*ITEMSIZE])], **sizes)
        if made.outputs[0] == "dx" and len(made.outputs) > 1:
            made = replace(made, outputs=draw.choice((made.outputs, made.outputs, ("dx",), made.outputs[1:])))
        if spec.extras and added.random() < 0.25:
            made = made.with_extras()
        if spec.activations and draw.random() < 0.25:
            beta = made.beta_dtype or made.gamma_dtype
            made = replace(made, activation="silu", beta_dtype=beta)
        yield made.canonical(), draw.choice([*KNOWN])


def cases(op: str, number: int, seed: int = 0) -> list[Case]:
    """Return the cases from which the shortlist of an op is made."""
    found = [(problem, DEVICE) for problem in suite(op, DTYPE)]
    others = [(problem, device) for dtype in ITEMSIZE for problem in suite(op, dtype) for device in KNOWN]
    random.Random(seed).shuffle(others)
    like = suite(op, DTYPE)[0]
    named = [replace(like, **laid_out("NCHW", *sizes, 1, 1)).canonical() for sizes in NAMED.get(op, ())]
    return [*found, *((one, device) for one in named for device in KNOWN), *others[:number], *drawn(op, number, seed)]


class Best(NamedTuple):
    """The default among all legal tiles, its predicted time in seconds, and the multiprocessors that it keeps busy."""

    strategy: str
    tile: Tile
    seconds: float
    busy: int


def right(case: Case, best: Best, chosen: costmodel.Choice) -> bool:
    """Whether a choice is as good as that of the ranking of all tiles."""
    problem, device = case
    if (device, problem.dtype) == (DEVICE, DTYPE) and problem in suite(problem.op, DTYPE):
        return (chosen.strategy.name, chosen.tile) == (best.strategy, best.tile)
    near = abs(chosen.seconds / best.seconds - 1) <= WITHIN
    return near and costmodel.busy(chosen.launches, known(device)) >= best.busy


def of_all(case: Case) -> Best | None:
    """Return the default among all legal tiles; None if no tile is legal."""
    problem, device = case[0], known(case[1])
    found = list(costmodel.legal(problem, OPS[problem.op].strategies.values(), device))
    if not found:
        return None
    default = costmodel.default_of(found, device)
    return Best(default.strategy.name, default.tile, default.seconds, costmodel.busy(default.launches, device))


def compared_with(case: Case, listed: dict[str, list[Tile]]) -> tuple[str, Tile]:
    """Return a tile with which `costmodel.default_of` compares the others.

    It is the one with the shortest predicted time or, if that is listed, the contender that moves the fewest bytes.
    """
    problem, device = case[0], known(case[1])
    every = list(costmodel.legal(problem, OPS[problem.op].strategies.values(), device))
    fastest = min(every, key=lambda one: one.seconds)
    if fastest.tile in listed[fastest.strategy.name]:
        fastest = min(costmodel.contenders(every, device), key=costmodel.moved)
    return fastest.strategy.name, fastest.tile


def chosen(case: Case, tiles: dict[str, list[Tile]]) -> costmodel.Choice | None:
    """Return the choice of the cost model with these lists; None if no tile of them is legal."""
    problem, device = case[0], known(case[1])
    lists = [shortlist.Shortlist(one, tiles[name]) for name, one in OPS[problem.op].strategies.items()]
    return costmodel.listed(problem, lists, device)


def satisfied(wanted: tuple[Case, Best], tiles: dict[str, list[Tile]]) -> bool:
    """Whether the choice with these lists is `right` for a case."""
    found = chosen(wanted[0], tiles)
    return found is not None and right(*wanted, found)


def made(op: str, number: int) -> dict[str, Any]:
    """Return the part of shortlist.json for one op."""
    wanted = [(case, best) for case in cases(op, number) if (best := of_all(case)) is not None]
    listed: dict[str, list[Tile]] = {name: [] for name in OPS[op].strategies}
    missed = wanted
    while missed:  # add the tiles first that most problems lack
        lacking = Counter(
            best[:2] if best.tile not in listed[best.strategy] else compared_with(case, listed) for case, best in missed
        )
        lacking = Counter({key: count for key, count in lacking.items() if key[1] not in listed[key[0]]})
        if not lacking:
            print(f"{op}: {len(missed)} problems get another tile although the right one is listed", flush=True)
            wanted = [one for one in wanted if one not in missed]
            missed = [one for one in wanted if not satisfied(one, listed)]
            continue
        for (name, tile), _ in lacking.most_common(max(1, len(lacking) // 8)):
            listed[name].append(tile)
        missed = [one for one in missed if not satisfied(one, listed)]
        if not missed:  # the new tiles may have changed the choice for other problems
            missed = [one for one in wanted if not satisfied(one, listed)]
        print(f"{op}: {sum(map(len, listed.values()))} tiles, {len(missed)} of {len(wanted)} problems left", flush=True)
    document = {}
    for name, tiles in listed.items():
        strategy = OPS[op].strategies[name]
        placed = sorted((shortlist.place_in(strategy, tile), tile) for tile in tiles)
        fields = [*strategy.space]
        document[name] = {"fields": fields, "tiles": [[dict(tile.fields)[one] for one in fields] for _, tile in placed]}
    return document


def written(document: dict[str, dict[str, Any]]) -> str:
    """Return the document as JSON, with one line per strategy."""
    ops = []
    for op, strategies in document.items():
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(listed)}" for name, listed in strategies.items())
        ops.append(f" {json.dumps(op)}: {{\n{lines}\n }}")
    return "{\n" + ",\n".join(ops) + "\n}\n"


def main(argv: list[str] | None = None) -> int:
    """Run the command and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--random", type=int, default=RANDOM, metavar="N", help="random problems per op")
    parser.add_argument("--op", choices=OPS, help="replace the lists of this op only")
    parser.add_argument("--output", type=Path, default=shortlist.PATH, metavar="FILE", help="write to FILE")
    asked = parser.parse_args(argv)
    every = [op for op in OPS if sum(len([*one.tiles()]) for one in OPS[op].strategies.values()) > SMALL]
    before = json.loads(shortlist.PATH.read_text(encoding="utf-8")) if asked.op else {}
    ops = [asked.op] if asked.op else every
    with multiprocessing.get_context("spawn").Pool() as pool:
        found = pool.starmap(made, [(op, asked.random) for op in ops], chunksize=1)
    lists = before | dict(zip(ops, found, strict=True))
    write_whole(asked.output, written({op: lists[op] for op in every if op in lists}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
