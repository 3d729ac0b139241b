"""The examples in docstrings run and print what they show; the scripts that are pages of the site run."""

from __future__ import annotations

import ast
import doctest
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import cunorm
from cunorm import ascend, reference
from tests.support.paths import ROOT, environment

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def public(module: ModuleType) -> Iterator[Any]:
    """Functions and classes of a public module, without exceptions, warnings and enumerations."""
    names = getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")])
    for name in names:
        found = getattr(module, name)
        function = inspect.isfunction(found) and found.__module__.startswith("cunorm")
        if function or (inspect.isclass(found) and not issubclass(found, (Exception, int))):
            yield found


OBJECTS = [found for module in (cunorm, ascend, reference) for found in public(module)]
METHODS = [
    pytest.param(inspect.getdoc(member), id=f"{found.__module__}.{found.__name__}.{name}")
    for found in OBJECTS
    if inspect.isclass(found)
    for name, member in vars(found).items()
    if not name.startswith("_") and ">>>" in (inspect.getdoc(member) or "")
]


def failures(docstring: str, name: str) -> int:
    """The examples of a docstring that fail."""
    test = doctest.DocTestParser().get_doctest(docstring, {}, name, None, 0)
    return doctest.DocTestRunner(optionflags=FLAGS).run(test).failed


@pytest.mark.parametrize("found", OBJECTS, ids=lambda found: f"{found.__module__}.{found.__name__}")
def test_every_public_docstring_has_an_example_that_runs(found: Any) -> None:
    docstring = inspect.getdoc(found)
    assert docstring is not None
    assert "\nExamples\n--------\n" in docstring
    assert not failures(docstring, found.__name__)


@pytest.mark.parametrize("docstring", METHODS)
def test_the_examples_of_methods_run(docstring: str) -> None:
    assert not failures(docstring, "method")


def test_the_example_of_an_exception_runs() -> None:
    docstring = inspect.getdoc(cunorm.UnsupportedTile)
    assert docstring is not None
    assert ">>>" in docstring
    assert not failures(docstring, "UnsupportedTile")


def test_a_wrong_example_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert failures(">>> 1 + 1\n3\n", "wrong") == 1
    assert "Expected" in capsys.readouterr().out


# ---- scripts that are pages of the site -----------------------------------------------------------------------------

#: Script -> what it prints, in this order.
PRINTED = {
    "first_call": [
        "True",
        "chosen by  the cost model",
        "15,728,640 bytes at least",
        "1.00 times the fewest bytes: cluster",
        "1.67 times the fewest bytes: split",
        "threads is 7, expected a multiple of 32",
    ],
    "tune_training_run": [
        "2 steps, 18 calls",
        "chosen by  the cost model: no tiling table has an entry",
        "table      tiles.json: 6 modelled, not measured",
        "chosen by  the problem's entry in tiles.json: modelled, not measured",
        "6 entries; the last one:",
        '"source": "model"',
    ],
}
#: Script -> the modules that it needs besides cunorm's own.
NEEDS = {"first_call": (), "tune_training_run": ("sklearn", "tqdm", "optuna")}


def output(name: str, folder: Path) -> str:
    """What a script of ``examples`` prints. Its temporary folder is empty afterwards, and so is its working folder."""
    for needed in NEEDS[name]:
        pytest.importorskip(needed, reason=f"{needed} is not installed")
    here, temporary = folder / "here", folder / "temporary"
    here.mkdir(parents=True)
    temporary.mkdir()
    scripts = sorted((ROOT / "examples").glob("[!_]*"))
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / f"{name}.py"],
        **{"cwd": here, "env": environment(TMPDIR=str(temporary)), "capture_output": True, "text": True},
    )
    assert done.returncode == 0, done.stderr
    assert [*here.iterdir(), *temporary.iterdir()] == []
    assert sorted((ROOT / "examples").glob("[!_]*")) == scripts
    return done.stdout


@pytest.mark.parametrize("name", PRINTED)
def test_a_script_that_is_a_page_runs(name: str, tmp_path: Path) -> None:
    printed = output(name, tmp_path)
    assert "False" not in printed
    assert re.search(r"\d ?(?:s|ms|seconds)\b", printed) is None  # no time of this machine
    for words in PRINTED[name]:
        assert words in printed
        printed = printed.partition(words)[2]


@pytest.mark.long
@pytest.mark.parametrize("name", PRINTED)
def test_a_script_that_is_a_page_prints_the_same_again(name: str, tmp_path: Path) -> None:
    assert output(name, tmp_path / "first") == output(name, tmp_path / "second")


def test_the_scripts_that_are_pages_are_those_of_the_site() -> None:
    (shown,) = re.findall(r"^SHOWN = (\(.*\))$", (ROOT / "docs" / "conf.py").read_text(encoding="utf-8"), re.MULTILINE)
    assert {*ast.literal_eval(shown)} == {*PRINTED}
