"""The Python examples of the pages: they run, print what the pages show, and compute what the oracle computes."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cunorm
import cunorm.reference
from tests.docs.pages import PAGES, Block, blocks, claimed, name_of, needs_sphinx, runs
from tests.support.paths import ROOT

#: Every language that a block may have. Blocks of ``python``, ``bash`` and ``sh`` are run by a test of this folder.
#: ``text`` is the output of the block before it. A ``py`` block is run by a test that is marked with `runs`.
LANGUAGES = {"python", "text", "bash", "sh", "py"}
TORCH = re.compile(r"^\s*(?:import|from) (?:cunorm\.)?torch\b", re.MULTILINE)
Names = dict[str, Any]


# ---- checks behind the examples of a page ---------------------------------------------------------------------------


def assert_gradients_of_the_layer(names: Names) -> None:
    """Compare the gradients of the page of RMSNorm with finite differences of the float64 oracle."""
    asked = {name: names[name].astype(np.float64) for name in ("branch", "stream", "gamma", "weight")}

    def loss(given: Names) -> float:
        y, _, h = cunorm.reference.rms_norm(given["branch"], 32, given["gamma"], residual=given["stream"])
        return float((names["dout"] * (y @ given["weight"])).sum() + (names["dstream"] * h).sum())

    found = {"branch": "dx", "stream": "dx", "gamma": "dgamma", "weight": "dweight"}
    for name, gradient in found.items():
        step = 1e-5 * np.random.default_rng(1).normal(size=asked[name].shape)
        change = loss(asked | {name: asked[name] + step}) - loss(asked | {name: asked[name] - step})
        assert change == pytest.approx(2 * float((names[gradient] * step).sum()), rel=1e-3), name


def assert_statistics_of_the_batch(names: Names) -> None:
    """Compare the running mean of the page of BatchNorm with the oracle's; the gradient of its input sums to zero."""
    exact = cunorm.reference.batch_norm_stats(names["x"])
    assert np.allclose(names["running_mean"], 0.1 * exact[0], atol=1e-6)
    assert abs(float(names["dx"].mean())) < 1e-6


CHECKS: dict[str, Callable[[Names], None]] = {
    "rms-norm.md": assert_gradients_of_the_layer,
    "batch-norm.md": assert_statistics_of_the_batch,
}


def model_of_the_reader() -> Any:
    """A model, for the example of the README that says ``model``."""
    from torch import nn

    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))


#: Names that an example takes from its reader.
GIVEN: dict[str, dict[str, Callable[[], Any]]] = {"README.md": {"model": model_of_the_reader}}


# ---- running them ---------------------------------------------------------------------------------------------------


def with_outputs(found: list[Block]) -> Iterator[tuple[Block, str | None]]:
    """The ``python`` blocks of a page, each with the ``text`` block that follows it."""
    for at, one in enumerate(found):
        if one.language == "python":
            follows = found[at + 1] if at + 1 < len(found) else None
            yield one, follows.text if follows is not None and follows.language == "text" else None


@needs_sphinx
@pytest.mark.parametrize("page", [page for page in PAGES if any(with_outputs(blocks(page)))], ids=name_of)
def test_the_examples_run_and_print_what_is_shown(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A block of text is the whole output of the example before it; a comment behind a print is what it prints."""
    names: Names = {}
    for block, shown in with_outputs(blocks(page)):
        if TORCH.search(block.text):
            pytest.importorskip("torch", reason="torch is not installed; CI runs these tests with it, too")
            names |= {name: make() for name, make in GIVEN.get(page.name, {}).items()}
        exec(block.text, names)
        printed = capsys.readouterr().out
        if shown is not None:
            assert printed == shown
        for said in re.findall(r"^print\(.*\)  # (.*)$", block.text, re.MULTILINE):
            assert said in printed.splitlines()
    if (check := CHECKS.get(page.name)) is not None:
        check(names)


def test_the_examples_of_the_ascend_page_agree_with_the_oracle() -> None:
    names: Names = {}
    page = ROOT / "docs" / "guide" / "ascend.md"
    operators, batch, group = (one.text for one in blocks(page) if one.language == "python")
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
    assert [names[name].tolist() for name in ("grad_weight", "grad_bias")] == [[21, 30], [7, 8]]
    exec(group, names)
    given = (names["grad_out"], names["x"], names["mean"], names["rstd"])
    exact = cunorm.reference.group_norm_backward(*given, num_groups=2)
    for name, want in zip(("grad_input", "grad_gamma", "grad_beta"), exact, strict=True):
        assert np.allclose(names[name], want, atol=1e-5)


@runs("docs/guide/pytorch.md", "cupy.from_dlpack")
def test_a_torch_tensor_becomes_an_array_and_back(text: str) -> None:
    """NumPy takes CuPy's place. Neither direction copies."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    names: Names = {"tensor": torch.randn(2, 64, 5), "cunorm": cunorm}
    exec(text.replace("import cupy, torch", "import numpy as cupy, torch"), names)
    assert np.shares_memory(names["x"], names["tensor"].numpy())
    assert torch.allclose(names["y"], torch.nn.functional.group_norm(names["tensor"], 32), atol=1e-5)


# ---- no block without a test ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_has_a_language_with_a_test(page: Path) -> None:
    found = [one.language for one in blocks(page)]
    assert {*found} <= LANGUAGES
    before = dict(zip(found[1:], found, strict=False))
    assert before.get("text") in (None, "python", "bash", "sh")  # otherwise nothing compares it


def claims(text: str) -> Iterator[tuple[str, str]]:
    """Page and words of each `runs` that marks a test of a module. The test has to use its argument ``text``."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            used = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and isinstance(mark.func, ast.Name) and mark.func.id == "runs":
                    page, words = (ast.literal_eval(argument) for argument in mark.args)
                    if "text" in used:
                        yield page, words


def test_every_py_block_is_run_by_a_test() -> None:
    modules = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
    marked = [text for text in modules if "@runs(" in text]
    run = [one for text in marked for page, words in claims(text) for one in claimed(page, words)]
    assert [one for page in PAGES for one in blocks(page) if one.language == "py" and one not in run] == []
    assert len(run) == len({*run}) >= 3


def test_a_claim_counts_only_if_the_test_uses_the_block() -> None:
    head = '@runs("docs/page.md", "words")\ndef test_it(text):\n    '
    assert [*claims(f"{head}exec(text)")] == [("docs/page.md", "words")]
    assert [*claims(f"{head}pass")] == []
    assert [*claims(f"{head}exec(text)".replace("test_it", "it"))] == []
