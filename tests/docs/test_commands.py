"""The commands of the pages: shell blocks run in a temporary folder, commands in the text have existing arguments."""

from __future__ import annotations

import argparse
import doctest
import importlib
import importlib.util
import itertools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from cunorm.cli.parser import parser
from cunorm.core import cache_folder, settings
from tests.docs.pages import PAGES, Block, blocks, name_of, needs_sphinx, without_blocks
from tests.support.paths import ROOT, environment

if sys.version_info >= (3, 11):
    import tomllib

SHELL = ("bash", "sh")

# ---- blocks of the shell --------------------------------------------------------------------------------------------

#: Blocks of the README that CI runs itself, by name. `test_ci_takes_its_commands_from_the_readme` checks that.
BY_CI = {"test": "pytest -n auto", "torch test": "tests/torch tests/reference tests/distributed tests/docs"}
#: Words of a block that takes long -> the reason.
LONG = {
    "cunorm demo": "trains a network for half a minute",
    "benchmarks/simulate.py": "simulates 16 million elements",
    "--evaluator simulate": "simulates 4 tiles",
}
#: Words of a block -> a module that it needs.
NEEDS = {"cunorm tune": "optuna", "cunorm demo": "sklearn"}
#: The reader's own script ``train.py`` on a page without Python that could be one.
TRAIN = """
import numpy as np, cunorm
y, mean, rstd = cunorm.layer_norm(np.ones((4, 64), np.float32), 64)
"""
#: Programs that take the place of those in a reader's environment. ``pip`` does nothing: `test_extras_exist` checks its
#: arguments. ``cunorm bench`` rehearses, because it needs a GPU otherwise. ``cunorm tune`` tries few tiles.
PROGRAMS = {
    "python": 'if [ "$1 $2" = "-m venv" ]; then mkdir -p "$3/bin" && : >"$3/bin/activate"; else exec {python} "$@"; fi',
    "python3": 'exec python "$@"',
    "pip": ":",
    "cunorm": 'case "$1" in bench) set -- "$@" --rehearse;; tune) set -- "$@" --trials 4;; esac; '
    'exec {python} -m cunorm "$@"',
}


def is_long(block: Block) -> bool:
    """Whether a block takes long, by `LONG`."""
    return any(words in block.text for words in LONG)


def prepare(folder: Path, page: Path) -> dict[str, str]:
    """Fill the folder of a shell with what the blocks of a page expect there; return the environment."""
    (folder / "bin").mkdir()
    for name, script in PROGRAMS.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{script.format(python=shlex.quote(sys.executable))}\n")
        (folder / "bin" / name).chmod(0o755)
    for name in ("benchmarks", "tests"):
        (folder / name).symlink_to(ROOT / name)
    own = [one.text for one in blocks(page) if one.language == "python" and "import cunorm" in one.text]
    (folder / "train.py").write_text(own[0] if own else TRAIN)
    # Tables and studies are the shell's own; compiled kernels are those of all tests.
    compiled = settings.cache_dir() / "cpu"
    cache_folder.make(compiled)
    cache_folder.make(folder / "cache")
    (folder / "cache" / "cpu").symlink_to(compiled)
    path = os.pathsep.join([str(folder / "bin"), os.environ["PATH"]])
    return environment(PATH=path, HOME=str(folder), CUNORM_CACHE_DIR=str(folder / "cache"))


def skip_without_tools(block: Block) -> None:
    """Skip a test if a block needs something that is not installed."""
    for words, module in NEEDS.items():
        if words in block.text:
            pytest.importorskip(module, reason=f"{module} is not installed")
    if "simulate" in block.text:
        simulate = importlib.import_module("cunorm.tuning.measure.simulate")
        try:
            simulate.check()
        except simulate.NoSimulatorError as error:
            pytest.skip(str(error))


def run_block(block: Block, folder: Path, given: dict[str, str]) -> str:
    """Run a block with the exported variables of the blocks before it; return its output."""
    script = f"[ -e .exported ] && . ./.exported\n{block.text}\nexport -p >.exported"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script], cwd=folder, env=given, capture_output=True, text=True, timeout=580
    )
    assert done.returncode == 0, f"{block.text}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def with_shell(long: bool) -> Iterator[object]:
    """The pages with blocks of the shell that take long, or that do not."""
    for page in PAGES:
        if any(one.language in SHELL and one.name not in BY_CI and is_long(one) == long for one in blocks(page)):
            yield pytest.param(page, long, marks=[pytest.mark.long] if long else [], id=name_of(page))


