"""Op: the definition of an operator, and the common path from the arguments of all calls to the kernels."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from cunorm.core import settings
from cunorm.core.arrays import Array, dtype_named, kind_of, place_of, same_place
from cunorm.core.locks import lazy
from cunorm.core.opspec import OpSpec
from cunorm.core.problem import Problem, accumulator
from cunorm.core.strategy import Strategy, Tile
from cunorm.tiling import problem_trace

from .checked_call import Call, Calls, signature
from .checks import OutputSpec, check_out, check_tuple, place_for
from .plans import Plan, Target, plan_for

#: The default mask. It is compared by identity: (1, 1, 1) is equal to it, but a mask of ints is an error.
EVERY = (True, True, True)


@dataclass(frozen=True)
class Checked:
    """The result of an op's checks of the arrays of a call.

    Attributes
    ----------
    problem : Problem
    orders : sequence of tuple of int
        For each input, its axes in the memory order that the kernels read.
    results : sequence of OutputSpec or None
        The results in result order; None for an output that is not requested.
    """

    problem: Problem
    orders: Sequence[tuple[int, ...]]
    results: Sequence[OutputSpec | None]


@dataclass(frozen=True)
class Request:
    """The arguments of `cunorm.plan`, which replace the arrays of a call. The names and defaults are the same."""

    shape: tuple[int, ...]
    dtype: str
    num_groups: Any = None
    normalized_shape: Any = None
    gamma_dtype: Any = None
    beta_dtype: Any = None
    output_mask: Any = EVERY
    data_format: Any = "NCHW"
    activation: Any = None
    residual: Any = False
    dh: Any = False
    y_dtype: Any = None
    dtypes: Any = None


@dataclass(frozen=True, eq=False, kw_only=True)
class Op(OpSpec):
    """An operator: its spec, its strategies, and the way from arrays to a problem.

    Attributes
    ----------
    strategies : mapping of str to Strategy
    check : callable
        (arrays, options, out) -> Checked; raises the errors for wrong arrays. Most ops ignore out.
    request : callable
        Request -> (problem, options), for arrays that are contiguous in the request's format.
    in_place : mapping of str to str
        Results, and for each the input that may be the same array if it has the same dtype.
    options : tuple of str
        The fields of a request that this op uses, without the output mask, which follows from `OpSpec.flags`.
    caller : callable or None
        The function that runs when a plan is called, with the plan's options and the plan before the arguments of the
        call; None: `call_planned`.
    calls : Calls
        The checked calls of this op.
    """

    strategies: Mapping[str, Strategy]
    check: Callable[[tuple[Any, ...], tuple[Any, ...], Any], Checked]
    request: Callable[[Request], tuple[Problem, tuple[Any, ...]]]
    in_place: Mapping[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    caller: Callable[..., Any] | None = None
    calls: Calls = field(default_factory=Calls, repr=False)

    @lazy
    def takes(self) -> tuple[str, ...]:
        """The fields of a request that this op uses."""
        return (*self.options, "output_mask") if self.flags else self.options

    @lazy
    def names(self) -> tuple[str, ...]:
        """The names that a launch may use, in the order of the values of `Plan.run`."""
        return (*self.inputs, *self.results, "workspace", *self.numbers, *self.measures)

    @lazy
    def labels(self) -> tuple[str, ...]:
        """The user-facing names of the written arrays, one per result."""
        if len(self.results) == 1:
            return ("out",)
        return tuple(name if name in self.updated else f"out[{name}]" for name in self.results)

    @lazy
    def _conditions(self) -> tuple[tuple[int, int], ...]:
        """For each optional tensor that has results of its own: its place in the inputs, and their number."""
        places = list(self.inputs)
        return tuple((places.index(name), len(results)) for name, results in self.extras.items() if results)

    def missing(self, arrays: Sequence[Array | None]) -> int:
        """Number of results, the last ones, that a call with these arrays does not have."""
        return sum(count for place, count in self._conditions if arrays[place] is None)

    @lazy
    def defaults(self) -> tuple[float, ...] | None:
        """The default values of the scalar arguments; None if one of them is required."""
        found = [number.default for number in self.numbers.values()]
        return None if None in found else tuple(found)  # type: ignore[arg-type]

    @lazy
    def required(self) -> int:
        """Number of scalar arguments without a default value."""
        return sum(number.default is None for number in self.numbers.values())

    @lazy
    def least(self) -> int:
        """The minimum number of arrays in a call: all inputs after them may be None."""
        return 1 + max(index for index, name in enumerate(self.inputs) if name not in self.optional)

    @lazy
    def signature(self) -> inspect.Signature:
        """The signature of a plan's call."""
        free, named = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
        absent = inspect.Parameter.empty
        arrays = [
            inspect.Parameter(name, free, default=None if i >= self.least else absent)
            for i, name in enumerate(self.inputs)
        ]
        numbers = [
            inspect.Parameter(name, free)
            if number.default is None
            else inspect.Parameter(name, named, default=number.default)
            for name, number in self.numbers.items()
        ]
        return inspect.Signature([*arrays, *numbers])


