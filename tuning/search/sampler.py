"""Proposes tiles to an Optuna study: only legal ones, none twice, the cost model's best first.

Optuna's own samplers know neither which combinations are legal nor what was tried, and TPE ignores failed trials. So
the space is enumerated, see space.py, and encoded flat: one categorical for the strategy and one for each field that
any strategy has, None where a strategy has it not. After the model's first proposals, half of the time an untried
neighbour of one of the three best, one parameter away; otherwise what TPE proposes, or the nearest untried tile to it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler, TPESampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from cunorm.core.strategy import Tile

from .space import SWEPT

#: What a pruned trial is marked with whose tile failed. Without the mark its run broke off: it may be proposed again.
FAILURE = "failure"
PRIOR = 20  # proposals in the model's order, in larger ones
LOCAL_SHARE, BEST = 0.5, 3  # how often a neighbour, and of how many
STEP = 0.1  # what a step to an adjacent value weighs beside a parameter that differs
TWO_PARAMETERS = 2.0  # the least distance of tiles that differ in two

Params = dict[str, Any]


def params_of(tile: Tile, names: Sequence[str]) -> Params:
    """A tile in the flat encoding."""
    return {"strategy": tile.strategy} | {name: tile.as_dict().get(name) for name in names}


def tile_of(params: Params) -> Tile:
    """The tile of a trial's parameters."""
    fields = {name: value for name, value in params.items() if name != "strategy" and value is not None}
    return Tile(params["strategy"], **fields)


def _fields(tiles: Sequence[Tile]) -> list[str]:
    return sorted({name for tile in tiles for name, _ in tile.fields})


def distributions_of(tiles: Sequence[Tile]) -> dict[str, BaseDistribution]:
    """The flat encoding of a space."""
    names = _fields(tiles)
    found: dict[str, BaseDistribution] = {
        "strategy": CategoricalDistribution(list(dict.fromkeys(tile.strategy for tile in tiles)))
    }
    for name in names:
        values = {tile.as_dict().get(name) for tile in tiles}
        numbers = sorted(value for value in values if value is not None)
        found[name] = CategoricalDistribution([*([None] if None in values else []), *numbers])
    return found


def tried(study: Study) -> set[Tile]:
    """The tiles that a study has proposed, whatever became of them; but not those whose run broke off."""
    found = set()
    for trial in study.get_trials(deepcopy=False):
        broken_off = trial.state == TrialState.PRUNED and FAILURE not in trial.user_attrs
        if "strategy" in trial.params and not broken_off:
            found.add(tile_of(trial.params))
    return found


class ValidSetSampler(BaseSampler):
    """See above.

    Parameters
    ----------
    tiles : sequence of Tile
        The legal ones, in the order of the cost model.
    first : sequence of Tile
        Proposed before all others: the default, what a table has, what was best for a neighbour.
    seed : int
    prior : int, optional
        Proposals in the order of the model; None: `PRIOR`, or all of a space of at most `SWEPT`.
    local : float, optional
        The share of neighbours after that.
    """

    def __init__(
        self,
        tiles: Sequence[Tile],
        first: Sequence[Tile] = (),
        seed: int = 0,
        prior: int | None = None,
        local: float = LOCAL_SHARE,
    ) -> None:
        known = set(tiles)
        self.tiles = list(dict.fromkeys([*(tile for tile in first if tile in known), *tiles]))
        self.distributions = distributions_of(tiles)
        self._names = _fields(tiles)
        self._params = {tile: params_of(tile, self._names) for tile in self.tiles}
        self._prior = (len(tiles) if len(tiles) <= SWEPT else PRIOR) if prior is None else prior
        self._seed, self._local = seed, local
        self._tpe = TPESampler(seed=seed)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """All parameters, in every trial."""
        return self.distributions

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """The next tile. There has to be one: ask `exhausted` before the study, which has made the trial by now."""
        seen = tried(study)
        left = [tile for tile in self.tiles if tile not in seen]
        if len(seen) < self._prior:
            return self._params[left[0]]
        chance = random.Random(f"{self._seed} {trial.number}")
        if chance.random() < self._local and (near := self._neighbour(study, set(left), chance)) is not None:
            return self._params[near]
        proposed = self._tpe.sample_relative(study, trial, search_space)
        if not proposed:  # TPE's own start-up
            return self._params[chance.choice(left)]
        return self._params[min(left, key=lambda tile: self._distance(self._params[tile], proposed))]

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Never needed: every parameter is in the relative space."""
        raise RuntimeError(f"{param_name}: not a parameter of this study's space")

    def exhausted(self, study: Study) -> bool:
        """Whether every tile was proposed."""
        return tried(study).issuperset(self.tiles)

    def _distance(self, one: Params, other: Params) -> float:
        far = 0.0
        for name, distribution in self.distributions.items():
            assert isinstance(distribution, CategoricalDistribution)
            a, b = one[name], other[name]
            if a != b:
                choices = list(distribution.choices)
                far += 1 + (0 if name == "strategy" else STEP * abs(choices.index(a) - choices.index(b)))
        return far

    def _neighbour(self, study: Study, left: set[Tile], chance: random.Random) -> Tile | None:
        """An untried tile that differs in one parameter from one of the best, by as small a step as there is."""
        done = [trial for trial in study.get_trials(deepcopy=False) if trial.state == TrialState.COMPLETE]
        best = sorted(done, key=lambda trial: trial.value if trial.value is not None else float("inf"))[:BEST]
        chance.shuffle(best)
        for trial in best:
            near = [
                (distance, tile) for tile in left if (distance := self._distance(self._params[tile], trial.params)) < 2
            ]
            if near:
                least = min(distance for distance, _ in near)
                return chance.choice(sorted((tile for distance, tile in near if distance == least), key=repr))
        return None


optuna.logging.set_verbosity(optuna.logging.WARNING)
