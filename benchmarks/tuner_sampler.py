"""Count the trials that the tuner's sampler and other methods need to find a good tile, on synthetic times.

Example: ``python benchmarks/tuner_sampler.py --json benchmarks/results/tuner_sampler.json``

The search spaces are those of real problems: every legal tile of every strategy. The times were not measured on a GPU.
The true time of a tile is the time that the cost model predicts, multiplied by a hidden factor and by a small noise per
tile. The factor is log-normal. It is the product of an effect of each strategy, of each value of each parameter, and of
some pairs of values. The size of the factor is chosen so that the Spearman rank correlation of prediction and true time
is 0.6. In a second case the true time is independent of the prediction, and the correlation is near 0. Each trial
reports the true time with a further noise of one percent. The benchmark counts the trials until a tile is within 5 % of
the best true time. The limit is the tuner's own budget: all tiles of a space of up to 200 tiles, else 116.

The result is a comparison of the methods for times with such a structure. It says nothing about the times of a GPU.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import itertools
import json
import math
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from cunorm.tuning.measure.result import MORE
from cunorm.tuning.problems import workloads
from cunorm.tuning.search.sampler import PRIOR, ValidSetSampler, tile_of
from cunorm.tuning.search.space import SWEPT, Space
from host_overhead import cpu_model
from optuna.samplers import TPESampler
from optuna.trial import TrialState

import cunorm
from cunorm.core.devices import KNOWN
from cunorm.core.problem import Problem
from cunorm.core.strategy import Tile
from cunorm.ops.registry import OPS

SYNTHETIC = "synthetic: the cost model's predictions times a hidden factor; no kernel was timed on a GPU"
DEVICE = "H200"
WITHIN = 1.05  # a tile is good if its true time is at most this multiple of the best
CORRELATIONS = (0.6, 0.0)
TOLERANCE = {0.6: 0.02, 0.0: 0.1}  # maximum difference of the reached correlation from the wanted one
PAIR_SHARE, PAIR_SCALE = 0.3, 0.7  # share of the pairs with an effect, and its size over that of a value
TILE_NOISE, TRIAL_NOISE = 0.02, 0.01
SHIPPED, MODEL_ORDER = "shipped", "model order only"


#: Some of the workloads' problems: first those with large spaces, then those whose tiles are all tried.
PROBLEMS = (
    "layer_norm_backward bfloat16 rows=65536 length=1",
    "layer_norm_backward bfloat16 rows=131072 length=128",
    "layer_norm_backward bfloat16 rows=200704 length=192",
    "layer_norm_backward bfloat16 rows=50432 length=384",
    "batch_norm_stats bfloat16 NCHW N=256 C=512 HxW=49",
    "batch_norm_backward_reduce bfloat16 NCHW N=256 C=1024 HxW=196",
    "batch_norm_stats bfloat16 NCHW N=32 C=512 HxW=49",
    "layer_norm bfloat16 rows=8192 length=768",
    "layer_norm_backward bfloat16 rows=8192 length=8192",
    "group_norm_backward bfloat16 NCHW N=64 C=2048 HxW=49 group=32",
    "group_norm_backward bfloat16 NCHW N=4 C=1280 HxW=1024 group=32",
)


def problems() -> dict[str, Problem]:
    """Return the problems by name."""
    found = {problem.describe().partition(" (")[0]: problem for _, problem in workloads.problems()}
    return {name: found[name] for name in PROBLEMS}


# ---- landscapes -----------------------------------------------------------------------------------------------------


def ranks(values: np.ndarray) -> np.ndarray:
    """Return the ranks of values; equal values get their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


def correlation(one: np.ndarray, other: np.ndarray) -> float:
    """Return Spearman's rank correlation."""
    return float(np.corrcoef(ranks(one), ranks(other))[0, 1])


@dataclass(frozen=True, eq=False)
class Landscape:
    """A search space, the true seconds of its tiles, and their rank correlation with the predicted times."""

    space: Space
    truth: dict[Tile, float]
    rho: float

    @property
    def enough(self) -> float:
        """Maximum true seconds of a good tile."""
        return WITHIN * min(self.truth.values())

    @property
    def budget(self) -> int:
        """Number of trials of the tuner."""
        return len(self.space) if len(self.space) <= SWEPT else MORE


