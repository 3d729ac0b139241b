"""Write the measured pages of docs/speed and the table in the README from the newest results in benchmarks/results.

Example: ``python benchmarks/speed_page.py``; with ``--check`` it only reports whether all agree with the results. No
number is typed by hand. The pages are docs/speed/measured.md and measured-*.md, the first part of docs/speed/index.md,
and their pictures.

A result is a file ``bench-*.json``, written by ``cunorm bench --json``. Of each problem of a device and workload, the
newest result is used; of one day, the one with the most contenders. Results of ``--rehearse`` are rejected: times of
the CPU executor say nothing about a kernel.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cunorm.tuning.bench.figure import drawn
from cunorm.tuning.bench.result import complete, refusal, timed

from benchmarks import measured_sections, measured_workload, speed_summary
from benchmarks.speed_summary import problem_of
from cunorm.core.problem import Problem
from docs.drawings.themes import facts_of, in_both, save, twin

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PAGES, PICTURES = ROOT / "benchmarks" / "results", ROOT / "docs" / "speed", ROOT / "docs" / "pictures"
HOST = "host_overhead_gpu"  # beginning of the names of the files about the host's time
README, BEGIN, END = ROOT / "README.md", "<!-- begin speed -->\n", "<!-- end speed -->\n"
HEAD = """# Measured on GPUs

`cunorm bench` times cunorm and its peers on the same arrays in one run, in interleaved order, with a cold L2 cache. A
time is the median over the rounds.

- **Percentage**: a bandwidth as a share of the bandwidth of a copy in the same run. The bandwidth is the byte floor of
  a problem (the fewest bytes that it has to move) over the time of its kernels.
- **(L2)**: a problem so small that the L2 cache was not cold.
- **–**: a peer without the operator. **wrong**: a peer whose result was not exact enough.

`python benchmarks/speed_page.py` writes this page and those below from `benchmarks/results/bench-*.json` and its
neighbours. The files also contain the quartiles of every time, and the tiles that ran.
"""
NONE = """
**Nothing has been measured on a GPU for this version.** On a machine with a GPU, `bash benchmarks/gpu_proof.sh`
measures everything that these pages show.
"""
HOW = """
`cunorm bench` timed the kernels of each call on the GPU, with all contenders on the same arrays in one run and a cold
L2 cache ([how it was measured](measured.md)). cunorm ran with the tile of the package's table where it has one for the
shape. The table was measured on the same shapes and the same model of GPU. A shape that is in several workloads counts
once, with the geometric mean of its ratios.
"""


class RefusedError(Exception):
    """A result that must not be published, or a page without the markers."""


def newest(folder: Path) -> list[dict[str, Any]]:
    """Return the documents of a folder, each with the results that are the newest of their problems."""
    found: dict[tuple[str, str | None], list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("bench-*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        if (sentence := refusal(document)) is not None:
            raise RefusedError(f"{path}: {sentence}")
        found.setdefault((document["device"]["name"], document["workload"]), []).append(document)
    return [one for key in sorted(found, key=str) for one in _newest_of(found[key])]


def _newest_of(documents: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the documents of a workload on a device, the newest first, without what newer ones contain.

    Together they may contain all problems, though a run was interrupted. Then none of them is incomplete.
    """
    best: dict[Problem, tuple[tuple[str, int, str], int]] = {}
    for at, document in enumerate(documents):
        for result in document["results"]:
            rank = document["date"][:10], len(timed(result)), document["date"]
            key = problem_of(result)
            if key not in best or best[key][0] < rank:
                best[key] = rank, at
    whole = len(best) >= max(document["problems"] for document in documents)
    kept = []
    for at, document in enumerate(documents):
        results = [result for result in document["results"] if best[problem_of(result)][1] == at]
        part = {**document, "results": results}
        if whole and len(results) < document["problems"]:
            part |= {"problems": len(results), "interrupted": False, "lost": None}
        kept += [part] if results or not best else []
    for part in sorted(kept, key=lambda one: one["date"], reverse=True):
        yield {**part, "part": len(kept) > 1}


def _of_devices(folder: Path, name: str) -> dict[str, Any]:
    """The contents of the newest files ``NAME-DEVICE-DATE.json``, by the name of their device."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob(f"{name}-*.json"))]
    return {document["device"]: document for document in found}  # a later one replaces an earlier one


def further(folder: Path) -> dict[str, tuple[str, list[str]]]:
    """Return the pages about host time, the cost model and kernels: name of the file -> link's text, lines."""
    host, stages, profiles = (_of_devices(folder, name) for name in (HOST, "stage_times", "profile"))
    model = folder / "cost_model.json"
    found = {}
    if host:
        found["measured-host"] = "the host's time of a call", measured_sections.host_page(host.values())
    if model.exists():
        lines = measured_sections.model_page(json.loads(model.read_text(encoding="utf-8")))
        found["measured-cost-model"] = "the cost model beside measured times", lines
    if stages or profiles:
        said = "what keeps kernels from the copy's bandwidth: profiles, and the stages of GroupNorm backward"
        found["measured-kernels"] = said, measured_sections.kernels_page(profiles.values(), stages.values())
    return found


