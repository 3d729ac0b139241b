"""Find the checks and kernels that reach each mutant: `python -m tests.mutation.coverage FOLDER COUNT CHECK...`.

The original code of each mutant gets a probe, which records that the code ran. A check that never runs this code cannot
distinguish the mutant from the original, so it need not run on the mutant. A kernel that never runs this code need not
be built from the mutant. For most lines of a shared header, this excludes most checks and kernels.
"""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from tests.mutation.mutants import Mutant
from tests.support.paths import environment

PROBES = "cunorm_probes"
_HEAD = f"""#ifndef CUNORM_PROBE
#define CUNORM_PROBE(site) ({PROBES}[site] = 1)
extern "C" __attribute__((visibility("default"))) unsigned char {PROBES}[%d];
unsigned char {PROBES}[%d];
#endif
#line 1
"""


def with_probes(text: str, sites: Sequence[tuple[int, Mutant]], count: int) -> str:
    """The text of a file with a probe at the original code of each mutant. Sites are numbered from 0 to count - 1."""
    edits = []
    for site, one in sites:
        statement = one.new == ";"
        opening, closing = ("{ CUNORM_PROBE(%d); ", " }") if statement else ("(CUNORM_PROBE(%d), (", "))")
        # An enclosing site opens before the site inside it and closes after it.
        edits += [(one.start, 1, -one.end, opening % site), (one.end, 0, -one.start, closing)]
    for at, _, _, new in sorted(edits, reverse=True):
        text = text[:at] + new + text[at:]
    return _HEAD % (count, count) + text


def reached(
    found: Sequence[Mutant], folders: Mapping[str, Path], checks: Iterable[str]
) -> dict[Mutant, dict[str, list[str]]]:
    """For each mutant, the checks that reach it, and the kernels in which each check does.

    ``folders`` maps the names of the folders of the copy to the folders that are copied.
    """
    spans = list(dict.fromkeys((one.file, one.start, one.end) for one in found))
    first = {span: one for one in reversed(found) for span in [(one.file, one.start, one.end)]}
    with tempfile.TemporaryDirectory(prefix="cunorm-probes-") as name:
        for folder, original in folders.items():
            shutil.copytree(original, Path(name) / folder)
        for file in {one.file for one in found}:
            path = Path(name) / (file if file.startswith("kernels/") else f"kernels_cu/{file}")
            sites = [(site, first[span]) for site, span in enumerate(spans) if span[0] == file]
            path.write_text(with_probes(path.read_text(encoding="utf-8"), sites, len(spans)), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-m", "tests.mutation.coverage", name, str(len(spans)), *checks],
            env=environment(CUNORM_CPU_CORES="1", CUNORM_CPU_BUILD="plain"),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
    if done.returncode != 0:
        raise RuntimeError(f"the unchanged kernels fail:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    by_span: dict[tuple[str, int, int], dict[str, list[str]]] = {span: {} for span in spans}
    for check, kernels in json.loads(done.stdout.splitlines()[-1]).items():
        for kernel, sites in kernels:
            for site in sites:
                by_span[spans[site]].setdefault(check, []).append(kernel)
    return {one: by_span[one.file, one.start, one.end] for one in found}


def main(folder: Path, count: int, checks: Sequence[str]) -> None:
    from cunorm.executors.cpu import executor
    from cunorm.jit import sources
    from tests.mutation.worker import run

    sources.folder = lambda: folder / "kernels_cu"  # type: ignore[assignment]
    real = executor.launch
    hits: dict[str, set[int]] = {}

    def launch(kernel: Any, *arguments: Any, **named: Any) -> None:
        # The kernels of a source share a build and its probes.
        probes = (ctypes.c_ubyte * count).in_dll(ctypes.CDLL(str(kernel.path)), PROBES)
        ctypes.memset(probes, 0, count)
        real(kernel, *arguments, **named)
        hits.setdefault(kernel.name, set()).update(at for at, hit in enumerate(bytes(probes)) if hit)

    found = {}
    with mock.patch.object(executor, "launch", launch):
        for check in checks:
            hits.clear()
            run(check, folder / "kernels")
            found[check] = [(name, sorted(sites)) for name, sites in hits.items() if sites]
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
