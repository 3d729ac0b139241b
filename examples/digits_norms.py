"""The norms of ``train_digits.py``: GroupNorm, InstanceNorm, LayerNorm, RMSNorm and BatchNorm, through cunorm.

Each norm is a layer (`forward`, `evaluate`, `backward`) that also computes its results with the oracle (`oracle`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cunorm import reference

if __package__:
    from .digits_checks import CheckedLibrary, Numbers, Oracle
    from .digits_network import Array, Layer, Parameter
else:  # imported by a script in the same folder
    from digits_checks import CheckedLibrary, Numbers, Oracle
    from digits_network import Array, Layer, Parameter

GROUP = 4  # channels per group of GroupNorm
EPSILON = 1e-5
MOMENTUM = 0.1  # weight of a batch in BatchNorm's running statistics

Three = tuple[Array, Array, Array]


class Norm(Layer):
    """Base of the norms: a name, gamma and beta, and a check in every backward pass."""

    title = ""
    x: Array  # the input of the last forward

    def __init__(self, xp: Any, library: CheckedLibrary, dtype: Any, number: int, sample: tuple[int, int, int]) -> None:
        """Make norm number `number` of a network, for samples of shape `sample`. It calls functions of `library`."""
        self.xp, self.library, self.sample = xp, library, sample
        self.name = "{} {} ({} channels, {}x{})".format(self.title, number, *sample)
        shape = self.affine_shape()
        self.gamma, self.beta = Parameter(xp.ones(shape, dtype)), Parameter(xp.zeros(shape, dtype))
        self.parameters = (self.gamma, self.beta)

    def affine_shape(self) -> tuple[int, ...]:
        """Return the shape of gamma and beta: one element per channel."""
        return self.sample[:1]

    def check(self, **tensors: Array) -> None:
        """Pass the inputs and results of a step to the library, which compares them with `oracle` if it is checking."""
        self.library.observe(self, x=self.x, gamma=self.gamma.value, beta=self.beta.value, **tensors)

    def oracle(self, t: dict[str, Numbers]) -> Oracle:
        """Return the exact results for the tensors of a step, and the magnitudes of their terms (see `Oracle`)."""
        raise NotImplementedError


class SampleNorm(Norm):
    """A norm whose statistics belong to slices of a sample. Training and evaluation are the same.

    `affine` and `gradients` call the functions of cunorm or of the oracle, which have the same parameters.
    """

    def affine(self, functions: Any, x: Array, gamma: Array, beta: Array) -> Three:
        """Return y, mean and rstd."""
        raise NotImplementedError

    def gradients(self, functions: Any, dy: Array, x: Array, mean: Array, rstd: Array, gamma: Array) -> Three:
        """Return dx, dgamma and dbeta."""
        raise NotImplementedError

    def forward(self, x: Array) -> Array:
        self.x = x
        self.saved = self.affine(self.library, x, self.gamma.value, self.beta.value)
        return self.saved[0]

    def backward(self, dy: Array) -> Array:
        y, mean, rstd = self.saved
        dy = self.xp.ascontiguousarray(dy)
        dx, dgamma, dbeta = self.gradients(self.library, dy, self.x, mean, rstd, self.gamma.value)
        self.check(dy=dy, y=y, mean=mean, rstd=rstd, dx=dx, dgamma=dgamma, dbeta=dbeta)
        self.gamma.grad, self.beta.grad = dgamma, dbeta
        return dx

    def oracle(self, t: dict[str, Numbers]) -> Oracle:
        y, mean, rstd = self.affine(reference, t["x"], t["gamma"], t["beta"])
        dx, dgamma, dbeta = self.gradients(reference, t["dy"], t["x"], t["mean"], t["rstd"], t["gamma"])
        # The magnitudes of the terms. `slices`, `inverse`, `xhat` and `dxhat` have one row per slice.
        broad = (*t["gamma"].shape, 1, 1)[:3]  # shape in which gamma and beta broadcast to a sample
        scale, shift, upstream = np.abs(t["gamma"]).reshape(broad), np.abs(t["beta"]).reshape(broad), np.abs(t["dy"])
        slices, inverse = t["x"].reshape(mean.size, -1), rstd.reshape(-1, 1)
        largest = np.abs(slices).max(axis=1, keepdims=True)
        xhat = np.abs(slices - mean.reshape(-1, 1)) * inverse
        dxhat = (scale * upstream).reshape(slices.shape)
        through = dxhat.mean(axis=1, keepdims=True) + xhat * (dxhat * xhat).mean(axis=1, keepdims=True)
        summed = (0, *range(1 + t["gamma"].ndim, 4))
        return {
            "y": (y, scale * (xhat + largest * inverse).reshape(y.shape) + shift),
            "mean": (mean, largest),
            "rstd": (rstd, rstd),
            "dx": (dx, inverse * (dxhat + through)),
            "dgamma": (dgamma, (upstream * xhat.reshape(y.shape)).sum(axis=summed)),
            "dbeta": (dbeta, upstream.sum(axis=summed)),
        }


class GroupNorm(SampleNorm):
    """One mean and rstd per `GROUP` channels of a sample."""

    title = "GroupNorm"

    def affine(self, functions: Any, x: Array, gamma: Array, beta: Array) -> Three:
        results: Three = functions.group_norm(x, self.sample[0] // GROUP, gamma, beta, eps=EPSILON)
        return results

    def gradients(self, functions: Any, dy: Array, x: Array, mean: Array, rstd: Array, gamma: Array) -> Three:
        results: Three = functions.group_norm_backward(dy, x, mean, rstd, gamma, num_groups=self.sample[0] // GROUP)
        return results


class InstanceNorm(SampleNorm):
    """One mean and rstd per sample and channel."""

    title = "InstanceNorm"

    def affine(self, functions: Any, x: Array, gamma: Array, beta: Array) -> Three:
        results: Three = functions.instance_norm(x, gamma, beta, eps=EPSILON)
        return results

    def gradients(self, functions: Any, dy: Array, x: Array, mean: Array, rstd: Array, gamma: Array) -> Three:
        results: Three = functions.instance_norm_backward(dy, x, mean, rstd, gamma)
        return results


class LayerNorm(SampleNorm):
    """One mean and rstd per sample: `normalized_shape` is its three dimensions.

    gamma and beta have that shape too. Normalising only the last dimension would compute separate statistics for each
    row of an image in each channel (8 pixels in the first layers), and gamma would depend only on the image's column.
    """

    title = "LayerNorm"

    def affine_shape(self) -> tuple[int, ...]:
        return self.sample

    def affine(self, functions: Any, x: Array, gamma: Array, beta: Array) -> Three:
        results: Three = functions.layer_norm(x, self.sample, gamma, beta, eps=EPSILON)
        return results

    def gradients(self, functions: Any, dy: Array, x: Array, mean: Array, rstd: Array, gamma: Array) -> Three:
        results: Three = functions.layer_norm_backward(dy, x, self.sample, mean, rstd, gamma)
        return results


class RMSNorm(Norm):
    """One rstd per sample, and no mean and no beta. The shapes are those of `LayerNorm`."""

    title = "RMSNorm"

    def __init__(self, xp: Any, library: CheckedLibrary, dtype: Any, number: int, sample: tuple[int, int, int]) -> None:
        super().__init__(xp, library, dtype, number, sample)
        self.parameters = (self.gamma,)  # no function reads beta

    def affine_shape(self) -> tuple[int, ...]:
        return self.sample

    def forward(self, x: Array) -> Array:
        self.x = x
        self.saved = self.library.rms_norm(x, self.sample, self.gamma.value, eps=EPSILON)
        return self.saved[0]

    def backward(self, dy: Array) -> Array:
        y, rstd = self.saved
        dy = self.xp.ascontiguousarray(dy)
        dx, dgamma = self.library.rms_norm_backward(dy, self.x, self.sample, rstd, self.gamma.value)
        self.check(dy=dy, y=y, rstd=rstd, dx=dx, dgamma=dgamma)
        self.gamma.grad = dgamma
        return dx

    def oracle(self, t: dict[str, Numbers]) -> Oracle:
        y, rstd = reference.rms_norm(t["x"], self.sample, t["gamma"], eps=EPSILON)
        dx, dgamma = reference.rms_norm_backward(t["dy"], t["x"], self.sample, t["rstd"], t["gamma"])
        # The magnitudes of the terms.
        scale, upstream, inverse = np.abs(t["gamma"]), np.abs(t["dy"]), rstd.reshape(-1, 1, 1, 1)
        xhat, dxhat = np.abs(t["x"]) * inverse, scale * upstream
        through = xhat * (dxhat * xhat).mean(axis=(1, 2, 3), keepdims=True)
        return {
            "y": (y, scale * xhat),
            "rstd": (rstd, rstd),
            "dx": (dx, inverse * (dxhat + through)),
            "dgamma": (dgamma, (upstream * xhat).sum(axis=0)),
        }


class BatchNorm(Norm):
    """One mean and invstd per channel of the batch, with the functions for synchronised training, on a single rank.

    Training normalises with the batch's statistics, and updates the running statistics with them. Evaluation normalises
    with the running statistics.
    """

    title = "BatchNorm"

    def __init__(self, xp: Any, library: CheckedLibrary, dtype: Any, number: int, sample: tuple[int, int, int]) -> None:
        super().__init__(xp, library, dtype, number, sample)
        self.running_mean, self.running_var = xp.zeros(sample[0], dtype), xp.ones(sample[0], dtype)

    def forward(self, x: Array) -> Array:
        self.x, self.count = x, x.size // x.shape[1]
        self.before = self.running_mean.copy(), self.running_var.copy()
        self.local = mean, invstd = self.library.batch_norm_stats(x, eps=EPSILON)
        # With several ranks, gather their means, invstds and counts here.
        self.merged = self.library.batch_norm_gather_stats(
            mean[None],
            invstd[None],
            [self.count],
            eps=EPSILON,
            running_mean=self.running_mean,
            running_var=self.running_var,
            momentum=MOMENTUM,
        )
        self.y = self.library.batch_norm_elemt(x, *self.merged, self.gamma.value, self.beta.value)
        return self.y

    def evaluate(self, x: Array) -> Array:
        invstd = 1 / self.xp.sqrt(self.running_var + EPSILON)
        return self.library.batch_norm_elemt(x, self.running_mean, invstd, self.gamma.value, self.beta.value)

    def backward(self, dy: Array) -> Array:
        dy = self.xp.ascontiguousarray(dy)
        given = (dy, self.x, *self.merged, self.gamma.value)
        sum_dy, sum_dy_xmu, dgamma, dbeta = self.library.batch_norm_backward_reduce(*given)
        # With several ranks, add up their sum_dy, sum_dy_xmu and count here.
        dx = self.library.batch_norm_backward_elemt(*given, sum_dy, sum_dy_xmu, self.count)
        names = ("before_mean", "before_var", "local_mean", "local_invstd", "mean", "invstd")
        statistics = dict(zip(names, (*self.before, *self.local, *self.merged), strict=True))
        running = {"running_mean": self.running_mean, "running_var": self.running_var}
        sums = {"sum_dy": sum_dy, "sum_dy_xmu": sum_dy_xmu, "dgamma": dgamma, "dbeta": dbeta}
        self.check(dy=dy, y=self.y, dx=dx, **statistics, **running, **sums)
        self.gamma.grad, self.beta.grad = dgamma, dbeta
        return dx

    def oracle(self, t: dict[str, Numbers]) -> Oracle:
        """Apply each function of the oracle to the arguments of cunorm's call, which include rounded results."""
        x, dy, given = t["x"], t["dy"], (t["mean"], t["invstd"], t["gamma"])
        count, column = x.size // x.shape[1], (-1, 1, 1)
        local_mean, local_invstd = reference.batch_norm_stats(x, eps=EPSILON)
        mean, invstd, running_mean, running_var = reference.batch_norm_gather_stats(
            t["local_mean"][None],
            t["local_invstd"][None],
            [count],
            eps=EPSILON,
            running_mean=t["before_mean"],
            running_var=t["before_var"],
            momentum=MOMENTUM,
        )
        sum_dy, sum_dy_xmu, dgamma, dbeta = reference.batch_norm_backward_reduce(dy, x, *given)
        # The magnitudes of the terms.
        running = (1 - MOMENTUM) * np.abs(t["before_mean"]) + MOMENTUM * np.abs(mean)
        scale, shift, inverse = (np.abs(t[name]).reshape(column) for name in ("gamma", "beta", "invstd"))
        upstream, xmu = np.abs(dy), np.abs(x - t["mean"].astype(np.float64).reshape(column))
        a, b = (np.abs(t[name]).reshape(column) / count for name in ("sum_dy", "sum_dy_xmu"))
        dx = reference.batch_norm_backward_elemt(dy, x, *given, t["sum_dy"], t["sum_dy_xmu"], count)
        size_dy, size_dy_xmu = ((upstream * each).sum(axis=(0, 2, 3)) for each in (1.0, xmu))
        return {
            "local_mean": (local_mean, np.abs(x).max(axis=(0, 2, 3))),
            "local_invstd": (local_invstd, local_invstd),
            "mean": (mean, np.abs(mean)),
            "invstd": (invstd, invstd),
            "running_mean": (running_mean, running),
            "running_var": (running_var, running_var),
            "y": (reference.batch_norm_elemt(x, *given, t["beta"]), scale * xmu * inverse + shift),
            "sum_dy": (sum_dy, size_dy),
            "sum_dy_xmu": (sum_dy_xmu, size_dy_xmu),
            "dgamma": (dgamma, size_dy_xmu * np.abs(t["invstd"])),
            "dbeta": (dbeta, size_dy),
            "dx": (dx, inverse * scale * (upstream + a + xmu * inverse**2 * b)),
        }


NORMS: dict[str, type[Norm]] = {
    "group": GroupNorm,
    "instance": InstanceNorm,
    "layer": LayerNorm,
    "rms": RMSNorm,
    "batch": BatchNorm,
}