def by_workload(documents: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The results of each workload, by the name of its page."""
    found: dict[str, list[dict[str, Any]]] = {}
    for document in documents:
        found.setdefault(f"measured-{speed_summary.workload_of(document)}", []).append(document)
    return found


def _listed(name: str, documents: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a line of the list of workloads for each result."""
    for one in documents:
        problems = f"{len(one['results'])}" + ("" if complete(one) else f" of {one['problems']}")
        norms = dict.fromkeys("_".join(result["problem"]["op"].split("_")[:2]) for result in one["results"])
        link = f"[{speed_summary.workload_of(one)}]({name}.md)"
        yield f"| {link} | {', '.join(norms)} | {problems} | {one['device']['name']}, {one['date'][:10]} |"


def pages(folder: Path, documents: list[dict[str, Any]]) -> dict[str, str]:
    """Return the texts of all generated pages by the names of their files."""
    workloads, more = by_workload(documents), further(folder)
    lines = [HEAD if documents else HEAD + NONE]
    if documents:
        lines += ["| workload | norms | problems | device |", "|---|---|---:|---|"]
        lines += [line for name, own in workloads.items() for line in _listed(name, own)]
        lines.append("")
    lines += [f"- [{title[0].upper()}{title[1:]}]({name}.md)" for name, (title, _) in more.items()]
    lines.append("")
    host = _of_devices(folder, HOST)
    for device, own in speed_summary.by_device(documents).items():
        lines += measured_sections.goals_section(device, own, host.get(device))
    below = [*workloads, *more]
    if below:
        lines += ["```{toctree}", ":hidden:", "", *below, "```"]
    texts = {name: measured_workload.page(own) for name, own in workloads.items()}
    texts |= {name: "\n".join(text).rstrip() + "\n" for name, (_, text) in more.items()}
    return {f"{name}.md": text for name, text in {**texts, "measured": "\n".join(lines).rstrip() + "\n"}.items()}


def landing(documents: list[dict[str, Any]]) -> str:
    """Return the generated part of docs/speed/index.md: the picture, the README's table, and what is slower."""
    if not documents:
        return speed_summary.summary(documents)
    picture = f"![{speed_summary.alternative(documents)}](../pictures/speed.svg)\n"
    lines = [picture, speed_summary.summary(documents), HOW]
    for device, own in speed_summary.by_device(documents).items():
        lines += [f"## Limits of these results, {device}\n", *speed_summary.slower(own)]
        lines += [*speed_summary.wrong(own), *speed_summary.unmeasured(own)]
    return "\n".join(lines)


def filled(page: Path, text: str) -> str:
    """Return the content of a page with a text between its two markers."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise RefusedError(f"{page}: expected a line {BEGIN.strip()} and, after it, a line {END.strip()}")
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def _bench(document: dict[str, Any], path: Path) -> None:
    save(drawn(document), path, measured_workload.facts(document))


def pictures(documents: list[dict[str, Any]]) -> dict[Path, tuple[str, Callable[[Path], None]]]:
    """Return the facts that each picture shows, and the function that draws it."""
    found: dict[Path, tuple[str, Callable[[Path], None]]] = {}
    if documents:
        draw = functools.partial(speed_summary.draw, documents)
        found[PICTURES / "speed.svg"] = speed_summary.facts(documents), draw
    for document in filter(measured_workload.has_picture, documents):
        path = PICTURES / measured_workload.picture_of(document)
        found[path] = measured_workload.facts(document), functools.partial(_bench, document)
    return found


def _current(path: Path, facts: str) -> bool:
    """Whether a picture and its dark twin show these facts."""
    return all(one.is_file() and facts_of(one) == facts for one in (path, twin(path)))


def main(argv: list[str] | None = None) -> int:
    """Write or check the pages and the README; return 0, 1 if the check fails, 2 if a result is rejected."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with code 1 if a page is stale")
    options = parser.parse_args(argv)
    try:
        documents = newest(RESULTS)
        index = PAGES / "index.md"
        wanted = {PAGES / name: text for name, text in pages(RESULTS, documents).items()}
        wanted[index] = filled(index, landing(documents))
        wanted[README] = filled(README, speed_summary.summary(documents))
    except RefusedError as error:
        print(error, file=sys.stderr)
        return 2
    stale = [path for path, text in wanted.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    left = [path for path in PAGES.glob("measured*.md") if path not in wanted]
    shown = {path: draw for path, (facts, draw) in pictures(documents).items() if not _current(path, facts)}
    if options.check:
        names = ", ".join(path.name for path in [*stale, *left, *shown])
        print(f"{names}: stale; run without --check" if names else "the pages agree with the results")
        return 1 if names else 0
    for path in left:
        path.unlink()
    for path in stale:
        path.write_text(wanted[path], encoding="utf-8")
    for path, draw in shown.items():
        in_both(draw, path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
