"""Remove barriers, guards, parity flips and inline PTX from the kernels, one at a time; a check must fail each time.

``python tests/mutation/run.py [--only FILE]... [--kind KIND]... [--list] [--jobs N]``. See mutants.py for the removed
code. The checks are the cases of tests/battery that run the file, and the functions of kernel_checks.py for test
kernels. Mutants of inline PTX run the test kernels through their PTX (tests/ptx), and need NVRTC. A mutant that passes
all checks must be in SURVIVORS, with the reason why no check can distinguish it from the original.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cunorm.core import settings
from cunorm.jit import sources
from tests.battery import cases as battery
from tests.battery.case import files_in, kernel_files
from tests.kernels.kernel_checks import CHECKS, expanded
from tests.mutation.coverage import reached
from tests.mutation.mutants import KINDS, Mutant, mutants
from tests.mutation.survivors import SURVIVORS
from tests.ptx.route import MISSING, PAIRS
from tests.support.paths import KERNELS as TEST_KERNELS
from tests.support.paths import environment

#: Signals that end a process by its own fault. SIGTERM and SIGKILL come from outside and prove nothing about a mutant.
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP)
#: Cases that run through PTX besides the test kernels: NVRTC moves mapa out of the loop over rows there.
PTX_CASES = (("layer_norm", "cluster"),)
#: Test kernels that cannot run through PTX: the translator has no static shared memory.
UNTRANSLATED = ("kernel:statics.cu",)


# ---- mutants and their checks ---------------------------------------------------------------------------------------


@cache
def checked_kernels() -> tuple[str, ...]:
    """File names of the test kernels for which kernel_checks.py has a check."""
    return tuple(sorted(p.name for p in TEST_KERNELS.glob("*.cu") if p.stem in CHECKS))


def all_mutants(only: Sequence[str] = ()) -> list[Mutant]:
    """All mutants, sorted by file and line. The file name of a test kernel includes its folder."""
    paths = {file: sources.folder() / file for file in kernel_files()}
    paths |= {f"kernels/{name}": TEST_KERNELS / name for name in checked_kernels()}
    unknown = [name for name in only if name not in paths]
    if unknown:
        raise ValueError(f"--only: {', '.join(unknown)}, expected some of {', '.join(paths)}")
    wanted = {name: path for name, path in paths.items() if not only or name in only}
    return [one for name, path in wanted.items() for one in mutants(name, path.read_text(encoding="utf-8"))]


@cache
def files_of_cases() -> tuple[frozenset[str], ...]:
    """The files that each case of the battery runs. Cached, because it needs a plan per case and is used per file."""
    return tuple(case.files for case in battery.CASES)


@cache
def checks_of(file: str) -> tuple[str, ...]:
    """Names of the checks that run a file, in the form that worker.py takes."""
    if file.startswith("kernels/"):
        return (f"kernel:{file.removeprefix('kernels/')}",)
    found = [f"case:{index}" for index, files in enumerate(files_of_cases()) if file in files]
    for name in checked_kernels():
        path = TEST_KERNELS / name
        if file in files_in(expanded(path.read_text(encoding="utf-8"), path.stem)):
            found.append(f"kernel:{name}")
    return tuple(found)


@cache
def ptx_checks_of(file: str) -> tuple[str, ...]:
    """Names of the checks that run the inline PTX of a file: test kernels, and the first case of each of PTX_CASES."""
    found = [check for check in checks_of(file) if check.startswith("kernel:")]
    firsts = [next(i for i, case in enumerate(battery.CASES) if (case.op, case.strategy) == one) for one in PTX_CASES]
    found += [f"case:{index}" for index in firsts if file in files_of_cases()[index]]
    return tuple(f"ptx:{check}" for check in found if check not in UNTRANSLATED)


def named(check: str) -> str:
    """Readable name of a check."""
    what, _, which = check.partition(":")
    if what == "ptx":
        return f"the PTX of {named(which)}"
    return str(battery.CASES[int(which)]) if what == "case" else which


# ---- one mutant -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """A mutant's state: "killed", "survived" or "stillborn" (does not compile), the check that killed it, and how."""

    mutant: Mutant
    state: str
    check: str = ""
    way: str = ""

    def __str__(self) -> str:
        one = self.mutant
        by = f" by {named(self.check)}" if self.state == "killed" else ""
        return f"{one.file}:{one.line} {one.kind} [{one.change}] {self.state}{by} {self.way}".rstrip()