def typed(values: Any) -> Any:
    """A cache key for flags or sizes that distinguishes True from 1. The checks reject unusable values later."""
    try:
        return (values, *map(type, values))
    except TypeError:
        return values, type(values)


def perform(
    op: Op,
    arrays: tuple[Array | None, ...],
    options: tuple[Any, ...],
    out: Any,
    tile: Any,
    workspace: Array | None,
    numbers: tuple[float, ...] = (),
    key: Any = None,
) -> Any:
    """Run an op on arrays: the common path of all public functions.

    ``options`` are passed to the op's checks. ``key`` replaces ``options`` in the cache key where equal options differ
    in type (1 == True). Returns the results in order, None for those not requested.
    """
    # The choice of a tile depends on the device whose limits the CPU executor uses.
    kind, posing = ("cpu", settings.cpu_device()) if isinstance(arrays[0], np.ndarray) else ("gpu", None)
    base = (options if key is None else key, tile, posing)
    return _run(op, kind, base, arrays, options, out, tile, None, workspace, numbers)


def _run(  # noqa: PLR0913  # runs in every call: an object for the arguments would cost a microsecond
    op: Op,
    kind: str,
    base: Any,
    arrays: tuple[Array | None, ...],
    options: tuple[Any, ...],
    out: Any,
    tile: Any,
    plan: Plan | None,
    workspace: Array | None,
    numbers: tuple[float, ...],
) -> Any:
    """Run a cached call, or check and cache it first.

    ``kind`` is the expected kind of the arrays, and ``base`` is the part of the call's key besides them.
    """
    missing = op.missing(arrays) if op.extras else 0
    if missing and out is not None:
        out = _padded(op, out, missing)
    key: Any
    try:
        every = (*arrays, workspace) if out is None else (*arrays, workspace, *out)
        key = (base, signature(kind, every), out.__class__)
        call = op.calls.get(key)
    except (AttributeError, TypeError):  # not an array of that kind, or not hashable: the checks raise the error
        key, call = None, None
    if call is None:
        call = _checked(op, arrays, options, out, tile, plan, workspace)
        if key is not None:
            op.calls.keep(key, call)
    results = call(arrays, out, workspace, numbers)
    return results[:-missing] if missing else results


def _padded(op: Op, out: Any, missing: int) -> tuple[Any, ...]:
    """Check the length of ``out`` for a call without its last results, and add None for each of them."""
    return (*check_tuple(out, tuple(op.results)[:-missing]), *(None,) * missing)


