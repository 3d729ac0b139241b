"""Compile the kernels of gpu_proof.sh ahead, on a machine without a GPU: a rented GPU should not wait for compilers.

Examples::

    bash benchmarks/gpu_proof.sh --prepare kernels --device H200         # draws the tiles and runs `pack`
    python benchmarks/prepare_proof.py pack tiles.jsonl --device H200 --out kernels
    bash benchmarks/gpu_proof.sh --kernels kernels                       # there: each part runs `unpack` first
    python benchmarks/prepare_proof.py wheels --without cupy-cuda13x,numpy,pytest    # packages to carry there

``pack`` compiles the kernels of the battery and those of a file of ``measure_tiles.py draw``, and writes each to an
archive. ``unpack`` adds an archive to the cache folder. A kernel in the cache is found by its text, the architecture
and the version of NVRTC, so that an archive of another version is useless and refused. ``wheels`` prints the
packages that the tests and the tuner need, in this environment's versions, for ``pip download --no-deps -r``.
"""

from __future__ import annotations

import argparse
import functools
import io
import re
import sys
import tarfile
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.measure_tiles import device_named, kernels_of, on_all_cores
from cunorm.core import cache_folder
from cunorm.core.devices import KNOWN, Device
from cunorm.core.files import write_whole
from cunorm.executors.choose import executor
from cunorm.jit.sources import TEXTS
from cunorm.ops.registry import OPS
from cunorm.runtime import plans
from cunorm.runtime.plans import Target
from tests.battery import cases as battery
from tests.battery.case import Case, grid_of

NVRTC = "nvrtc"  # the file of an archive that names the version
#: Extras whose packages the proof imports, without the tools of a developer.
EXTRAS, TOOLS = ("tune", "dev"), frozenset({"build", "mypy", "pre-commit", "ruff"})
#: Packages with the compiler or the interpreter itself: those of the other machine count.
LEFT_OUT = re.compile(r"cupy|nvidia-|pip$|cunorm$|ziglang$|clang-format$|scikit-learn$")


# ---- pack -----------------------------------------------------------------------------------------------------------


def kernels_of_case(case: Case, device: Device) -> dict[str, str]:
    """The texts of the kernels that a case of the battery launches, each with its entry."""
    problem, op = case.plan().problem, OPS[case.op]
    with grid_of(case.grid):
        made = plans.plan_for(problem, op.strategies, op.names, Target("gpu", 0, device), case.plan().tile)
    return dict(kernel for text in TEXTS for kernel in made.texts(text))


def _built(kernel: tuple[str, str], architecture: str) -> tuple[str, bytes]:
    """Compile a kernel, or find it in the cache folder. Returns the file's name and content."""
    file = executor("gpu").build_for(*kernel, architecture)
    return file.name, file.read_bytes()


def nvrtc_version() -> str:
    """The version of the NVRTC that CuPy uses here."""
    return ".".join(map(str, executor("gpu").cupy_nvrtc.getVersion()))


def write_archive(path: Path, kernels: dict[str, str], architecture: str) -> None:
    """Compile kernels and write them to an archive."""
    print(f"{path}: {len(kernels)} kernels", flush=True)
    found = on_all_cores(functools.partial(_built, architecture=architecture), [*kernels.items()], "kernel")
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w:xz") as archive:
        for name, content in [(NVRTC, nvrtc_version().encode()), *sorted(found)]:
            header = tarfile.TarInfo(name)
            header.size = len(content)
            archive.addfile(header, io.BytesIO(content))
    write_whole(path, written.getvalue())


def pack(asked: argparse.Namespace) -> None:
    """Write the archives."""
    device = device_named(asked.device)
    asked.out.mkdir(parents=True, exist_ok=True)
    tests: dict[str, str] = {}
    for case in battery.CASES:
        tests |= kernels_of_case(case, device)
    write_archive(asked.out / "tests.tar.xz", tests, device.architecture)
    write_archive(asked.out / "tiles.tar.xz", kernels_of(asked.tiles, device), device.architecture)


# ---- unpack ---------------------------------------------------------------------------------------------------------


def unpack(asked: argparse.Namespace) -> None:
    """Add an archive to the cache folder."""
    with tarfile.open(asked.archive) as archive:
        members = {one.name: archive.extractfile(one) for one in archive if one.isfile()}
        found = {name: member.read() for name, member in members.items() if member is not None}
    version = found.pop(NVRTC, b"").decode()
    if version != nvrtc_version():
        raise SystemExit(f"{asked.archive}: kernels of NVRTC {version or '?'}, expected those of {nvrtc_version()}")
    folder = cache_folder.folder("cubins")
    for name, content in found.items():
        write_whole(folder / Path(name).name, content, mode=0o600)
    print(f"{len(found)} kernels of {asked.archive.name} added to {folder}")


# ---- wheels ---------------------------------------------------------------------------------------------------------


def needs_of(requirements: Sequence[str], extras: Sequence[str]) -> Iterator[str]:
    """Names of the packages in requirements that hold in this environment with one of some extras."""
    for requirement in map(Requirement, requirements):
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": one}) for one in ("", *extras)):
            yield canonicalize_name(requirement.name)


def wheels_without(present: frozenset[str]) -> list[str]:
    """What must be carried to a machine that has some packages, as lines of a file for pip."""
    found: dict[str, str] = {}
    waiting = [*needs_of(metadata.requires("cunorm") or [], EXTRAS)]
    while waiting:
        name = waiting.pop()
        if name not in found and name not in present | TOOLS and not LEFT_OUT.match(name):
            found[name] = metadata.version(name)
            waiting += needs_of(metadata.requires(name) or [], ())
    return [f"{name}=={version}" for name, version in sorted(found.items())]


def wheels(asked: argparse.Namespace) -> None:
    """Print the packages to carry."""
    print("\n".join(wheels_without(frozenset(map(canonicalize_name, asked.without.split(","))))))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    one = commands.add_parser("pack", help="compile the kernels and write them to archives; needs no GPU")
    one.add_argument("tiles", type=Path, metavar="FILE")
    one.add_argument("--device", choices=KNOWN, required=True, help="the GPU to compile for")
    one.add_argument("--out", type=Path, required=True, metavar="DIR")
    one.set_defaults(run=pack)
    one = commands.add_parser("unpack", help="add an archive to the cache folder")
    one.add_argument("archive", type=Path, metavar="FILE")
    one.set_defaults(run=unpack)
    one = commands.add_parser("wheels", help="print the packages to carry to the machine with the GPU")
    one.add_argument("--without", default="", metavar="NAMES", help="packages that are there, separated by commas")
    one.set_defaults(run=wheels)
    asked = parser.parse_args(argv)
    asked.run(asked)
    return 0


if __name__ == "__main__":
    sys.exit(main())
