"""Prints the progress of a run: a bar on a terminal, plain lines elsewhere, and a report of each tuned problem."""

from __future__ import annotations

import sys
from typing import Any

from cunorm.core.problem import Problem
from cunorm.tiling.table import SOURCES, Entry
from cunorm.tiling.table import WORDS as STORED

from .measure.result import Trial, TuningResult
from .search.space import Space
from .tuner import Events, Options

#: By source of the times.
WORDS = {**STORED, "rehearsed": "rehearsed, not timed on a GPU"}


class Progress(Events):
    """Prints progress to stderr and results to stdout.

    Parameters
    ----------
    options : Options
    problems : int
        Number of problems.
    quiet : bool
        Whether stdout stays empty. Without a bar, stderr then shows wrong results only.
    """

    def __init__(self, options: Options, problems: int, quiet: bool = False) -> None:
        self._options, self._problems, self._quiet = options, problems, quiet
        self._ended = 0
        self._bar: Any = None
        self._best: dict[Problem, float] = {}
        self._elsewhere: set[Problem] = set()
        if sys.stderr is not None and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=0, unit="tile", file=sys.stderr, dynamic_ncols=True, leave=False)

    def _say(self, line: str, loud: bool = False) -> None:
        if self._bar is not None:
            self._bar.write(line, file=sys.stderr)
        elif loud or not self._quiet:
            print(line, file=sys.stderr, flush=True)

    def begins(self, space: Space, trials: int) -> None:
        """Tuning of a problem begins."""
        if self._bar is not None:
            self._bar.total += trials
            self._bar.set_description(f"{self._ended + 1}/{self._problems} {space.problem.op}")
            self._bar.refresh()
        else:
            where = f"[{self._ended + 1}/{self._problems}]"
            self._say(f"{where} {space.problem.describe()}: {trials} of {len(space)} tiles")

    def tried(self, space: Space, trial: Trial) -> None:
        """A tile was tried."""
        if trial.failure in ("wrong", "fault"):
            self._say(f"WRONG RESULT  {trial.tile.text}: {trial.sentence}", loud=True)
        elif trial.failure is not None:
            self._say(f"{trial.failure:8}  {trial.tile.text}: {trial.sentence.splitlines()[0]}")
        if trial.seconds is not None:
            best = min(trial.seconds, self._best.get(space.problem, trial.seconds))
            self._best[space.problem] = best
            if self._bar is not None:
                self._bar.set_postfix_str(f"best {best * 1e6:.1f} us", refresh=False)
        if self._bar is not None:
            self._bar.update(1)

    def ends(self, result: TuningResult) -> None:
        """Tuning of a problem has ended."""
        self._ended += not result.interrupted  # an interrupted problem is left for --resume
        line = self._line(result)
        if self._bar is not None:
            self._bar.write(line, file=sys.stderr if self._quiet else sys.stdout)
        elif not self._quiet:
            print(line, flush=True)

    def elsewhere(self, problem: Problem, entry: Entry | None) -> None:
        """Another process tunes, or has tuned, a problem."""
        if entry is None and problem not in self._elsewhere:
            self._elsewhere.add(problem)
            self._say(f"{problem.describe()}: another process is tuning it; it is retried later")
        elif entry is not None:
            self._ended += 1
            self._say(f"{problem.describe()}: already tuned in this storage, {entry.tile.text}")

    def _line(self, result: TuningResult) -> str:
        name = result.space.problem.describe()
        if result.winner is None:
            return f"{name}\n  not tuned: {result.sentence}"
        chosen, default = result.timings[result.winner], result.timings.get(result.space.default)
        text = f"{name}\n  {result.winner.text}  {chosen.seconds * 1e6:.1f} us {WORDS[result.source]}"
        if result.winner == result.space.default:
            text += "; the default"
        elif default is not None:
            text += (
                f"; the default {default.seconds * 1e6:.1f} us, {default.seconds / chosen.seconds:.2f} times as long"
            )
        text += f"; {len(result.trials)} tiles tried"
        if result.failures:
            text += f", {len(result.failures)} failed"
        if result.entry is not None and (verified := result.entry.facts.get("verified")):
            text += f"; verified on the {verified}"
        if result.sentence:
            text += f"; {result.sentence}"
        if result.entry is None:
            text += "; not stored"
        elif not result.kept:
            text += f"; not stored: the table contains a {result.instead} entry"
        if result.interrupted:
            text += "; interrupted"
        return text

    def summary(self, results: list[TuningResult], entries: list[Entry], interrupted: bool) -> None:
        """Print the summary of the run."""
        counts = {source: sum(entry.source == source for entry in entries) for source in SOURCES}
        parts = [f"{count} {WORDS[source]}" for source, count in counts.items() if count]
        print(f"table      {self._options.table}: {', '.join(parts) or 'nothing new'}, for {self._options.device.name}")
        if interrupted:
            left = self._problems - self._ended
            print(f"interrupted: results so far are kept; {left} problems are left, continue with --resume")

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
