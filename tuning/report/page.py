"""The report of a tuning run: one HTML page with embedded figures, which needs neither network nor JavaScript.

This module is imported only for --report, because it imports matplotlib, which is large.
"""

from __future__ import annotations

import base64
import datetime
import html
from collections.abc import Iterable, Sequence
from pathlib import Path

from cunorm.core.files import target, write_whole
from cunorm.tiling import costmodel

from ..measure.result import Trial, TuningResult
from ..search.importance import fastest, importances
from . import figures as figures

LONG = 12  # a list of more failures is folded
#: By source of the times: the label, the noun, the explanation for the reader.
SOURCES = {
    "measured": ("MEASURED", "time", "Times are medians of kernels that ran on the device."),
    "simulated": (
        "SIMULATED",
        "simulated time",
        "No kernel ran on a GPU: every time on this page is that of the kernels' machine code on a simulated clock.",
    ),
    "model": (
        "MODELLED",
        "predicted time",
        "No kernel was timed: every time on this page is a prediction of the cost model.",
    ),
    "rehearsed": (
        "REHEARSED",
        "rehearsed time",
        "The clock did not time a GPU: the numbers show that the tuner works, but say nothing about kernel speed.",
    ),
}
PAGE = "index.html"
#: The element by which a page is known.
GENERATOR = '<meta name="generator" content="cunorm tune">'
CSS = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 75rem; margin: 1rem auto; padding: 0 1rem; }
h1, h2 { line-height: 1.2; } h2 { border-top: 1px solid #ddd; padding-top: 1rem; font-size: 1.2rem; }
img { max-width: 100%; height: auto; } .figures { display: flex; flex-wrap: wrap; gap: .5rem; align-items: flex-start; }
.figures img { width: 36rem; } code { background: #f4f4f4; padding: 0 .2em; } .facts { color: #555; }
.source { font-weight: bold; padding: .5rem .8rem; border-left: .5rem solid; }
.measured { background: #e7f3ee; border-color: #009e73; } .simulated { background: #e5f0f7; border-color: #0072b2; }
.model { background: #fdf2d8; border-color: #e69f00; } .rehearsed { background: #f6e4ee; border-color: #cc79a7; }
.wrong { color: #b00000; font-weight: bold; } div.wrong, li.wrong { background: #fdeaea; padding: .2rem .5rem; }
table { border-collapse: collapse; } td, th { padding: .1rem .7rem; text-align: left; border-bottom: 1px solid #eee; }
td.number, th.number { text-align: right; white-space: nowrap; }
"""


def write(results: Sequence[TuningResult], folder: Path, *, title: str) -> Path:
    """Write the report of a run.

    Parameters
    ----------
    results : sequence of TuningResult
    folder : Path
        Created if it is missing.
    title : str

    Returns
    -------
    Path
        The page ``index.html`` in the folder. An existing page is replaced as a whole.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = target(folder / PAGE)
    write_whole(path, "".join(f"{line}\n" for line in _page(results, title)))
    return path


# ---- facts ----------------------------------------------------------------------------------------------------------


def _us(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{seconds * 1e6:,.{1 if seconds > 1e-4 else 2}f} µs"


def _sorted(results: Sequence[TuningResult]) -> list[TuningResult]:
    """The results by decreasing gain; those without a winner are last."""
    return sorted(results, key=lambda result: (-(figures.gain(result) or 0.0), result.space.problem.describe()))


# ---- the page -------------------------------------------------------------------------------------------------------


def _e(text: object) -> str:
    return html.escape(str(text))


def _image(png: bytes, text: str) -> str:
    return f'<img alt="{_e(text)}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'


def _joined(values: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(values))


def _page(results: Sequence[TuningResult], title: str) -> Iterable[str]:
    yield f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{_e(title)}</title>'
    yield GENERATOR
    yield f'<meta name="viewport" content="width=device-width"><style>{CSS}</style></head><body>'
    yield f"<h1>{_e(title)}</h1>"
    ordered = _sorted(results)
    sources = [source for source in SOURCES if any(result.source == source for result in results)]
    for source in sources:
        word, _, sentence = SOURCES[source]
        count = "" if len(sources) == 1 else f" {sum(r.source == source for r in results)} of {len(results)} problems."
        yield f'<p class="source {source}">{word}.{count} {_e(sentence)}</p>'
    now = datetime.datetime.now().astimezone().isoformat(" ", "minutes")
    devices = _joined(result.space.device.name for result in results)
    versions = _joined(f"{name} {value}" for result in results for name, value in result.software.items())
    heads = [f"device: {devices}"] if devices else []
    heads += [f"problems: {len(results)}", f"date: {now}", *([f"software: {versions}"] if versions else [])]
    yield f'<p class="facts">{_e("; ".join(heads))}</p>'
    if not results:
        yield "<p>No problem was tuned in this run: there is nothing to show.</p></body></html>"
        return
    yield from _wrong(ordered)
    times = _joined(SOURCES[source][1] for source in sources)
    yield _image(figures.summary(ordered, times), "summary")
    yield f"<p>The floor is the time for the problem's bytes at the bandwidth of a copy{_e(_bandwidths(results))}.</p>"
    yield from _contents(ordered, times)
    for at, result in enumerate(ordered, 1):
        yield from _section(result, at)
    yield "</body></html>"


def _bandwidths(results: Sequence[TuningResult]) -> str:
    if {result.source for result in results} == {"model"}:
        return f": {costmodel.ACHIEVABLE:g} of the device's peak"
    found = [result.bandwidth / 1e9 for result in results if result.bandwidth]
    where = "on the simulated GPU" if {result.source for result in results} == {"simulated"} else "in this run"
    return f": {min(found):,.0f} to {max(found):,.0f} GB/s {where}" if found else ""


def _wrong(results: Sequence[TuningResult]) -> Iterable[str]:
    """The count of tiles with wrong results. It precedes all other results on the page."""
    counts = {at: sum(one.failure == "wrong" for one in result.trials) for at, result in enumerate(results, 1)}
    if total := sum(counts.values()):
        links = ", ".join(f'<a href="#p{at}">{at}</a> ({count})' for at, count in counts.items() if count)
        yield f'<div class="wrong">WRONG RESULTS: {total} tiles compute wrong results; problems {links}</div>'


def _contents(results: Sequence[TuningResult], times: str) -> Iterable[str]:
    yield f'<table><tr><th class="number">#</th><th>problem</th><th class="number">{_e(times)}</th>'
    yield '<th class="number">default</th><th class="number">gain</th><th>chosen</th><th>failed</th></tr>'
    for at, result in enumerate(results, 1):
        gain, chosen = figures.gain(result), result.winner
        cells = [
            "" if chosen is None else _us(figures.seconds(result, chosen)),
            _us(figures.seconds(result, result.space.default)),
            "" if gain is None else f"{gain:.2f}",
        ]
        name = "none" if chosen is None else "the default" if chosen == result.space.default else chosen.text
        yield f'<tr><td class="number">{at}</td><td><a href="#p{at}">{_e(figures.label(result))}</a></td>'
        yield "".join(f'<td class="number">{_e(cell)}</td>' for cell in cells)
        yield f'<td>{_e(name)}</td><td class="number">{len(result.failures) or ""}</td></tr>'
    yield "</table>"


def _section(result: TuningResult, at: int) -> Iterable[str]:
    noun = SOURCES[result.source][1]
    yield f'<h2 id="p{at}">{at}. {_e(figures.label(result))}</h2>'
    word = SOURCES[result.source][0].lower()
    yield f'<p class="facts">{_e(result.space.problem.describe())}; {word}, {_e(result.space.device.name)}</p>'
    yield f"<p>{' '.join(_sentences(result, noun))}</p>"
    yield from _failures(result)
    if not result.trials:
        yield "<p>No tile was tried in this run.</p>"
        return
    yield f'<div class="figures">{_image(figures.history(result, noun), f"{noun} of each trial")}'
    if figures.timed(result):
        yield _image(figures.strategies(result, noun), f"{noun} by strategy")
    timed = [(trial.tile, trial.seconds) for trial in figures.timed(result) if trial.seconds is not None]
    shares = importances(result.space.tiles, timed)
    if isinstance(shares, str):
        yield f"</div><p>{_e(shares)}</p>"
    else:
        apart = f"fastest {fastest([seconds for _, seconds in timed])} of {len(timed)} tiles"
        yield f"{_image(figures.importance(shares, apart), 'importance of the parameters')}</div>"


def _sentences(result: TuningResult, noun: str) -> Iterable[str]:
    """The result of a problem as escaped sentences."""
    default, winner, gain = result.space.default, result.winner, figures.gain(result)
    if winner is None:
        yield "<b>No tile was chosen.</b>"
    else:
        timing = result.timings.get(winner)
        spread = ""
        if timing is not None and result.source not in ("model", "simulated"):
            spread = f" (quartiles {_us(timing.q25)} and {_us(timing.q75)}, {timing.samples} samples)"
        stays = ", which is the default" if winner == default else ""
        took = _e(_us(figures.seconds(result, winner)))
        yield f"Winner: <code>{_e(winner.text)}</code>{stays}, {noun} <b>{took}</b>{_e(spread)}."
    if winner != default:
        yield f"Default: <code>{_e(default.text)}</code>, {_e(_us(figures.seconds(result, default)))}."
    if gain is not None and winner != default:
        yield f"Gain: <b>{gain:.3f} times</b>."
    yield f"Floor: {_e(_us(figures.floor(result)))}."
    yield f"{len(result.trials)} trials in a space of {len(result.space)} tiles, {result.seconds:.1f} s."
    if result.entry is not None and "verified" in result.entry.facts:
        yield f"Verified: {_e(result.entry.facts['verified'] or 'no')}."
    if result.interrupted:
        yield "<b>Interrupted.</b>"
    if not result.kept:
        yield f"Not stored: the table contains a {_e(result.instead)} entry, which is better evidence."
    if result.sentence:
        yield f"<b>{_e(result.sentence)}</b>"


def _failures(result: TuningResult) -> Iterable[str]:
    """The tiles that failed, by kind. Wrong results are first and never folded."""
    kinds: dict[str, list[Trial]] = {}
    for trial in sorted(result.failures, key=lambda trial: trial.failure != "wrong"):
        kinds.setdefault(str(trial.failure), []).append(trial)
    for kind, trials in kinds.items():
        mark = ' class="wrong"' if kind == "wrong" else ""
        word = "WRONG RESULTS" if kind == "wrong" else f"failed, {_e(kind)}"
        items = "".join(f"<li{mark}><code>{_e(one.tile.text)}</code>: {_e(one.sentence)}</li>" for one in trials)
        if kind == "wrong" or len(trials) <= LONG:
            yield f"<p{mark}>{word}: {len(trials)}</p><ul>{items}</ul>"
        else:
            yield f"<details><summary>{word}: {len(trials)}</summary><ul>{items}</ul></details>"
