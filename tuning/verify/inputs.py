"""Inputs of a problem as they lie in memory: hostile ones, with slices far from zero, constant, wide, with an outlier;
and plain ones, on which any sound implementation is right and no other is.
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

EPS = 1e-5  # of the statistics that gradients are given
DY_SEED = 1000  # how far dy's seed is from x's
OFFSET, CONSTANT, WIDTH, OUTLIER = 1e3, 100.1, 1e3, 1e4
#: Plain slices lie this far from zero and are this wide, each somewhere between; what gradients have of a constant and
#: of the normalised x, so that no term of a formula is near zero; how wide gamma is around one.
PLAIN_OFFSET, PLAIN_WIDTH, CONSTANT_SHARE, X_SHARE, PLAIN_GAMMA = (0.5, 1.0), (1.0, 2.0), 1.0, 0.5, 0.25
ABSENT = 1  # the rank that has seen nothing, where there are several

Values = NDArray[Any]
Inputs = dict[str, Values]


@dataclass(frozen=True)
class Kind:
    """How the elements of a slice of statistics differ from N(0, 1).

    Attributes
    ----------
    width, offset : float
        An element is ``width * N(0, 1) + offset``.
    outliers : callable
        Length of a slice -> indices of the elements that are `OUTLIER` instead.
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
#: The kinds that slices take turns with, unless others are named.
HOSTILE = ("plain", "far from zero", "constant", "wide", "outlier first")


def _blocks(x: Values) -> Iterator[tuple[slice, Values]]:
    """Parts of an array along its first axis, in float64, of some million elements."""
    rows = max(1, (1 << 22) // max(1, x[0].size))
    for start in range(0, len(x), rows):
        part = slice(start, start + rows)
        yield part, x[part].astype(np.float64)


def _slices(problem: Problem, seed: int) -> Values:
    """x or dy with its slices of statistics in a row: (slices, length), or (N, C, HxW) for BatchNorm's channels."""
    random = np.random.default_rng(seed)
    if problem.spec.channelwise:
        return random.standard_normal((problem.N, problem.C, problem.HxW), np.float32)
    return random.standard_normal((problem.N * problem.group, problem.group_length), np.float32)


def _plain(problem: Problem, seed: int) -> tuple[Values, Values | None]:
    """x and, of a gradient, dy as (N, C, HxW) in float32: slices with an offset and a width of their own; dy has a part
    of the normalised x.
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
    """Slices of statistics that a problem has."""
    return problem.C if problem.spec.channelwise else problem.N * problem.group


def _hostile(problem: Problem, seed: int, kinds: Sequence[str]) -> tuple[Values, Values | None]:
    """x and, of a gradient, dy as (N, C, HxW) in float32: x with the kinds of slices in turn."""
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
    """Mean and rstd of every slice of (N, C, HxW)."""
    if problem.spec.channelwise:
        size = problem.N * problem.HxW
        mean = np.sum([part.sum(axis=(0, 2)) for _, part in _blocks(x)], axis=0) / size
        squares = [((part - mean[:, None]) ** 2).sum(axis=(0, 2)) for _, part in _blocks(x)]
        return mean, 1 / np.sqrt(np.sum(squares, axis=0) / size + EPS)
    grouped = x.reshape(problem.N, problem.group, problem.group_length)
    mean, rstd = np.empty(grouped.shape[:2]), np.empty(grouped.shape[:2])
    for part, values in _blocks(grouped):
        mean[part] = values.mean(axis=2)
        rstd[part] = 1 / np.sqrt(((values - mean[part][:, :, None]) ** 2).mean(axis=2) + EPS)
    return mean, rstd


@dataclass
class _Draw:
    """The values of one problem's inputs."""

    problem: Problem
    seed: int
    hostile: bool
    kinds: Sequence[str]
    random: np.random.Generator

    @functools.cached_property
    def tensors(self) -> tuple[Values, Values | None]:
        """x, and dy of a gradient, (N, C, HxW)."""
        made = _hostile(self.problem, self.seed, self.kinds) if self.hostile else _plain(self.problem, self.seed)
        dtype = DTYPES[self.problem.dtype]
        return made[0].astype(dtype), None if made[1] is None else made[1].astype(dtype)

    @functools.cached_property
    def moments(self) -> tuple[Values, Values]:
        """Mean and rstd of x as it is stored, rounded as a forward would have saved them."""
        return _moments(self.problem, self.tensors[0])

    def gamma(self, shape: tuple[int, ...]) -> Values:
        """Around 0, or, in plain inputs, around 1."""
        values = self.random.standard_normal(shape)
        return values if self.hostile else 1 + PLAIN_GAMMA * values

    def means(self, shape: tuple[int, ...]) -> Values:
        """Of ranks, one of which is absent, whatever it holds."""
        values = self.random.standard_normal(shape) + OFFSET
        values[ABSENT : ABSENT + 1] = np.nan
        return values

    def counts(self, shape: tuple[int, ...]) -> Values:
        """Of ranks, one of which is absent."""
        values = self.random.integers(1, 1000, shape)
        values[ABSENT : ABSENT + 1] = 0
        return values


#: What an `ArraySpec` may ask for: (draw, shape) -> values.
MAKERS: dict[str, Callable[[_Draw, tuple[int, ...]], Values]] = {
    "normal": lambda draw, shape: draw.random.standard_normal(shape),
    "slices": lambda draw, shape: draw.tensors[0],
    "gradient": lambda draw, shape: np.asarray(draw.tensors[1]),
    "gamma": _Draw.gamma,
    "mean": lambda draw, shape: draw.moments[0],
    "rstd": lambda draw, shape: draw.moments[1],
    # A sum over a channel grows with it.
    "sum": lambda draw, shape: draw.problem.N * draw.problem.HxW * draw.random.standard_normal(shape),
    "means": _Draw.means,
    "invstds": lambda draw, shape: 0.1 + draw.random.random(shape),
    "counts": _Draw.counts,
    "running": lambda draw, shape: draw.random.random(shape),
}


def inputs_of(problem: Problem, seed: int, hostile: bool = True, kinds: Sequence[str] = HOSTILE) -> Inputs:
    """The inputs of a problem by the names that launches know, each as it lies in memory.

    Parameters
    ----------
    problem : Problem
    seed : int
        Another one gives other values, and other kinds of slices their turn.
    hostile : bool
        False: plain slices, on which any sound implementation is right.
    kinds : sequence of str
        Of `KINDS`, that hostile slices take turns with.
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
