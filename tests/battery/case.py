"""One hostile problem of one strategy, which runs and is compared with the oracle. cases.py lists the problems."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np

import cunorm
from cunorm.jit import sources
from cunorm.ops.common import limits
from cunorm.ops.registry import OPS
from cunorm.runtime import plans
from cunorm.runtime.plans import Plan
from tests.battery.run_case import RUNS, InPlace, OnGpu
from tests.support import problems

#: The orders of threads that a result must not depend on.
ORDERS = ("ascending", "descending", "random:3")


def kernel_files() -> list[str]:
    """Paths of all files of kernels_cu, relative to that folder."""
    folder = sources.folder()
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.cu*"))


def files_in(text: str) -> frozenset[str]:
    """The files that `sources` has included in a text."""
    return frozenset(re.findall(r'^#line 1 "([^"]+)"$', text, re.MULTILINE))


def forget() -> None:
    """Empty the caches of plans and calls."""
    plans._plans.clear()
    problems.forget_calls()


@contextlib.contextmanager
def grid_of(blocks: int | None) -> Iterator[None]:
    """Limit launches to `blocks` blocks, so that a block processes several items and reuses its shared memory."""
    if blocks is None:
        yield
        return
    with mock.patch.object(limits, "MAX_GRID", blocks):
        forget()
        try:
            yield
        finally:
            forget()


@dataclass(frozen=True)
class Case:
    """A problem with an explicit tile.

    Attributes
    ----------
    op, label : str
    tile : mapping
        Including its strategy.
    shape : tuple of int
        Shape of x; (world, C) for batch_norm_gather_stats.
    dtype : str
    groups : int
        Number of groups for GroupNorm. LayerNorm normalises the last axis.
    gamma, beta : str or None
        Dtype of gamma and beta; "same" is the dtype of x, None means absent.
    last : bool
        Channels are innermost in memory. For GroupNorm and InstanceNorm, data_format is NHWC and `shape` is in this
        order too. For BatchNorm, x has channels-last strides.
    mask : tuple of bool
    shifts : mapping
        Elements between the start of an allocation and its array, by the array's name; out is y or dx.
    grid : int, optional
        Maximum number of blocks of a launch.
    sums : tuple of str
        Dtypes of the four results of batch_norm_backward_reduce, or of the two running statistics.
    nan : tuple of int, optional
        Index of a NaN in x.
    infinite : bool
        The first mean that is passed to a backward call is -infinity, and dy is positive. The first sums are infinite
        then.
    constant : float, optional
        Value of all elements of x.
    flat : bool
        All elements of x in a channel's plane are equal.
    outlier : tuple of int, optional
        Index of an element of x that is far from all others.
    in_place : bool
        The result overwrites x, or dy in a backward call, and h the residual.
    extra : bool
        The call passes the optional tensor of its op: a residual in a forward, dh in a backward.
    gamma_offset : float
        Of RMSNorm.
    ranks : int
        batch_norm_backward_elemt gets the counts of so many ranks as a strided array; 0: a number.
    packed : bool
        The inputs of batch_norm_gather_stats are columns of one buffer.
    y_dtype : str, optional
        Argument of a forward.
    """

    op: str
    label: str
    tile: Mapping[str, Any]
    shape: tuple[int, ...]
    dtype: str = "float32"
    groups: int = 1
    gamma: str | None = "same"
    beta: str | None = "same"
    last: bool = False
    mask: tuple[bool, ...] = (True, True, True)
    shifts: Mapping[str, int] = field(default_factory=dict)
    grid: int | None = None
    sums: tuple[str, ...] = ()
    nan: tuple[int, ...] | None = None
    infinite: bool = False
    constant: float | None = None
    flat: bool = False
    outlier: tuple[int, ...] | None = None
    in_place: bool = False
    extra: bool = False
    gamma_offset: float = 0.0
    ranks: int = 0
    packed: bool = False
    y_dtype: str | None = None

    def __str__(self) -> str:
        return f"{self.op}-{self.strategy}: {self.label}"

    @property
    def strategy(self) -> str:
        return str(self.tile["strategy"])

    def plan(self) -> Plan:
        """The plan of the case."""
        options: dict[str, Any] = {}
        shape = self.shape
        if self.op.startswith("instance_norm"):
            options = {"data_format": "NHWC" if self.last else "NCHW"}
        elif self.op.startswith("group_norm"):
            options = {"num_groups": self.groups, "data_format": "NHWC" if self.last else "NCHW"}
        elif "normalized_shape" in OPS[self.op].takes:
            options = {"normalized_shape": shape[-1]}
        elif self.last:
            shape, options = (shape[0], *shape[2:], shape[1]), {"data_format": "NHWC"}
        if OPS[self.op].flags:
            options["output_mask"] = self.mask[: len(OPS[self.op].flags)]
        if self.extra:
            options |= dict.fromkeys(OPS[self.op].extras, True)
        if self.y_dtype is not None:
            options["y_dtype"] = self.y_dtype
        for name, given in (("gamma", self.gamma), ("beta", self.beta)):
            if name in OPS[self.op].inputs and f"{name}_dtype" in OPS[self.op].takes:
                options[f"{name}_dtype"] = self.dtype if given == "same" else given
        with grid_of(self.grid):
            return cunorm.plan(self.op, shape=shape, dtype=self.dtype, device="cpu", tile=self.tile, **options)

    @property
    def results(self) -> tuple[str, ...]:
        """The names of the results, if the mask selects all of them."""
        return OPS[self.op].results_with(OPS[self.op].extras if self.extra else ())

    @property
    def kernels(self) -> frozenset[str]:
        """Stems of the kernels that the case runs."""
        return frozenset(one.kernel for one in self.plan().launches)

    @property
    def files(self) -> frozenset[str]:
        """The files of kernels_cu that the case runs."""
        return frozenset[str]().union(*(files_in(sources._expand(kernel)) for kernel in self.kernels))

    @property
    def builds(self) -> frozenset[tuple[str, tuple[str, ...]]]:
        """What tells the builds apart that the case needs. Its plan does not know the dtypes of sums."""
        made = self.plan()
        texts = (sources.kernel_text(one, made.problem, made.strategy, made.tile) for one in made.launches)
        return frozenset((text, self.sums) for text in texts)

    def run(self, kind: str = "cpu") -> list[np.ndarray | None]:
        """Run the case, compare the results with the oracle, and return them as NumPy arrays.

        Parameters
        ----------
        kind : {"cpu", "gpu"}
            The executor that runs it.

        Raises
        ------
        AssertionError
            If a result is wrong.
        KernelFault
            If the CPU executor detected a violated rule.
        """
        needed = self.plan().workspace_nbytes
        workspace = np.empty(needed, np.uint8) if needed else None
        if workspace is not None:
            workspace.fill(0xFF)
        with grid_of(self.grid), np.errstate(all="ignore"):
            return RUNS[self.op](self, OnGpu() if kind == "gpu" else InPlace(), workspace, tile=self.tile)

    def at(self, name: str) -> int:
        """Elements between the start of the allocation and that array."""
        return self.shifts.get(name, 0)


# ---- fields that several problems share ------------------------------------------------------------------------------

Named = dict[str, dict[str, Any]]

ALL_OFF = {"x": 1, "dy": 2, "out": 3, "gamma": 1, "beta": 2, "residual": 2, "h": 1, "dh": 3}
SAME_OFF = dict.fromkeys(("x", "dy", "out", "residual", "h", "dh"), 3)
MIXED = {"dtype": "bfloat16", "gamma": "float32", "beta": "float32"}
NO_PARAMETERS = {"gamma": None, "beta": None}
#: An additional term of 0 * infinity turns an infinite sum into NaN.
INFINITE = {"infinite": True, "shifts": SAME_OFF, **NO_PARAMETERS}
#: Sums overflow unless they are relative to an element of the slice. The oracle is exact, as this is a power of two.
FAR = {"constant": 2.0**123}
MASKS: Named = {
    "dx alone": {"mask": (True, False, False)},
    "dgamma alone": {"mask": (False, True, False)},
    "dbeta alone": {"mask": (False, False, True)},
    "no dx": {"mask": (False, True, True)},
}


def masked(named: Named, *labels: str) -> Named:
    """The problems with those labels, each with every mask of MASKS."""
    return {f"{label}, {mask}": named[label] | flags for label in labels for mask, flags in MASKS.items()}
