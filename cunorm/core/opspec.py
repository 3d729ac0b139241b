"""OpSpec: what the rest of the library has to know of an op. Nobody asks for an op by its name.

An op is known as soon as its spec is in `OPS`. The rooms below `ops` find it there, by the name in a `Problem`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from .locks import lazy

if TYPE_CHECKING:
    from .problem import Problem


@dataclass(frozen=True)
class ArraySpec:
    """An array of an op.

    Attributes
    ----------
    sizes : tuple of str
        The fields of a problem that are its sizes, in the order of its shape in NCHW.
    dtype : tuple of str
        Where a problem says its dtype: the first of these that is not None, fields or names of `Problem.others`.
    tensor : bool
        Whether it has an element for each of the problem's, so that every strategy moves it at least once. Other arrays
        hold parameters and statistics.
    values : str
        What the tests and the tuner fill it with: a key of ``MAKERS`` in ``tuning/verify/inputs.py``.
    """

    sizes: tuple[str, ...]
    dtype: tuple[str, ...]
    tensor: bool = False
    values: str = "normal"

    def shape_of(self, problem: Problem) -> tuple[int, ...]:
        """Its shape, with the channels of a tensor second."""
        return tuple(getattr(problem, size) for size in self.sizes)

    def dtype_of(self, problem: Problem) -> str | None:
        """Its dtype; None where the problem has no such array."""
        others = dict(problem.others)
        named = (others[name] if name in others else getattr(problem, name, None) for name in self.dtype)
        return next((dtype for dtype in named if dtype is not None), None)


@dataclass(frozen=True)
class Number:
    """A number of a call.

    Attributes
    ----------
    default : float or None
        None: it has to be given.
    validate : callable
        What a user gives -> a float; raises the sentence of a wrong one.
    typical : callable, optional
        Problem -> what the tests and the tuner give; None: the default.
    """

    default: float | None
    validate: Callable[[Any], float]
    typical: Callable[[Problem], float] | None = None

    def of(self, problem: Problem) -> float:
        """What the tests and the tuner give."""
        if self.typical is not None:
            return self.typical(problem)
        assert self.default is not None
        return self.default


class Exact(NamedTuple):
    """What a result has to be.

    Attributes
    ----------
    name : str
        Of the result.
    shape : tuple of int
        Of the whole of it, with the channels of a tensor second.
    part : tuple
        The index of what was looked at: of a large problem not all.
    values, bound : ndarray
        The float64 oracle's values of that part, and how far from them a result may lie before it is rounded.
    """

    name: str
    shape: tuple[int, ...]
    part: Any
    values: Any
    bound: Any


#: (problem, its inputs as they lie in memory, the numbers of the call) -> what its results have to be.
Oracle = Callable[["Problem", Mapping[str, Any], Mapping[str, float]], Iterable[Exact]]


@dataclass(frozen=True, eq=False, kw_only=True)
class OpSpec:
    """What there is to know of an op besides its checks and its kernels.

    Attributes
    ----------
    name : str
        Of its public function, and of its kernels.
    family : str
        What a forward and its gradients have in common: ``"group_norm"``.
    sizes : mapping of str to str
        The sizes that make a problem: name in tables and on the command line -> field of `Problem`.
    inputs : mapping of str to ArraySpec
        The arrays of a call, in its order.
    results : mapping of str to ArraySpec
        In result order.
    layouts : tuple of str
        Memory orders that its problems may have.
    oracle : callable
        See `Oracle`.
    optional : tuple of str
        Inputs that may be None.
    numbers : mapping of str to Number
        What kernels get besides arrays and sizes.
    activations : tuple of str
        What may lie behind it, fused.
    flags : mapping of str to tuple of str
        The flags of its output mask, and the results that each stands for; none: it always gives all.
    types : mapping of str to tuple of str
        The names in `Problem.others`, and the dtypes that each may be.
    updated : tuple of str
        Results that arrays of that name bring, and not ``out``: their old content is read.
    kernels : mapping of str to str
        The texts of its kernels that are no files of ``kernels_cu``, by name.
    channelwise : bool
        Whether statistics are of a channel over all samples: then a problem has a group for each channel. Else they
        are of a group of one sample.
    holds_parameters : bool
        Whether threads hold gamma and beta as they come: wide ones take more registers.
    """

    name: str
    family: str
    sizes: Mapping[str, str]
    inputs: Mapping[str, ArraySpec]
    results: Mapping[str, ArraySpec]
    layouts: tuple[str, ...]
    oracle: Oracle
    optional: tuple[str, ...] = ()
    numbers: Mapping[str, Number] = field(default_factory=dict)
    activations: tuple[str, ...] = ()
    flags: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    types: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    updated: tuple[str, ...] = ()
    kernels: Mapping[str, str] = field(default_factory=dict)
    channelwise: bool = False
    holds_parameters: bool = False

    @lazy
    def arrays(self) -> Mapping[str, ArraySpec]:
        """Inputs and results."""
        return {**self.inputs, **self.results}

    @lazy
    def tensors(self) -> frozenset[str]:
        """The arrays that every strategy moves at least once."""
        return frozenset(name for name, array in self.arrays.items() if array.tensor)

    @lazy
    def saved(self) -> frozenset[str]:
        """The statistics that it returns beside a tensor, for its gradient."""
        beside = any(array.tensor for array in self.results.values())
        return frozenset(name for name in ("mean", "rstd", "invstd") if beside and name in self.results)

    @lazy
    def is_backward(self) -> bool:
        """Whether it is a gradient, or a part of one."""
        return "dy" in self.inputs


#: Every op by its name: `cunorm.ops.registry` puts them in.
OPS: dict[str, OpSpec] = {}


def spec_of(op: str) -> OpSpec:
    """The spec of an op.

    Raises
    ------
    ValueError
        If there is none of that name.
    """
    if op not in OPS:
        raise ValueError(f"op: {op!r}, expected one of {', '.join(OPS)}")
    return OPS[op]


def is_tensor(name: str) -> bool:
    """Whether an array of that name is a tensor in the op that has it."""
    return any(name in spec.tensors for spec in OPS.values())
