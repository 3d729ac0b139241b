"""Problem: everything about a call that selects code or changes traffic, in a canonical form."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from .locks import lazy
from .opspec import OpSpec, spec_of

#: Bytes of a pack: the widest access of a thread to memory.
PACK_BYTES = 16
#: Largest number of elements, where an empty axis counts as 1: kernels count in 64 bits.
MOST_ELEMENTS = 2**60
#: Most dimensions of x.
MOST_AXES = 8
#: Bytes of an element of each supported dtype.
ITEMSIZE: dict[str, int] = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}

#: Activations that may follow GroupNorm in the same kernel (fused).
ACTIVATIONS: tuple[str, ...] = ("silu",)

#: Memory orders that kernels read directly: (N, C, HxW) and (N, HxW, C).
LAYOUTS: tuple[str, str] = ("NCHW", "NHWC")


def accumulator(dtype: str) -> str:
    """The dtype of sums and saved statistics for x of ``dtype``: float64 for float64, else float32."""
    return "float64" if dtype == "float64" else "float32"


def laid_out(layout: str, N: int, C: int, HxW: int, group: int) -> dict[str, Any]:
    """The layout and the sizes of a `Problem`, by name."""
    return {"layout": layout, "N": N, "C": C, "HxW": HxW, "group": group}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One normalisation problem.

    Attributes
    ----------
    op : str
        Name of the op.
    dtype : str
        dtype of x, dy and dx; also of y, unless `others` contains ``"y_t"``.
    gamma_dtype, beta_dtype : str or None
        None if the array is absent. In a backward, dgamma and dbeta also have gamma's dtype.
    stats_dtype : str
        dtype of mean and rstd (or invstd).
    layout : str
        ``"NCHW"`` or ``"NHWC"``: the order in memory, which may differ from the order of the shape.
    N, C, HxW, group : int
        Samples, channels, positions per channel, groups. For LayerNorm, N is the number of rows, C the length of a
        row, and HxW and group are 1. For BatchNorm and InstanceNorm, group is C.
    outputs : tuple of str
        The requested results, in result order.
    others : tuple of (str, str)
        dtypes that only some ops have: the name of a type in the kernels, and its dtype.
    activation : str or None
        The activation that is fused with GroupNorm: ``"silu"``.
    extras : tuple of str
        The tensors of `OpSpec.extras` that the call passes: ``"residual"``, which a forward adds to x, or ``"dh"``,
        which a backward adds to dx.
    """

    op: str
    dtype: str
    gamma_dtype: str | None
    beta_dtype: str | None
    stats_dtype: str
    layout: str
    N: int
    C: int
    HxW: int
    group: int
    outputs: tuple[str, ...]
    others: tuple[tuple[str, str], ...] = ()
    activation: str | None = None
    extras: tuple[str, ...] = ()

    def canonical(self) -> Problem:
        """The same problem in its canonical form: NCHW if HxW = 1 or C = 1, where both layouts are the same bytes."""
        if self.layout == "NHWC" and (self.HxW == 1 or self.C == 1):
            return replace(self, layout="NCHW")
        return self

    def with_extras(self) -> Problem:
        """The same problem with all optional tensors of its op. Without dx there is no dh."""
        if self.is_backward and "dx" not in self.outputs:
            return self
        extras = tuple(self.spec.extras)
        outputs = self.outputs if self.is_backward else self.spec.results_with(extras)
        return replace(self, extras=extras, outputs=outputs)

    @property
    def spec(self) -> OpSpec:
        """The spec of its op."""
        return spec_of(self.op)

    @lazy
    def is_backward(self) -> bool:
        """Whether its op computes a gradient, or a part of one."""
        return self.spec.is_backward

    @lazy
    def itemsize(self) -> int:
        """Bytes per element of x."""
        return ITEMSIZE[self.dtype]

    @lazy
    def sum_itemsize(self) -> int:
        """Bytes of an accumulator."""
        return ITEMSIZE[accumulator(self.dtype)]

    @lazy
    def pair(self) -> int:
        """Bytes of a `Pair` in reduce.cuh: two accumulators."""
        return 2 * self.sum_itemsize

    @lazy
    def row_sums(self) -> int:
        """Bytes of the sums of a row or of a column of rows: a `Pair`, or without a mean a `Single` (row_norms.cuh)."""
        return self.pair if self.has_mean else self.sum_itemsize

    @lazy
    def has_mean(self) -> bool:
        """Whether the op subtracts a mean."""
        return "mean" in self.spec.arrays

    @lazy
    def moments(self) -> int:
        """Bytes of `Moments` in moments.cuh, in shared memory and in a workspace: four accumulators."""
        return 4 * self.sum_itemsize

    @lazy
    def part(self) -> int:
        """Bytes of one channel's partial result in a workspace: `Moments` in a forward, a `Pair` in a backward."""
        return self.pair if self.is_backward else self.moments

    @lazy
    def read(self) -> int:
        """Number of tensors that a sweep reads: x in a forward; dy, and x if `reads_x`, in a backward; all `extras`."""
        return 1 + (self.is_backward and self.reads_x) + len(self.extras)

    @lazy
    def written(self) -> int:
        """Bytes of the tensors that are written."""
        return sum(self.nbytes_of(name) for name in self.outputs if name in self.spec.tensors)

    @lazy
    def wide_y(self) -> bool:
        """Whether y is wider than x."""
        return "y_t" in dict(self.others)

    @lazy
    def pack(self) -> int:
        """Elements of x per pack."""
        return PACK_BYTES // self.itemsize

    @lazy
    def group_channels(self) -> int:
        """Channels per group."""
        return self.C // self.group

    @lazy
    def group_length(self) -> int:
        """Elements per group of one sample."""
        return self.group_channels * self.HxW

    @lazy
    def nbytes(self) -> int:
        """Bytes of x."""
        return self.N * self.C * self.HxW * self.itemsize

    def nbytes_of(self, name: str) -> int:
        """Bytes of an array of the problem."""
        return self.elements_of(name) * ITEMSIZE[self.dtype_of(name)]

    @lazy
    def uneven(self) -> bool:
        """Whether rows, or planes, are no whole number of packs, so that packs straddle their ends."""
        if self.layout == "NCHW" and self.HxW > 1:
            return self.HxW % self.pack > 0
        return self.C % self.pack > 0

    @lazy
    def wants_parameters(self) -> bool:
        """Whether dgamma or dbeta is requested."""
        return "dgamma" in self.outputs or "dbeta" in self.outputs

    @lazy
    def reads_x(self) -> bool:
        """Whether x is read. Only dbeta alone does not need x, unless an activation recomputes z from x."""
        return self.outputs != ("dbeta",) or self.activation is not None

    def has(self, name: str) -> bool:
        """Whether a call has that array: a result that is requested, or an input that is passed."""
        if name in self.spec.results:
            return name in self.outputs
        if name in self.spec.extras:
            return name in self.extras
        return self.spec.inputs[name].dtype_of(self) is not None

    def dtype_of(self, name: str) -> str:
        """The dtype of an array of the problem."""
        found = self.spec.arrays[name].dtype_of(self)
        assert found is not None, f"{self.describe()} has no {name}"
        return found

    def elements_of(self, name: str) -> int:
        """Number of elements of an array of the problem."""
        return math.prod(self.spec.arrays[name].shape_of(self))

    @property
    def numbers(self) -> dict[str, float]:
        """The numbers in a call of the tests and of the tuner, by their names in launches. Arrays are contiguous."""
        found = {name: number.of(self) for name, number in self.spec.numbers.items()}
        return found | {name: self._measured(name) for name in self.spec.measures}

    def _measured(self, name: str) -> int:
        """A measure of a contiguous array."""
        array, is_stride = self.spec.measures[name]
        shape = self.spec.arrays[array].shape_of(self)
        return math.prod(shape[1:] if is_stride else shape) if self.has(array) else 0

    @property
    def sizes_text(self) -> str:
        """Its sizes by their names in tables: ``N=2 C=320 HxW=4096 group=32``."""
        return " ".join(f"{name}={getattr(self, field)}" for name, field in self.spec.sizes.items())

    @property
    def extras_text(self) -> str:
        """The `extras` behind the sizes: `` with residual``, or nothing."""
        return "".join(f" with {name}" for name in self.extras)

    @property
    def _fused_text(self) -> str:
        activation = f" activation={self.activation}" if self.activation is not None else ""
        return activation + self.extras_text

    @property
    def options_text(self) -> str:
        """What a call chooses, behind the sizes: `` activation=silu with residual y=float32``, or nothing."""
        return self._fused_text + (" y=float32" if self.wide_y else "")

    @property
    def parameters(self) -> list[tuple[str, str]]:
        """The user-facing names and the dtypes of the arrays that are not tensors."""
        named = [("gamma", self.gamma_dtype), ("beta", self.beta_dtype), ("statistics", self.stats_dtype)]
        named += [(name.removesuffix("_t"), dtype) for name, dtype in self.others]
        return [(name, dtype) for name, dtype in named if dtype is not None]

    def describe(self) -> str:
        """A one-line description for users."""
        others = ", ".join(f"{name} {dtype}" for name, dtype in self.parameters if dtype != self.dtype)
        layout = f"{self.layout} " if len(self.spec.layouts) > 1 else ""
        kept = ", ".join(self.outputs) or "nothing"
        wide = f" ({others})" if others else ""
        return f"{self.op} {self.dtype} {layout}{self.sizes_text}{self._fused_text}{wide} -> {kept}"
