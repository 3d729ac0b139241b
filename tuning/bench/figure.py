"""The figure of a bench: one group of bars per shape. A bar is a contender's share of a copy's bandwidth."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cunorm.core.opspec import spec_of

from .result import cold, fraction, refusal

#: Colours of the bars. They differ in lightness, and cunorm's bars are outlined, for readers who see no colours.
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
ROW_INCHES, WIDTH_INCHES, HEAD_INCHES = 0.19, 10.0, 1.6
MARKS = {"missing": "missing", "not offered": "–", "failed": "failed", "wrong": "wrong"}


def _short(problem: Mapping[str, Any]) -> str:
    """A short label of a problem for the axis."""
    spec = spec_of(problem["op"])
    sizes = ", ".join(f"{name} {problem[field]}" for name, field in spec.sizes.items())
    layout = f" {problem['layout']}" if len(spec.layouts) > 1 else ""
    added = "".join(f" with {name}" for name in problem.get("extras", ()))  # older results have no such field
    return f"{problem['op']}{added}\n{sizes}{layout} {problem['dtype']}"


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


def figure(found: Mapping[str, Any], path: Path) -> None:
    """Draw a measured bench.

    Parameters
    ----------
    found : mapping
        Result of `cunorm.tuning.bench.result.document`.
    path : Path
        PNG, SVG or PDF.

    Raises
    ------
    ValueError
        If nothing was measured.
    """
    sentence = refusal(found)
    if sentence is not None:
        raise ValueError(f"no figure: {sentence}")
    from matplotlib.figure import Figure

    present = {one["name"] for result in found["results"] for one in result["contenders"] if one["kernels"] is not None}
    names = [name for name in COLOURS if name in present]
    rows = (len(names) + 1) * len(found["results"])
    drawing = Figure(figsize=(WIDTH_INCHES, HEAD_INCHES + ROW_INCHES * rows), layout="constrained")
    axes = drawing.add_subplot()
    ticks, labels, at, widest = [], [], 0.0, 1.0
    for result in found["results"]:
        begin = at
        states = {one["name"]: one for one in result["contenders"]}
        for name in names:
            one = states.get(name)
            share = None if one is None else fraction(found, result, one)
            if one is not None and share is not None:
                own = name.startswith("cunorm")
                axes.barh(at, share, 0.9, color=COLOURS[name], edgecolor="black" if own else "none", linewidth=0.6)
                seconds = one["kernels"]["seconds"]
                low, high = (share * seconds / one["kernels"][part] for part in ("q75", "q25"))
                # A quartile that equals the median may be on its other side by a rounding.
                error = [[max(0.0, share - low)], [max(0.0, high - share)]]
                axes.errorbar(share, at, xerr=error, color="black", linewidth=0.8)
                widest = max(widest, high)
                axes.text(high + 0.008, at, f"{share:.0%}  {_us(seconds)}", va="center", fontsize=6.5)
            elif one is not None:
                axes.text(
                    0.008, at, f"{name}: {MARKS.get(one['state'], one['state'])}", va="center", fontsize=6, color="0.4"
                )
            at += 1
        ticks.append((begin + at - 1) / 2)
        labels.append(_short(result["problem"]) + ("" if cold(found, result) else " (L2 not cold)"))
        at += 1
    axes.set_yticks(ticks, labels, fontsize=7)
    axes.invert_yaxis()
    axes.set_ylim(at - 0.5, -1)
    axes.set_xlim(0, 1.15 * widest)  # small shapes whose arrays are in the L2 may be faster than a copy
    axes.axvline(1, color="0.5", linewidth=0.8, linestyle=":")
    axes.set_xlabel(
        "byte floor / time, as a share of a copy's bandwidth; dotted line: a copy; whiskers: quartiles",
        fontsize=8,
    )
    handles = [axes.barh(-10, 0, color=COLOURS[name], label=name) for name in names]
    drawing.legend(handles=handles, loc="outside lower center", ncols=len(handles) or 1, fontsize=7, frameon=False)
    bandwidth = found["copy_bandwidth"] / 1e9
    title = f"{found['device']['name']}, {found['date'][:10]}: a copy moves {bandwidth:.0f} GB/s; L2 cold"
    axes.set_title("\n".join([title, *_absent(found, present)]), fontsize=8)
    drawing.savefig(path, dpi=150)
