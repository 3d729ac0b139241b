"""The layer between the norms of ``train_digits.py`` and ``cunorm``: it counts calls and checks results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[Any]
#: Name of a tensor -> its values from the oracle, and for each value the sum of the magnitudes of its terms (or an
#: upper bound of that sum).
Oracle = dict[str, tuple[Any, Any]]


class Checkable(Protocol):
    """A norm whose results can be compared with the oracle's."""

    name: str

    def oracle(self, tensors: dict[str, Numbers]) -> Oracle: ...


class GradientMismatch(RuntimeError):
    """A result of a norm is further from the float64 oracle than rounding explains."""

    def __init__(self, layer: str, tensor: str, error: float, bound: float) -> None:
        super().__init__(f"{layer}: {tensor} is off by {error:.3g}, expected at most {bound:.3g}")
        self.layer, self.tensor, self.error, self.bound = layer, tensor, error, bound


class CheckedLibrary:
    """Provide the functions of `functions` as attributes, count their calls, and compare results with the oracle."""

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
        """If `checking`, compare the results of a layer with the oracle; raise GradientMismatch if one is wrong.

        The bound on each value is 16 times the machine epsilon of the layer's dtype, times the sum of the magnitudes of
        its terms. A result needs a few roundings per term. Sums of many terms are computed as trees, or as some dozens
        of partial sums, and their errors mostly cancel. Together the error is a few epsilons. The error of a wrong
        formula is a considerable part of the terms, 100,000 times as large. The last addend of the bound permits a GPU
        to flush subnormals to zero.
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
    """Return a NumPy array with the same values."""
    return array.get() if hasattr(array, "get") else np.asarray(array)
