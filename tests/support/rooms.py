"""The rooms of the source: its folders from the top down, and who imports whom. Nothing here imports cunorm."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.support.paths import ROOT

PACKAGE, TUNING = ROOT / "cunorm", ROOT / "tuning"
#: The folder of the library's kernels.
SOURCES = ROOT / "kernels_cu"

#: The folders of cunorm from the top down. A folder may import itself and the folders in lower lines.
#: ``cunorm/__init__.py`` re-exports names, and may import any folder.
ROOMS = [
    {"__main__"},
    {"cli"},
    {"torch"},
    {"ascend", "distributed", "gate"},
    {"ops"},
    {"traffic"},
    {"runtime"},
    {"executors", "tiling"},
    {"jit"},
    {"core"},
    {"reference"},
]
#: The folders of kernels that belong to an op.
OP_KERNELS = {path.name for path in SOURCES.iterdir()} - {"common", "partition"}
#: The folders of the kernels from the top down. A file may include files of its own folder and of lower lines.
KERNEL_ROOMS = [OP_KERNELS, {"partition"}, {"common"}]


def rank(rooms: list[set[str]], name: str) -> int:
    return next(line for line, names in enumerate(rooms) if name in names)


def below(rooms: list[set[str]], importer: str, imported: str) -> bool:
    """Whether a folder may import another."""
    return importer == imported or rank(rooms, importer) < rank(rooms, imported)


def module_of(path: str) -> list[str]:
    """The parts of a module's name: ``["cunorm", "ops", "registry"]`` for ``"ops/registry.py"``.

    The file ``__init__.py`` has the name of its folder.
    """
    parts = ["cunorm", *path.removesuffix(".py").split("/")]
    return parts[:-1] if parts[-1] == "__init__" else parts


def imports(text: str, path: str) -> Iterator[tuple[str, bool]]:
    """Yield (full name of an imported module or member, whether the import is at the top level of the file)."""
    tree = ast.parse(text)
    package = module_of(path) if path.endswith("__init__.py") else module_of(path)[:-1]
    for node in ast.walk(tree):
        top = node in tree.body
        if isinstance(node, ast.Import):
            yield from ((alias.name, top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((f"{source}.{alias.name}", top) for alias in node.names)


def imported_rooms() -> set[tuple[str, str]]:
    """Every pair of a room of cunorm, or tuning, and a room that one of its files imports.

    ``cunorm/__init__.py`` is left out: it re-exports the public names.
    """
    files = [(path, path.relative_to(PACKAGE).as_posix()) for path in PACKAGE.rglob("*.py")]
    files += [(path, path.relative_to(ROOT).as_posix()) for path in TUNING.rglob("*.py")]
    known = {name for names in ROOMS for name in names}
    found = set()
    for path, name in files:
        _, *own = module_of(name)
        for imported, _ in imports(path.read_text(encoding="utf-8"), name):
            package, *room = imported.split(".")
            if own and package == "cunorm" and room and room[0] in known - {own[0]}:
                found.add((own[0], room[0]))
    return found


def includes(text: str) -> list[str]:
    """The files that a kernel's file includes."""
    return re.findall(r'^#include "([^"]+)"$', text, re.MULTILINE)


def included_rooms() -> set[tuple[str, str]]:
    """Every pair of a folder of kernels and another folder that one of its files includes."""
    found = set()
    for path in SOURCES.rglob("*.cu*"):
        own = path.relative_to(SOURCES).parts[0]
        found.update((own, one.split("/")[0]) for one in includes(path.read_text(encoding="utf-8")))
    return {(own, other) for own, other in found if own != other}
