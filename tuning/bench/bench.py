"""Measures cunorm beside its peers on the same arrays, in one run of rounds that sample every contender.

Each contender has two times: the time of its kernels, from GPU events, and the time of a call until its results exist,
from the host's clock. A contender that is missing, lacks the operator, fails or is wrong is in the results too, with a
sentence that gives the reason.
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
from cunorm.runtime.plans import Plan, Target
from cunorm.tiling import choose_tile, costmodel

from ..verify.oracle import Expected
from ..verify.verifier import GuardedBuffer
from .ahead import Prepared, prepared
from .arrays import Sets, public_call
from .clock import BenchClock
from .peers import PEERS, NotOffered
from .result import DEFAULT, TABLE, Contender, DeviceLostError, Outcome, Spread

#: Default number of samples per contender.
ROUNDS = 21
#: Tolerance: maximum error of a result, divided by its largest value. For 16-bit dtypes it is sixteen times the largest
#: error of rounding a value to the dtype, because some contenders store sums in 16 bits. For float32 it is the error of
#: sums of some million terms in any order. On the bench's inputs, an implementation that leaves out a term of a formula
#: has a far larger error. The results contain the error of each contender.
WRONG = {"float16": 2.0**-7, "bfloat16": 2.0**-4, "float32": 1e-4, "float64": 1e-10}


@dataclass
class _Entrant:
    """A contender that runs, with its functions and samples."""

    contender: Contender
    run: Callable[[int], Any]
    call: Callable[[], Any]
    results: Callable[[], Mapping[str, Any]]
    by_torch: bool
    sample: Callable[[], float] | None = None
    samples: list[float] = field(default_factory=list)
    walls: list[float] = field(default_factory=list)


# ---- contenders -----------------------------------------------------------------------------------------------------


def _kernels(plan: Plan) -> str:
    """What a reader of a time should know about the kernels of a plan on a GPU, or ""."""
    return "; generic kernels" if plan.place.kind == "gpu" and plan.text == "generic" else ""


def _own(name: str, tile: Tile | None, place: Target, problem: Problem, sets: Sets) -> _Entrant:
    op = OPS[problem.op]
    plan = plans.plan_for(problem, op.strategies, op.names, place, tile).compile()
    xp: Any = np if sets.kind == "cpu" else executor("gpu").cupy
    workspace = GuardedBuffer(xp, plan.workspace_nbytes)
    scratch = {"workspace": workspace.address}
    values = [
        plan.values({name: pointer(flat) for name, flat in sets.bytes_of(index).items()} | scratch)
        for index in range(len(sets))
    ]
    sizes = [0] * len(plan.array_names)
    call = public_call(problem, sets.arrays(0), tile, into=False)
    return _Entrant(
        Contender(name, sentence=f"{'' if plan.tile is None else plan.tile.text}{_kernels(plan)}"),
        run=lambda index, keep=workspace: plan.run(values[index], sizes),  # type: ignore[misc]
        call=call,
        results=lambda: {name: flat for name, flat in sets.bytes_of(0).items() if name in problem.outputs},
        by_torch=False,
    )


def _peer(name: str, problem: Problem, sets: Sets, clock: BenchClock) -> _Entrant:
    peer = PEERS[name]
    note = peer.note(problem, peer.version)

    def prepared_on(index: int) -> Callable[[], Mapping[str, Any]]:
        if "y_t" in dict(problem.others):
            raise NotOffered("returns y in the dtype of x")
        return peer.prepare(problem, peer.arrays(problem, sets.bytes_of(index)))

    with clock.beside():
        calls = [prepared_on(index) for index in range(len(sets))]
    return _Entrant(
        Contender(name, sentence=", ".join(filter(None, [f"{peer.distribution} {peer.version}", note]))),
        run=lambda index: calls[index](),
        call=calls[0],
        # The results of a first run: some peers overwrite their inputs.
        results=lambda: {key: peer.flat(problem, key, tensor) for key, tensor in prepared_on(0)().items()},
        by_torch=True,
    )


# ---- the run --------------------------------------------------------------------------------------------------------


def _host(flat: Any) -> Any:
    if isinstance(flat, np.ndarray):
        return flat.copy()
    return flat.get() if hasattr(flat, "get") else flat.cpu().numpy()


class _BenchRun:
    """The contenders of a problem. The contenders that can be timed are entrants."""

    def __init__(self, problem: Problem, place: Target, sets: Sets, clock: BenchClock, peers: Sequence[str]) -> None:
        self.problem, self.place, self.sets, self.clock = problem, place, sets, clock
        self.names = (DEFAULT, TABLE, *peers)
        self.found: dict[str, Contender] = {}
        self.entrants: list[_Entrant] = []

    def enter(self) -> None:
        """Prepare all contenders; record why a contender is missing or does not offer the operator."""
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
            except Exception as error:  # libraries raise errors of many types; a user would get the same error
                self.found[name] = Contender(name)
                self._fail(self.found[name], error)
            else:
                self.found[name] = entrant.contender
                self.entrants.append(entrant)

    def admit(self, wanted: Sequence[Expected]) -> None:
        """Check the results of the entrants, and create the samplers of the entrants that are right."""
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
        """Sample all entrants in every round, in a random order.

        A call uses the first set, because the preceding walk of the kernels has used it least recently.
        """
        for _ in range(count):
            for entrant in order.sample(self.entrants, len(self.entrants)):
                assert entrant.sample is not None
                with self._watched(entrant):
                    entrant.samples.append(entrant.sample())
                    with self._beside(entrant):
                        entrant.walls.append(self.clock.wall(entrant.call))

    def close(self, lost: str | None) -> list[Contender]:
        """Return all contenders with their times. If the device was lost, those without times contain the reason."""
        for entrant in self.entrants:
            if self.clock.measures and entrant.samples and entrant.walls:
                entrant.contender.kernels = Spread.of(entrant.samples)
                entrant.contender.wall = Spread.of(entrant.walls)
            elif lost is not None:
                entrant.contender.state, entrant.contender.sentence = "failed", lost
        return [self.found.get(name, Contender(name, "failed", lost or "")) for name in self.names]

    @contextlib.contextmanager
    def _watched(self, entrant: _Entrant) -> Iterator[None]:
        """Remove an entrant that raises an error in this context."""
        try:
            yield
        except Exception as error:
            self.entrants.remove(entrant)
            self._fail(entrant.contender, error)

    def _fail(self, contender: Contender, error: Exception) -> None:
        """Record an error as one line; raise DeviceLostError if the error left the device unusable."""
        contender.state, contender.sentence = "failed", sentence_of(error)
        if not self.clock.sound():
            raise DeviceLostError(f"{contender.name} left the GPU unusable: {contender.sentence}") from error

    def _beside(self, entrant: _Entrant) -> AbstractContextManager[Any]:
        return self.clock.beside() if entrant.by_torch else contextlib.nullcontext()

    def _judged(self, entrant: _Entrant, wanted: Sequence[Expected]) -> str | None:
        """A sentence that says how an entrant's results are wrong, or None. Records the largest error."""
        self.sets.spoil(0)  # the set still contains another entrant's results
        with self._beside(entrant):
            entrant.run(0)
            came = {name: _host(flat) for name, flat in entrant.results().items()}
        worst = 0.0
        for one in wanted:
            if one.name not in came:
                if one.name in self.problem.spec.saved:  # most libraries do not return saved statistics
                    continue
                return f"{one.name} was not returned"
            elements, dtype = self.problem.elements_of(one.name), self.problem.dtype_of(one.name)
            values = came[one.name]
            if values.nbytes != elements * DTYPES[dtype].itemsize:
                return f"{one.name} has {values.nbytes} bytes, expected the bytes of its shape in {dtype}"
            off = one.off(values.view(DTYPES[dtype]))
            worst = max(worst, off)
            if not off <= WRONG[dtype]:
                entrant.contender.error = off if math.isfinite(off) else None
                return f"{one.name} is off by {off:.2g} of its largest value, expected at most {WRONG[dtype]:.2g}"
        entrant.contender.error = worst
        return None


def bench_problem(
    problem: Problem,
    place: Target,
    clock: BenchClock,
    peers: Sequence[str],
    *,
    rounds: int = ROUNDS,
    seed: int = 0,
    given: Prepared | None = None,
) -> Outcome:
    """Check and time all contenders of a problem.

    Parameters
    ----------
    problem : Problem
    place : Target
        The device on which cunorm runs.
    clock : BenchClock
    peers : sequence of str
        Keys of `PEERS`.
    rounds : int
        Number of samples of each contender's kernels, and of its calls.
    seed : int
        Seed of the inputs and of the order in a round.
    given : Prepared, optional
        The inputs and the oracle, if another process has prepared them.

    Returns
    -------
    Outcome

    Raises
    ------
    DeviceLostError
        If a contender left the GPU unusable.
    """
    inputs, wanted = prepared(problem, seed) if given is None else given
    nbytes = sum(values.nbytes for values in inputs.values())  # the inputs alone must not fit in the L2
    sets = Sets(problem, inputs, place.kind, clock.sets(nbytes, place.device))
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
