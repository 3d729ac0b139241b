"""How many times faster cunorm is than each peer: the table of the README, and the picture docs/pictures/speed.svg."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cunorm.tuning.bench.result import compared, geometric_mean, speedups

from docs.drawings.themes import save

#: Peer -> op -> the ratios of all shapes.
Ratios = Mapping[str, Mapping[str, Sequence[float]]]
Documents = Sequence[Mapping[str, Any]]
#: Colour and marker of each peer in the picture.
PEERS = {"torch": ("#e8743b", "o"), "torch.compile": ("#3d8fd1", "s"), "liger": ("#2fa572", "D")}
OTHER = ("#9a7fd1", "^")
LEAST = 0.45  # left end of the axis


def peers_of(documents: Documents) -> list[str]:
    """The names of the peers in results, in their order there."""
    ones = (one for document in documents for result in document["results"] for one in result["contenders"])
    return [name for name in dict.fromkeys(one["name"] for one in ones) if not name.startswith("cunorm")]


def ratios_of(documents: Documents) -> dict[str, dict[str, list[float]]]:
    """The speed-ups of all workloads together by peer and op, for the peers that have any."""
    found: dict[str, dict[str, list[float]]] = {}
    for peer in peers_of(documents):
        for document in documents:
            for op, ratios in speedups(document, peer).items():
                found.setdefault(peer, {}).setdefault(op, []).extend(ratios)
    return found


def by_device(documents: Documents) -> dict[str, list[Mapping[str, Any]]]:
    """Documents by the name of their device."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for document in documents:
        found.setdefault(document["device"]["name"], []).append(document)
    return found


def _ratio(found: Sequence[float] | None) -> str:
    return f"{geometric_mean(found):.2f} ({min(found):.2f}), {len(found)}" if found else "–"


def table(ratios: Ratios) -> list[str]:
    """The lines of a table of ops and peers: geometric mean (least), number of shapes."""
    ops = dict.fromkeys(op for found in ratios.values() for op in found)
    lines = [f"| op | {' | '.join(ratios)} |", f"|---|{'---:|' * len(ratios)}"]
    return lines + [f"| {op} | {' | '.join(_ratio(found.get(op)) for found in ratios.values())} |" for op in ops]


def summary(documents: Documents) -> str:
    """Return the summary for the README: for each device a table of speed-ups, all workloads together."""
    if not documents:
        return "Nothing has been measured on a GPU yet.\n"
    lines = []
    for device, own in by_device(documents).items():
        workloads = ", ".join(str(one["workload"] or "shapes") for one in own)
        lines += [
            f"How many times faster cunorm is, on {device}, {own[-1]['date'][:10]}; workloads {workloads}. "
            "Geometric mean (least), number of shapes:\n",
            *table(ratios_of(own)),
            "",
        ]
    return "\n".join(lines)


def _sizes(result: Mapping[str, Any]) -> str:
    """The layout and the sizes of a problem, without its op and its dtypes."""
    _, _, rest = result["name"].partition(f" {result['problem']['dtype']} ")
    return rest.partition(" (")[0].partition(" -> ")[0]


def slower(documents: Documents) -> list[str]:
    """The lines of a table of the shapes for which a peer is faster than cunorm, the worst first; none without any."""
    found = []
    for peer in peers_of(documents):
        for document in documents:
            for result, ratio in compared(document, peer):
                cells = [result["problem"]["op"], _sizes(result), peer, document["workload"] or "shapes"]
                found.append((ratio, f"| {' | '.join(cells)} | {ratio:.2f} |"))
    under = [line for ratio, line in sorted(found) if ratio < 1]
    if not under:
        return []
    return [
        f"**Slower than a peer** in {len(under)} of {len(found)} comparisons. "
        "The ratio is the peer's time over cunorm's.\n",
        "| op | shape | faster peer | workload | ratio |",
        "|---|---|---|---|---:|",
        *under,
        "",
    ]


def wrong(documents: Documents) -> Iterator[str]:
    """Yield a line per op and peer with the number of shapes without a ratio: a result was not exact enough."""
    found: dict[tuple[str, str], int] = {}
    for document in documents:
        for result in document["results"]:
            for one in result["contenders"]:
                if one["state"] == "wrong":
                    key = result["problem"]["op"], one["name"]
                    found[key] = found.get(key, 0) + 1
    for (op, peer), count in found.items():
        yield f"- {op}, {peer}: {count} shapes"