def factor(space: Space, chance: random.Random) -> np.ndarray:
    """Return the logarithm of the hidden factor of each tile before scaling: mean 0, standard deviation 1."""
    effects: dict[Any, float] = {}

    def effect(key: Any, share: float = 1.0) -> float:
        if key not in effects:
            effects[key] = chance.gauss(0, 1) if chance.random() < share else 0.0
        return effects[key]

    found = {}
    for tile in sorted(space.tiles, key=repr):  # the random draws must not depend on the model's order
        values = [("strategy", tile.strategy), *tile.fields]
        pairs = itertools.combinations(values, 2)
        found[tile] = sum(map(effect, values)) + PAIR_SCALE * sum(effect(pair, PAIR_SHARE) for pair in pairs)
    logs = np.array([found[tile] for tile in space.tiles])
    scaled: np.ndarray = (logs - logs.mean()) / logs.std()
    return scaled


def landscape(space: Space, seed: int, wanted: float) -> Landscape:
    """Return a landscape whose true times have the wanted rank correlation with the predictions."""
    predicted = np.log([candidate.predicted for candidate in space.candidates])
    for attempt in itertools.count():
        chance = random.Random(f"{seed} {wanted} {attempt} {space.problem.describe()}")
        hidden = factor(space, chance)
        noise = np.array([chance.gauss(0, TILE_NOISE) for _ in hidden])
        truth = predicted.mean() + predicted.std() * hidden + noise
        low, high = 0.0, 8.0
        for _ in range(30 if wanted else 0):
            scale = (low + high) / 2
            truth = predicted + scale * predicted.std() * hidden + noise
            low, high = (scale, high) if correlation(predicted, truth) > wanted else (low, scale)
        rho = correlation(predicted, truth)
        if abs(rho - wanted) <= TOLERANCE[wanted]:
            return Landscape(space, dict(zip(space.tiles, map(math.exp, truth), strict=True)), rho)
    raise AssertionError


# ---- ways to choose -------------------------------------------------------------------------------------------------

Trials = Iterator[Tile | None]  # None: a trial of an illegal or repeated tile


def noisy(land: Landscape, seed: int) -> Callable[[Tile], float]:
    """Return a function that reports the logarithm of a tile's time with noise; the tuner reports logarithms too."""
    chance = random.Random(seed)
    return lambda tile: math.log(land.truth[tile]) + chance.gauss(0, TRIAL_NOISE)


def valid_set(land: Landscape, seed: int, **settings: Any) -> Trials:
    """Propose tiles with the tuner's sampler."""
    sampler, tell = ValidSetSampler(land.space.tiles, [land.space.default], seed, **settings), noisy(land, seed)
    study = optuna.create_study(sampler=sampler)
    while not sampler.exhausted(study):
        trial = study.ask(fixed_distributions=sampler.distributions)
        tile = tile_of(trial.params)
        study.tell(trial, tell(tile))
        yield tile


@functools.cache
def stock(land: Landscape, seed: int) -> tuple[Tile | None, ...]:
    """Propose tiles with Optuna's TPE, one parameter at a time, until a tile is good or twice the budget is used.

    None marks a repeated tile, and an illegal tile, which is reported to the study as pruned.
    """
    study, tell = optuna.create_study(sampler=TPESampler(seed=seed)), noisy(land, seed)
    used = list(dict.fromkeys(tile.strategy for tile in land.space.tiles))
    found: list[Tile | None] = []
    for _ in range(2 * land.budget):
        trial = study.ask()
        name = trial.suggest_categorical("strategy", used)
        space = land.space.strategies[name].space
        tile = Tile(name, **{key: trial.suggest_categorical(f"{name}.{key}", values) for key, values in space.items()})
        if tile not in land.truth:
            study.tell(trial, state=TrialState.PRUNED)
            found.append(None)
            continue
        study.tell(trial, tell(tile))
        found.append(None if tile in found else tile)
        if land.truth[tile] <= land.enough:
            break
    return tuple(found)


def shuffled(land: Landscape, seed: int) -> Trials:
    """Propose all tiles in random order."""
    tiles = list(land.space.tiles)
    random.Random(seed).shuffle(tiles)
    yield from tiles


def enumerated(land: Landscape, seed: int) -> Trials:
    """Propose the tiles in the order in which the strategies enumerate them."""
    yield from (tile for one in land.space.strategies.values() for tile in one.tiles() if tile in land.truth)


WAYS: dict[str, Callable[[Landscape, int], Trials]] = {
    SHIPPED: valid_set,
    f"first {PRIOR} by model, then half neighbours, half TPE": lambda *of: valid_set(*of, prior=PRIOR),
    MODEL_ORDER: lambda land, seed: valid_set(land, seed, prior=len(land.space)),
    "no model: half neighbours, half TPE": lambda *of: valid_set(*of, prior=0),
    "no model: TPE, snapped to untried tiles": lambda *of: valid_set(*of, prior=0, local=0.0),
    "random, none twice": shuffled,
    "Optuna's TPE, repeats and illegal tiles counted": lambda *of: iter(stock(*of)),
    "Optuna's TPE, only new legal tiles counted": lambda *of: filter(None, stock(*of)),
    "order of enumeration": enumerated,
}


