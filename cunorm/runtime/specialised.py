"""The specialised kernels of a plan: which calls run them, and when they are compiled.

A specialised kernel has the sizes of a problem, except N, as compile-time constants, and assumes that every array
starts at a multiple of 16 bytes (see `cunorm.jit.sources.kernel_text`). It gives the same bits as the generic kernel.
``CUNORM_SPECIALISE`` selects the policy:

- ``background``: the first calls of a plan run the generic kernels. After `CALLS` of them a thread compiles the
  specialised ones, and a later call loads them. A call waits for a compiler only for the generic kernels. On
  the CPU executor, where compiling takes longer than it saves, this is the same as ``never``.
- ``always``: the first call compiles them and waits.
- ``never``: all calls run the generic kernels.
"""

from __future__ import annotations

import atexit
import functools
import operator
import os
import queue
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from cunorm.core import settings
from cunorm.core.errors import CompileError
from cunorm.core.locks import Lock
from cunorm.core.problem import PACK_BYTES
from cunorm.executors.choose import capturing, executor

if TYPE_CHECKING:
    from .plans import Plan

#: A launch for an executor: kernel, blocks, threads per block, bytes of shared memory, function that selects its
#: arguments, blocks per cluster, and number of resident blocks if blocks wait for each other (0: they do not).
Step = tuple[Any, int, int, int, Callable[[Any], Any], int, int]
#: Calls of a plan after which its specialised kernels are compiled: a problem that occurs a few times is not worth it.
CALLS = 8
#: Maximum number of specialised kernels that a process loads. They are never unloaded, because a captured graph may
#: contain them.
MOST_KERNELS = 512
#: Bytes at whose multiples the arrays of a specialised kernel start: access_bytes in types.cuh.
ALIGNMENT = PACK_BYTES


def are_assumed(addresses: Sequence[int]) -> bool:
    """Whether specialised kernels may run on arrays at these addresses; 0 for an absent array."""
    return functools.reduce(operator.or_, addresses) % ALIGNMENT == 0 and 0 not in addresses


class Builder:
    """A thread that compiles kernels, one plan after the other. It is started by the first plan.

    When the process ends, it finishes the compilation that it is in, since the compiler must not be unloaded under it,
    and drops the others.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._over = False
        self._lock = Lock()

    def submit(self, job: Callable[[], None]) -> None:
        """Queue a job, which must not raise."""
        self._jobs.put(job)
        with self._lock.held:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="cunorm-builder", daemon=True)
                self._thread.start()
                atexit.register(self.close)

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            if self._over:
                return
            job()

    def close(self) -> None:
        """Wait for the job that is being done; the thread then ends."""
        self._over = True
        self._jobs.put(lambda: None)
        if self._thread is not None:
            self._thread.join()


_builder = Builder()


def builder() -> Builder:
    """The builder of this process."""
    return _builder


def _renew() -> None:
    global _builder
    _builder = Builder()  # a forked child has none of its parent's threads


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


class Specialised:
    """The specialised kernels of one plan.

    Attributes
    ----------
    steps : list of Step or None
        Their launches; None while there are none.
    waiting : bool
        Whether they may still come, so that calls have to be counted.
    state : str
        The state in words, for ``explain()``.
    """

    def __init__(self, kind: str, launches: bool) -> None:
        """For arrays of a kind, ``"cpu"`` or ``"gpu"``; a plan without launches never has any."""
        self.mode = settings.specialise()
        reason = f"CUNORM_SPECIALISE is {self.mode}"
        if kind == "cpu" and self.mode == "background":
            self.mode, reason = "never", "on the CPU executor, specialised only if CUNORM_SPECIALISE is always"
        self.waiting = launches and self.mode != "never"
        self.steps: list[Step] | None = None
        self.state = {
            "never": f"generic: {reason}",
            "always": "specialised, compiled in the first call",
            "background": f"generic in the first {CALLS} calls, specialised when a thread has then compiled them",
        }[self.mode]
        self._calls = 0
        self._built: list[Any] | None = None
        self._lock = Lock()

    def called(self, plan: Plan) -> None:
        """Count a call that comes while there are no specialised kernels, and take the step that is due."""
        self._calls = calls = self._calls + 1
        if self.mode == "always":
            self.now(plan)
        elif self._built is not None:
            # A call that is captured into a graph must not load code.
            if not capturing(plan.place.kind, plan.place.ordinal):
                self._load(plan)
        elif calls == CALLS and self._has_room(plan):
            builder().submit(functools.partial(self._build, plan))

    def now(self, plan: Plan) -> None:
        """Compile and load the kernels in this thread, if they may still come.

        Raises
        ------
        CompileError
            If they do not compile and the policy is ``always``. Otherwise the plan keeps its generic kernels.
        """
        with self._lock.held:
            if self.waiting and self._has_room(plan):
                self._build(plan)
                self._load(plan)
        if self.mode == "always" and plan.launches and self.steps is None:
            raise CompileError(self.state)

    def _has_room(self, plan: Plan) -> bool:
        """Whether this plan's kernels may be loaded too."""
        if executor(plan.place.kind).loaded() + len(plan.launches) > MOST_KERNELS:
            self._refuse(f"{MOST_KERNELS} specialised kernels are loaded, the most that a process keeps")
        return self.waiting

    def _refuse(self, why: str) -> None:
        self.waiting, self.state = False, f"generic: {why}"

    def _build(self, plan: Plan) -> None:
        """Compile the kernels to files. The builder's thread does it: nothing is raised, and no GPU is used."""
        build = functools.partial(executor(plan.place.kind).build, ordinal=plan.place.ordinal)
        try:
            self._built = [build(text, entry) for text, entry in plan.texts("specialised")]
        except Exception as error:  # whatever it is, the generic kernels do the same work
            self._refuse(f"the specialised kernels do not compile: {error}")

    def _load(self, plan: Plan) -> None:
        """Load the kernels that have been built, in the thread of a call."""
        with self._lock.held:
            if self._built is None or self.steps is not None:
                return
            load = functools.partial(executor(plan.place.kind).load, ordinal=plan.place.ordinal)
            try:
                entries = [launch.entry for launch in plan.launches]
                kernels = [load(built, entry) for built, entry in zip(self._built, entries, strict=True)]
                steps = plan.assembled(kernels)
            except Exception as error:
                self._refuse(f"the specialised kernels do not load: {error}")
                return
            self.waiting = False
            self.state = f"specialised; generic if an array does not start at a multiple of {ALIGNMENT} bytes"
            self.steps = steps  # last: another thread that sees it uses the rest