@needs_sphinx
@pytest.mark.parametrize(("page", "long"), [*with_shell(False), *with_shell(True)])
def test_the_commands_run(page: Path, long: bool, tmp_path: Path) -> None:
    """The blocks of a page run one after the other, as in one shell. Text behind one is the whole output of it."""
    found = [one for one in blocks(page) if one.name not in BY_CI]
    given = prepare(tmp_path, page)
    if "import torch" in (tmp_path / "train.py").read_text():
        pytest.importorskip("torch", reason="torch is not installed; CI runs these tests with it, too")
    for at, one in enumerate(found):
        if one.language not in SHELL or is_long(one) != long:
            continue
        skip_without_tools(one)
        printed = run_block(one, tmp_path, given)
        if at + 1 < len(found) and found[at + 1].language == "text":
            assert doctest.OutputChecker().check_output(found[at + 1].text, printed, doctest.ELLIPSIS), printed


def test_every_long_block_is_on_a_page() -> None:
    texts = [one.text for page in PAGES for one in blocks(page) if one.language in SHELL]
    assert [words for words in (*LONG, *NEEDS) if not any(words in text for text in texts)] == []


def test_a_failing_command_fails_its_block(tmp_path: Path) -> None:
    given = prepare(tmp_path, ROOT / "README.md")
    assert run_block(Block("bash", "export A=1\ncunorm --version"), tmp_path, given).startswith("cunorm ")
    assert run_block(Block("bash", 'echo "$A"'), tmp_path, given) == "1\n"
    for wrong in ("cunorm doctr", "cunorm show --shap 1 | head -1", "false\ntrue"):
        with pytest.raises(AssertionError):
            run_block(Block("bash", wrong), tmp_path, given)


@pytest.mark.parametrize("name", BY_CI)
def test_ci_takes_its_commands_from_the_readme(name: str) -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    extract = re.search(r"awk -v mark=.*README\.md", script)
    assert extract is not None
    assert f'readme_command "{name}"' in script or f"readme_command {name})" in script
    command = extract[0].replace('"<!-- $1 command -->"', f'"<!-- {name} command -->"')
    found = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert " && pytest -n auto" in found and found.strip().endswith(BY_CI[name])
    assert found in [one.text for one in blocks(ROOT / "README.md") if one.name == name]


# ---- commands in the text -------------------------------------------------------------------------------------------

#: A placeholder of a page -> what a reader may write for it. Other words stand for themselves.
PLACEHOLDERS = {
    "OP": "group_norm",
    "N,C,HxW,GROUP": "2,8,9,4",
    "N": "1",
    "S": "1",
    "K": "1",
    "--shape=...": "--shape=1",
}
STARTS = ("cunorm ", "python ", "bash ", "pytest ", "pip install ")


def in_text(page: Path) -> list[str]:
    """The commands in the text and the tables of a page, and in its indented lines."""
    text = without_blocks(page)
    spans = [found.replace("\\|", "|").replace("\n", " ") for found in re.findall(r"`([^`]+)`", text)]
    indented = re.findall(r"^    (\S.*)$", text, re.MULTILINE)
    return [found for found in (*spans, *indented) if found.startswith(STARTS)]


def variants(command: str) -> list[list[str]]:
    """The words of a command with its optional parts, once for each of the alternatives ``a|b``."""
    words = [PLACEHOLDERS.get(word, word) for word in shlex.split(re.sub(r"[\[\]]", " ", command))]
    return [list(one) for one in itertools.product(*(word.split("|") for word in words))]


#: The pages with a changelog, whose commands exist too.
TEXTS = [*PAGES, ROOT / "CHANGELOG.md"]
COMMANDS = sorted({command for page in TEXTS for command in in_text(page)})


def accepted(words: list[str]) -> bool:
    """Whether the command line of cunorm takes these arguments. A subcommand alone is its name, not a call."""
    if words[0] == "demo":
        made = importlib.import_module("cunorm.examples.train_digits").parser_of_options()
        words = words[1:]
    else:
        made = parser()
        if len(words) == 1 and not words[0].startswith("-"):
            return f"\n    {words[0]} " in made.format_help()
    for ends in ([], ["value"]):  # an option may be named without its value
        try:
            made.parse_args([*words, *ends])
        except SystemExit as ended:
            if ended.code == 0:  # --help and --version end the program
                return True
            continue
        return True
    return False


@pytest.mark.parametrize("command", [one for one in COMMANDS if one.startswith(("cunorm ", "python -m cunorm"))])
def test_cunorm_takes_the_arguments(command: str) -> None:
    for words in variants(command.removeprefix("python -m ")):
        assert accepted(words[1:]), " ".join(words)


