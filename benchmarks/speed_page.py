"""Write docs/speed/measured.md and the summary in the README from the newest results in benchmarks/results.

Example: ``python benchmarks/speed_page.py``; with ``--check`` it only reports whether both agree with the results. No
number is typed by hand.

A result is a file ``bench-*.json``, written by ``cunorm bench --json``. For each device and workload, the newest
complete result is used, or the newest incomplete one if none is complete. Results of ``--rehearse`` are rejected: times
of the CPU executor say nothing about a kernel.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cunorm.tuning.bench.figure import figure
from cunorm.tuning.bench.result import cold, complete, fraction, geometric_mean, refusal, speedups

from benchmarks import measured_sections

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "speed" / "measured.md"
PICTURES = ROOT / "docs" / "pictures"
README, BEGIN, END = ROOT / "README.md", "<!-- begin speed -->\n", "<!-- end speed -->\n"
HEAD = """# Speed

What was measured on GPUs. `python benchmarks/speed_page.py` writes this page: first the results of `cunorm bench`, from
the files `benchmarks/results/bench-*.json`, which also name the tiles that ran; then goals, the host's time, the cost
model, and profiles.

A percentage is a bandwidth as a share of the bandwidth of a copy in the same run. The bandwidth is the byte floor of a
problem (the fewest bytes that it has to move) over the time of its kernels. The brackets contain that time in
microseconds: the median, then the quartiles. Peers run on the same arrays in the same run, in interleaved order, with
a cold L2 cache. "(L2)" marks a problem so small that the L2 cache was not cold. "–" marks a peer without the operator.
"""
MOST_DRAWN = 40  # problems in a picture
NONE = """
**Nothing has been measured on a GPU for this version.** On a machine with a GPU, `bash benchmarks/gpu_proof.sh`
measures everything that this page shows.
"""


class RefusedError(Exception):
    """A result that must not be published, or a README without the markers."""


def newest(folder: Path) -> list[dict[str, Any]]:
    """Return the newest complete result per device and workload; the newest of all if none is complete."""
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
        yield f"Did not run: {', '.join(absent)}.\n"
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
    """Yield one line per peer and op: how many times faster cunorm is."""
    names = dict.fromkeys(one["name"] for result in document["results"] for one in result["contenders"])
    for peer in (name for name in names if not name.startswith("cunorm")):
        for op, ratios in speedups(document, peer).items():
            yield (
                f"- {op}: {geometric_mean(ratios):.2f} times {peer} in the geometric mean of {len(ratios)} shapes, "
                f"{min(ratios):.2f} times at least"
            )


def _drawn(document: dict[str, Any]) -> bool:
    """Whether a result has a picture: one of more problems is too long to be looked at."""
    return len(document["results"]) <= MOST_DRAWN


def picture_of(document: dict[str, Any]) -> str:
    """The file name of a result's picture, which is beside the page."""
    words = ["speed", *document["device"]["name"].split(), document["workload"] or "shapes"]
    return f"{'-'.join(words).lower()}.svg"


def draw(documents: list[dict[str, Any]]) -> None:
    """Write the pictures, with text as text."""
    import matplotlib

    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "cunorm"}
    for document in filter(_drawn, documents):
        figure(document, PICTURES / picture_of(document))


def _newest_file(folder: Path, pattern: str) -> Any:
    """The content of the last file by name, which ends in its date; None if there is none."""
    found = sorted(folder.glob(pattern), key=lambda path: path.name)
    return json.loads(found[-1].read_text(encoding="utf-8")) if found else None


def further(folder: Path, documents: list[dict[str, Any]]) -> list[str]:
    """Return the sections about goals, host time, the cost model and profiles, from the newest file of each kind."""
    host = _newest_file(folder, "host_overhead_gpu-*.json")
    lines = measured_sections.goals_section(documents, host) if documents else []
    for found, section in (
        (host, measured_sections.host_section),
        (_newest_file(folder, "cost_model.json"), measured_sections.model_section),
        (_newest_file(folder, "stage_times-*.json"), measured_sections.stages_section),
        (_newest_file(folder, "profile-*.json"), measured_sections.profile_section),
    ):
        if found is not None:
            lines += section(found)
    return lines


