"""Proposes tiles to an Optuna study: only legal tiles, each at most once, the cost model's best first.

Optuna's own samplers do not know which combinations are legal or which were tried, and TPE ignores failed trials.
Therefore space.py enumerates the space, and this module encodes it flat: one categorical parameter for the strategy,
and one for each field of any strategy. A field is None if the tile's strategy does not have it.

The first proposals follow the order of the cost model. After them, half of the proposals are untried neighbours of one
of the three best tiles; a neighbour differs in one parameter. The other proposals are the untried tiles nearest to
TPE's proposals.
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

from .space import PRIOR, SWEPT

#: User attribute of a pruned trial whose tile failed. A pruned trial without it was aborted: its tile may be proposed
#: again.
FAILURE = "failure"
LOCAL_SHARE, BEST = 0.5, 3  # share of proposals that are neighbours, and number of best tiles that have neighbours
STEP = 0.1  # distance per step between adjacent values, relative to the distance 1 of a parameter that differs
TWO_PARAMETERS = 2.0  # minimum distance of tiles that differ in two parameters

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
    """The tiles that a study has proposed, whether they succeeded or failed, except those of aborted trials."""
    found = set()
    for trial in study.get_trials(deepcopy=False):
        broken_off = trial.state == TrialState.PRUNED and FAILURE not in trial.user_attrs
        if "strategy" in trial.params and not broken_off:
            found.add(tile_of(trial.params))
    return found


class ValidSetSampler(BaseSampler):
    """Sampler of the legal tiles, as the docstring of the module describes it.

    Parameters
    ----------
    tiles : sequence of Tile
        The legal tiles, in the order of the cost model.
    first : sequence of Tile
        Tiles to propose before all others: the default, a table's tile, the best tile of a neighbouring problem.
    seed : int
    prior : int, optional
        Number of proposals in the order of the model; None: `PRIOR`, or the whole space if it has at most `SWEPT`
        tiles.
    local : float, optional
        Share of neighbours among the proposals after these.
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
        """Return all parameters, for every trial."""
        return self.distributions

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """The parameters of the next tile.

        There must be an untried tile. Check `exhausted` before `Study.ask`, which creates the trial before it samples.
        """
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
        """Raise RuntimeError: every parameter is in the relative space."""
        raise RuntimeError(f"{param_name}: not a parameter of this study's space")

    def exhausted(self, study: Study) -> bool:
        """Whether every tile was tried."""
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
        """An untried tile that differs in one parameter from one of the best tiles, by the smallest possible step."""
        done = [trial for trial in study.get_trials(deepcopy=False) if trial.state == TrialState.COMPLETE]
        best = sorted(done, key=lambda trial: trial.value if trial.value is not None else float("inf"))[:BEST]
        chance.shuffle(best)
        for trial in best:
            distances = ((self._distance(self._params[tile], trial.params), tile) for tile in left)
            near = [(distance, tile) for distance, tile in distances if distance < TWO_PARAMETERS]
            if near:
                least = min(distance for distance, _ in near)
                return chance.choice(sorted((tile for distance, tile in near if distance == least), key=repr))
        return None


optuna.logging.set_verbosity(optuna.logging.WARNING)
