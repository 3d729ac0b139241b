"""The common path from a Problem to running kernels: plans, their launches, and the arguments of executors."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cunorm.core.arrays import Array
from cunorm.core.devices import Device
from cunorm.core.locks import Lock, lazy
from cunorm.core.problem import Problem
from cunorm.core.strategy import Launch, Strategy, Tile
from cunorm.executors.choose import executor
from cunorm.jit import sources
from cunorm.tiling import choose_tile, costmodel, problem_trace

from .raw_call import RawCall
from .specialised import Specialised, Step, are_assumed

#: Maximum number of cached plans. An application has few problems, a fuzzer has many.
KEPT_PLANS = 4096


@dataclass(frozen=True)
class Target:
    """The place of a call: the kind of executor, the GPU's ordinal, and the device whose limits and tiles apply."""

    kind: str
    ordinal: int
    device: Device


@dataclass(eq=False)  # compared by identity: plans are keys of calls
class Plan:
    """A prepared call, made by `cunorm.plan`. Call it with the arrays of the op.

    Attributes
    ----------
    problem : Problem
    place : Target
    strategy : Strategy or None
        None if there is nothing to launch (no elements, or no requested outputs).
    tile : Tile or None
    reason : str
        Which rule chose the tile, and why.
    launches : tuple of Launch
    workspace_nbytes : int
        Bytes of workspace that a call needs; 0 for none.
    names : tuple of str
        The order of the values of `launch`: inputs, results, ``"workspace"``, and numbers such as ``"eps"``.
    caller, counter : callable or None
        The functions of a call and of `traffic`. None unless `cunorm.plan` made the plan.

    Examples
    --------
    >>> import numpy as np
    >>> import cunorm
    >>> plan = cunorm.plan("layer_norm", shape=(2, 4), dtype="float32", normalized_shape=4)
    >>> y, mean, rstd = plan(np.array([[1, 2, 3, 6], [0, 0, 0, 4]], np.float32))
    >>> mean
    array([[3.],
           [1.]], dtype=float32)
    """

    problem: Problem
    place: Target
    strategy: Strategy | None
    tile: Tile | None
    reason: str
    launches: tuple[Launch, ...]
    workspace_nbytes: int
    names: tuple[str, ...] = field(repr=False)
    caller: Callable[..., Any] | None = field(default=None, repr=False)
    counter: Callable[[Plan], Any] | None = field(default=None, repr=False)
    _ready: list[Step] | None = field(default=None, init=False, repr=False)
    _lock: Lock = field(default_factory=Lock, init=False, repr=False)
    _specialised: Specialised = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._specialised = Specialised(self.place.kind, bool(self.launches))

    def __setattr__(self, name: str, value: object) -> None:
        if name in self.__dict__ and not name.startswith("_"):
            raise AttributeError(f"{name}: a plan cannot be changed, because calls share it; make one with cunorm.plan")
        object.__setattr__(self, name, value)

    def __copy__(self) -> Plan:
        return self  # as other immutable objects do

    def __deepcopy__(self, memo: object) -> Plan:
        return self

    def __reduce__(self) -> str:
        raise TypeError("a plan cannot be pickled, because it has compiled kernels; make it there with cunorm.plan")

    def compile(self) -> Plan:
        """Compile the kernels now rather than in the first calls; return the plan itself.

        Both texts of the kernels are compiled, the specialised one unless ``CUNORM_SPECIALISE`` is ``never``. Several
        threads compile them only once. A signal handler that interrupts the compilation and calls the plan compiles
        them again.

        Raises
        ------
        CompileError
            If a kernel does not compile, or there is no compiler.
        """
        self._generic()
        self._specialised.now(self)
        return self

    @property
    def text(self) -> sources.Text:
        """Which of the kernels' texts calls with aligned arrays run now."""
        return "generic" if self._specialised.steps is None else "specialised"

    def _generic(self) -> list[Step]:
        """The launches of the generic kernels, which are compiled once."""
        if self._ready is None:
            with self._lock.held:
                if self._ready is None:
                    compile = functools.partial(executor(self.place.kind).compile, ordinal=self.place.ordinal)
                    self._ready = self.assembled([compile(text, entry) for text, entry in self.texts("generic")])
        return self._ready

    def texts(self, text: sources.Text) -> list[tuple[str, str]]:
        """The text and the entry of the kernel of each launch.

        Parameters
        ----------
        text : str
            Which of the kernels' texts, one of `cunorm.jit.sources.TEXTS`.
        """
        if self.strategy is None or self.tile is None:
            return []
        return [
            (sources.kernel_text(launch, self.problem, self.strategy, self.tile, text), launch.entry)
            for launch in self.launches
        ]

    @lazy
    def _arguments(self) -> tuple[list[list[int]], tuple[int | float, ...]]:
        """For each launch, the places of its arguments in the values of a call and the constants that follow them."""
        constants: list[int | float] = []
        places: list[list[int]] = []
        for launch in self.launches:
            of_launch = []
            for parameter in sources.parameters(launch.kernel, launch.entry, launch.arguments):
                argument = launch.arguments[parameter]
                if isinstance(argument, str):
                    of_launch.append(self.names.index(argument))
                else:
                    of_launch.append(len(self.names) + len(constants))
                    constants.append(argument)
            places.append(of_launch)
        return places, tuple(constants)

    @lazy
    def _constants(self) -> tuple[int | float, ...]:
        return self._arguments[1]

    def assumed_addresses(self) -> list[int]:
        """The places, in the values of a call, of the arrays that specialised kernels assume to be aligned."""
        arrays = [sources.aligned_arrays(launch, self.problem) for launch in self.launches]
        return sorted({self.names.index(name) for names in arrays for name in names})

    def assembled(self, kernels: Sequence[Any]) -> list[Step]:
        """The launches for an executor, with its compiled kernel of each."""
        steps: list[Step] = []
        for kernel, launch, places in zip(kernels, self.launches, self._arguments[0], strict=True):
            resident = 0
            if launch.waits:
                device = self.place.device
                resident = min(launch.grid, costmodel.resident_blocks(launch, device) * device.multiprocessors)
            if self.place.kind == "gpu":
                executor("gpu").allow_cluster(kernel, launch.cluster)
            pick = operator.itemgetter(*places)
            steps.append((kernel, launch.grid, launch.threads, launch.shared_bytes, pick, launch.cluster, resident))
        return steps

    def steps(
        self, compile: Callable[[str, str], Any], text: sources.Text = "generic"
    ) -> tuple[list[Step], tuple[int | float, ...]]:
        """The launches for an executor, and the constants that follow the values of a call in their arguments.

        Parameters
        ----------
        compile : callable
            Text and entry of a kernel -> compiled kernel for the executor.
        text : str
            Which of the kernels' texts, one of `cunorm.jit.sources.TEXTS`.
        """
        return self.assembled([compile(*one) for one in self.texts(text)]), self._constants

    @lazy
    def _assumed(self) -> Callable[[Any], tuple[int, ...]]:
        places = self.assumed_addresses()
        return operator.itemgetter(places[0], *places)  # of two or more it returns a tuple

    def assumes(self, values: Sequence[int | float]) -> bool:
        """Whether the arrays of a call are there, and start where the specialised kernels assume.

        The problem of a call does not tell whether an op's running statistics are there.
        """
        return are_assumed(self._assumed(values))

    @lazy
    def array_names(self) -> tuple[str, ...]:
        """The names of `names` that are arrays, which come first: the op's inputs, its results, the workspace."""
        return tuple(name for name in self.names if name not in self.problem.numbers)

    def values(self, addresses: Mapping[str, int]) -> list[int | float]:
        """The values of `run` for arrays at these addresses, with the problem's own numbers; other arrays are absent.

        So is the workspace if the plan needs none. Tests, counters and the tuner use these numbers. Those of a call are
        its arguments.
        """
        numbers = self.problem.numbers
        unused = () if self.workspace_nbytes else ("workspace",)
        at = {name: address for name, address in addresses.items() if name not in unused}
        return [numbers[name] if name in numbers else at.get(name, 0) for name in self.names]

    def run(self, values: Sequence[int | float], sizes: Sequence[int] = (), assumed: bool | None = None) -> None:
        """Launch the kernels.

        Parameters
        ----------
        values : sequence of int or float
            Addresses (0: absent array) and numbers in the order of ``names``.
        sizes : sequence of int
            Bytes of the arrays at these addresses, with which the CPU executor checks bounds.
        assumed : bool, optional
            The result of `assumes` for these values, if the caller has it already.
        """
        specialised = self._specialised
        if specialised.waiting:
            specialised.called(self)
        steps = specialised.steps
        if steps is None or not (self.assumes(values) if assumed is None else assumed):
            steps = self._ready or self._generic()
        everything = (*values, *self._constants)
        if self.place.kind == "cpu":
            executor("cpu").run(steps, everything, self.names, sizes, device=self.place.device)
            return
        executor("gpu").run(steps, everything, self.place.ordinal)

    def launch(self, pointers: Sequence[int | float], *, stream: Any = None) -> None:
        """Run the plan on memory of another library: the shortest way to the kernels.

        Nothing is allocated or copied, and nobody waits. Only the number of values, the absent arrays and the alignment
        of the workspace are checked: wrong addresses end a process on a GPU. Results of a problem without elements are
        filled. `cunorm.trace` records the call.

        Parameters
        ----------
        pointers : sequence of int or float
            The address of each array in the order of `names`: the op's inputs, its results, the workspace. An absent
            array has 0. Then the numbers that `names` ends with. Arrays are dense in the plan's layout, have the plan's
            dtypes and do not overlap, except results that a call may write in place.
            A launch that may run at the same time needs another workspace: kernels count in it, and wait for counts.
        stream : cupy.cuda.Stream or int, optional
            Stream of the launches, or the address of a ``cudaStream_t``, such as ``cuda_stream`` of a PyTorch stream.
            None: CuPy's current stream. The memory must stay alive until the stream has passed the launches.

        Raises
        ------
        ValueError
            For a wrong number of values, an address that is missing or that the plan has no array for, or a misaligned
            workspace; or if the stream is on another device.
        TypeError
            If an address is not an int, for instance an array, or ``stream`` is not a stream.
        CompileError
            See `compile`.

        Examples
        --------
        >>> import numpy as np
        >>> import cunorm
        >>> x, y, mean, rstd = np.ones((2, 4), np.float32), *(np.empty(n, np.float32) for n in ((2, 4), 2, 2))
        >>> plan = cunorm.plan("layer_norm", shape=(2, 4), dtype="float32", normalized_shape=4, device="cpu")
        >>> plan.names
        ('x', 'gamma', 'beta', 'residual', 'y', 'mean', 'rstd', 'h', 'workspace', 'eps')
        >>> x_at, y_at, mean_at, rstd_at = (array.ctypes.data for array in (x, y, mean, rstd))
        >>> plan.launch((x_at, 0, 0, 0, y_at, mean_at, rstd_at, 0, 0, 1e-5))
        >>> mean
        array([1., 1.], dtype=float32)
        """
        call = self._raw_call
        call.check(pointers)
        if problem_trace.active() and self.launches:
            problem_trace.record(self.problem)
        with call.on(stream):
            if self.launches:
                self.run(pointers, call.sizes(pointers))
            else:
                call.fill(pointers)

    @lazy
    def _raw_call(self) -> RawCall:
        return RawCall(self)

    def __call__(self, *arrays: Array, out: Any = None, workspace: Array | None = None, **options: Any) -> Any:
        """Run the op on arrays, as its public function does.

        Parameters
        ----------
        *arrays : array
            The op's inputs in the order of `names`; optional ones at the end may be left out. They are on the plan's
            device and have the shapes and dtypes of its problem. batch_norm_gather_stats and
            batch_norm_backward_elemt take the arguments of their public functions.
        out : array or tuple of array, optional
            See the public function.
        workspace : array, optional
            Contiguous, on the plan's device, of at least `workspace_nbytes` bytes. None: the call allocates it.
        **options
            The op's numbers, such as ``eps``; arrays may be named, too.

        Returns
        -------
        array or tuple of array
            The results of the public function.

        Raises
        ------
        TypeError
            If an argument is missing or has a wrong type, or if an array is of another kind than the plan's device.
        ValueError
            If an array does not match the plan's problem or is on another GPU, or arrays overlap.
        CompileError
            See `compile`.
        """
        assert self.caller is not None, "expected a plan from cunorm.plan"
        return self.caller(self, arrays, out, workspace, options)

    def traffic(self) -> Any:
        """Count the traffic of the plan: bytes, sectors, reuse and bank conflicts, compared with the byte floor.

        The CPU executor counts it on its own arrays, whatever the plan's place. Nothing is timed. It takes
        seconds; of very large problems, of which parts are counted, minutes.

        Returns
        -------
        cunorm.traffic.traffic.Traffic

        Raises
        ------
        CompileError
            If there is no C++ compiler.
        KernelFault
            If the CPU executor finds a fault in a kernel.
        ValueError
            If the problem is too large to be counted.
        """
        assert self.counter is not None, "expected a plan from cunorm.plan"
        return self.counter(self)

    def explain(self) -> str:
        """A text for users: the launches of the plan, and why its tile was chosen."""
        where = "cpu executor: exact, not fast; with the limits and tiles of " if self.place.kind == "cpu" else ""
        lines = [self.problem.describe(), f"device     {where}{self.place.device.name}"]
        if self.strategy is None or self.tile is None:
            return "\n".join([*lines, f"strategy   none: {self.reason}"])
        lines += [
            f"strategy   {self.tile.text}",
            f"chosen by  {self.reason}",
            f"workspace  {self.workspace_nbytes} bytes",
            f"kernels    {self._specialised.state}",
        ]
        lines += [
            f"launch     {launch.entry}: {launch.grid} blocks of {launch.threads} threads, "
            f"{launch.shared_bytes} bytes of shared memory"
            for launch in self.launches
        ]
        return "\n".join(lines)


