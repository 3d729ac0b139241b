"""Problem: everything about a call that selects code or changes traffic, in one canonical form."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from .locks import lazy

#: Bytes of an element of each supported dtype.
ITEMSIZE: dict[str, int] = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}

#: The arrays that have an element for each of the problem's, which every strategy of an op moves at least once; every
#: other one but the workspace holds parameters.
TENSORS = frozenset({"x", "dy", "y", "dx", "means", "invstds"})

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

    @lazy
    def itemsize(self) -> int:
        """Bytes of an element of x."""
        return ITEMSIZE[self.dtype]

    @lazy
    def sum_itemsize(self) -> int:
        """Bytes of an accumulator."""
        return ITEMSIZE[accumulator(self.dtype)]

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

    @property
    def parameters(self) -> list[tuple[str, str]]:
        """What there is besides the tensors, by the names that people use, with its dtype."""
        named = [("gamma", self.gamma_dtype), ("beta", self.beta_dtype), ("statistics", self.stats_dtype)]
        named += [(name.removesuffix("_t"), dtype) for name, dtype in self.others]
        return [(name, dtype) for name, dtype in named if dtype is not None]

    def describe(self) -> str:
        """One line for people."""
        others = ", ".join(f"{name} {dtype}" for name, dtype in self.parameters if dtype != self.dtype)
        if self.op.startswith("layer_norm"):
            sizes = f"rows={self.N} length={self.C}"
        else:
            sizes = f"{self.layout} N={self.N} C={self.C} HxW={self.HxW}"
            sizes += f" group={self.group}" if self.op.startswith("group_norm") else ""
        sizes += f" activation={self.activation}" if self.activation is not None else ""
        kept = ", ".join(self.outputs) or "nothing"
        return f"{self.op} {self.dtype} {sizes}{f' ({others})' if others else ''} -> {kept}"
