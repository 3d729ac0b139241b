"""OpSpec: the facts about an op that the rest of the library needs. No other code depends on the name of an op.

An op is known as soon as its spec is in `OPS`. Packages that `ops` builds on find the spec there by `Problem.op`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from .locks import lazy

if TYPE_CHECKING:
    from .problem import Problem


@dataclass(frozen=True)
class ArraySpec:
    """An input or result of an op.

    Attributes
    ----------
    sizes : tuple of str
        The fields of a problem that are the sizes of the array, in the order of its NCHW shape.
    dtype : tuple of str
        Fields of `Problem` or names in `Problem.others`; the first that is not None is the dtype of the array.
    tensor : bool
        Whether the array has one element per element of the problem. Every strategy loads or stores a tensor at least
        once. Other arrays contain parameters and statistics.
    values : str
        How the tests and the tuner fill the array: a key of ``MAKERS`` in ``tuning/verify/inputs.py``.
    """

    sizes: tuple[str, ...]
    dtype: tuple[str, ...]
    tensor: bool = False
    values: str = "normal"

    def shape_of(self, problem: Problem) -> tuple[int, ...]:
        """The shape of the array; the channels are the second axis of a tensor."""
        return tuple(getattr(problem, size) for size in self.sizes)

    def dtype_of(self, problem: Problem) -> str | None:
        """The dtype of the array; None if the problem has no such array."""
        others = dict(problem.others)
        named = (others[name] if name in others else getattr(problem, name, None) for name in self.dtype)
        return next((dtype for dtype in named if dtype is not None), None)


@dataclass(frozen=True)
class Number:
    """A scalar argument of a call.

    Attributes
    ----------
    default : float or None
        None: the argument is required.
    validate : callable
        Value from the user -> float; raises the error for a wrong value.
    typical : callable, optional
        Problem -> value that the tests and the tuner pass; None: they pass the default.
    rounded : bool
        Whether kernels round it to the accumulator's dtype. A call then refuses a number outside that dtype's range.
    """

    default: float | None
    validate: Callable[[Any], float]
    typical: Callable[[Problem], float] | None = None
    rounded: bool = True

    def of(self, problem: Problem) -> float:
        """The value that the tests and the tuner pass for a problem."""
        if self.typical is not None:
            return self.typical(problem)
        assert self.default is not None
        return self.default


class Measure(NamedTuple):
    """A number that a call reads off one of its arrays and passes to kernels.

    Attributes
    ----------
    array : str
        Name of the input.
    is_stride : bool
        Whether it is the number of elements from one row to the next. Kernels then read the array with any distance
        between its rows. Otherwise it is the number of elements; 0 for an absent array.
    """

    array: str
    is_stride: bool


class Exact(NamedTuple):
    """The exact values of a result.

    Attributes
    ----------
    name : str
        Name of the result.
    shape : tuple of int
        Shape of the whole result; the channels are the second axis of a tensor.
    part : tuple
        Index of the elements that the oracle computed: of a large problem, not all.
    values, bound : ndarray
        The float64 oracle's values of that part, and the largest allowed error of a result before it is rounded.
    """

    name: str
    shape: tuple[int, ...]
    part: Any
    values: Any
    bound: Any


#: (problem, its inputs in memory order, the scalar arguments of the call) -> the exact values of its results.
Oracle = Callable[["Problem", Mapping[str, Any], Mapping[str, float]], Iterable[Exact]]


def oracle_of(package: str) -> Oracle:
    """The oracle in ``oracle.py`` of a package. Its first call imports it, because no call of a norm needs it."""

    def oracle(problem: Problem, given: Mapping[str, Any], numbers: Mapping[str, float]) -> Iterable[Exact]:
        found: Iterable[Exact] = importlib.import_module(f"{package}.oracle").expected(problem, given, numbers)
        return found

    return oracle


@dataclass(frozen=True, eq=False, kw_only=True)
class OpSpec:
    """The facts about an op besides its checks and its kernels.

    Attributes
    ----------
    name : str
        Name of its public function, and of its kernels unless its strategies name another op's.
    family : str
        Common name of a forward op and its gradients: ``"group_norm"``.
    sizes : mapping of str to str
        The sizes that define a problem: name in tables and on the command line -> field of `Problem`.
    inputs : mapping of str to ArraySpec
        The arrays of a call, in argument order.
    results : mapping of str to ArraySpec
        The results, in result order.
    layouts : tuple of str
        Memory orders that its problems may have.
    oracle : callable
        See `Oracle`.
    optional : tuple of str
        Inputs that may be None.
    extras : mapping of str to tuple of str
        Optional tensors, and for each of them the results that exist only if a call passes it: the last results.
        `Problem.extras` contains those that are passed.
    numbers : mapping of str to Number
        Scalar arguments of a call that are passed to kernels.
    measures : mapping of str to Measure
        Numbers that a call reads off its arrays, by the names that launches use.
    activations : tuple of str
        Activations that may follow it in the same kernel (fused).
    flags : mapping of str to tuple of str
        The flags of its output mask, and the results that each flag selects; empty: it always returns all results.
    types : mapping of str to tuple of str
        The names in `Problem.others`, and the allowed dtypes of each.
    optional_types : tuple of str
        The names in ``types`` that `Problem.others` contains only if the dtype differs from its default, see
        `OpSpec.default_type`. So a problem with the default keeps the key that it had before the op had the type.
    updated : tuple of str
        Results that are passed as arguments of that name instead of in ``out``; kernels read their old contents.
    kernels : mapping of str to str
        The source texts of its kernels that are not files in ``kernels_cu``, by name.
    channelwise : bool
        Whether statistics are computed per channel over all samples; a problem then has one group per channel.
        Otherwise they are computed per group of one sample.
    group_per_channel : bool
        Whether a problem has one group per channel although statistics are computed per sample. Its sizes name no
        groups.
    holds_parameters : bool
        Whether threads keep gamma and beta in registers in the dtype of the arrays: wide ones take more registers.
    """

    name: str
    family: str
    sizes: Mapping[str, str]
    inputs: Mapping[str, ArraySpec]
    results: Mapping[str, ArraySpec]
    layouts: tuple[str, ...]
    oracle: Oracle
    optional: tuple[str, ...] = ()
    extras: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    numbers: Mapping[str, Number] = field(default_factory=dict)
    measures: Mapping[str, Measure] = field(default_factory=dict)
    activations: tuple[str, ...] = ()
    flags: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    types: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    optional_types: tuple[str, ...] = ()
    updated: tuple[str, ...] = ()
    kernels: Mapping[str, str] = field(default_factory=dict)
    channelwise: bool = False
    group_per_channel: bool = False
    holds_parameters: bool = False

    @lazy
    def arrays(self) -> Mapping[str, ArraySpec]:
        """Inputs and results by name."""
        return {**self.inputs, **self.results}

    @lazy
    def strided(self) -> Mapping[str, str]:
        """The inputs that kernels read with any distance between their rows, and the measure of that distance."""
        return {of.array: name for name, of in self.measures.items() if of.is_stride}

    @lazy
    def tensors(self) -> frozenset[str]:
        """The arrays that every strategy loads or stores at least once."""
        return frozenset(name for name, array in self.arrays.items() if array.tensor)

    @lazy
    def saved(self) -> frozenset[str]:
        """The statistics that the op returns with a tensor, for its gradient."""
        beside = any(array.tensor for array in self.results.values())
        return frozenset(name for name in ("mean", "rstd", "invstd") if beside and name in self.results)

    def results_with(self, extras: Iterable[str]) -> tuple[str, ...]:
        """The results of a call that passes the optional tensors ``extras``, if its mask selects all of them."""
        missing = [name for extra, names in self.extras.items() if extra not in extras for name in names]
        return tuple(name for name in self.results if name not in missing)

    @lazy
    def required_types(self) -> tuple[str, ...]:
        """The names that `Problem.others` always contains."""
        return tuple(name for name in self.types if name not in self.optional_types)

    @lazy
    def tensor_types(self) -> tuple[str, ...]:
        """The names in `types` that are dtypes of tensors: they change the bytes that a call moves."""
        of_tensors = {name for array in self.arrays.values() if array.tensor for name in array.dtype}
        return tuple(name for name in self.types if name in of_tensors)

    def default_type(self, problem: Problem, name: str) -> str | None:
        """The dtype that a type of `optional_types` has in a problem whose `others` do not contain it.

        It is the dtype of the array whose `ArraySpec.dtype` begins with the name; None if there is no such array then.
        """
        bare = replace(problem, others=tuple(one for one in problem.others if one[0] != name))
        return next((array.dtype_of(bare) for array in self.arrays.values() if array.dtype[0] == name), None)

    @lazy
    def one_channel_per_group(self) -> bool:
        """Whether every problem of the op has one group per channel."""
        return self.channelwise or self.group_per_channel

    @lazy
    def is_backward(self) -> bool:
        """Whether the op computes a gradient, or a part of one."""
        return "dy" in self.inputs


#: Every op by its name, filled by `cunorm.ops.registry`.
OPS: dict[str, OpSpec] = {}


def spec_of(op: str) -> OpSpec:
    """The spec of an op.

    Raises
    ------
    ValueError
        If there is no op with that name.
    """
    if op not in OPS:
        raise ValueError(f"op: {op!r}, expected one of {', '.join(OPS)}")
    return OPS[op]


def is_tensor(name: str) -> bool:
    """Whether an array of that name is a tensor in any op."""
    return any(name in spec.tensors for spec in OPS.values())