_plans: dict[tuple[Any, ...], Plan] = {}


def plan_for(
    problem: Problem,
    strategies: Mapping[str, Strategy],
    names: tuple[str, ...],
    place: Target,
    tile: Tile | None = None,
) -> Plan:
    """The plan of a problem at a place, made once.

    Parameters
    ----------
    problem : Problem
    strategies : mapping of str to Strategy
        The strategies of the op.
    names : tuple of str
        The arrays and numbers that a launch may use, in the order of the values of `Plan.run`.
    place : Target
    tile : Tile, optional
        An explicit tile.

    Raises
    ------
    ValueError, UnsupportedTile
        See `cunorm.tiling.choose_tile.resolve`.
    """
    problem = problem.canonical()
    # The choice of a tile depends on the contents of the tables. An existing plan keeps its tile.
    key = (problem, place, tile, None if tile is not None else choose_tile.stamp(place.device))
    plan = _plans.get(key)
    if plan is None:
        if problem.N * problem.C * problem.HxW == 0 or not problem.outputs:
            why = "no output is wanted" if not problem.outputs else "there are no elements; results are filled"
            if tile is not None:  # an illegal tile is an error even if a size is 0
                N, C, HxW = max(1, problem.N), problem.C or problem.group, max(1, problem.HxW)
                choose_tile.resolve(replace(problem, N=N, C=C, HxW=HxW), strategies, place.device, tile)
            plan = Plan(problem, place, None, None, why, (), 0, names)
        else:
            strategy, chosen, reason = choose_tile.resolve(problem, strategies, place.device, tile)
            cut = strategy.of(problem, chosen)
            plan = Plan(problem, place, strategy, chosen, reason, cut.launches, cut.workspace, names)
        if len(_plans) >= KEPT_PLANS:
            _plans.clear()
        plan = _plans.setdefault(key, plan)
    return plan
