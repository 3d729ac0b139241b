"""How many times faster cunorm is than each peer: the table of the README, and the picture docs/pictures/speed.svg."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from cunorm.tuning.bench.bench import WRONG
from cunorm.tuning.bench.peers import PEERS as KNOWN_PEERS
from cunorm.tuning.bench.result import TABLE, compared, complete, geometric_mean, own_of
from cunorm.tuning.problems.workloads import WORKLOADS

from cunorm.core.devices import Device
from cunorm.core.problem import Problem
from cunorm.ops.registry import OPS, is_stale
from cunorm.tiling.choose_tile import tables
from cunorm.tiling.table import Entry, place_of
from docs.drawings.themes import save

#: Peer -> op -> the ratios of all shapes.
Ratios = Mapping[str, Mapping[str, Sequence[float]]]
Documents = Sequence[Mapping[str, Any]]
Result = Mapping[str, Any]
#: A result beside a peer: the result, the workloads that contain its problem, and how many times faster cunorm is.
Beside = tuple[Result, list[str], float]
#: Colour and marker of each peer in the picture.
PEERS = {"torch": ("#e8743b", "o"), "torch.compile": ("#3d8fd1", "s"), "liger": ("#2fa572", "D")}
OTHER = ("#9a7fd1", "^")
LEAST = 0.45  # left end of the axis
#: Why a result of a contender is wrong, as the bench says it.
OFF = re.compile(r"(\w+) is off by \S+ of its largest value, expected at most (\S+)")


def problem_of(result: Result) -> Problem:
    """The problem of a result."""
    fields = dict(result["problem"])
    lists = {name: tuple(map(_frozen, value)) for name, value in fields.items() if isinstance(value, list)}
    return Problem(**fields | lists)


def device_of(document: Mapping[str, Any]) -> Device | None:
    """The device of a result; None if a fact that the cost model needs is missing."""
    facts = document["device"]
    if any(one.name not in facts for one in fields(Device)):
        return None
    lists = {one.name: tuple(facts[one.name]) for one in fields(Device) if isinstance(facts[one.name], list)}
    return Device(**{one.name: facts[one.name] for one in fields(Device)} | lists)


def packaged(problem: Problem, device: Device) -> list[Entry]:
    """The entries of a problem in the package's table. The user's tables are not read."""
    return [entry for _, read in tables(device, shipped=True) for entry in read.entries(*place_of(problem))]


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def workload_of(document: Mapping[str, Any]) -> str:
    """The name of a result's workload."""
    return document["workload"] or "shapes"


def peers_of(documents: Documents) -> list[str]:
    """The names of the peers in results, in their order there."""
    ones = (one for document in documents for result in document["results"] for one in result["contenders"])
    return [name for name in dict.fromkeys(one["name"] for one in ones) if not name.startswith("cunorm")]


def beside(documents: Documents, peer: str) -> list[Beside]:
    """Each problem with a time of cunorm and of a peer, once per device.

    The ratio of a problem that several workloads contain is the geometric mean of its ratios there.
    """
    found: dict[tuple[str, Problem], tuple[Result, list[str], list[float]]] = {}
    for document in documents:
        for result, ratio in compared(document, peer):
            key = document["device"]["name"], problem_of(result)
            _, workloads, ratios = found.setdefault(key, (result, [], []))
            workloads.append(workload_of(document))
            ratios.append(ratio)
    return [(result, [*dict.fromkeys(names)], geometric_mean(ratios)) for result, names, ratios in found.values()]


def ratios_of(documents: Documents) -> dict[str, dict[str, list[float]]]:
    """The speed-ups of all problems together by peer and op, for the peers that have any. See `beside`."""
    found: dict[str, dict[str, list[float]]] = {}
    for peer in peers_of(documents):
        for result, _, ratio in beside(documents, peer):
            found.setdefault(peer, {}).setdefault(result["problem"]["op"], []).append(ratio)
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
        workloads = ", ".join(dict.fromkeys(map(workload_of, own)))
        days = sorted({one["date"][:10] for one in own})
        between = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
        lines += [
            f"How many times faster cunorm is, on {device}, {between}; workloads {workloads}. "
            "Geometric mean (least), number of shapes:\n",
            *table(ratios_of(own)),
            "",
        ]
    return "\n".join(lines)


