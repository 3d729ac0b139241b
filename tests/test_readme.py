"""The README and the docs: tables are complete, and links exist. ``tests/docs`` runs their examples and commands."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

import cunorm
import cunorm.reference
from cunorm.cli.parser import parser
from cunorm.core import settings
from cunorm.core.devices import known
from cunorm.ops.parse_problem import plan_options
from cunorm.ops.registry import OPS, problem_of
from tests.docs.pages import PAGES
from tests.support.paths import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = (ROOT / "docs" / "guide" / "commands.md").read_text(encoding="utf-8")
MOST_LINES = 150


def test_the_readme_is_short() -> None:
    assert README.count("\n") <= MOST_LINES


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_the_longest_rows_of_the_pages_are_those_that_the_strategies_take(op: str) -> None:
    """A tile takes a row of the stated length, and none takes a row that is longer by 16 bytes."""
    page, device = (ROOT / "docs" / "guide" / f"{op.replace('_', '-')}.md").read_text(encoding="utf-8"), known("H200")
    stated = re.findall(r"^\| `(\w+)` \| ([\d,]+ / .*?) \| (.*?) \| (.*?) \|$", page, re.MULTILINE)
    assert [row[0] for row in stated] == ["warp", "block", "cluster"]
    columns = [(op, None), (f"{op}_backward", None), (f"{op}_backward", "dh")]
    checked = 0
    for strategy, *cells in stated:
        for cell, (name, extras) in zip(cells, columns, strict=True):
            tiles = [tile for tile in OPS[name].strategies[strategy].tiles() if tile.as_dict().get("cluster", 1) <= 8]
            for length, dtype in zip(cell.split(" / "), ("bfloat16", "float32", "float64"), strict=True):
                longest = int(length.replace(",", ""))
                problem = problem_of(name, **plan_options(name, f"64,{longest}", dtype, extras=extras))
                longer = replace(problem, C=longest + problem.pack)
                refuses = OPS[name].strategies[strategy].refuses
                assert any(refuses(problem, tile, device) is None for tile in tiles), problem.describe()
                assert all(refuses(longer, tile, device) is not None for tile in tiles), longer.describe()
                checked += 1
    assert checked == 27


def test_the_table_of_the_ascend_page_is_complete() -> None:
    """The table contains every public name of the module, and the functions of cunorm that it names exist."""
    page = (ROOT / "docs" / "guide" / "ascend.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \w+ \| `(\w+)` \| (?:`cunorm\.(\w+)` )?\|$", page, re.MULTILINE)
    assert {name for name, _ in rows} | {"strict_limits"} == {*cunorm.ascend.__all__}
    assert "| `strict_limits` |" in page
    assert {by for _, by in rows if by} <= {*OPS, "plan"}
    for name in ("GroupNormGrad", "LayerNormGrad"):
        taken = [str(p).split(":")[0] for p in inspect.signature(getattr(cunorm.ascend, name)).parameters.values()]
        shown = re.search(rf"^    {name}\((.*?)\) ->", page, re.MULTILINE | re.DOTALL)
        assert shown is not None
        assert re.findall(r"[a-z_]+", re.sub(r"=\(.*?\)|=[^,]*|\*", "", shown[1])) == taken
    for status in cunorm.ascend.AclnnStatus:
        assert f"| `{status.name}` | {int(status)} |" in page


def test_every_function_in_the_table_exists() -> None:
    rows = re.findall(r"^\| (`cunorm\..*?) \|", README, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`cunorm\.(\w+)`", row)}
    assert {*OPS, "plan", "trace"} <= named
    for name in named - {"reference", "ndarray", "torch"}:
        assert name in cunorm.__all__


def test_the_table_of_commands_is_complete() -> None:
    """Every subcommand and script (benchmarks/, docs/drawings/) has a row, and every row names an existing one."""
    rows = re.findall(r"^\| `(.*?)` \|", COMMANDS, re.MULTILINE)
    listed = re.search(r"\{(.*?)\}|COMMAND\n((?:    \w+ .*\n(?: {6,}.*\n)*)+)", parser().format_help())
    assert listed is not None
    subcommands = set(re.findall(r"^    (\w+)", listed[2], re.MULTILINE))
    assert {row.split()[1] for row in rows if row.startswith("cunorm ")} == subcommands
    words = [row.split() for row in rows if row.startswith(("python ", "bash "))]
    scripts = {one[1] if one[1] != "-m" else f"{one[2].replace('.', '/')}.py" for one in words}
    runnable = {
        path.relative_to(ROOT).as_posix()
        for folder in ("benchmarks", "docs/drawings")
        for path in (ROOT / folder).rglob("*.*")
        if path.suffix == ".sh"
        or (path.suffix == ".py" and '__name__ == "__main__"' in path.read_text(encoding="utf-8"))
    }
    assert scripts == runnable | {"tests/mutation/run.py"}


def test_the_table_of_variables_is_complete() -> None:
    assert tuple(re.findall(r"^\| `(CUNORM_\w+)`", COMMANDS, re.MULTILINE)) == settings.VARIABLES
    assert settings.__doc__ is not None
    assert tuple(re.findall(r"``(CUNORM_\w+)``", settings.__doc__)) == settings.VARIABLES


def test_the_picture_shows_every_counted_problem(tmp_path: Path) -> None:
    """A new picture and the committed one have one marker per problem of the result file."""
    overview = importlib.import_module("docs.drawings.overview")
    document = json.loads(overview.COUNTS.read_text(encoding="utf-8"))
    overview.draw(document, tmp_path / "fresh.svg")
    for picture in (tmp_path / "fresh.svg", overview.PICTURE):
        collections = re.findall(
            r'\n( *)<g id="PathCollection_\d+">(.*?)\n\1</g>', picture.read_text(encoding="utf-8"), re.DOTALL
        )
        assert sum(found.count("<use ") for _, found in collections) == len(document["rows"])


def test_the_target_of_every_link_exists() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        linked = re.findall(r"\]\((?!https?:)([^)#]+)\)", text) + re.findall(r"\bsrc(?:set)?=\"(.*?)\"", text)
        for target in linked:
            assert (page.parent / target).exists(), f"{page.name}: {target}"
