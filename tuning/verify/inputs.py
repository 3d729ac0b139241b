"""Inputs of a problem, in the memory order of its layout.

Hostile inputs contain slices that are far from zero, constant, wide or have an outlier. On plain inputs every sound
implementation is right, and an implementation that leaves a term out is not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cunorm.core.arrays import DTYPES
from cunorm.core.problem import Problem

EPS = 1e-5  # epsilon of the statistics that are inputs of gradients
DY_SEED = 1000  # difference between the seeds of dy and x
OFFSET, CONSTANT, WIDTH, OUTLIER = 1e3, 100.1, 1e3, 1e4
#: Plain inputs: bounds of a slice's offset and of its width; the constant and the share of the normalised x that are
#: added to dy, so that no term of a gradient is near zero; the standard deviation of gamma, whose mean is one.
PLAIN_OFFSET, PLAIN_WIDTH, CONSTANT_SHARE, X_SHARE, PLAIN_GAMMA = (0.5, 1.0), (1.0, 2.0), 1.0, 0.5, 0.25
ABSENT = 1  # index of the rank without samples, if there are several ranks

Values = NDArray[Any]
Inputs = dict[str, Values]


@dataclass(frozen=True)
class Kind:
    """The distribution of the elements of a slice. A slice contains the elements of one mean and variance.

    Attributes
    ----------
    width, offset : float
        An element is ``width * N(0, 1) + offset``.
    outliers : callable
        Length of a slice -> indices of the elements that are replaced by `OUTLIER`.
    """

    width: float = 1.0
    offset: float = 0.0
    outliers: Callable[[int], Sequence[int]] = lambda length: ()


#: Kinds of slices by name.
KINDS: dict[str, Kind] = {
    "plain": Kind(),
    "far from zero": Kind(offset=OFFSET),
    "constant": Kind(width=0.0, offset=CONSTANT),
    "wide": Kind(width=WIDTH),
    "outlier first": Kind(outliers=lambda length: (0,)),
    "outlier second": Kind(outliers=lambda length: (min(1, length - 1),)),
    "outlier last": Kind(outliers=lambda length: (length - 1,)),
    "outlier in the middle": Kind(outliers=lambda length: (length // 2,)),
    "two outliers": Kind(outliers=lambda length: (0, length // 2)),
    "an outlier in every 8": Kind(outliers=lambda length: range(0, length, 8)),
    "all equal but the first": Kind(width=0.0, offset=CONSTANT, outliers=lambda length: (0,)),
}
#: Default kinds of hostile slices; neighbouring slices alternate between them.
HOSTILE = ("plain", "far from zero", "constant", "wide", "outlier first")


def _blocks(x: Values) -> Iterator[tuple[slice, Values]]:
    """Yield parts of an array along its first axis, in float64, with at most about 4 million elements each."""
    rows = max(1, (1 << 22) // max(1, x[0].size))
    for start in range(0, len(x), rows):
        part = slice(start, start + rows)
        yield part, x[part].astype(np.float64)


def _slices(problem: Problem, seed: int) -> Values:
    """Values of x or dy from N(0, 1): (slices, length), or (N, C, HxW) if a slice is a channel (BatchNorm)."""
    random = np.random.default_rng(seed)
    if problem.spec.channelwise:
        return random.standard_normal((problem.N, problem.C, problem.HxW), np.float32)
    return random.standard_normal((problem.N * problem.group, problem.group_length), np.float32)


def _plain(problem: Problem, seed: int) -> tuple[Values, Values | None]:
    """Plain x and, for a gradient, dy: (N, C, HxW), float32.

    Each slice of x has its own offset and width. dy contains a share of the normalised x.
    """
    shape = (problem.N, problem.C, problem.HxW)
    x, dy = _slices(problem, seed), None
    if problem.is_backward:
        dy = (_slices(problem, seed + DY_SEED) + CONSTANT_SHARE + X_SHARE * x).reshape(shape)
    random = np.random.default_rng((seed, 2))
    each = (1, problem.C, 1) if problem.spec.channelwise else (len(x), 1)
    x *= random.uniform(*PLAIN_WIDTH, each).astype(np.float32)
    x += random.uniform(*PLAIN_OFFSET, each).astype(np.float32)
    return x.reshape(shape), dy


def slices_of(problem: Problem) -> int:
    """Number of slices of a problem."""
    return problem.C if problem.spec.channelwise else problem.N * problem.group


def _hostile(problem: Problem, seed: int, kinds: Sequence[str]) -> tuple[Values, Values | None]:
    """Hostile x and, for a gradient, dy: (N, C, HxW), float32. The slices of x alternate between the kinds."""
    shape = (problem.N, problem.C, problem.HxW)
    x, dy = _slices(problem, seed), None
    if problem.is_backward:
        dy = _slices(problem, seed + DY_SEED).reshape(shape)
    channels = problem.spec.channelwise
    length = problem.N * problem.HxW if channels else problem.group_length
    for turn, kind in enumerate(KINDS[name] for name in kinds):
        own = np.arange((turn - seed) % len(kinds), slices_of(problem), len(kinds))
        part: Any = (slice(None), own) if channels else own
        if kind.width != 1.0:
            x[part] *= np.float32(kind.width)
        if kind.offset:
            x[part] += np.float32(kind.offset)
        for index in kind.outliers(length):
            x[(index // problem.HxW, own, index % problem.HxW) if channels else (own, index)] = OUTLIER
    return x.reshape(shape), dy


def _moments(problem: Problem, x: Values) -> tuple[Values, Values]:
    """Mean and rstd of every slice of x with shape (N, C, HxW), in float64. Without a mean, it is 0."""
    if problem.spec.channelwise:
        size = problem.N * problem.HxW
        mean = np.sum([part.sum(axis=(0, 2)) for _, part in _blocks(x)], axis=0) / size
        squares = [((part - mean[:, None]) ** 2).sum(axis=(0, 2)) for _, part in _blocks(x)]
        return mean, 1 / np.sqrt(np.sum(squares, axis=0) / size + EPS)
    grouped = x.reshape(problem.N, problem.group, problem.group_length)
    mean, rstd = np.empty(grouped.shape[:2]), np.empty(grouped.shape[:2])
    for part, values in _blocks(grouped):
        mean[part] = values.mean(axis=2) if problem.has_mean else 0.0
        rstd[part] = 1 / np.sqrt(((values - mean[part][:, :, None]) ** 2).mean(axis=2) + EPS)
    return mean, rstd


@dataclass
class _Draw:
    """Draws the values of one problem's inputs."""

    problem: Problem
    seed: int
    hostile: bool
    kinds: Sequence[str]
    random: np.random.Generator

    @functools.cached_property
    def tensors(self) -> tuple[Values, Values | None]:
        """x and, for a gradient, dy; shape (N, C, HxW)."""
        made = _hostile(self.problem, self.seed, self.kinds) if self.hostile else _plain(self.problem, self.seed)
        dtype = DTYPES[self.problem.dtype]
        return made[0].astype(dtype), None if made[1] is None else made[1].astype(dtype)

    @functools.cached_property
    def moments(self) -> tuple[Values, Values]:
        """Mean and rstd of x as stored in the problem's dtype. `inputs_of` rounds them as a forward does."""
        return _moments(self.problem, self.tensors[0])

    def gamma(self, shape: tuple[int, ...]) -> Values:
        """Gamma: its mean is 0 in hostile inputs and 1 in plain inputs."""
        values = self.random.standard_normal(shape)
        return values if self.hostile else 1 + PLAIN_GAMMA * values

    def means(self, shape: tuple[int, ...]) -> Values:
        """Means of the ranks. The mean of the rank without samples is NaN, because a kernel must ignore it."""
        values = self.random.standard_normal(shape) + OFFSET
        values[ABSENT : ABSENT + 1] = np.nan
        return values

    def counts(self, shape: tuple[int, ...]) -> Values:
        """Sample counts of the ranks. The count of rank `ABSENT`, if there is one, is 0."""
        values = self.random.integers(1, 1000, shape)
        values[ABSENT : ABSENT + 1] = 0
        return values


