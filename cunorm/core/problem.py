"""Problem: everything about a call that selects code or changes traffic, in one canonical form."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from .locks import lazy
from .opspec import OpSpec, spec_of

#: Bytes of an element of each supported dtype.
ITEMSIZE: dict[str, int] = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}

#: What may lie behind GroupNorm, fused.
ACTIVATIONS: tuple[str, ...] = ("silu",)

#: Memory orders that kernels read directly: (N, C, HxW) and (N, HxW, C).
LAYOUTS: tuple[str, str] = ("NCHW", "NHWC")


def accumulator(dtype: str) -> str:
    """The dtype that sums and saved statistics of ``dtype`` have: float64 for float64, else float32."""
    return "float64" if dtype == "float64" else "float32"


def laid_out(layout: str, N: int, C: int, HxW: int, group: int) -> dict[str, Any]:
    """The order in memory and the sizes of a `Problem`, by name."""
    return {"layout": layout, "N": N, "C": C, "HxW": HxW, "group": group}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One normalisation problem.

    Attributes
    ----------
    op : str
        The name of the function.
    dtype : str
        Of x, and of dy, dx and y.
    gamma_dtype, beta_dtype : str or None
        None where there is no such array. In a backward, gamma's is also that of dgamma and dbeta.
    stats_dtype : str
        Of mean and rstd (or invstd).
    layout : str
        ``"NCHW"`` or ``"NHWC"``: the order in memory, whatever the shape says.
    N, C, HxW, group : int
        Samples, channels, positions in a channel, groups. LayerNorm has rows for samples, the length of a row for
        channels, one position and one group; BatchNorm has a group a channel.
    outputs : tuple of str
        The wanted results, in result order.
    others : tuple of (str, str)
        What only some ops have: the name of a type in their kernels, and the dtype that it stands for.
    activation : str or None
        What lies behind GroupNorm, fused: ``"silu"``.
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

    def canonical(self) -> Problem:
        """The same problem under its one name: with HxW = 1 or C = 1 the two layouts are the same bytes."""
        if self.layout == "NHWC" and (self.HxW == 1 or self.C == 1):
            return replace(self, layout="NCHW")
        return self

    @property
    def spec(self) -> OpSpec:
        """What there is to know of its op."""
        return spec_of(self.op)

    @lazy
    def is_backward(self) -> bool:
        """Whether it is one of a gradient."""
        return self.spec.is_backward

    @lazy
    def itemsize(self) -> int:
        """Bytes of an element of x."""
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
    def moments(self) -> int:
        """Bytes of `Moments` in moments.cuh, in shared memory and in a workspace: four accumulators."""
        return 4 * self.sum_itemsize

    @lazy
    def part(self) -> int:
        """Bytes that a first sweep leaves of a channel's part in a workspace: `Moments`, or a `Pair` of sums."""
        return self.pair if self.is_backward else self.moments

    @lazy
    def read(self) -> int:
        """Tensors that a sweep reads: x in a forward; dy, and x unless only dbeta is wanted, in a backward."""
        return 1 + self.reads_x if self.is_backward else 1

    @lazy
    def pack(self) -> int:
        """Elements of x in a 16-byte access."""
        return 16 // self.itemsize

    @lazy
    def group_channels(self) -> int:
        """Channels in a group."""
        return self.C // self.group

    @lazy
    def group_length(self) -> int:
        """Elements in a group of one sample."""
        return self.group_channels * self.HxW

    @lazy
    def nbytes(self) -> int:
        """Bytes of x."""
        return self.N * self.C * self.HxW * self.itemsize

    @lazy
    def wants_parameters(self) -> bool:
        """Whether dgamma or dbeta is wanted."""
        return "dgamma" in self.outputs or "dbeta" in self.outputs

    @lazy
    def reads_x(self) -> bool:
        """Whether x is needed: all but a lone dbeta do, and that one too where an activation makes z of x again."""
        return self.outputs != ("dbeta",) or self.activation is not None

    def has(self, name: str) -> bool:
        """Whether a call of it has that array: a result that is wanted, an input that is given."""
        if name in self.spec.results:
            return name in self.outputs
        return self.spec.inputs[name].dtype_of(self) is not None

    def dtype_of(self, name: str) -> str:
        """The dtype of an array that it has."""
        found = self.spec.arrays[name].dtype_of(self)
        assert found is not None, f"{self.describe()} has no {name}"
        return found

    def elements_of(self, name: str) -> int:
        """How many elements an array that it has is long."""
        return math.prod(self.spec.arrays[name].shape_of(self))

    @property
    def numbers(self) -> dict[str, float]:
        """The numbers of a call, as the tests and the tuner make it."""
        return {name: number.of(self) for name, number in self.spec.numbers.items()}

    @property
    def sizes_text(self) -> str:
        """Its sizes, as a table names them: ``N=2 C=320 HxW=4096 group=32``."""
        return " ".join(f"{name}={getattr(self, field)}" for name, field in self.spec.sizes.items())

    @property
    def parameters(self) -> list[tuple[str, str]]:
        """What there is besides the tensors, by the names that people use, with its dtype."""
        named = [("gamma", self.gamma_dtype), ("beta", self.beta_dtype), ("statistics", self.stats_dtype)]
        named += [(name.removesuffix("_t"), dtype) for name, dtype in self.others]
        return [(name, dtype) for name, dtype in named if dtype is not None]

    def describe(self) -> str:
        """One line for people."""
        others = ", ".join(f"{name} {dtype}" for name, dtype in self.parameters if dtype != self.dtype)
        layout = f"{self.layout} " if len(self.spec.layouts) > 1 else ""
        behind = f" activation={self.activation}" if self.activation is not None else ""
        kept = ", ".join(self.outputs) or "nothing"
        wide = f" ({others})" if others else ""
        return f"{self.op} {self.dtype} {layout}{self.sizes_text}{behind}{wide} -> {kept}"
