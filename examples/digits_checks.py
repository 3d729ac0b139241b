"""What stands between the norms of ``train_digits.py`` and ``cunorm``: a count of the calls, and the oracle's check."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[Any]
#: By name of a tensor: what the oracle makes of it, and the sum of the sizes of the terms that make it up.
Oracle = dict[str, tuple[Any, Any]]


class Checkable(Protocol):
    """A norm whose results can be compared with the oracle."""

    name: str

    def oracle(self, tensors: dict[str, Numbers]) -> Oracle: ...


class GradientMismatch(RuntimeError):
    """A result of a norm is further from the float64 oracle than rounding explains."""

    def __init__(self, layer: str, tensor: str, error: float, bound: float) -> None:
        super().__init__(f"{layer}: {tensor} is off by {error:.3g}, expected at most {bound:.3g}")
        self.layer, self.tensor, self.error, self.bound = layer, tensor, error, bound


class CheckedLibrary:
    """The functions of `functions`, as attributes; a count of the calls; their results' comparison with the oracle."""

    def __init__(self, functions: Any) -> None:
        self.functions = functions
        self.calls: Counter[str] = Counter()
        self.checking = False
        self.checks = 0
        self.worst = 0.0  # largest error seen, as a fraction of its bound

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(self.functions, name)

        def call(*arguments: Any, **options: Any) -> Any:
            self.calls[name] += 1
            return function(*arguments, **options)

        return call

    def observe(self, layer: Checkable, **tensors: Any) -> None:
        """While checking, compare what a layer computed with the oracle; raise GradientMismatch if it is wrong.

        The bound on each number is 16 units of rounding of the layer's dtype times the sum of the sizes of the terms
        that make it up. A result takes a few roundings per term, and sums over many terms run as trees or as some
        dozens of partial sums, whose errors mostly cancel: a few units in all. A wrong formula is off by a sizeable
        part of the terms, 100,000 times more. The last addend forgives subnormals that a GPU flushes to zero.
        """
        if not self.checking:
            return
        ours = {name: to_numpy(array) for name, array in tensors.items()}
        limits = np.finfo(ours["x"].dtype)
        for name, (truth, sizes) in layer.oracle(ours).items():
            error = np.abs(ours[name].astype(np.float64).reshape(truth.shape) - truth)
            bound = 16 * float(limits.eps) * sizes.reshape(truth.shape) + 1e4 * float(limits.tiny)
            ratio = error / bound
            at = np.unravel_index(int(np.argmax(ratio)), ratio.shape)  # argmax finds a NaN first
            if not ratio[at] <= 1:
                raise GradientMismatch(layer.name, name, float(error[at]), float(bound[at]))
            self.worst = max(self.worst, float(ratio[at]))
            self.checks += 1


def to_numpy(array: Any) -> Numbers:
    """A NumPy array of the same values."""
    return array.get() if hasattr(array, "get") else np.asarray(array)
