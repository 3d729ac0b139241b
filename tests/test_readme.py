"""The README and the docs: examples run, tables are complete, links exist, and CI runs the README's commands."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cunorm
import cunorm.reference
from cunorm.cli.parser import parser
from cunorm.core import settings
from cunorm.core.devices import known
from cunorm.ops.parse_problem import plan_options
from cunorm.ops.registry import OPS, problem_of
from tests.support.paths import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = (ROOT / "docs" / "guide" / "commands.md").read_text(encoding="utf-8")
MOST_LINES = 150


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_example_prints_the_output_that_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    exec(blocks("python")[0], {})
    assert capsys.readouterr().out == blocks("text")[0]


def test_the_readme_is_short() -> None:
    assert README.count("\n") <= MOST_LINES


def assert_gradients_of_the_layer(names: dict[str, Any]) -> None:
    """Compare the gradients of the page of RMSNorm with finite differences of the float64 oracle."""
    asked = {name: names[name].astype(np.float64) for name in ("branch", "stream", "gamma", "weight")}

    def loss(given: dict[str, Any]) -> float:
        y, _, h = cunorm.reference.rms_norm(given["branch"], 32, given["gamma"], residual=given["stream"])
        return float((names["dout"] * (y @ given["weight"])).sum() + (names["dstream"] * h).sum())

    found = {"branch": "dx", "stream": "dx", "gamma": "dgamma", "weight": "dweight"}
    for name, gradient in found.items():
        step = 1e-5 * np.random.default_rng(1).normal(size=asked[name].shape)
        change = loss(asked | {name: asked[name] + step}) - loss(asked | {name: asked[name] - step})
        assert change == pytest.approx(2 * float((names[gradient] * step).sum()), rel=1e-3), name


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.name)
def test_the_examples_of_the_docs_run(page: Path) -> None:
    found = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, object] = {}
    if any("import torch" in text for text in found):
        pytest.importorskip("torch", reason="torch is not installed; CI runs tests/torch with it")
    for text in found:
        if "import torch" in text:
            pytest.importorskip("torch", reason="torch is not installed")
        exec(text, names)
    if page.name == "rms-norm.md":
        assert_gradients_of_the_layer(names)
    if page.name == "batch-norm.md":
        exact = cunorm.reference.batch_norm_stats(names["x"])  # type: ignore[arg-type]
        assert np.allclose(names["running_mean"], 0.1 * exact[0], atol=1e-6)  # type: ignore[arg-type]
        assert isinstance(names["dx"], np.ndarray)
        assert abs(float(names["dx"].mean())) < 1e-6  # the gradient of the input of a BatchNorm sums to zero


def test_the_examples_of_the_ascend_page_give_the_documented_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    """The gradients on the page also agree with the oracle."""
    names: dict[str, Any] = {}
    page = (ROOT / "docs" / "guide" / "ascend.md").read_text(encoding="utf-8")
    operators, batch, group = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(operators, names)
    rows = names["x"], (3, 3), names["mean"], 1 / np.sqrt(names["variance"] + 1e-5)
    exact = cunorm.reference.layer_norm_backward(names["dy"], *rows)
    for name, want in zip(("pd_x", "pd_gamma", "pd_beta"), exact, strict=True):
        assert np.allclose(names[name], want, atol=1e-5)
    statistics = names["groups"].mean(axis=2), names["rstd"]
    exact = cunorm.reference.group_norm_backward(names["dy"], names["x"], *statistics, num_groups=2)
    for name, want in zip(("dx", "dgamma", "dbeta"), exact, strict=True):
        assert np.allclose(names[name], want, atol=1e-5)
    exec(batch, names)
    assert capsys.readouterr().out == "[7. 8.] [21. 30.]\n"
    assert batch.rstrip().endswith("# [7. 8.] [21. 30.]")
    assert [names[name].tolist() for name in ("grad_weight", "grad_bias")] == [[21, 30], [7, 8]]
    exec(group, names)
    given = (names["grad_out"], names["x"], names["mean"], names["rstd"])
    exact = cunorm.reference.group_norm_backward(*given, num_groups=2)
    for name, want in zip(("grad_input", "grad_gamma", "grad_beta"), exact, strict=True):
        assert np.allclose(names[name], want, atol=1e-5)


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


def test_a_torch_tensor_goes_through_dlpack() -> None:
    """The code of docs/guide/pytorch.md with NumPy in place of CuPy. Neither direction copies."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    assert "cupy.from_dlpack(tensor.detach())" in (ROOT / "docs" / "guide" / "pytorch.md").read_text(encoding="utf-8")
    tensor = torch.randn(2, 8, 5)
    x = np.from_dlpack(tensor.detach())
    y = torch.from_dlpack(cunorm.group_norm(x, 4)[0])
    assert np.shares_memory(x, tensor.numpy())
    assert torch.allclose(y, torch.nn.functional.group_norm(tensor, 4), atol=1e-5)


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
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs" / "drawings")
        overview = importlib.import_module("overview")
    document = json.loads(overview.COUNTS.read_text(encoding="utf-8"))
    overview.draw(document, tmp_path / "fresh.svg")
    for picture in (tmp_path / "fresh.svg", overview.PICTURE):
        collections = re.findall(
            r'<g id="PathCollection_\d+">.*?\n   </g>', picture.read_text(encoding="utf-8"), re.DOTALL
        )
        assert sum(found.count("<use ") for found in collections) == len(document["rows"])


def test_the_target_of_every_link_exists() -> None:
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize(("name", "end"), [("test", "pytest -n auto"), ("torch test", "tests/torch tests/distributed")])
def test_ci_takes_its_commands_from_the_readme(name: str, end: str) -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    extract = re.search(r"awk -v mark=.*README\.md", script)
    assert extract is not None
    assert f'readme_command "{name}"' in script or f"readme_command {name})" in script
    command = extract[0].replace('"<!-- $1 command -->"', f'"<!-- {name} command -->"')
    found = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert " && pytest -n auto" in found and found.strip().endswith(end)
    assert found in "\n".join(blocks("bash"))