def commands_of(made: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    """The parsers of the commands."""
    found = next(one for one in made._actions if isinstance(one, argparse._SubParsersAction))
    return found.choices


def test_the_table_of_options_is_that_of_the_parser() -> None:
    """Each option of each command has a row, which names the commands that take it."""
    page = (ROOT / "docs" / "guide" / "commands.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w-]+)`[^|]* \| ([a-z, ]+) \|", page, re.MULTILINE)
    documented = {name: set(commands.split(", ")) for name, commands in rows if name.startswith("-") or name == "OP"}
    taken: dict[str, set[str]] = {}
    for name, command in commands_of(parser()).items():
        for action in command._actions:
            if name != "demo" and action.dest != "help" and action.dest != "tables":
                taken.setdefault(action.option_strings[-1] if action.option_strings else "OP", set()).add(name)
    assert documented == taken


def test_wrong_arguments_are_found() -> None:
    wrong = ("tune --tabel FILE", "shw", "doctor --tiles some", "merge", "bench --rounds many", "demo --norm batsch")
    assert [one for one in wrong if accepted(one.split()) and one != "merge"] == []
    assert accepted(["tune", "--table"]) and accepted(["merge"])


@cache
def help_of(script: str, *subcommand: str) -> str:
    """The help of a script: what ``--help`` prints, or the usage in a script of the shell."""
    if script.endswith(".sh"):
        return re.findall(r"^usage=.*|usage: .*", (ROOT / script).read_text(encoding="utf-8"), re.MULTILINE)[0]
    command = [sys.executable, script, *subcommand, "--help"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=100)
    if "No module named 'elftools'" in done.stderr:
        pytest.skip("pyelftools is not installed")
    assert done.returncode == 0, done.stderr
    return done.stdout


def script_of(words: list[str]) -> tuple[str, list[str]]:
    """Path and arguments of ``python PATH ...``, ``python -m MODULE ...`` or ``bash PATH ...``."""
    if words[1] == "-m":
        return f"{words[2].replace('.', '/')}.py", words[3:]
    return words[1], words[2:]


def unknown(script: str, arguments: list[str]) -> list[str]:
    """The options and subcommands that the help of a script does not mention."""
    if not arguments:
        return []
    help = help_of(script)
    subcommands = re.search(r"\{([\w,]+)\}", help)
    if subcommands and arguments[0] in subcommands[1].split(","):
        help += help_of(script, arguments[0])
    named = [one for one in arguments if re.fullmatch("--[a-z-]+", one)]
    named += [one for one in arguments[:1] if re.fullmatch("[a-z]+", one)]
    return [one for one in named if not re.search(rf"(?<![\w-]){re.escape(one)}(?![\w-])", help)]


SCRIPTS = [one for one in COMMANDS if one.startswith(("python ", "bash ")) and not one.startswith("python -m cunorm")]


@pytest.mark.parametrize("command", SCRIPTS)
def test_scripts_exist_and_take_the_arguments(command: str) -> None:
    for words in variants(command):
        script, arguments = script_of(words)
        assert (ROOT / script).is_file(), script
        assert unknown(script, arguments) == []


def test_wrong_arguments_of_scripts_are_found() -> None:
    assert unknown("benchmarks/fit_costs.py", ["sample", "--spred"]) == ["--spred"]
    assert unknown("benchmarks/fit_costs.py", ["simple"]) == ["simple"]
    assert unknown("benchmarks/gpu_proof.sh", ["--dry"]) == ["--dry"]


@pytest.mark.parametrize("command", [one for one in COMMANDS if one.startswith("pytest ")])
def test_pytest_takes_the_arguments(command: str, pytestconfig: pytest.Config) -> None:
    words = shlex.split(command)[1:]
    pytestconfig._parser.parse(words)
    assert all((ROOT / word).exists() for word in words if "/" in word)


def extras(text: str) -> set[str]:
    """The extras that the commands of a text install."""
    installed = re.findall(r"pip install ([^`\n&]*)", text)
    return {
        name.strip() for one in installed for names in re.findall(r"\[([\w, -]+)\]", one) for name in names.split(",")
    }


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib is part of Python 3.11")
def test_extras_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = {name for page in TEXTS for name in extras(page.read_text(encoding="utf-8"))}
    assert named <= {*project["optional-dependencies"]}
    assert {"cpu", "cuda12", "cuda13", "torch", "mpi", "tune", "demo", "dev"} <= named
    assert extras('`pip install "cunorm[tunes]"` && x[1]') == {"tunes"}