def _prepare(folder: Path, mutant: Mutant) -> None:
    """Copy the kernels with one replacement, and create a cache that already contains the builds of the originals."""
    shutil.copytree(sources.folder(), folder / "kernels_cu")
    shutil.copytree(TEST_KERNELS, folder / "kernels")
    path = folder / (mutant.file if mutant.file.startswith("kernels/") else f"kernels_cu/{mutant.file}")
    path.write_text(mutant.applied(path.read_text(encoding="utf-8")), encoding="utf-8")
    kept = folder / "cache" / "cpu"
    kept.parent.mkdir(0o700)
    kept.mkdir(0o700)
    there = settings.cache_dir() / "cpu"
    for build in there.iterdir() if there.is_dir() else ():
        if not build.name.startswith("."):  # an unfinished build starts with a dot
            (kept / build.name).symlink_to(build.resolve())


def run_mutant(mutant: Mutant, checks: Iterable[str], kernels: Iterable[str] = ("*",)) -> Outcome:
    """Run checks in a separate process until one fails. Only `kernels` are built from the mutant ("*": all)."""
    with tempfile.TemporaryDirectory(prefix="cunorm-mutant-") as name:
        folder = Path(name)
        _prepare(folder, mutant)
        surroundings = environment(CUNORM_CACHE_DIR=str(folder / "cache"), CUNORM_CPU_CORES="1")
        surroundings.setdefault("CUNORM_CPU_BUILD", "checked")
        done = subprocess.run(
            [sys.executable, "-m", "tests.mutation.worker", name, ",".join(kernels), *checks],
            env=surroundings,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
        )
    lines = done.stdout.splitlines()
    check = next((line.removeprefix("at ") for line in reversed(lines) if line.startswith("at ")), "")
    if done.returncode == -signal.SIGPROF:
        return Outcome(mutant, "killed", check, "hangs")
    if -done.returncode in CRASHES:
        return Outcome(mutant, "killed", check, f"crashes: {signal.Signals(-done.returncode).name}")
    state, _, way = (lines[-1] if lines else "").partition(" ")
    if done.returncode != 0 or state not in ("killed", "survived", "stillborn"):
        raise RuntimeError(f"{mutant.file}:{mutant.line}: the worker ended with {done.returncode}\n{done.stderr}")
    return Outcome(mutant, state, check, way)


