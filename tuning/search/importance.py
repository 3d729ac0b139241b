"""The importance of each tile parameter for the time: PED-ANOVA on the trials of a study."""

from __future__ import annotations

import math
from collections.abc import Sequence

import optuna
from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

from cunorm.core.strategy import Tile

from .sampler import distributions_of, params_of

LEAST_TRIALS = 8
TENTH = 0.1  # share of the trials that PED-ANOVA distinguishes from the others


def fastest(seconds: Sequence[float]) -> int:
    """Number of trials that PED-ANOVA distinguishes from the others: the fastest tenth, including ties."""
    slowest = sorted(seconds)[math.ceil(TENTH * len(seconds)) - 1]
    return sum(one <= slowest for one in seconds)


def importances(space: Sequence[Tile], timed: Sequence[tuple[Tile, float]]) -> dict[str, float] | str:
    """Each parameter's share of the importance by PED-ANOVA, or a sentence that says why there is none.

    Parameters
    ----------
    space : sequence of Tile
        Every tile that might have been tried.
    timed : sequence of (Tile, float)
        The tiles that have a time, and their times in seconds.
    """
    if len(timed) < LEAST_TRIALS:
        return f"No parameter importance: {len(timed)} trials have a time, expected at least {LEAST_TRIALS}."
    distributions = distributions_of(space)
    names = [name for name in distributions if name != "strategy"]
    params = [params_of(tile, names) for tile, _ in timed]
    varied = [name for name in distributions if len({one[name] for one in params}) > 1]
    if not varied:
        return "No parameter importance: each parameter had one value in all trials."
    if fastest([seconds for _, seconds in timed]) == len(timed):
        return "No parameter importance: all trials took the same time."
    study = optuna.create_study()
    for one, (_, seconds) in zip(params, timed, strict=True):
        study.add_trial(optuna.trial.create_trial(params=one, distributions=distributions, value=math.log(seconds)))
    evaluator = PedAnovaImportanceEvaluator(target_quantile=TENTH)
    return dict(get_param_importances(study, evaluator=evaluator, params=varied))
