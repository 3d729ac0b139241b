"""The figures of the tuner's report, as PNGs: a summary of all problems; per problem history, importance, strategies.

Figures are made without pyplot, whose global state would be shared by threads. The colours come from Okabe and Ito's
palette, which colour-blind readers can distinguish. Marks also differ in shape.
"""

from __future__ import annotations

import io
import itertools
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import quantiles
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from cunorm.core.strategy import Tile
from cunorm.tiling import costmodel
from cunorm.traffic.sampling import floor_bytes

from ..measure.result import Trial, TuningResult

BLUE, ORANGE, RED, GREEN, GREY = "#0072B2", "#E69F00", "#D55E00", "#009E73", "#666666"
DPI, SIZE = 110, (6.4, 3.7)  # dots per inch; width and height of a problem's figures in inches
ROW = 0.27  # height of a problem in the summary in inches
TALL = 20  # a summary of more problems shows the axis of times at the top too
NARROW = 5.0  # a log axis has evenly spaced ticks if largest / smallest time is below this


# ---- facts of a result ----------------------------------------------------------------------------------------------


def seconds(result: TuningResult, tile: Tile | None) -> float | None:
    """The final time of a tile in seconds, measured, simulated or predicted; None if there is none."""
    timing = None if tile is None else result.timings.get(tile)
    return None if timing is None else timing.seconds


def gain(result: TuningResult) -> float | None:
    """The speed of the winner divided by the speed of the default."""
    chosen, default = seconds(result, result.winner), seconds(result, result.space.default)
    return default / chosen if chosen and default else None


def floor(result: TuningResult) -> float | None:
    """The byte floor in seconds: the time to move the problem's fewest bytes at the bandwidth of a copy."""
    bandwidth = result.bandwidth
    if result.source == "model":
        bandwidth = costmodel.ACHIEVABLE * result.space.device.bandwidth
    moved = floor_bytes(result.space.problem)
    return moved / bandwidth if bandwidth and moved else None


def label(result: TuningResult) -> str:
    """A short name of the problem."""
    problem = result.space.problem
    layout = f"{problem.layout} " if len(problem.spec.layouts) > 1 and problem.HxW > 1 else ""
    return f"{problem.op} {problem.dtype} {layout}{problem.sizes_text}{problem.options_text}"


def timed(result: TuningResult) -> list[Trial]:
    """The trials that have a time and whose tile did not fail later."""
    failed = {trial.tile for trial in result.failures}
    return [trial for trial in result.trials if trial.seconds is not None and trial.tile not in failed]


# ---- figures --------------------------------------------------------------------------------------------------------


def _png(figure: Figure) -> bytes:
    kept = io.BytesIO()
    FigureCanvasAgg(figure)
    figure.savefig(kept, format="png")
    figure.clear()
    return kept.getvalue()


def _new(
    width: float, height: float, title: str, left: float | None = None, bottom: float = 0.55
) -> tuple[Figure, Axes]:
    """A figure and its axes.

    With ``left``, the margins for labels are ``left`` and ``bottom`` inches. Fixed margins take half the time of a
    constrained layout.
    """
    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained" if left is None else None)
    axes = figure.subplots()
    if left is not None:
        figure.subplots_adjust(left / width, bottom / height, 1 - 0.2 / width, 1 - 0.35 / height)
    axes.set_title(title, fontsize=11, loc="left")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(labelsize=9)
    axes.set_axisbelow(True)
    return figure, axes


