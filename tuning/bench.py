"""Measures cunorm beside its peers: the same arrays, one run, one round of all after another.

Two times of each: its kernels', from GPU events, and a call's, from the host's clock until the results are there. A
contender that is missing, does not have the operator, fails or is wrong is in the results with its sentence.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any

import numpy as np

from cunorm import costmodel, launch, lookup
from cunorm.arrays import DTYPES, pointer
from cunorm.launch import Place, executor
from cunorm.ops import OPS
from cunorm.problem import Problem
from cunorm.strategy import Tile
from cunorm.traffic_problem import array_facts

from .bench_calls import Sets, public_call
from .bench_clock import BenchClock
from .inputs import inputs_of, numbers_of
from .oracle import Expected, expected
from .peers import PEERS, NotOffered
from .verify import Guarded

__all__ = ["ROUNDS", "WRONG", "Contender", "DeviceLostError", "Outcome", "Spread", "bench_problem"]

#: Samples of each contender.
ROUNDS = 21
#: Share of a result's largest value that it may be off by: eight units in the last place of 16-bit storage, and what
#: sums of some million terms in float32, in any order, are off by.
WRONG = {"float16": 2.0**-8, "bfloat16": 2.0**-5, "float32": 1e-4, "float64": 1e-10}
DEFAULT, TABLE = "cunorm, default tile", "cunorm, table tile"


class DeviceLostError(Exception):
    """Nothing runs on the device any more; the sentence says who was the last to."""


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of samples, in seconds."""

    seconds: float
    q25: float
    q75: float
    samples: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        """Of one sample or more."""
        q25, _, q75 = quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else [samples[0]] * 3
        return cls(median(samples), q25, q75, len(samples))


@dataclass
class Contender:
    """What one implementation came to on a problem.

    Attributes
    ----------
    name : str
    state : {"timed", "rehearsed", "missing", "not offered", "failed", "wrong"}
    sentence : str
        Why it was not timed; of one that was, how: the tile, or what its kernels were timed by.
    error : float or None
        The largest share of a result's largest value that it is off by.
    kernels, wall : Spread or None
        Of its kernels on the GPU, and of a call.
    """

    name: str
    state: str = "failed"
    sentence: str = ""
    error: float | None = None
    kernels: Spread | None = None
    wall: Spread | None = None


@dataclass(frozen=True)
class Outcome:
    """What came of a problem.

    Attributes
    ----------
    problem : Problem
    contenders : sequence of Contender
        cunorm's first, then the peers as they were named, those that did not run among them.
    walked : int
        Bytes of all sets of its arrays: kernels walk through them, a set after a set.
    """

    problem: Problem
    contenders: Sequence[Contender]
    walked: int


@dataclass
class _Entrant:
    """A contender that runs."""

    contender: Contender
    run: Callable[[int], Any]
    call: Callable[[int], Any]
    results: Callable[[], Mapping[str, Any]]
    by_torch: bool
    sample: Callable[[], float] | None = None
    samples: list[float] = field(default_factory=list)
    walls: list[float] = field(default_factory=list)


# ---- who runs -------------------------------------------------------------------------------------------------------


def _own(name: str, tile: Tile | None, place: Place, problem: Problem, sets: Sets) -> _Entrant:
    op = OPS[problem.op]
    plan = launch.plan_for(problem, op.strategies, op.names, place, tile).compile()
    numbers, names = numbers_of(problem), [name for name in op.names if name not in numbers_of(problem)]
    xp: Any = np if sets.kind == "cpu" else executor("gpu").cupy
    workspace = Guarded(xp, plan.workspace_nbytes)
    values = []
    for index in range(len(sets)):
        at = {name: pointer(flat) for name, flat in sets.bytes_of(index).items()}
        at["workspace"] = workspace.address if plan.workspace_nbytes else 0
        values.append([*(at.get(name, 0) for name in names), *(numbers[n] for n in plan.names if n in numbers)])
    sizes = [0] * len(names)
    calls = [public_call(problem, sets.arrays(index), tile) for index in range(len(sets))]
    fields = ", ".join(f"{field}={value}" for field, value in plan.tile.fields) if plan.tile is not None else ""
    strategy = "" if plan.strategy is None else plan.strategy.name
    return _Entrant(
        Contender(name, sentence=f"{strategy} ({fields})"),
        run=lambda index, keep=workspace: plan.run(values[index], sizes),  # type: ignore[misc]
        call=lambda index: calls[index](),
        results=lambda: {name: flat for name, flat in sets.bytes_of(0).items() if name in problem.outputs},
        by_torch=False,
    )


def _peer(name: str, problem: Problem, sets: Sets, clock: BenchClock) -> _Entrant:
    peer = PEERS[name]
    with clock.beside():
        calls = [peer.prepare(problem, peer.arrays(problem, sets.bytes_of(index))) for index in range(len(sets))]
    return _Entrant(
        Contender(name, sentence=f"{peer.distribution} {peer.version}"),
        run=lambda index: calls[index](),
        call=lambda index: calls[index](),
        results=lambda: {key: peer.flat(problem, key, tensor) for key, tensor in calls[0]().items()},
        by_torch=True,
    )


