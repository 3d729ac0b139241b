"""Writes docs/speed.md, and what the README says of it, from the newest results in benchmarks/results: none is typed.

Example: ``python benchmarks/speed_page.py``; with ``--check`` it only says whether both are what the results give.

A result is a file ``bench-*.json`` as ``cunorm bench --json`` writes it; of each device and workload the newest counts,
of the complete ones if there are any. What was rehearsed on the CPU executor is refused: its times say nothing about a
kernel.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cunorm.tuning.bench.result import cold, complete, fraction, geometric_mean, refusal, speedups

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "speed.md"
README, BEGIN, END = ROOT / "README.md", "<!-- begin speed -->\n", "<!-- end speed -->\n"
HEAD = """# Speed

What `cunorm bench` measured, written by `python benchmarks/speed_page.py` from `benchmarks/results/bench-*.json`.

A percentage is the share of a copy's bandwidth, measured in the same run, at which the fewest bytes that the problem
has to move were moved by its kernels; in brackets the kernels' time in microseconds, the median, with its quartiles.
Peers run on the same arrays in the same run, in interleaved order, with a cold L2 cache; "(L2)": so small a
problem that it was not. "–": it has no such operator.
"""
NONE = """
**Nothing has been measured on a GPU for this version.** On a machine with one, `bash benchmarks/gpu_proof.sh` measures
everything that this page would show.
"""


class RefusedError(Exception):
    """A result that does not belong on the page."""


def newest(folder: Path) -> list[dict[str, Any]]:
    """Of each device and workload the newest complete result; the newest of all where none is complete."""
    found: dict[tuple[str, str | None], dict[str, Any]] = {}

    def rank(document: dict[str, Any]) -> tuple[bool, str]:
        return complete(document), document["date"]

    for path in sorted(folder.glob("bench-*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        if (sentence := refusal(document)) is not None:
            raise RefusedError(f"{path}: {sentence}")
        key = document["device"]["name"], document["workload"]
        if key not in found or rank(found[key]) < rank(document):
            found[key] = document
    return [found[key] for key in sorted(found, key=str)]


def _cell(document: dict[str, Any], result: dict[str, Any], one: dict[str, Any] | None) -> str:
    if one is None:
        return ""
    share = fraction(document, result, one)
    if share is None:
        return "–" if one["state"] == "not offered" else one["state"]
    kernels = one["kernels"]
    low, middle, high = (kernels[part] * 1e6 for part in ("q25", "seconds", "q75"))
    return f"{share:.0%} ({middle:.1f}; {low:.1f} to {high:.1f})"


def _table(document: dict[str, Any]) -> Iterator[str]:
    names = list(dict.fromkeys(one["name"] for result in document["results"] for one in result["contenders"]))
    ran = {one["name"] for result in document["results"] for one in result["contenders"] if one["state"] != "missing"}
    if absent := [name for name in names if name not in ran]:
        yield f"Not there: {', '.join(absent)}.\n"
    names = [name for name in names if name in ran]
    yield f"| problem | {' | '.join(names)} |"
    yield "|---" * (len(names) + 1) + "|"
    for result in document["results"]:
        by_name = {one["name"]: one for one in result["contenders"]}
        cells = [_cell(document, result, by_name.get(name)) for name in names]
        yield f"| {result['name']}{'' if cold(document, result) else ' (L2)'} | {' | '.join(cells)} |"
    yield ""
    yield from _ratios(document)


def _ratios(document: dict[str, Any]) -> Iterator[str]:
    """How many times faster than each peer, an op a line."""
    names = dict.fromkeys(one["name"] for result in document["results"] for one in result["contenders"])
    for peer in (name for name in names if not name.startswith("cunorm")):
        for op, ratios in speedups(document, peer).items():
            yield (
                f"- {op}: {geometric_mean(ratios):.2f} times {peer} in the geometric mean of {len(ratios)} shapes, "
                f"{min(ratios):.2f} times at least"
            )


def page(documents: list[dict[str, Any]]) -> str:
    """The whole page."""
    lines = [HEAD if documents else HEAD + NONE]
    for document in documents:
        device, software = document["device"], document["software"]
        lines.append(f"## {device['name']}, {document['workload'] or 'shapes'}, {document['date'][:10]}\n")
        facts = [f"{name} {value}" for name, value in software.items()]
        facts += [f"{name} {device[name]}" for name in device if name.startswith(("driver", "clocks", "power"))]
        lines.append(f"Copy {document['copy_bandwidth'] / 1e9:.0f} GB/s. {', '.join(facts)}.\n")
        if not complete(document):
            reason = document["lost"] or "interrupted"
            lines.append(f"Not whole, {len(document['results'])} of {document['problems']} problems: {reason}.\n")
        lines += _table(document)
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def summary(documents: list[dict[str, Any]]) -> str:
    """What the README says: of each result the ratios."""
    lines = [] if documents else ["Nothing has been measured on a GPU yet.", ""]
    for document in documents:
        lines.append(f"{document['device']['name']}, {document['workload'] or 'shapes'}, {document['date'][:10]}:\n")
        lines += [*_ratios(document), ""]
    return "\n".join(lines)


def filled(readme: str, documents: list[dict[str, Any]]) -> str:
    """The README with the summary between its two marks."""
    before, _, rest = readme.partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise RefusedError(f"{README}: no line {BEGIN.strip()} with a line {END.strip()} behind it")
    return f"{before}{BEGIN}\n{summary(documents)}\n{END}{after}"


def main(argv: list[str] | None = None) -> int:
    """Write the page, or check it; 0 if it is right, 1 if not, 2 if a result is refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if the page is another")
    options = parser.parse_args(argv)
    try:
        documents = newest(RESULTS)
        wanted = {PAGE: page(documents), README: filled(README.read_text(encoding="utf-8"), documents)}
    except RefusedError as error:
        print(error, file=sys.stderr)
        return 2
    stale = [path for path, text in wanted.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    if options.check:
        names = " and ".join(path.name for path in stale or wanted)
        print(f"{names}: stale; leave out --check" if stale else f"{names}: what the results give")
        return 1 if stale else 0
    for path in stale:
        path.write_text(wanted[path], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
