"""The page of one workload: docs/speed/measured-WORKLOAD.md, one table per op and layout."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cunorm.tuning.bench.result import DEFAULT, TABLE, cold, complete, fraction, timed

from benchmarks.speed_summary import device_of, packaged, problem_of, ratios_of, table, workload_of
from cunorm.core.devices import Device
from cunorm.core.problem import Problem
from cunorm.ops.registry import OPS
from cunorm.tiling import costmodel

MOST_DRAWN = 40  # problems in a picture
HEAD = """# Workload {workload}

Measured. A cell is the median time of a call's kernels in microseconds, and the share of a copy's bandwidth. The
shortest time of a row is bold. The spread is the largest distance of a quartile from its median in the row.
[How it was measured](measured.md). `python benchmarks/speed_page.py` writes this page.
"""


def has_picture(document: Mapping[str, Any]) -> bool:
    """Whether a result has a picture: one of more problems is too long to be looked at, and a part is no workload."""
    return len(document["results"]) <= MOST_DRAWN and not document["part"]


def picture_of(document: Mapping[str, Any]) -> str:
    """The file name of a result's picture."""
    words = ["speed", *document["device"]["name"].split(), workload_of(document)]
    return f"{'-'.join(words).lower()}.svg"


def _times(result: Mapping[str, Any]) -> dict[str, Mapping[str, float]]:
    """The times of the contenders that have one."""
    return {name: one["kernels"] for name, one in timed(result).items()}


def facts(document: Mapping[str, Any]) -> str:
    """What the picture shows, as text: each problem with the microseconds of its contenders."""
    lines = [f"{document['device']['name']}, {document['date']}"]
    for result in document["results"]:
        told = (f"{name} {1e6 * kernels['seconds']:.3g}" for name, kernels in _times(result).items())
        lines.append(f"{result['name']}: {', '.join(told)}")
    return "\n".join(lines)


def _cell(document: Mapping[str, Any], result: Mapping[str, Any], name: str) -> str:
    """The time of a contender in microseconds and its share of the copy's bandwidth, or why it has none."""
    one = next((one for one in result["contenders"] if one["name"] == name), None)
    share = None if one is None else fraction(document, result, one)
    if one is None or share is None:
        return "" if one is None else "–" if one["state"] == "not offered" else one["state"]
    seconds = one["kernels"]["seconds"]
    fastest = min(kernels["seconds"] for kernels in _times(result).values())
    mark = "**" if seconds == fastest else ""
    return f"{mark}{1e6 * seconds:.1f}{mark}, {share:.0%}"


def _spread(result: Mapping[str, Any]) -> str:
    """The largest distance of a quartile from its median, over the contenders."""
    apart = (abs(of[part] / of["seconds"] - 1) for of in _times(result).values() for part in ("q25", "q75"))
    return f"{max(apart, default=0):.1%}"