def _entrants(
    problem: Problem, place: Place, sets: Sets, peers: Sequence[str], clock: BenchClock
) -> tuple[list[_Entrant], list[Contender]]:
    """Who runs, and who does not and why."""
    strategies = OPS[problem.op].strategies
    default = costmodel.choose(problem, strategies.values(), place.device).tile
    found = lookup.exact(problem, strategies, place.device)
    makers: dict[str, Callable[[], _Entrant]] = {DEFAULT: lambda: _own(DEFAULT, default, place, problem, sets)}
    out: list[Contender] = []
    if found is None:
        out.append(Contender(TABLE, "missing", "no tiling table has an entry for this problem; see `cunorm tune`"))
    else:
        makers[TABLE] = lambda: _own(TABLE, found.tile, place, problem, sets)
    for name in peers:
        makers[name] = lambda name=name: _peer(name, problem, sets, clock)  # type: ignore[misc]
    entrants = []
    for name, make in makers.items():
        if name in PEERS and (sentence := PEERS[name].missing) is not None:
            out.append(Contender(name, "missing", sentence))
            continue
        try:
            entrants.append(make())
        except NotOffered as error:
            out.append(Contender(name, "not offered", str(error)))
        except Exception as error:  # whatever a library comes up with is what its user would get
            out.append(Contender(name, "failed", _failure(name, error, clock)))
    return entrants, out


def _failure(name: str, error: Exception, clock: BenchClock) -> str:
    """An error in one line; DeviceLostError if nobody can run after it."""
    text = str(error).strip()
    sentence = f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}"
    if not clock.sound():
        raise DeviceLostError(f"{name} left the GPU unusable: {sentence}") from error
    return sentence


# ---- whether it is right --------------------------------------------------------------------------------------------


def _host(flat: Any) -> Any:
    if isinstance(flat, np.ndarray):
        return flat.copy()
    return flat.get() if hasattr(flat, "get") else flat.cpu().numpy()


def _judge(entrant: _Entrant, problem: Problem, wanted: Sequence[Expected], clock: BenchClock) -> str | None:
    """What is wrong with an entrant's results; None if nothing is. Notes how far they are off."""
    with clock.beside() if entrant.by_torch else contextlib.nullcontext():
        entrant.run(0)
        came = {name: _host(flat) for name, flat in entrant.results().items()}
    worst = 0.0
    for one in wanted:
        if one.name not in came:
            continue
        dtype = array_facts(problem, one.name)[1]
        values = came[one.name]
        if values.nbytes != array_facts(problem, one.name)[0] * DTYPES[dtype].itemsize:
            return f"{one.name} has {values.nbytes} bytes, in another dtype or shape than {dtype}"
        off = one.off(values.view(DTYPES[dtype]))
        worst = max(worst, off)
        if not off <= WRONG[dtype]:
            entrant.contender.error = off
            return f"{one.name} is off by {off:.2g} of its largest value, {WRONG[dtype]:.2g} would do"
    entrant.contender.error = worst
    return None


# ---- the run --------------------------------------------------------------------------------------------------------


def bench_problem(
    problem: Problem, place: Place, clock: BenchClock, peers: Sequence[str], *, rounds: int = ROUNDS, seed: int = 0
) -> Outcome:
    """Run a problem's contenders beside each other.

    Parameters
    ----------
    problem : Problem
    place : Place
        Where cunorm runs.
    clock : BenchClock
    peers : sequence of str
        Keys of `PEERS`.
    rounds : int
        Samples of each contender's kernels, and of its calls.
    seed : int
        Of the inputs, and of the order in a round.

    Returns
    -------
    Outcome

    Raises
    ------
    DeviceLostError
        If a contender left the GPU unusable.
    """
    given = inputs_of(problem, seed, hostile=False)
    wanted = expected(problem, given)
    nbytes = Sets.nbytes(problem, given)
    sets = Sets(problem, given, place.kind, clock.sets(nbytes, place.device))
    entrants, out = _entrants(problem, place, sets, peers, clock)
    for entrant in list(entrants):
        contender = entrant.contender
        try:
            sentence, contender.state = _judge(entrant, problem, wanted, clock), "wrong"
            if sentence is None:
                how, entrant.sample = clock.kernels(entrant.run, len(sets), entrant.by_torch)
                contender.state = "timed" if clock.measures else "rehearsed"
                contender.sentence += f"; {how}"
                continue
        except Exception as error:
            sentence, contender.state = _failure(contender.name, error, clock), "failed"
        contender.sentence = sentence
        entrants.remove(entrant)
        out.append(contender)
    _rounds(entrants, clock, rounds, len(sets), random.Random(seed), out)
    for entrant in entrants:
        if clock.measures:
            entrant.contender.kernels = Spread.of(entrant.samples)
            entrant.contender.wall = Spread.of(entrant.walls)
    order = [DEFAULT, TABLE, *peers]
    found = sorted([*(entrant.contender for entrant in entrants), *out], key=lambda one: order.index(one.name))
    return Outcome(problem, found, nbytes * len(sets))


def _rounds(
    entrants: list[_Entrant], clock: BenchClock, rounds: int, sets: int, order: random.Random, out: list[Contender]
) -> None:
    """Samples of all, a round after a round, in another order each; who fails is out from then on. The calls of a round
    are of a set each, the next one's in the next.
    """
    for at in range(rounds):
        for entrant in order.sample(entrants, len(entrants)):
            assert entrant.sample is not None
            try:
                entrant.samples.append(entrant.sample())
                entrant.walls.append(clock.wall(functools.partial(entrant.call, at % sets)))
            except Exception as error:
                contender = entrant.contender
                contender.state, contender.sentence = "failed", _failure(contender.name, error, clock)
                entrants.remove(entrant)
                out.append(entrant.contender)
