"""Batches whose samples are spread over ranks, and the comparison of every rank's results with the whole batch's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cunorm import reference
from cunorm.core.arrays import DTYPES
from cunorm.core.problem import accumulator
from cunorm.distributed import Engine, SavedStatistics, sync_batch_norm, sync_batch_norm_backward

C = 7
EPS, MOMENTUM = 1e-3, 0.3
#: Samples of each rank, by the number of ranks.
SIZES = {1: [(3,), (0,)], 2: [(3, 5), (4, 0), (0, 2), (1, 1), (0, 0)], 3: [(2, 0, 3), (1, 4, 2), (0, 0, 0)]}
#: Dtypes of x, and of gamma, beta and the running statistics.
TYPES = [("float64", "float64"), ("float32", "float32"), ("bfloat16", "float32"), ("float16", "float16")]


@dataclass(frozen=True)
class Batch:
    """A batch that is spread over ranks.

    Attributes
    ----------
    sizes : tuple of int
        Samples of each rank.
    dtype, parameter_dtype : str
    channels_last : bool
    ragged : bool
        Whether the ranks have different numbers of positions.
    """

    sizes: tuple[int, ...]
    dtype: str = "float32"
    parameter_dtype: str = "float32"
    channels_last: bool = False
    ragged: bool = False

    def parts(self, seed: int) -> list[np.ndarray]:
        """Each rank's part, in the dtype of x."""
        rng, found = np.random.default_rng(seed), []
        for rank, size in enumerate(self.sizes):
            plane = (3, 5 + rank) if self.ragged else (3, 5)
            rows = rng.normal(size=(size, *plane, C)) * rng.uniform(0.5, 3, C) + 2
            part = rows.astype(DTYPES[self.dtype]).transpose(0, 3, 1, 2)
            found.append(part if self.channels_last else np.ascontiguousarray(part))
        return found

    def parameters(self) -> list[np.ndarray]:
        """gamma, beta, running_mean and running_var: the same on all ranks."""
        rng, dtype = np.random.default_rng(9), DTYPES[self.parameter_dtype]
        return [rng.uniform(0.5, 2, C).astype(dtype) for _ in range(4)]


def batches(world: int) -> Iterator[Batch]:
    """All batches for a number of ranks."""
    for dtype, parameter_dtype in TYPES:
        for channels_last in (False, True):
            for sizes in SIZES[world]:
                yield Batch(sizes, dtype, parameter_dtype, channels_last)
    yield Batch(SIZES[world][0], ragged=True)


def rows(part: np.ndarray) -> np.ndarray:
    """The elements of (N, C, *) as float64 rows of C."""
    return np.moveaxis(part, 1, -1).reshape(-1, part.shape[1]).astype(np.float64)


def expected(batch: Batch, rank: int) -> dict[str, np.ndarray]:
    """The results of a rank, computed in float64 from the whole batch."""
    xs, dys = ([rows(part) for part in batch.parts(seed)] for seed in (0, 1))
    gamma, beta, running_mean, running_var = (one.astype(np.float64) for one in batch.parameters())
    x, dy, own = np.concatenate(xs), np.concatenate(dys), (dys[rank], xs[rank])
    empty = np.zeros(0)
    if not len(x):
        return {
            **{"y": empty, "dx": empty, "mean": np.full(C, np.nan), "invstd": np.full(C, np.nan)},
            **{"running_mean": running_mean, "running_var": running_var, "dgamma": np.zeros(C), "dbeta": np.zeros(C)},
        }
    mean, invstd = reference.batch_norm_stats(x, eps=EPS)
    _, _, running_mean, running_var = reference.batch_norm_gather_stats(
        mean[None], invstd[None], [len(x)], eps=EPS, running_mean=running_mean, running_var=running_var,
        momentum=MOMENTUM,
    )  # fmt: skip
    sum_dy, sum_dy_xmu, _, _ = reference.batch_norm_backward_reduce(dy, x, mean, invstd)
    _, _, dgamma, dbeta = reference.batch_norm_backward_reduce(*own, mean, invstd)
    dx = reference.batch_norm_backward_elemt(*own, mean, invstd, gamma, sum_dy, sum_dy_xmu, len(x))
    y = reference.batch_norm_elemt(xs[rank], mean, invstd, gamma, beta)
    return {
        **{"y": y, "dx": dx, "mean": mean, "invstd": invstd, "dgamma": dgamma, "dbeta": dbeta},
        **{"running_mean": running_mean, "running_var": running_var},
    }


def computed(batch: Batch, rank: int, engine: Engine) -> tuple[dict[str, np.ndarray], SavedStatistics]:
    """The results of a rank through the engine."""
    x, dy = batch.parts(0)[rank], batch.parts(1)[rank]
    gamma, beta, running_mean, running_var = batch.parameters()
    y, saved = sync_batch_norm(x, gamma, beta, running_mean, running_var, engine=engine, eps=EPS, momentum=MOMENTUM)
    dx, dgamma, dbeta = sync_batch_norm_backward(dy, x, saved, gamma, engine=engine)
    return {
        **{"y": y, "dx": dx, "mean": saved.mean, "invstd": saved.invstd, "dgamma": dgamma, "dbeta": dbeta},
        **{"running_mean": running_mean, "running_var": running_var},
    }, saved


def check(batch: Batch, rank: int, engine: Engine) -> None:
    """Compare the results of a rank with the whole batch's."""
    found, saved = computed(batch, rank, engine)
    parts, wide = batch.parts(0), accumulator(batch.dtype)
    for name, want in expected(batch, rank).items():
        came, where = found[name], f"{batch}, rank {rank}: {name}"
        like_x, saves = name in ("y", "dx"), name in ("mean", "invstd")
        dtype = batch.dtype if like_x else wide if saves else batch.parameter_dtype
        assert came.dtype == DTYPES[dtype], where
        if like_x:
            assert came.shape == parts[rank].shape, where
            assert came.strides == parts[rank].strides or not came.size, where
            came = rows(came).reshape(want.shape)
        # One rounding of the result, and some dozen of float32 or float64 before.
        size = np.abs(want[np.isfinite(want)]).max(initial=0)
        unit = float(reference_eps(dtype)) + 32 * float(reference_eps(wide))
        np.testing.assert_allclose(came.astype(np.float64), want, rtol=0, atol=unit * max(size, 1e-3), err_msg=where)
    counts = [part.size // C for part in parts]
    assert saved.counts.dtype == np.int64
    assert saved.counts.tolist() == counts, f"{batch}: counts"


def reference_eps(dtype: str) -> float:
    """The distance from 1 to the next number of a dtype."""
    return {"float64": 2**-52, "float32": 2**-23, "bfloat16": 2**-7, "float16": 2**-10}[dtype]
