"""The figure of a bench: one group of bars per shape. A bar is a contender's share of a copy's bandwidth."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cunorm.core.opspec import spec_of

from .result import cold, fraction, refusal

#: Colours of the bars. They differ in lightness, and cunorm's bars are outlined, for readers who see no colours. Other
#: colours are those of matplotlib's settings, so that a figure may have a dark background.
COLOURS = {
    "cunorm, default tile": "#08519c",
    "cunorm, table tile": "#3182bd",
    "torch": "#fdae6b",
    "torch.compile": "#e6550d",
    "liger": "#74c476",
    "quack": "#9e9ac8",
    "flashinfer": "#fa9fb5",
    "apex": "#969696",
}
ROW_INCHES, WIDTH_INCHES, HEAD_INCHES = 0.16, 6.4, 1.1
MARKS = {"missing": "missing", "not offered": "–", "failed": "failed", "wrong": "wrong"}


def _short(problem: Mapping[str, Any]) -> str:
    """A short label of a problem, which stands above its bars."""
    spec = spec_of(problem["op"])
    sizes = ", ".join(f"{name} {problem[field]}" for name, field in spec.sizes.items())
    layout = f" {problem['layout']}" if len(spec.layouts) > 1 else ""
    added = "".join(f" with {name}" for name in problem.get("extras", ()))  # older results have no such field
    return f"{problem['op']}{added}{layout} {problem['dtype']}: {sizes}"


def _us(seconds: float) -> str:
    """Microseconds with three digits, or all digits before the point."""
    microseconds = seconds * 1e6
    return f"{microseconds:.0f} us" if microseconds >= 1000 else f"{microseconds:.3g} us"


def _absent(found: Mapping[str, Any], present: set[str]) -> list[str]:
    """A line that names the contenders without a time for any shape, with their states."""
    states: dict[str, dict[str, None]] = {}
    for result in found["results"]:
        for one in result["contenders"]:
            if one["name"] not in present:
                states.setdefault(one["name"], {})[one["state"]] = None
    told = [f"{name} ({', '.join(of)})" for name, of in states.items()]
    return [f"not timed: {', '.join(told)}"] if told else []


def _bar(axes: Any, at: float, name: str, share: float, kernels: Mapping[str, float]) -> float:
    """Draw one time as a bar with its quartiles and its numbers; return the end of the whisker."""
    from matplotlib import rcParams

    ink = rcParams["text.color"]
    edge = ink if name.startswith("cunorm") else "none"
    axes.barh(at, share, 0.9, color=COLOURS[name], edgecolor=edge, linewidth=0.6)
    low, high = (share * kernels["seconds"] / kernels[part] for part in ("q75", "q25"))
    # A quartile that equals the median may be on its other side by a rounding.
    error = [[max(0.0, share - low)], [max(0.0, high - share)]]
    axes.errorbar(share, at, xerr=error, color=ink, linewidth=0.8)
    axes.text(high + 0.012, at, f"{share:.0%}  {_us(kernels['seconds'])}", va="center", fontsize=7.5)
    return high


def _group(axes: Any, found: Mapping[str, Any], result: Mapping[str, Any], names: list[str], at: float) -> float:
    """Draw the bars of one problem below each other, from ``at``; return the end of the longest one."""
    states = {one["name"]: one for one in result["contenders"]}
    label = _short(result["problem"]) + ("" if cold(found, result) else " (L2 not cold)")
    axes.text(0, at, label, va="center", fontsize=8, fontweight="bold")
    longest = 0.0
    for place, name in enumerate(names, 1):
        one = states.get(name)
        share = None if one is None else fraction(found, result, one)
        if one is not None and share is not None:
            longest = max(longest, _bar(axes, at + place, name, share, one["kernels"]))
        elif one is not None:
            axes.text(0.008, at + place, f"{name}: {MARKS.get(one['state'], one['state'])}", va="center", fontsize=7.5)
    return longest


def drawn(found: Mapping[str, Any]) -> Any:
    """Draw a measured bench.

    Parameters
    ----------
    found : mapping
        Result of `cunorm.tuning.bench.result.document`.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    ValueError
        If nothing was measured.
    """
    sentence = refusal(found)
    if sentence is not None:
        raise ValueError(f"no figure: {sentence}")
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    present = {one["name"] for result in found["results"] for one in result["contenders"] if one["kernels"] is not None}
    names = [name for name in COLOURS if name in present]
    rows = (len(names) + 1.6) * len(found["results"])
    drawing = Figure(figsize=(WIDTH_INCHES, HEAD_INCHES + ROW_INCHES * rows), layout="constrained")
    axes = drawing.add_subplot()
    at, widest = 0.0, 1.0
    for result in found["results"]:
        widest = max(widest, _group(axes, found, result, names, at))
        at += len(names) + 1.6
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    axes.set_ylim(at - 0.6, -0.8)
    axes.set_xlim(0, 1.22 * widest)  # small shapes whose arrays are in the L2 may be faster than a copy
    axes.axvline(1, color=rcParams["text.color"], linewidth=0.8, linestyle=":", zorder=0)
    axes.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.set_xlabel("share of a copy's bandwidth (dotted line: a copy); whiskers: quartiles", fontsize=8)
    axes.tick_params(labelsize=8)
    handles = [axes.barh(-10, 0, color=COLOURS[name], label=name) for name in names]
    bandwidth = found["copy_bandwidth"] / 1e9
    title = f"{found['device']['name']}, {found['date'][:10]}: a copy moves {bandwidth:.0f} GB/s; L2 cold"
    title = "\n".join([title, *_absent(found, present)])
    ncols = min(len(handles) or 1, 3)
    place: dict[str, Any] = {"loc": "outside upper left", "alignment": "left", "frameon": False}
    drawing.legend(handles=handles, ncols=ncols, fontsize=8, title=title, title_fontsize=8.5, **place)
    return drawing


def figure(found: Mapping[str, Any], path: Path) -> None:
    """Draw a measured bench into a file, as `drawn` does.

    Parameters
    ----------
    found : mapping
        Result of `cunorm.tuning.bench.result.document`.
    path : Path
        PNG, SVG or PDF.
    """
    drawn(found).savefig(path, dpi=150)