def _log_axis(axes: Axes, which: Literal["x", "y"], times: Sequence[float], room: float = 1.0) -> None:
    """Make a log axis of times with readable ticks for any range. ``room`` > 1 adds space after the largest time."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    low, high = min(times), max(times)
    margin = max(1.02, (high / low) ** 0.06)
    getattr(axes, f"set_{which}scale")("log")
    getattr(axes, f"set_{which}lim")(low / margin, high * margin * margin ** (3 * (room - 1)))
    if high / low < NARROW:
        axis.set_major_locator(MaxNLocator(6))
    else:
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high / low < 1000 else (1.0,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())
    axes.grid(axis=which, color="#dddddd", linewidth=0.8)


def summary(results: Sequence[TuningResult], times: str) -> bytes:
    """The chosen tile's time beside the default's and the floor, one row per problem, the first on top.

    Parameters
    ----------
    results : sequence of TuningResult
    times : str
        Label of the axis: the kind of times.
    """
    names = [f"{label(result)}  [{number}]" for number, result in enumerate(results, 1)]
    rows = [
        {"floor": floor(one), "default": seconds(one, one.space.default), "chosen": seconds(one, one.winner)}
        for one in results
    ]
    found = [{name: value * 1e6 for name, value in row.items() if value} for row in rows]
    width = 7 + 0.065 * max(map(len, names))
    figure, axes = _new(width, 1.7 + ROW * len(rows), "chosen, default and floor of each problem")
    for place, row in enumerate(found):
        if row:
            ends = min(row.values()), max(row.values())
            axes.plot(ends, (place, place), color="#cccccc", linewidth=1.5, zorder=1)
    marks = (("floor", "|", GREY, 90), ("default", "o", ORANGE, 46), ("chosen", "D", BLUE, 22))
    for order, (name, mark, colour, size) in enumerate(marks, 2):
        places = [place for place, row in enumerate(found) if name in row]
        how: dict[str, Any] = {"facecolors": "none", "edgecolors": colour} if mark == "o" else {"color": colour}
        axes.scatter(
            [found[place][name] for place in places], places, marker=mark, s=size, linewidths=1.8, zorder=order,
            label=name, **how,
        )  # fmt: skip
    axes.set_yticks(range(len(rows)), names, fontsize=9)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    if any(found):
        _log_axis(axes, "x", [time for row in found for time in row.values()])
    axes.grid(axis="y", color="#eeeeee", linewidth=0.8)
    gains = ["no tile chosen" if one.winner is None else f"{gain(one) or math.nan:.2f}×" for one in results]
    right = axes.secondary_yaxis("right")
    right.set_yticks(range(len(rows)), gains, fontsize=9)
    right.tick_params(length=0)
    right.spines["right"].set_visible(False)
    if len(rows) > TALL:
        axes.tick_params(axis="x", top=True, labeltop=True)
    axes.set_xlabel(f"{times}, µs", fontsize=10)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper right", ncols=3, fontsize=9, frameon=False)
    return _png(figure)


def history(result: TuningResult, times: str) -> bytes:
    """The trials in order, the best time so far, the default's time, and failures as crosses at the top."""
    figure, axes = _new(*SIZE, f"{times} of each trial", 0.95, 0.85)
    trials = [(number, one.tile, 1e6 * (one.seconds or 0.0)) for number, one in enumerate(result.trials, 1)]
    failed = {one.tile for one in result.failures}
    good = [(number, time) for number, tile, time in trials if time and tile not in failed]
    revoked = [(number, time) for number, tile, time in trials if time and tile in failed]
    bad = [number for number, _, time in trials if not time]
    default = 1e6 * (seconds(result, result.space.default) or 0.0)
    seen = [time for _, time in good + revoked] + ([default] if default else [])
    if seen:
        _log_axis(axes, "y", seen, 2.0 if bad else 1.0)
    else:
        axes.set_yticks([])
        axes.text(0.5, 0.5, "no tile has a time", ha="center", transform=axes.transAxes, color=GREY)
    if default:
        axes.axhline(default, color=ORANGE, linestyle="--", linewidth=1.6, zorder=2.5, label="default")
    if good:
        x, y = zip(*good, strict=True)
        best = list(itertools.accumulate(y, min))
        line: dict[str, Any] = {"where": "post", "color": BLUE, "linewidth": 1.8, "label": "best so far"}
        axes.step((*x, len(trials) + 0.5), (*best, best[-1]), **line)
        axes.plot(x, y, "o", color=GREY, markersize=4.5, label="a trial")
    chosen = [(number, time) for number, tile, time in trials if time and tile == result.winner][:1]
    top = axes.get_xaxis_transform()
    crosses = {"markeredgewidth": 2, "transform": top}
    for points, mark, colour, size, name, others in (
        (chosen, "D", BLUE, 7, "chosen", {}),
        (revoked, "o", RED, 6, "failed later", {"markerfacecolor": "none"}),
        ([(number, 0.95) for number in bad], "x", RED, 7, "failed", crosses),
    ):
        if points:
            axes.plot(*zip(*points, strict=True), mark, color=colour, markersize=size, label=name, **others)
    axes.set_xlim(0.3, len(trials) + 0.7)
    axes.xaxis.set_major_locator(MaxNLocator(9, integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
    axes.set_xlabel("trial", fontsize=10)
    axes.set_ylabel("µs", fontsize=10)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=6, fontsize=9, frameon=False, columnspacing=1.2)
    return _png(figure)


def importance(shares: Mapping[str, float], apart: str) -> bytes:
    """Each parameter's share of the importance for the fastest tiles, which ``apart`` names."""
    names = sorted(shares, key=lambda name: shares[name])
    left = 0.4 + 0.09 * max(map(len, names))
    figure, axes = _new(SIZE[0], 1.3 + 0.36 * len(names), "importance of the parameters", left)
    bars = axes.barh(names, [shares[name] for name in names], color=GREEN, height=0.65)
    axes.bar_label(bars, fmt="{:.2f}", padding=3, fontsize=9)
    axes.set_xlim(0, 1.12 * max(max(shares.values()), 0.01))
    axes.grid(axis="x", color="#dddddd", linewidth=0.8)
    axes.set_xlabel(f"share of importance for the {apart} (PED-ANOVA)", fontsize=10)
    return _png(figure)


def strategies(result: TuningResult, times: str) -> bytes:
    """The times of each strategy's tiles, with median and quartiles from four times on. At least one time is needed."""
    found: dict[str, list[float]] = {one.tile.strategy: [] for one in result.trials}
    for one in timed(result):
        found[one.tile.strategy].append(1e6 * (one.seconds or 0.0))
    failed = Counter(tile.strategy for tile in {one.tile for one in result.failures})
    names = sorted(found, key=lambda name: min(found[name], default=math.inf), reverse=True)  # the fastest on top
    figure, axes = _new(SIZE[0], 1.3 + 0.62 * len(names), f"{times} by strategy", 1.75)
    chance, labels = random.Random(0), []
    for place, name in enumerate(names):
        values = found[name]
        if len(values) >= 4:
            low, middle, high = quantiles(values, n=4, method="inclusive")
            axes.barh(place, high - low, left=low, height=0.6, color="#d8d8d8", zorder=1)
            axes.plot([middle, middle], [place - 0.3, place + 0.3], color=ORANGE, linewidth=2.2, zorder=2)
        spread = [place + chance.uniform(-0.16, 0.16) for _ in values]
        axes.plot(values, spread, "o", color=BLUE, markersize=4, alpha=0.65, markeredgewidth=0, zorder=3)
        labels.append(f"{name}\n{len(values)} tiles" + (f", {failed[name]} failed" if failed[name] else ""))
    axes.set_yticks(range(len(names)), labels)
    axes.set_ylim(-0.6, len(names) - 0.4)
    _log_axis(axes, "x", [time for values in found.values() for time in values])
    axes.set_xlabel("µs", fontsize=10)
    return _png(figure)