def _tables(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield the tables of a result. All problems of a table differ in their sizes only."""
    groups: dict[tuple[str, str], list[tuple[Problem, Mapping[str, Any]]]] = {}
    for result in document["results"]:
        problem = problem_of(result)
        layout = f", {problem.layout}" if len(problem.spec.layouts) > 1 else ""
        kind = result["name"].replace(f" {problem.sizes_text}", "")
        groups.setdefault((f"{problem.op}{layout}{problem.extras_text}", kind), []).append((problem, result))
    for (title, kind), rows in groups.items():
        yield f"### {title}\n"
        yield f"`{kind}`\n"
        yield from _rows(document, rows)
        yield ""


def _rows(document: Mapping[str, Any], rows: Sequence[tuple[Problem, Mapping[str, Any]]]) -> Iterator[str]:
    """Yield the lines of a table, without a column for a contender that has no cell in it."""
    names = dict.fromkeys(one["name"] for _, result in rows for one in result["contenders"])
    columns = {name: [_cell(document, result, name) for _, result in rows] for name in names}
    kept = {name: cells for name, cells in columns.items() if {*cells} - {"", "–", "missing"}}
    absent = [name for name, cells in columns.items() if {*cells} == {"–"}]
    sizes = rows[0][0].spec.sizes
    titles = [*sizes, *kept, "spread"]
    yield f"| {' | '.join(titles)} |"
    yield f"|{'---:|' * len(titles)}"
    for place, (problem, result) in enumerate(rows):
        cells = [str(getattr(problem, field)) for field in sizes.values()]
        cells[-1] += "" if cold(document, result) else " (L2)"
        yield f"| {' | '.join([*cells, *(cells[place] for cells in kept.values()), _spread(result)])} |"
    if absent:
        yield f"\nWithout this operator or layout: {', '.join(absent)}."


def _missing(document: Mapping[str, Any]) -> list[str]:
    """The names of the contenders that did not run at all."""
    ones = [one for result in document["results"] for one in result["contenders"]]
    ran = {one["name"] for one in ones if one["state"] != "missing"}
    return [name for name in dict.fromkeys(one["name"] for one in ones) if name not in ran]


@functools.cache
def _chosen(problem: Problem, device: Device) -> set[str]:
    """The tile that the cost model chooses for a problem."""
    return {costmodel.choose(problem, OPS[problem.op].strategies.values(), device).tile.text}


@functools.cache
def _packaged(problem: Problem, device: Device) -> set[str]:
    """The tiles that the package's table has for a problem. The user's tables are not read."""
    return {entry.tile.text for entry in packaged(problem, device)}


def _up_to_date(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield a text on how many of the tiles that ran this version still has."""
    device = device_of(document)
    if device is None:
        return
    kept: dict[str, list[bool]] = {DEFAULT: [], TABLE: []}
    for result in document["results"]:
        problem = problem_of(result)
        for one in result["contenders"]:
            if one["name"] in kept and one["kernels"] is not None:
                present = _chosen(problem, device) if one["name"] == DEFAULT else _packaged(problem, device)
                kept[one["name"]].append(one["sentence"].partition(";")[0] in present)
    default, tabled = kept[DEFAULT], kept[TABLE]
    yield (
        "The times are of the tiles that ran, which calls may no longer get. Of "
        f"{len(default)} default tiles, the cost model still chooses {sum(default)}. Of "
        f"{len(tabled)} tiles of the table, the package's table still has {sum(tabled)}.\n"
    )


def _section(document: Mapping[str, Any]) -> Iterator[str]:
    device, software = document["device"], document["software"]
    yield f"## {device['name']}\n"
    yield f"Measured on {document['date'][:10]}.\n"
    if not complete(document):
        reason = document["lost"] or "interrupted"
        yield f"Incomplete, {len(document['results'])} of {document['problems']} problems: {reason}.\n"
    yield "How many times faster cunorm is: geometric mean (least), number of shapes.\n"
    yield from table(ratios_of([document]))
    yield ""
    if absent := _missing(document):
        yield f"Did not run: {', '.join(absent)}.\n"
    yield from _tables(document)
    if has_picture(document):
        yield "### In one picture\n"
        said = f"One group of bars per problem of {document['workload']} on {device['name']}, one bar per contender: "
        yield f"![{said}the shares of a copy's bandwidth of the tables above](../pictures/{picture_of(document)})\n"
    yield "### The run\n"
    facts = [f"{name} {value}" for name, value in software.items()]
    facts += [f"{name} {device[name]}" for name in device if name.startswith(("driver", "clocks", "power"))]
    yield f"Copy {document['copy_bandwidth'] / 1e9:.0f} GB/s, {document['rounds']} rounds. {', '.join(facts)}.\n"
    yield from _up_to_date(document)


def page(documents: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of the page of one workload, with one section per device."""
    workload = workload_of(documents[0])
    lines = [line for document in documents for line in _section(document)]
    return "\n".join([HEAD.format(workload=workload), *lines]).rstrip() + "\n"