def _checked(
    op: Op,
    arrays: tuple[Array | None, ...],
    options: tuple[Any, ...],
    out: Any,
    tile: Any,
    plan: Plan | None,
    workspace: Any,
) -> Call:
    """The checked call for these arguments, with ``plan`` if it is not None."""
    given = list(zip(op.inputs, arrays, strict=True))
    for name, array in given:
        if name not in op.optional:
            kind_of(name, array)
    # The other arrays are compared with x, whatever its position.
    leader = ("x", dict(given)["x"]) if "x" in op.inputs else given[0]
    outputs = list(zip(op.labels, out, strict=False)) if isinstance(out, tuple) else []
    same_place([leader, *given, *outputs, ("workspace", workspace)])
    checked = op.check(arrays, options, out)
    results = [
        None if result is None else replace(result, label=label, updated=result.name in op.updated)
        for result, label in zip(checked.results, op.labels, strict=True)
    ]
    check_out(out, results, tuple(op.results))
    plan = _plan(op, checked.problem, leader, tile, plan)
    inputs = [(name, array, order) for (name, array), order in zip(given, checked.orders, strict=True)]
    made = Call(plan, inputs, results, out, _same_type(op, checked.problem), workspace)
    if problem_trace.active() and plan.launches:
        problem_trace.record(plan.problem)
    return made


def _same_type(op: Op, problem: Problem) -> dict[str, str]:
    """`Op.in_place` of a problem, without the results whose elements are wider than those of the input."""
    return {to: of for to, of in op.in_place.items() if problem.dtype_of(to) == problem.dtype_of(of)}


def _plan(op: Op, problem: Problem, leader: tuple[str, Any], tile: Any, plan: Plan | None) -> Plan:
    """The plan of a problem. An existing ``plan`` is used if the arrays match its problem and place (ValueError)."""
    name, array = leader
    kind, ordinal = place_of(array)
    if plan is None:
        chosen = None if tile is None else Tile.of(tile)
        return plan_for(problem, op.strategies, op.names, place_for(kind, ordinal), chosen)
    if kind != plan.place.kind:
        array_type, device = ("numpy.ndarray", '"cpu"') if kind == "cpu" else ("cupy.ndarray", ordinal)
        where = "the CPU executor" if plan.place.kind == "cpu" else f"GPU {plan.place.ordinal}"
        raise TypeError(f"{name}: a {array_type}, but the plan is for {where}; make a plan with device={device}")
    if ordinal != plan.place.ordinal:
        raise ValueError(f"{name}: on GPU {ordinal}, but the plan is for GPU {plan.place.ordinal}")
    # A plan without a dtype for gamma or beta accepts arrays of any dtype, or none. Every plan accepts all dtypes of
    # the statistics that the op accepts. None of these dtypes changes the tile.
    loose = {
        name: getattr(problem, name) for name in ("gamma_dtype", "beta_dtype") if getattr(plan.problem, name) is None
    }
    expected = replace(plan.problem, stats_dtype=problem.stats_dtype, others=problem.others, **loose)
    if problem.canonical() != expected:
        # The loose dtypes of the arrays are shown as the plan's, so that only a difference is seen. They follow from
        # the dtype of x: with another one, the plan has none of them.
        own = expected if problem.dtype == plan.problem.dtype else plan.problem
        came = problem.canonical().describe()
        raise ValueError(f"{name}: the plan is for {own.describe()}, the arrays are {came}")
    return plan if expected == plan.problem else plan_for(expected, op.strategies, op.names, plan.place, plan.tile)


def requested(op: Op, request: Request) -> tuple[Problem, tuple[Any, ...]]:
    """The problem of a request, and the options of its calls.

    Raises
    ------
    TypeError, ValueError
        For a wrong value in the request.
    """
    problem, options = op.request(request)
    return with_dtypes(op, problem, {} if request.dtypes is None else request.dtypes), options