def fill_cache(checks: Sequence[str]) -> None:
    """Run checks on the unchanged kernels, whose builds then are in the cache of every mutant.

    Raises
    ------
    RuntimeError
        If a check fails.
    """
    with tempfile.TemporaryDirectory(prefix="cunorm-unchanged-") as name:
        for folder, original in (("kernels_cu", sources.folder()), ("kernels", TEST_KERNELS)):
            shutil.copytree(original, Path(name) / folder)
        surroundings = environment(CUNORM_CPU_CORES="1")
        surroundings.setdefault("CUNORM_CPU_BUILD", "checked")
        command = [sys.executable, "-m", "tests.mutation.worker", name, "*", *checks]
        done = subprocess.run(command, env=surroundings, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.stdout.splitlines()[-1:] != ["survived"]:
        raise RuntimeError(f"the unchanged kernels fail:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def run_all(found: Sequence[Mutant], jobs: int) -> list[Outcome]:
    """Run every mutant on the checks that reach it, first those that killed the latest mutants of the same file."""
    from tqdm import tqdm

    everything = [one for one in all_mutants() if one.kind != "ptx"]
    ran = {one.file for one in found if one.kind != "ptx"}
    checks = sorted({check for file in ran for check in checks_of(file)}, key=lambda one: (len(one), one))
    reaching: dict[Mutant, dict[str, list[str]]] = {}
    if checks:
        print(f"running {len(checks)} checks on kernels with {len(everything)} probes")
        reaching = reached(everything, {"kernels_cu": sources.folder(), "kernels": TEST_KERNELS}, checks)
    if of_ptx := {check for one in found if one.kind == "ptx" for check in ptx_checks_of(one.file)}:
        print(f"running {len(of_ptx)} checks on the PTX of the kernels")
        fill_cache(sorted(of_ptx))
    killers: dict[str, list[str]] = {}

    def run(mutant: Mutant) -> Outcome:
        latest = killers.setdefault(f"{mutant.file} {mutant.kind == 'ptx'}", [])
        there = {check: ["*"] for check in ptx_checks_of(mutant.file)} if mutant.kind == "ptx" else reaching[mutant]
        if not there:
            return Outcome(mutant, "survived", way="unseen: no check reaches it")
        kernels = {kernel for names in there.values() for kernel in names}
        checks = sorted(there, key=lambda one: latest.index(one) if one in latest else len(latest))
        outcome = run_mutant(mutant, checks, kernels)
        if outcome.state == "killed":
            latest[:] = [outcome.check, *(one for one in latest if one != outcome.check)]
        elif mutant.key not in SURVIVORS:
            tqdm.write(str(outcome))
        return outcome

    with ThreadPoolExecutor(jobs) as pool:
        return list(tqdm(pool.map(run, found), total=len(found), unit="mutant"))


# ---- errors and report ----------------------------------------------------------------------------------------------


def judge(outcomes: Sequence[Outcome]) -> list[str]:
    """Errors: survivors without a reason, reasons for mutants that do not survive, mutants that do not compile."""
    wrong = []
    survived = {one.mutant.key for one in outcomes if one.state == "survived"}
    for one in outcomes:
        if one.state == "survived" and one.mutant.key not in SURVIVORS:
            wrong.append(f"survives without a reason: {one}")
        if one.state == "stillborn":
            wrong.append(f"does not compile, so no check ran (correct mutants.py): {one}")
    ran = {(one.mutant.file, one.mutant.kind == "ptx") for one in outcomes}
    for key in SURVIVORS:
        if (key[0], key[2] == "ptx") in ran and key not in survived:
            wrong.append(f"has a reason but does not survive: {key}")
    return wrong


def report(outcomes: Sequence[Outcome]) -> None:
    """Print a line per mutant, survivors last, and the counts."""
    states = ("killed", "stillborn", "survived")
    for state in states:
        for one in outcomes:
            if one.state == state:
                print(one)
                if state == "survived" and one.mutant.key in SURVIVORS:
                    print(f"    {SURVIVORS[one.mutant.key]}")
    counts = ", ".join(f"{sum(one.state == state for one in outcomes)} {state}" for state in states)
    print(f"{len(outcomes)} mutants: {counts}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Return 1 if there are errors, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="FILE", help="only the mutants of this file")
    parser.add_argument("--kind", action="append", default=[], choices=KINDS, help="only the mutants of this kind")
    parser.add_argument("--list", action="store_true", help="list the mutants and run no check")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="number of parallel processes"
    )
    asked = parser.parse_args(arguments)
    found = [one for one in all_mutants(asked.only) if not asked.kind or one.kind in asked.kind]
    if asked.list:
        for one in found:
            print(f"{one.file}:{one.line} {one.kind} [{one.change}]")
        return 0
    if not PAIRS and any(one.kind == "ptx" for one in found):
        print(f"the mutants of inline PTX are left out: {MISSING}")
        found = [one for one in found if one.kind != "ptx"]
    outcomes = run_all(found, asked.jobs)
    report(outcomes)
    wrong = judge(outcomes)
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