def needed(way: Callable[[Landscape, int], Trials], land: Landscape, seed: int) -> float:
    """Return the number of trials until a tile is good; infinite if none is good within the budget."""
    for number, tile in enumerate(itertools.islice(way(land, seed), land.budget), 1):
        if tile is not None and land.truth[tile] <= land.enough:
            return number
    return math.inf


# ---- the report -----------------------------------------------------------------------------------------------------


def summary(counts: list[float]) -> dict[str, float | None]:
    """Return median and 90th percentile of trials (None: above the budget), and the share that found a good tile."""
    ordered = sorted(counts)
    known = {name: ordered[math.ceil(share * len(counts)) - 1] for name, share in (("median", 0.5), ("p90", 0.9))}
    found = statistics.fmean(map(math.isfinite, counts))
    return {name: n if math.isfinite(n) else None for name, n in known.items()} | {"found": round(found, 3)}


def print_table(groups: dict[str, dict[str, dict[str, dict[str, float | None]]]]) -> None:
    """Print the results."""
    for rho, sizes in groups.items():
        for size, ways in sizes.items():
            print(f"\nrank correlation {rho}, {size}: trials until within {WITHIN - 1:.0%} of the best")
            print(f"  {'':58s} median     p90   found")
            for way, one in ways.items():
                cells = ("beyond" if one[name] is None else f"{one[name]:.0f}" for name in ("median", "p90"))
                print(f"  {way:58s}", *(f"{cell:>7s}" for cell in cells), f"{one['found']:7.0%}")


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark and return the exit code 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10, help="landscapes per problem and correlation (default 10)")
    parser.add_argument("--quick", action="store_true", help="run two problems with one seed")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the results to FILE too")
    options = parser.parse_args(argv)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    seeds, chosen = max(1, options.seeds), problems()
    if options.quick:
        seeds, chosen = 1, dict([*chosen.items()][4::5])
    began, facts = time.perf_counter(), list[dict[str, Any]]()
    counts: dict[str, dict[str, dict[str, list[float]]]] = {}
    for problem in chosen.values():
        space = Space.of(problem, OPS[problem.op].strategies, KNOWN[DEVICE])
        size = f"more than {SWEPT} tiles" if len(space) > SWEPT else f"up to {SWEPT} tiles"
        for wanted in CORRELATIONS:
            lands = [landscape(space, seed, wanted) for seed in range(seeds)]
            good = statistics.fmean(time <= land.enough for land in lands for time in land.truth.values())
            fact = {"problem": problem.describe(), "tiles": len(space), "wanted": wanted, "good_share": round(good, 4)}
            facts.append(fact | {"rho": [round(land.rho, 3) for land in lands]})
            for way, make in WAYS.items():
                group = counts.setdefault(str(wanted), {}).setdefault(size, {}).setdefault(way, [])
                group += [needed(make, land, seed) for seed, land in enumerate(lands)]
            print(f"{time.perf_counter() - began:4.0f} s  {problem.describe()}, {wanted}", file=sys.stderr)
    results = {
        rho: {size: {way: summary(found) for way, found in ways.items()} for size, ways in sizes.items()}
        for rho, sizes in counts.items()
    }
    print(f"{SYNTHETIC}\n{len(chosen)} problems on an {DEVICE}, {seeds} landscapes per problem; rank correlations")
    for wanted in CORRELATIONS:
        reached = [rho for fact in facts if fact["wanted"] == wanted for rho in fact["rho"]]
        print(f"  wanted {wanted}: {min(reached):.3f} to {max(reached):.3f}, median {statistics.median(reached):.3f}")
    print_table(results)
    if options.json is not None:
        machine = {"date": datetime.date.today().isoformat(), "cpu": cpu_model(), "python": platform.python_version()}
        machine |= {one.__name__: one.__version__ for one in (cunorm, np, optuna)}
        machine |= {"seconds": round(time.perf_counter() - began), "cpu_seconds": round(time.process_time())}
        settings = {"device": DEVICE, "seeds": seeds, "within": WITHIN, "budget": {"up to": SWEPT, "else": MORE}}
        settings |= {"tile_noise": TILE_NOISE, "trial_noise": TRIAL_NOISE}
        document: dict[str, Any] = {
            "schema": "cunorm-tuner-sampler/1",
            "times": SYNTHETIC,
            "machine": machine,
            "settings": settings,
        }
        document |= {"landscapes": facts, "results": results}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
