"""Candidates and a clock for the tuner's tests: right and broken kernels on the CPU executor, and planted times.

If CUNORM_TESTS_PLANT is set, importing this module adds the candidates to batch_norm_elemt. A worker imports this
module to create its clock.
"""

from __future__ import annotations

import functools
import hashlib
import os
import random
import signal
from collections.abc import Callable
from typing import Any

from cunorm.tuning.measure.session import Spec

from cunorm.core.devices import KNOWN, Device
from cunorm.core.locks import lazy
from cunorm.core.problem import Problem
from cunorm.core.strategy import Launch, Strategy, Tile, Tiling, by_name
from cunorm.jit import sources
from cunorm.ops.registry import OPS
from tests.support.paths import KERNELS

OP = "batch_norm_elemt"
#: A number of channels that no other test uses. The strategy is legal only for this number.
CHANNELS = 13
DEVICE = KNOWN["H200"]
PROBLEM = Problem(
    op=OP,
    dtype="float32",
    gamma_dtype="float32",
    beta_dtype="float32",
    stats_dtype="float32",
    layout="NCHW",
    N=2,
    C=CHANNELS,
    HxW=35,
    group=CHANNELS,
    outputs=("y",),
)
RIGHT, WRONG, CRASH, HANG, OUTSIDE, RANDOM, UNWRITTEN, DIES_LATER, HANGS_LATER = 1, 4, 5, 6, 7, 8, 9, 10, 11
BROKEN = {WRONG: "wrong", CRASH: "crash", HANG: "hang", OUTSIDE: "wrong", RANDOM: "wrong", UNWRITTEN: "wrong"}
KINDS = (RIGHT, *BROKEN, DIES_LATER, HANGS_LATER)


class Planted(Tiling):
    """One block for the whole problem."""

    def refuses(self, device: Device) -> str | None:
        problem, tile = self.problem, self.tile
        if (problem.op, problem.C, problem.dtype) != (OP, CHANNELS, "float32"):
            return "legal only for the problem of the tuner's tests"
        return None if tile.kind == RIGHT or tile.threads == 64 else "a broken kernel is legal only with threads=64"

    @lazy
    def launches(self) -> tuple[Launch, ...]:
        problem = self.problem
        size = problem.N * problem.C * problem.HxW
        arguments = {
            **by_name("x", "mean", "invstd", "gamma", "beta", "y"),
            **{"C": problem.C, "HxW": problem.HxW, "size": size},
        }
        return (Launch("planted", "planted", 1, self.tile.threads, arguments, traffic=2 * problem.nbytes),)


def planted(kinds: tuple[int, ...] = KINDS, threads: tuple[int, ...] = (32, 64)) -> Strategy:
    space = {"kind": kinds, "threads": threads}
    return Strategy("planted", OP, space, ("kind",), Planted, lambda *_: (8, 64, 64, 64))


def plant(strategy: Strategy) -> None:
    """Add the candidates to the op in this process."""
    OPS[OP].strategies["planted"] = strategy  # type: ignore[index]
    real = getattr(sources._expand, "real", sources._expand)
    text = (KERNELS / "planted.cu").read_text(encoding="utf-8")

    @functools.cache
    def expand(stem: str) -> str:
        return text if stem == "planted" else real(stem)

    expand.real = real  # type: ignore[attr-defined]
    sources._expand = expand


def uproot() -> None:
    OPS[OP].strategies.pop("planted", None)  # type: ignore[attr-defined]
    sources._expand = getattr(sources._expand, "real", sources._expand)


def microseconds(tile: Tile) -> float:
    """The planted time of a tile. Of the right tiles, planted(kind=1, threads=64) is the fastest."""
    if tile.strategy == "planted":
        return 10.0 + (3.0 if tile.threads != 64 else 0.0)
    seed = int(hashlib.sha256(repr(tile).encode()).hexdigest()[:8], 16)
    return 14.0 + seed % 1000 / 100


class PlantedClock:
    """Planted times with 1 % of noise and a drifting clock rate. No time is measured."""

    measures = False

    def __init__(self) -> None:
        self._random = random.Random(0)
        self._drift = 1.0

    def sets(self, nbytes: int, device: Device) -> int:
        return 2

    def sampler(self, tile: Tile, run: Callable[[int], None], sets: int) -> Callable[[], float]:
        if tile.strategy == "planted" and tile.kind in BROKEN:
            raise AssertionError(f"{tile!r} was passed to the clock, expected verification to reject it first")
        for index in range(sets):
            run(index)

        def sample() -> float:
            if tile.strategy == "planted" and tile.kind == DIES_LATER:
                os.kill(os.getpid(), signal.SIGKILL)
            if tile.strategy == "planted" and tile.kind == HANGS_LATER:
                signal.pause()
            self._drift *= 1.0005
            return microseconds(tile) * 1e-6 * self._drift * self._random.gauss(1.0, 0.01)

        return sample

    def bandwidth(self) -> float:
        return 4e12


def spec() -> Spec:
    return Spec("cpu", DEVICE, f"{__name__}:PlantedClock")


if os.environ.get("CUNORM_TESTS_PLANT"):
    kinds: Any = os.environ["CUNORM_TESTS_PLANT"]
    plant(planted(tuple(map(int, kinds.split(",")))))
