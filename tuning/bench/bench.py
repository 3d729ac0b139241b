"""Measures cunorm beside its peers: the same arrays, one run, one round of all after another.

Two times of each: its kernels', from GPU events, and a call's, from the host's clock until the results are there. A
contender that is missing, does not have the operator, fails or is wrong is in the results with its sentence.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cunorm.core.arrays import DTYPES, pointer
from cunorm.core.errors import sentence as sentence_of
from cunorm.core.problem import Problem
from cunorm.core.strategy import Tile
from cunorm.executors.choose import executor
from cunorm.ops.registry import OPS
from cunorm.runtime import plans
from cunorm.runtime.plans import Target
from cunorm.tiling import choose_tile, costmodel

from ..verify.inputs import inputs_of
from ..verify.oracle import Expected, expected
from ..verify.verifier import GuardedBuffer
from .arrays import Sets, public_call
from .clock import BenchClock
from .peers import PEERS, NotOffered
from .result import DEFAULT, TABLE, Contender, DeviceLostError, Outcome, Spread

#: Samples of each contender.
ROUNDS = 21
#: Share of a result's largest value that it may be off by: sixteen times what rounding it to 16 bits costs at most,
#: since some keep what they sum in 16 bits; and what sums of some million terms in float32, in any order, are off by.
#: Whoever leaves a term of a formula out is off by far more, on the bench's inputs. How far each is off is told.
WRONG = {"float16": 2.0**-7, "bfloat16": 2.0**-4, "float32": 1e-4, "float64": 1e-10}


@dataclass
class _Entrant:
    """A contender that runs."""

    contender: Contender
    run: Callable[[int], Any]
    call: Callable[[], Any]
    results: Callable[[], Mapping[str, Any]]
    by_torch: bool
    sample: Callable[[], float] | None = None
    samples: list[float] = field(default_factory=list)
    walls: list[float] = field(default_factory=list)


# ---- who runs -------------------------------------------------------------------------------------------------------


def _own(name: str, tile: Tile | None, place: Target, problem: Problem, sets: Sets) -> _Entrant:
    op = OPS[problem.op]
    plan = plans.plan_for(problem, op.strategies, op.names, place, tile).compile()
    numbers, names = problem.numbers, [name for name in op.names if name not in problem.numbers]
    xp: Any = np if sets.kind == "cpu" else executor("gpu").cupy
    workspace = GuardedBuffer(xp, plan.workspace_nbytes)
    values = []
    for index in range(len(sets)):
        at = {name: pointer(flat) for name, flat in sets.bytes_of(index).items()}
        at["workspace"] = workspace.address if plan.workspace_nbytes else 0
        values.append([*(at.get(name, 0) for name in names), *(numbers[n] for n in plan.names if n in numbers)])
    sizes = [0] * len(names)
    call = public_call(problem, sets.arrays(0), tile, into=False)
    fields = ", ".join(f"{field}={value}" for field, value in plan.tile.fields) if plan.tile is not None else ""
    strategy = "" if plan.strategy is None else plan.strategy.name
    return _Entrant(
        Contender(name, sentence=f"{strategy} ({fields})"),
        run=lambda index, keep=workspace: plan.run(values[index], sizes),  # type: ignore[misc]
        call=call,
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
        call=calls[0],
        results=lambda: {key: peer.flat(problem, key, tensor) for key, tensor in calls[0]().items()},
        by_torch=True,
    )


# ---- the run --------------------------------------------------------------------------------------------------------


def _host(flat: Any) -> Any:
    if isinstance(flat, np.ndarray):
        return flat.copy()
    return flat.get() if hasattr(flat, "get") else flat.cpu().numpy()


class _BenchRun:
    """A problem's contenders, of whom those that can be timed are entrants."""

    def __init__(self, problem: Problem, place: Target, sets: Sets, clock: BenchClock, peers: Sequence[str]) -> None:
        self.problem, self.place, self.sets, self.clock = problem, place, sets, clock
        self.names = (DEFAULT, TABLE, *peers)
        self.found: dict[str, Contender] = {}
        self.entrants: list[_Entrant] = []

    def enter(self) -> None:
        """Make everybody ready; who is not there or lacks the operator is told so."""
        problem, strategies = self.problem, OPS[self.problem.op].strategies
        default = costmodel.choose(problem, strategies.values(), self.place.device).tile
        tuned = choose_tile.exact(problem, strategies, self.place.device)
        for name in self.names:
            sentence = PEERS[name].missing if name in PEERS else None
            if name == TABLE and tuned is None:
                sentence = "no tiling table has an entry for this problem; see `cunorm tune`"
            if sentence is not None:
                self.found[name] = Contender(name, "missing", sentence)
                continue
            try:
                if name in PEERS:
                    entrant = _peer(name, problem, self.sets, self.clock)
                else:
                    tile = default if name == DEFAULT or tuned is None else tuned.tile
                    entrant = _own(name, tile, self.place, problem, self.sets)
            except NotOffered as error:
                self.found[name] = Contender(name, "not offered", str(error))
            except Exception as error:  # whatever a library comes up with is what its user would get
                self.found[name] = Contender(name)
                self._fail(self.found[name], error)
            else:
                self.found[name] = entrant.contender
                self.entrants.append(entrant)

    def admit(self, wanted: Sequence[Expected]) -> None:
        """Find out who is right, and what takes their samples."""
        for entrant in list(self.entrants):
            contender = entrant.contender
            with self._watched(entrant):
                sentence = self._judged(entrant, wanted)
                if sentence is not None:
                    contender.state, contender.sentence = "wrong", sentence
                    self.entrants.remove(entrant)
                    continue
                how, entrant.sample = self.clock.kernels(entrant.run, len(self.sets), entrant.by_torch)
                contender.state = "timed" if self.clock.measures else "rehearsed"
                contender.sentence += f"; {how}"

    def rounds(self, count: int, order: random.Random) -> None:
        """Samples of all, a round after a round, in another order each. A call has the first set, which the walk of the
        kernels before it has left longest ago.
        """
        for _ in range(count):
            for entrant in order.sample(self.entrants, len(self.entrants)):
                assert entrant.sample is not None
                with self._watched(entrant):
                    entrant.samples.append(entrant.sample())
                    with self._beside(entrant):
                        entrant.walls.append(self.clock.wall(entrant.call))

    def close(self, lost: str | None) -> list[Contender]:
        """Everybody, with what the samples come to; who was not reached before the device was lost is told so."""
        for entrant in self.entrants:
            if self.clock.measures and entrant.samples and entrant.walls:
                entrant.contender.kernels = Spread.of(entrant.samples)
                entrant.contender.wall = Spread.of(entrant.walls)
            elif lost is not None:
                entrant.contender.state, entrant.contender.sentence = "failed", lost
        return [self.found.get(name, Contender(name, "failed", lost or "")) for name in self.names]

    @contextlib.contextmanager
    def _watched(self, entrant: _Entrant) -> Iterator[None]:
        """Who fails in it is no entrant any more."""
        try:
            yield
        except Exception as error:
            self.entrants.remove(entrant)
            self._fail(entrant.contender, error)

    def _fail(self, contender: Contender, error: Exception) -> None:
        """Tell an error in one line; DeviceLostError if nobody can run after it."""
        contender.state, contender.sentence = "failed", sentence_of(error)
        if not self.clock.sound():
            raise DeviceLostError(f"{contender.name} left the GPU unusable: {contender.sentence}") from error

    def _beside(self, entrant: _Entrant) -> AbstractContextManager[Any]:
        return self.clock.beside() if entrant.by_torch else contextlib.nullcontext()

    def _judged(self, entrant: _Entrant, wanted: Sequence[Expected]) -> str | None:
        """What is wrong with an entrant's results; None if nothing is. Notes how far they are off."""
        self.sets.spoil(0)  # another's results are still there
        with self._beside(entrant):
            entrant.run(0)
            came = {name: _host(flat) for name, flat in entrant.results().items()}
        worst = 0.0
        for one in wanted:
            if one.name not in came:
                if one.name in self.problem.spec.saved:  # which most libraries show to nobody
                    continue
                return f"{one.name} did not come"
            elements, dtype = self.problem.elements_of(one.name), self.problem.dtype_of(one.name)
            values = came[one.name]
            if values.nbytes != elements * DTYPES[dtype].itemsize:
                return f"{one.name} has {values.nbytes} bytes, in another dtype or shape than {dtype}"
            off = one.off(values.view(DTYPES[dtype]))
            worst = max(worst, off)
            if not off <= WRONG[dtype]:
                entrant.contender.error = off if math.isfinite(off) else None
                return f"{one.name} is off by {off:.2g} of its largest value, {WRONG[dtype]:.2g} would do"
        entrant.contender.error = worst
        return None


def bench_problem(
    problem: Problem, place: Target, clock: BenchClock, peers: Sequence[str], *, rounds: int = ROUNDS, seed: int = 0
) -> Outcome:
    """Run a problem's contenders beside each other.

    Parameters
    ----------
    problem : Problem
    place : Target
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
    nbytes = sum(values.nbytes for values in given.values())  # what is read has to come from memory
    sets = Sets(problem, given, place.kind, clock.sets(nbytes, place.device))
    run, lost = _BenchRun(problem, place, sets, clock, peers), None
    try:
        run.enter()
        run.admit(wanted)
        run.rounds(rounds, random.Random(seed))
    except DeviceLostError as error:
        lost = error
    outcome = Outcome(problem, run.close(None if lost is None else str(lost)), nbytes * len(sets))
    if lost is not None:
        lost.outcome = outcome
        raise lost
    return outcome