def page(documents: list[dict[str, Any]], more: Sequence[str] = ()) -> str:
    """Return the text of the page: the results of the bench, then more sections."""
    lines = [HEAD if documents else HEAD + NONE]
    for document in documents:
        device, software = document["device"], document["software"]
        lines.append(f"## {device['name']}, {document['workload'] or 'shapes'}, {document['date'][:10]}\n")
        facts = [f"{name} {value}" for name, value in software.items()]
        facts += [f"{name} {device[name]}" for name in device if name.startswith(("driver", "clocks", "power"))]
        lines.append(f"Copy {document['copy_bandwidth'] / 1e9:.0f} GB/s. {', '.join(facts)}.\n")
        if not complete(document):
            reason = document["lost"] or "interrupted"
            lines.append(f"Incomplete, {len(document['results'])} of {document['problems']} problems: {reason}.\n")
        lines += _table(document)
        if _drawn(document):
            lines.append(f"\n![{document['workload']} on {device['name']}](../pictures/{picture_of(document)})")
        lines.append("")
    lines += more
    return "\n".join(lines).rstrip() + "\n"


def _combined(documents: list[dict[str, Any]], peer: str) -> dict[str, list[float]]:
    """The speed-ups over a peer by op, of all workloads."""
    found: dict[str, list[float]] = {}
    for document in documents:
        for op, ratios in speedups(document, peer).items():
            found.setdefault(op, []).extend(ratios)
    return found


def _ratio(found: list[float] | None) -> str:
    return f"{geometric_mean(found):.2f} ({min(found):.2f}), {len(found)}" if found else "–"


def summary(documents: list[dict[str, Any]]) -> str:
    """Return the summary for the README: for each device a table of speed-ups, all workloads together."""
    if not documents:
        return "Nothing has been measured on a GPU yet.\n"
    lines = []
    for device in dict.fromkeys(document["device"]["name"] for document in documents):
        of_device = [one for one in documents if one["device"]["name"] == device]
        results = [result for document in of_device for result in document["results"]]
        names = dict.fromkeys(one["name"] for result in results for one in result["contenders"])
        ratios = {name: _combined(of_device, name) for name in names if not name.startswith("cunorm")}
        peers = [name for name, found in ratios.items() if found]
        workloads = ", ".join(str(one["workload"] or "shapes") for one in of_device)
        lines += [
            f"How many times faster cunorm is, on {device}, {of_device[-1]['date'][:10]}; workloads {workloads}. "
            "Geometric mean (least), number of shapes:\n",
            f"| op | {' | '.join(peers)} |",
            "|---" * (len(peers) + 1) + "|",
        ]
        ops = dict.fromkeys(op for found in ratios.values() for op in found)
        for op in ops:
            lines.append(f"| {op} | {' | '.join(_ratio(ratios[peer].get(op)) for peer in peers)} |")
        lines.append("")
    return "\n".join(lines)


def filled(readme: str, documents: list[dict[str, Any]]) -> str:
    """Return the README with the summary between its two markers."""
    before, _, rest = readme.partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise RefusedError(f"{README}: expected a line {BEGIN.strip()} and, after it, a line {END.strip()}")
    return f"{before}{BEGIN}\n{summary(documents)}\n{END}{after}"


def main(argv: list[str] | None = None) -> int:
    """Write or check the page and the README; return 0, 1 if the check fails, 2 if a result is rejected."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with code 1 if a page is stale")
    options = parser.parse_args(argv)
    try:
        documents = newest(RESULTS)
        wanted = {
            PAGE: page(documents, further(RESULTS, documents)),
            README: filled(README.read_text(encoding="utf-8"), documents),
        }
    except RefusedError as error:
        print(error, file=sys.stderr)
        return 2
    stale = [path for path, text in wanted.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    if options.check:
        names = " and ".join(path.name for path in stale or wanted)
        print(f"{names}: stale; run without --check" if stale else f"{names}: agree with the results")
        return 1 if stale else 0
    for path in stale:
        path.write_text(wanted[path], encoding="utf-8")
    if PAGE in stale:
        draw(documents)
    return 0


if __name__ == "__main__":
    sys.exit(main())