def with_dtypes(op: Op, problem: Problem, dtypes: object) -> Problem:
    """A problem with the dtypes of its statistics, sums and counts replaced by those that ``dtypes`` names.

    Raises
    ------
    TypeError
        For a dtype that the array may not have.
    ValueError
        For an array that the op does not have, or whose dtype follows from those of other arrays.
    """
    if not isinstance(dtypes, Mapping):
        raise TypeError(f"dtypes: {type(dtypes).__name__}, expected a mapping of arrays to their dtypes")
    others, stats = dict(problem.others), {accumulator(problem.dtype), problem.dtype}
    allowed = {name: (spec.dtype[0], op.types.get(spec.dtype[0], ())) for name, spec in op.arrays.items()}
    settable = [name for name, (key, of) in allowed.items() if of or (key == "stats_dtype" and name in op.inputs)]
    settable = [name for name in settable if name not in op.tensors]  # those have options of their own
    for name, value in dtypes.items():
        if name not in settable:
            raise ValueError(f"dtypes: {name!r}, expected {' or '.join(settable) or 'no name'} for {op.name}")
        key, of = allowed[name]
        if key == "stats_dtype":
            problem = replace(problem, stats_dtype=dtype_named(f"dtypes[{name!r}]", value, tuple(sorted(stats))))
        else:
            others[key] = dtype_named(f"dtypes[{name!r}]", value, of)
            if key in op.optional_types and others[key] == op.default_type(problem, key):
                del others[key]
    return replace(problem, others=tuple((key, others[key]) for key in op.types if key in others))


def plan_of(op: Op, request: Request, place: Target, tile: Tile | None) -> Plan:
    """The plan of a request, ready to be called with arrays."""
    problem, options = requested(op, request)
    made = plan_for(problem, op.strategies, op.names, place, tile)
    if op.caller is None:
        return replace(made, caller=functools.partial(call_planned, op, options))
    return replace(made, caller=functools.partial(_called, op.caller, options))


def _called(
    caller: Callable[..., Any],
    options: tuple[Any, ...],
    plan: Plan,
    given: tuple[Any, ...],
    out: Any,
    workspace: Any,
    named: Mapping[str, Any],
) -> Any:
    """Call an op's own function, whose parameters bind the arguments."""
    return caller(options, plan, *given, out=out, workspace=workspace, **named)


def _bound(
    op: Op, given: tuple[Any, ...], named: Mapping[str, Any]
) -> tuple[tuple[Array | None, ...], tuple[float, ...]]:
    """The arrays and the scalar arguments of a plan's call."""
    count, defaults = len(op.inputs), op.defaults
    if not named and defaults is not None and op.least <= len(given) <= count:
        return (*given, *(None,) * (count - len(given))) if len(given) < count else given, defaults
    if not named and len(given) == count + op.required == count + len(op.numbers):
        numbers = [number.validate(one) for number, one in zip(op.numbers.values(), given[count:], strict=True)]
        return given[:count], tuple(numbers)
    if len(given) == count and named.keys() == op.numbers.keys():
        return given, tuple([number.validate(named[name]) for name, number in op.numbers.items()])
    # The general rule takes longer than the rest of the call.
    bound = op.signature.bind(*given, **named)
    bound.apply_defaults()
    arrays = tuple(bound.arguments[name] for name in op.inputs)
    return arrays, tuple(number.validate(bound.arguments[name]) for name, number in op.numbers.items())


def call_planned(
    op: Op,
    options: tuple[Any, ...],
    plan: Plan,
    given: tuple[Any, ...],
    out: Any,
    workspace: Array | None,
    named: Mapping[str, Any],
) -> Any:
    """Run a plan on arrays: the default function of a plan's call.

    ``given`` and ``named`` are the positional and the other arguments. They are not unpacked again, which takes time.
    """
    arrays, numbers = _bound(op, given, named)
    single = len(op.results) == 1
    if single and out is not None:
        out = (out,)
    results = _run(op, plan.place.kind, plan, arrays, options, out, None, plan, workspace, numbers)
    return results[0] if single else results
