"""The pages of the documentation, their fenced blocks, and the mark of a test that runs a block."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.paths import ROOT

#: Folders of docs that a build writes.
BUILT = {"_build", "examples", "generated"}
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if not BUILT & {*page.relative_to(ROOT / "docs").parts}),
]
#: The blocks run once in CI: in the environment that also has PyTorch.
needs_sphinx = pytest.mark.skipif(
    find_spec("sphinx") is None, reason="Sphinx is not installed; CI runs this test where it is, beside PyTorch"
)
_FENCE = re.compile(r"(?:^<!-- ([\w ]+) command -->\n)?^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes
    ----------
    language : str
        The words behind the fence.
    text : str
    name : str or None
        The name in a comment ``<!-- NAME command -->`` above the block.
    """

    language: str
    text: str
    name: str | None = None


def name_of(page: Path) -> str:
    """The path of a page in the repository."""
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order, without Sphinx's directives."""
    found = [Block(language, text, name) for name, language, text in _FENCE.findall(page.read_text(encoding="utf-8"))]
    return [Block(one.language, one.text, one.name or None) for one in found if not one.language.startswith("{")]


def without_blocks(page: Path) -> str:
    """The text of a page between its fenced blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def claimed(page: str, words: str) -> list[Block]:
    """The ``py`` blocks of a page that contain some words."""
    return [one for one in blocks(ROOT / page) if one.language == "py" and words in one.text]


def runs(page: str, words: str) -> pytest.MarkDecorator:
    """Mark a test that runs a ``py`` block, which it receives as its argument ``text``.

    Parameters
    ----------
    page : str
        Path of the page in the repository.
    words : str
        Words that exactly one ``py`` block of the page contains.
    """
    (found,) = claimed(page, words)
    return pytest.mark.parametrize("text", [found.text], ids=[f"{Path(page).name}: {words}"])