def _sizes(result: Mapping[str, Any]) -> str:
    """The layout and the sizes of a problem, without its op and its dtypes."""
    name: str = result["name"]
    _, _, rest = name.partition(f" {result['problem']['dtype']} ")
    return rest.partition(" (")[0].partition(" -> ")[0]


def slower(documents: Documents) -> list[str]:
    """The lines of a table of the shapes for which a peer is faster than cunorm, the worst first; none without any."""
    found = []
    for peer in peers_of(documents):
        for result, workloads, ratio in beside(documents, peer):
            cells = [result["problem"]["op"], _sizes(result), peer, ", ".join(workloads)]
            found.append((ratio, f"| {' | '.join(cells)} | {ratio:.2f} |"))
    under = [line for ratio, line in sorted(found) if ratio < 1]
    if not under:
        return []
    return [
        f"**Slower than a peer** in {len(under)} of {len(found)} comparisons. "
        "The ratio is the peer's time over cunorm's.\n",
        "| op | shape | faster peer | workloads | ratio |",
        "|---|---|---|---|---:|",
        *under,
        "",
    ]


def wrong(documents: Documents) -> list[str]:
    """The lines about problems without a ratio, because a result of a peer was not exact enough; none without any."""
    found: dict[tuple[str, str], dict[Problem, tuple[Result, Mapping[str, Any]]]] = {}
    for document in documents:
        for result in document["results"]:
            for one in result["contenders"]:
                if one["state"] == "wrong":
                    key = result["problem"]["op"], one["name"]
                    found.setdefault(key, {})[problem_of(result)] = result, one
    if not found:
        return []
    lines = ["Not compared, because a result of the peer was not exact enough:\n"]
    for (op, peer), cases in found.items():
        results, ones = zip(*cases.values(), strict=True)
        lines.append(f"- {op}, {peer}: {len(cases)} shapes. {_off(ones)}. {_own_errors(results)}")
    dtypes = {dtype for cases in found.values() for problem in cases for dtype in _dtypes(problem)}
    return [*lines, "", _limits(dtypes), ""]


def _dtypes(problem: Problem) -> set[str]:
    """The dtypes of the results of a problem."""
    return {problem.dtype_of(name) for name in problem.outputs}


def _limits(dtypes: Iterable[str]) -> str:
    """What the errors and limits of `wrong` are of."""
    limits = ", ".join(f"{WRONG[dtype]:.2g} in {dtype}" for dtype in sorted(dtypes))
    return (
        "An error is a share of the largest value of a result. Its limit depends on the dtype of the result: "
        f"{limits}. The error of a contender within the limits is the largest of all its results."
    )


def _range(values: Sequence[float]) -> str:
    least, most = f"{min(values):.2g}", f"{max(values):.2g}"
    return least if least == most else f"{least} to {most}"


def _off(ones: Sequence[Mapping[str, Any]]) -> str:
    """How far the results of wrong contenders are off, and the limit."""
    said = [OFF.fullmatch(one["sentence"]) for one in ones]
    errors = [one["error"] for one in ones if one["error"] is not None]
    if not all(said) or len(errors) < len(ones):
        return "; ".join(dict.fromkeys(one["sentence"] for one in ones))
    names, limits = (dict.fromkeys(match[group] for match in said if match) for group in (1, 2))
    return f"{' or '.join(names)} is off by {_range(errors)}, expected at most {' or '.join(limits)}"