def facts(documents: Documents) -> str:
    """What the picture shows, as text: mean, least and greatest of each op and peer."""
    lines = []
    for device, own in by_device(documents).items():
        for peer, found in ratios_of(own).items():
            for op, ratios in found.items():
                told = f"{geometric_mean(ratios):.3g} times ({min(ratios):.3g} to {max(ratios):.3g})"
                lines.append(f"{device}: {op}, {told} faster than {peer}")
    return "\n".join(lines)


def alternative(documents: Documents) -> str:
    """The picture in words."""
    means = [
        (geometric_mean(ratios), op, peer)
        for own in by_device(documents).values()
        for peer, found in ratios_of(own).items()
        for op, ratios in found.items()
    ]
    (least, op, peer), (most, top, beaten) = min(means), max(means)
    return (
        f"How many times faster cunorm is than each peer, one dot per op and peer, measured on "
        f"{', '.join(by_device(documents))}. {sum(mean > 1 for mean, _, _ in means)} of {len(means)} dots are on the "
        f"faster side of 1: from {least:.2f} times ({op}, {peer}) to {most:.1f} times ({top}, {beaten})."
    )


def draw(documents: Documents, path: Path) -> None:
    """Draw the ratios: one panel per device, one row per op and peer."""
    from matplotlib import pyplot as plt

    devices = by_device(documents)
    ratios = {device: ratios_of(own) for device, own in devices.items()}
    heights = [sum(map(len, found.values())) + 0.5 * len(set().union(*found.values())) for found in ratios.values()]
    figure = plt.figure(figsize=(6.2, 1.4 + 0.21 * sum(heights)), layout="constrained")
    axes = figure.subplots(len(devices), 1, squeeze=False, height_ratios=heights)
    for axis, (device, found) in zip(axes[:, 0], ratios.items(), strict=True):
        _panel(axis, found)
        axis.set_title(f"Measured on {device}", loc="left", fontsize=9)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    title = "How many times faster cunorm is than"
    legend = figure.legend(handles, labels, loc="outside upper left", ncols=len(handles), title=title, fontsize=10)
    legend.set_alignment("left")
    legend.get_title().set(fontsize=11, fontweight="bold")
    save(figure, path, facts(documents))
    plt.close(figure)


def _panel(axis: Any, ratios: Ratios) -> None:
    """Draw a dot at each geometric mean, with a line from the least to the greatest ratio."""
    from matplotlib import rcParams

    ink, at, ticks = rcParams["text.color"], 0.0, {}
    for op in dict.fromkeys(op for found in ratios.values() for op in found):
        begin = at
        for peer in (peer for peer in ratios if op in ratios[peer]):
            _dot(axis, at, peer, ratios[peer][op])
            at += 1
        ticks[(begin + at - 1) / 2] = op
        at += 0.5
    most = max(max(found) for by_op in ratios.values() for found in by_op.values())
    axis.set(xscale="log", xlim=(LEAST, 1.7 * most), ylim=(at - 0.2, -1.3))
    axis.axvspan(LEAST, 1, color=rcParams["grid.color"], alpha=0.5, linewidth=0)
    axis.axvline(1, color=ink, linewidth=1.2)
    axis.text(1.06, -0.9, "faster →", va="center", fontsize=9, fontweight="bold")
    axis.text(0.94, -0.9, "← slower", va="center", ha="right", fontsize=9)
    axis.set_yticks(list(ticks), list(ticks.values()), fontsize=9.5)
    axis.tick_params(axis="y", length=0)
    axis.set_xticks([tick for tick in (1, 2, 5, 10, 20, 50, 100) if tick < 1.7 * most])
    axis.xaxis.set_major_formatter("{x:g}×")
    axis.minorticks_off()
    axis.spines["left"].set_visible(False)
    axis.grid(axis="x")
    axis.set_xlabel("dot and number: geometric mean over the shapes\nline: from the least to the greatest", fontsize=9)


def _dot(axis: Any, at: float, peer: str, ratios: Sequence[float]) -> None:
    """Draw the ratios of one op and peer, with the mean as a number at the right."""
    colour, marker = PEERS.get(peer, OTHER)
    mean, most = geometric_mean(ratios), max(ratios)
    axis.plot([min(ratios), most], [at, at], color=colour, linewidth=2.2, alpha=0.45, solid_capstyle="round")
    labelled = peer not in axis.get_legend_handles_labels()[1]
    axis.plot(mean, at, marker, color=colour, markersize=6.5, linestyle="none", label=peer if labelled else None)
    axis.text(1.07 * max(most, 1.06), at, f"{mean:.3g}×", va="center", fontsize=9, color=colour, fontweight="bold")
