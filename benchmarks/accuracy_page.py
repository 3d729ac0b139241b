"""Write docs/speed/accuracy.md and its picture from the results of benchmarks/accuracy.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cunorm.tuning.verify.inputs import CONSTANT, OFFSET, OUTLIER, WIDTH

from cunorm.ops.registry import OPS
from docs.drawings.themes import save

DEVICE = "H200"
DTYPES_SHOWN = ("float32", "bfloat16")
KINDS_SHOWN = ("plain", "far from zero", "outlier first", "outlier second", "wide", "constant")
#: Elements per slice -> number of slices. Long slices are fewer, because they take long. One slice is not enough: the
#: error of a mean is one sample of many.
LENGTHS = {10**3: 64, 10**5: 16, 10**6: 8}
#: Maximum error of the mean and the rstd of every strategy, as a multiple of NumPy's error, or of the error of rounding
#: the exact value once if that is larger.
GOAL = 4.0
STATISTICS = ("mean", "rstd", "invstd")
#: All ops but batch_norm_gather_stats, which computes in float64, and ops with the kernels of another op.
ACTIVE = [
    name
    for name, op in OPS.items()
    if "world" not in op.sizes and all(one.kernels_of is None for one in op.strategies.values())
]


def beside_numpy(rows: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], str, float]]:
    """Yield each row of a strategy, a statistic, and its error over the larger of NumPy's error and one rounding."""
    key = ("op", "layout", "dtype", "kind", "length")
    of_numpy = {tuple(row[k] for k in key): row["results"] for row in rows if row["contender"] == "numpy"}
    for row in rows:
        if row["contender"] in ("numpy", "torch"):
            continue
        for name in STATISTICS:
            if name in row["results"]:
                own, other = row["results"][name], of_numpy[tuple(row[k] for k in key)][name]
                yield row, name, own["error"] / max(other["error"], other["rounding"], 1e-300)


HEAD = """# Accuracy

The errors of the results of every strategy, measured on the CPU executor. `python benchmarks/accuracy.py` writes this
page from `benchmarks/results/accuracy.json`.

**{verdict}** {worst}

![{alternative}](../pictures/accuracy.svg)

A point is one strategy, tile, dtype and length. Its height is its largest error over NumPy's on the same data. Lower
ratios are drawn at {lowest:g}.

## What is compared

- **Exact** is the float64 oracle (`cunorm.reference`) on the same rounded inputs.
- **numpy** is the formula in NumPy's float32, which sums pairwise. **torch** is {torch}.
- **Data**: N(0, 1) ("plain"); N(0, 1) plus {offset:g} ("far from zero"); N(0, 1) with {outlier:g} as the first or the
  second element ("outlier first", "outlier second"); N(0, 1) times {width:g} ("wide"); {constant:g} in all elements
  ("constant").
- **Slices** have {lengths} elements. A problem has {counts} slices of these lengths, in the same order. A
  slice is a group of GroupNorm, a row of LayerNorm or a channel of BatchNorm. For bfloat16, torch too gets float32
  parameters.
- Each strategy runs with the best predicted tile of each of its kernels on an {device}, and with the tile with the
  fewest threads, whose chains of additions are the longest. The CPU executor does not flush denormals, a GPU does.

A cell shows the largest error over all lengths and tiles, in units in the last place of the exact value (ulp). The
number in brackets is the largest error as a share of its bound, which is the limit in the tests and in the tuner
(`cunorm/ops/common/tolerance.py`). Near zero, as for the mean of N(0, 1), an ulp is far smaller than the rounding of
the terms, so the share of the bound is more informative. A mean or rstd is bold if its error is more than {goal:g}
times NumPy's.
"""
ALTERNATIVE = (
    "Two charts, for mean and rstd: points of GroupNorm, LayerNorm and BatchNorm for six kinds of data. A red line "
    "marks {goal:g} times NumPy's error. {points}."
)
LOWEST = 0.01  # a logarithmic axis cannot show 0
TITLES = {"float32": "float32", "bfloat16": "bfloat16, statistics and parameters float32"}


def _worst(rows: list[dict[str, Any]], name: str) -> tuple[float, float] | None:
    """Largest error of a result in ulp, and largest share of its bound; None without rows."""
    found = [row["results"][name] for row in rows if name in row["results"]]
    return (max(one["ulp"] for one in found), max(one["bound"] for one in found)) if found else None


def _number(value: float) -> str:
    return "inf" if value >= 1e99 else f"{value:.2g}" if value < 100 else f"{value:,.0f}"