def _own_errors(results: Sequence[Result]) -> str:
    """The largest errors of cunorm's contender on these problems, and the dtype that such a result has."""
    passed = [(problem_of(result), one["error"]) for result in results if (one := own_of(result)) is not None]
    if not passed:
        return "cunorm has no time there."
    dtypes = {dtype for problem, error in passed for dtype in _dtypes(problem) if WRONG[dtype] >= error}
    where = f", of a result in {dtypes.pop()}" if len(dtypes) == 1 else ""
    many = "all" if len(passed) == len(results) else f"{len(passed)} of them"
    return f"cunorm was within every limit on {many}: its largest error is {_range([one for _, one in passed])}{where}."


def unmeasured(documents: Documents) -> list[str]:
    """The lines that say what the results do not contain."""
    results = [result for document in documents for result in document["results"]]
    dtypes = ", ".join(sorted({result["problem"]["dtype"] for result in results}))
    seen = {op for found in ratios_of(documents).values() for op in found}
    partly = [
        f"{workload_of(one)} with {len(one['results'])} of {one['problems']} problems"
        for one in documents
        if not complete(one)
    ]
    lists = {
        "Shapes whose kernels have changed since": changed(documents),
        "Shapes whose measured tile has left the package's table": dropped(documents),
        "Functions of cunorm without a time beside a peer": [op for op in OPS if op not in seen],
        "Peers that ran on some of the workloads only": _partial_peers(documents),
        "Peers that did not run": [peer for peer in KNOWN_PEERS if not _ran(documents, peer)],
        "Incomplete workloads": partly,
        "Workloads without results": [name for name in WORKLOADS if name not in map(workload_of, documents)],
    }
    lines = [f"- {title}: {_listed(found)}." for title, found in lists.items() if found]
    all_of = f"- All results are in {dtypes}, on {', '.join(by_device(documents))}."
    return ["What was not measured:\n", all_of, *lines, ""]


def _with_device(documents: Documents) -> Iterator[tuple[Mapping[str, Any], Device]]:
    """The results of documents that contain the facts of their device, each with that device."""
    for document in documents:
        if (device := device_of(document)) is not None:
            yield from ((result, device) for result in document["results"])


def _shapes_of(found: Mapping[Problem, bool]) -> list[str]:
    """The ops of which some problems are marked, each with the number of these problems and of all of its problems."""
    marks: dict[str, list[bool]] = {}
    for problem, marked in found.items():
        marks.setdefault(problem.op, []).append(marked)
    return [f"{op} ({sum(of_op)} of {len(of_op)})" for op, of_op in marks.items() if any(of_op)]


def changed(documents: Documents) -> list[str]:
    """The ops with a table tile whose kernels have changed since the results, each with the number of its shapes."""
    found: dict[Problem, bool] = {}
    for result, device in _with_device(documents):
        problem = problem_of(result)
        for entry in packaged(problem, device):
            found[problem] = is_stale(entry)
    return _shapes_of(found)


def dropped(documents: Documents) -> list[str]:
    """The ops that ran with a table tile and have no entry now, each with the number of its shapes."""
    found: dict[Problem, bool] = {}
    for result, device in _with_device(documents):
        if any(one["name"] == TABLE and one["kernels"] is not None for one in result["contenders"]):
            problem = problem_of(result)
            found[problem] = not packaged(problem, device)
    return _shapes_of(found)


def _listed(names: Sequence[str]) -> str:
    return ("; " if any("," in name for name in names) else ", ").join(names)


def _ran(documents: Documents, peer: str) -> list[str]:
    """The workloads on which a peer ran."""
    ran = (
        workload_of(document)
        for document in documents
        if any(
            one["name"] == peer and one["state"] not in ("missing", "not offered")
            for result in document["results"]
            for one in result["contenders"]
        )
    )
    return [*dict.fromkeys(ran)]


def _partial_peers(documents: Documents) -> list[str]:
    """The peers that ran on some of the workloads only, each with these workloads."""
    ran = {peer: _ran(documents, peer) for peer in peers_of(documents)}
    all_of = {*map(workload_of, documents)}
    return [f"{peer} on {', '.join(names)}" for peer, names in ran.items() if 0 < len(names) < len(all_of)]


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