#: Makers of the kinds of values that an `ArraySpec` names: (draw, shape) -> values.
MAKERS: dict[str, Callable[[_Draw, tuple[int, ...]], Values]] = {
    "normal": lambda draw, shape: draw.random.standard_normal(shape),
    "slices": lambda draw, shape: draw.tensors[0],
    "gradient": lambda draw, shape: np.asarray(draw.tensors[1]),
    "gamma": _Draw.gamma,
    "mean": lambda draw, shape: draw.moments[0],
    "rstd": lambda draw, shape: draw.moments[1],
    # A sum over a channel grows with the number of elements of the channel.
    "sum": lambda draw, shape: draw.problem.N * draw.problem.HxW * draw.random.standard_normal(shape),
    "means": _Draw.means,
    "invstds": lambda draw, shape: 0.1 + draw.random.random(shape),
    "counts": _Draw.counts,
    "total": lambda draw, shape: np.full(shape, draw.problem.N * draw.problem.HxW),
    "running": lambda draw, shape: draw.random.random(shape),
}


def inputs_of(problem: Problem, seed: int, hostile: bool = True, kinds: Sequence[str] = HOSTILE) -> Inputs:
    """The inputs of a problem by name, each in the memory order of the problem's layout.

    Parameters
    ----------
    problem : Problem
    seed : int
        Seed of the values. It also selects the kind of the first slice.
    hostile : bool
        Whether the slices are hostile or plain.
    kinds : sequence of str
        Keys of `KINDS`; hostile slices alternate between these kinds.
    """
    draw, spec = _Draw(problem, seed, hostile, kinds, np.random.default_rng((seed, 1))), problem.spec
    found: Inputs = {}
    for name, array in spec.arrays.items():
        if problem.has(name) and (name in spec.inputs or name in spec.updated):
            dtype = problem.dtype_of(name)
            values = MAKERS[array.values](draw, array.shape_of(problem)).astype(DTYPES.get(dtype, dtype))
            last = array.tensor and problem.layout == "NHWC"
            found[name] = np.ascontiguousarray(np.moveaxis(values, 1, -1)) if last else values
    return found
