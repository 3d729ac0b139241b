"""The part of a worker that uses the device: it allocates one problem's arrays, and verifies and times plans."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cunorm import __version__
from cunorm.core.devices import Device
from cunorm.core.problem import Problem
from cunorm.core.strategy import Tile
from cunorm.executors.choose import executor
from cunorm.ops.registry import OPS
from cunorm.runtime import plans
from cunorm.runtime.op import Op
from cunorm.runtime.plans import Plan, Target

from ..verify.inputs import Inputs
from ..verify.verifier import GuardedBuffer, Verifier, array_bytes, filled_buffers
from .clock import Clock


def _foreign() -> tuple[str, ...]:
    """The modules outside cunorm that define ops of this process."""
    modules = dict.fromkeys(op.check.__module__ for op in OPS.values())
    return tuple(module for module in modules if module.partition(".")[0] != "cunorm")


def _register(module: str) -> None:
    """Register the ops that a module defines."""
    for found in vars(importlib.import_module(module)).values():
        if isinstance(found, Op):
            OPS.setdefault(found.name, found)


@dataclass(frozen=True)
class Spec:
    """The configuration of a worker.

    Attributes
    ----------
    kind : {"cpu", "gpu"}
        The executor that runs and verifies plans.
    device : Device
        The device whose limits apply to tiles.
    clock : str or None
        ``module:name`` of the clock; None: nothing is timed.
    visible : str or None
        The worker's value of ``CUDA_VISIBLE_DEVICES``, which names one GPU; None: the parent's value.
    modules : tuple of str
        Modules outside cunorm that define ops; the worker registers these ops.
    """

    kind: str
    device: Device
    clock: str | None = None
    visible: str | None = None
    modules: tuple[str, ...] = field(default_factory=_foreign)


def software(kind: str) -> dict[str, Any]:
    """The software versions that a table records for its entries."""
    found: dict[str, Any] = {"cunorm": __version__}
    if kind == "gpu":
        import cupy
        from cupy.cuda import nvrtc, runtime

        found["cupy"] = cupy.__version__
        found["nvrtc"] = "{}.{}".format(*nvrtc.getVersion())
        found["driver"] = int(runtime.driverGetVersion())
    return found


class Session:
    """Verifies and times the plans of one problem at a time on one device.

    Parameters
    ----------
    spec : Spec
    """

    def __init__(self, spec: Spec) -> None:
        self.spec, self.place = spec, Target(spec.kind, 0, spec.device)
        for module in spec.modules:
            _register(module)
        self.clock: Clock | None = None
        if spec.clock is not None:
            module, _, name = spec.clock.partition(":")
            self.clock = getattr(importlib.import_module(module), name)()
        self._verifier: Verifier | None = None
        self._sets: list[dict[str, GuardedBuffer]] = []
        self._samplers: dict[Tile, Callable[[], float]] = {}

    def open(self, problem: Problem) -> None:
        """Switch to a problem and compute its oracle."""
        self._samplers, self._sets = {}, []  # free the previous problem's memory first
        self._verifier = Verifier(problem, self.spec.kind)
        given, _ = self._verifier.cases[0]
        if self.clock is not None:
            self._make_sets(self.clock, given)

    def _plan(self, tile: Tile) -> Plan:
        assert self._verifier is not None, "a problem that was opened"
        op = OPS[self._verifier.problem.op]
        return plans.plan_for(self._verifier.problem, op.strategies, op.names, self.place, tile)

    def compile(self, tile: Tile) -> str:
        """Compile a tile's kernels; return the text that calls run, one of `cunorm.jit.sources.TEXTS`.

        Raises
        ------
        CompileError, UnsupportedTile
        """
        return self._plan(tile).compile().text

    def verify(self, tile: Tile) -> str | None:
        """A sentence that says how a tile's results are wrong, or None."""
        assert self._verifier is not None, "a problem that was opened"
        return self._verifier.fault(self._plan(tile).compile())

    def simulate(self, problem: Problem, tile: Tile) -> float:
        """The simulated time of a tile, in seconds. The problem need not be open."""
        from .simulate import seconds_of  # imported here: a session that measures has no simulator

        return seconds_of(problem, tile, self.spec.device)

    def keep(self, tiles: Sequence[Tile]) -> None:
        """Free the workspaces and graphs of all other tiles."""
        self._samplers = {tile: one for tile, one in self._samplers.items() if tile in tiles}

    def sound(self) -> bool:
        """Whether the device still works: after some CUDA errors every call fails."""
        if self.spec.kind == "cpu":
            return True
        try:
            executor("gpu").synchronise(0)
            return bool(executor("gpu").cupy.ones(1).get()[0] == 1)
        except Exception:  # any error means that the device is unusable
            return False

    def sample(self, tile: Tile) -> float:
        """Take one sample of a tile, in seconds per launch."""
        if tile not in self._samplers:
            assert self.clock is not None, "a spec with a clock"
            # Compiled first, since this process may be a new one: a sample must not run the generic kernels of the
            # plan's first calls.
            run = self._runner(self._plan(tile).compile())
            self._samplers[tile] = self.clock.sampler(tile, run, len(self._sets))
        return self._samplers[tile]()

    def _make_sets(self, clock: Clock, given: Inputs) -> None:
        """Allocate the sets of arrays to walk through, all with the same inputs, without workspaces."""
        assert self._verifier is not None
        problem, xp = self._verifier.problem, self._verifier.xp
        needed = array_bytes(problem, OPS[problem.op].names, given)
        count = clock.sets(sum(needed.values()), self.spec.device)
        self._sets = [filled_buffers(xp, needed, given) for _ in range(count)]

    def _runner(self, plan: Plan) -> Callable[[int], None]:
        """A function that launches a plan on a set of arrays. All sets share one workspace."""
        assert self._verifier is not None
        workspace = GuardedBuffer(self._verifier.xp, plan.workspace_nbytes)
        scratch = {"workspace": workspace.address}
        values = [plan.values({name: one.address for name, one in made.items()} | scratch) for made in self._sets]
        sizes = [0] * len(plan.array_names)  # no sizes, so no bounds are checked while the clock runs
        # The arrays were filled on another stream than the one that reads them.
        executor(self.spec.kind).synchronise(self.place.ordinal)

        def run(index: int, keep: Any = workspace) -> None:
            plan.run(values[index], sizes)

        return run