def _table(rows: list[dict[str, Any]], name: str, over: Mapping[tuple[Any, ...], float]) -> Iterator[str]:
    """Table of one result of one op in one dtype: one line per contender, one column per kind of data."""
    yield f"| {name} | " + " | ".join(KINDS_SHOWN) + " |"
    yield "|---|" + "---|" * len(KINDS_SHOWN)
    layouts = sorted({row["layout"] for row in rows})
    contenders = dict.fromkeys((row["contender"], row["layout"]) for row in rows if row["tile"] is not None)
    for contender, layout in (*contenders, ("numpy", "NCHW"), ("torch", "NCHW")):
        own = [row for row in rows if (row["contender"], row["layout"]) == (contender, layout)]
        cells = []
        for kind in KINDS_SHOWN:
            of_kind = [row for row in own if row["kind"] == kind]
            worst = _worst(of_kind, name)
            cell = "–" if worst is None else f"{_number(worst[0])} ({_number(worst[1])})"
            bold = any(over.get((id(row), name), 0.0) > GOAL for row in of_kind)
            cells.append(f"**{cell}**" if bold else cell)
        if any(cell != "–" for cell in cells):
            of_layout = f" {layout}" if len(layouts) > 1 and contender not in ("numpy", "torch") else ""
            yield f"| {contender}{of_layout} | " + " | ".join(cells) + " |"


def _summary(rows: list[dict[str, Any]]) -> str:
    ratio, row, name = max(((ratio, row, name) for row, name, ratio in beside_numpy(rows)), key=lambda one: one[0])
    return (
        f"The largest error of a mean or rstd, over NumPy's of the same data, is {ratio:.1f}: {name} of {row['op']} "
        f"{row['layout']} `{row['contender']}`, {row['dtype']}, {row['kind']}, {row['length']:,} elements."
    )


def page(document: Mapping[str, Any]) -> str:
    """Return the text of the page for a document of results."""
    rows = document["rows"]
    over = {(id(row), name): ratio for row, name, ratio in beside_numpy(rows)}
    missed = sum(ratio > GOAL for ratio in over.values())
    verdict = f"Mean and rstd are never more than {GOAL:g} times as far off as NumPy's pairwise float32."
    if missed:
        verdict = f"Mean or rstd is more than {GOAL:g} times as far off as NumPy's in {missed} of {len(over)} results."
    facts = {
        "torch": f"PyTorch {document['torch']} on the CPU" if document["torch"] else "missing from these results",
        "lengths": " and ".join(f"{length:,}" for length in LENGTHS),
        "counts": ", ".join(map(str, LENGTHS.values())),
        "offset": OFFSET, "outlier": OUTLIER, "width": WIDTH, "constant": CONSTANT, "device": DEVICE, "goal": GOAL,
        "lowest": LOWEST,
    }  # fmt: skip
    points = "All points are" if not missed else f"All points but {missed} are"
    facts["alternative"] = ALTERNATIVE.format(points=f"{points} at or below it", goal=GOAL)
    lines = [HEAD.format(verdict=verdict, worst=_summary(rows), **facts)]
    for op in ACTIVE:
        lines.append(f"## {op}\n")
        for dtype in DTYPES_SHOWN:
            own = [row for row in rows if (row["op"], row["dtype"]) == (op, dtype)]
            if own:
                lines.append(f"### {op}, {TITLES[dtype]}\n")
                for name in dict.fromkeys(name for row in own for name in row["results"]):
                    lines += [*_table(own, name, over), ""]
    return "\n".join(lines)


def draw(document: Mapping[str, Any], path: Path) -> None:
    """Draw errors of mean and rstd over NumPy's, by kind of data: one point per strategy, tile, dtype and length."""
    from matplotlib import pyplot as plt
    from matplotlib import rcParams

    figure, axes = plt.subplots(2, 1, figsize=(6.2, 6.4), sharex=True, layout="constrained")
    names = {"mean": ("mean",), "rstd": ("rstd", "invstd")}
    found = list(beside_numpy(document["rows"]))
    for axis, (title, wanted) in zip(axes, names.items(), strict=True):
        _draw_points(axis, [(row, ratio) for row, name, ratio in found if name in wanted])
        axis.axhline(1, color=rcParams["text.color"], linewidth=1, label="as far off as NumPy")
        axis.axhline(GOAL, color="tab:red", linewidth=1.2, linestyle="--", label=f"{GOAL:g} times as far: the goal")
        axis.set(yscale="log", xlim=(-0.5, 5.5))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.set_title(title, loc="left", fontweight="bold")
        axis.grid(axis="y")
    axes[1].set_xticks(range(len(KINDS_SHOWN)), [kind.replace(" ", "\n", 1) for kind in KINDS_SHOWN])
    figure.supylabel("largest error over NumPy's (less is better)", fontsize=9)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper left", ncols=2)
    save(figure, path, f"{len(found)} errors of mean and rstd; {_summary(document['rows'])}")
    plt.close(figure)


def _draw_points(axis: Any, points: list[tuple[dict[str, Any], float]]) -> None:
    """Draw one point per row, in one colour per op."""
    families = {"group_norm": "tab:blue", "layer_norm": "tab:green", "batch_norm_stats": "tab:orange"}
    for shift, (op, colour) in enumerate(families.items()):
        own = [(row, ratio) for row, ratio in points if row["op"] == op]
        # Lengths are drawn side by side, so that points of equal height do not hide each other.
        wide = [KINDS_SHOWN.index(row["kind"]) + 0.26 * (shift - 1) for row, _ in own]
        spread = [0.07 * (list(LENGTHS).index(row["length"]) - 1) for row, _ in own]
        where = [x + dx for x, dx in zip(wide, spread, strict=True)]
        axis.scatter(where, [max(ratio, LOWEST) for _, ratio in own], s=12, color=colour, alpha=0.6, label=op)
