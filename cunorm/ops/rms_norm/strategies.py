"""Strategies of RMSNorm, forward and backward. The kernels are in kernels_cu.

In a problem of RMSNorm, N is the number of rows, C is the length of a row, and HxW and group are 1, as in LayerNorm.
"""

from __future__ import annotations

from cunorm.core.strategy import Strategy
from cunorm.ops.common.rows import held_strategies, short_rows
from cunorm.ops.common.strips import STRIPS_SPACE, StripGradients

from .split import RmsSplit


def _strategies(op: str, backward: bool) -> dict[str, Strategy]:
    of = StripGradients if backward else RmsSplit
    split = Strategy("split", op, STRIPS_SPACE, ("threads", "packs_per_thread"), of, short_rows)
    return {strategy.name: strategy for strategy in (*held_strategies(op, backward), split)}


FORWARD: dict[str, Strategy] = _strategies("rms_norm", backward=False)
BACKWARD: dict[str, Strategy] = _strategies("rms_norm_backward", backward=True)
