"""benchmarks/renew_digests.py: digests are renewed where the code is the same, and nowhere else."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cunorm.core.devices import KNOWN
from cunorm.jit import sources
from cunorm.ops.registry import OPS, problem_of
from cunorm.tiling import costmodel, table
from tests.support.compilers import needs_nvrtc
from tests.support.paths import ROOT

PROBLEMS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "batch_norm_elemt": ((2, 8, 5), {}),
    "rms_norm": ((4, 64), {"normalized_shape": 64}),
}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.renew_digests")


def checkout(folder: Path) -> Path:
    """A copy of what the script reads, with the times of two ops."""
    for name in ("cunorm", "kernels_cu"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    results = folder / "benchmarks" / "results"
    results.mkdir(parents=True)
    lines = []
    for op, (shape, options) in PROBLEMS.items():
        problem = problem_of(op, shape=shape, dtype="float32", **options).canonical()
        tile = costmodel.choose(problem, OPS[op].strategies.values(), KNOWN["H100"]).tile
        raw = {"strategy": tile.strategy, **tile.as_dict()}
        digest = sources.kernel_digest(problem, OPS[op].strategies[tile.strategy], tile)
        lines.append({"problem": table.key_of(problem), "tile": raw, "kernel": digest})
        lines.append({"problem": table.key_of(problem), "tiles": [{"tile": raw, "kernel": "0" * 16}]})  # out of date
    (results / "times.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder


def edit(file: Path, before: str, after: str) -> None:
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after, 1))


@needs_nvrtc
def test_digests_of_the_same_code_are_renewed(script: ModuleType, tmp_path: Path) -> None:
    """A shared header gets a constant that nothing uses; the kernel of one op also computes something else."""
    old, new = checkout(tmp_path / "old"), checkout(tmp_path / "new")
    edit(
        new / "kernels_cu/common/reduce.cuh",
        "constexpr int warp_size = 32;",
        "constexpr int unused = 3, warp_size = 32;",
    )
    edit(new / "kernels_cu/partition/row_norms.cuh", "return gamma + gamma_offset;", "return gamma - gamma_offset;")
    made, changed = script.renewals(old, new)
    before = [json.loads(line) for line in (new / "benchmarks/results/times.jsonl").read_text().splitlines()]
    assert [*made] == [before[0]["kernel"]]
    assert changed == 1
    script.renew(new, made)
    after = [json.loads(line) for line in (new / "benchmarks/results/times.jsonl").read_text().splitlines()]
    assert after == [before[0] | {"kernel": made[before[0]["kernel"]]}, *before[1:]]
    assert script.renewals(old, new) == ({}, 1)


@needs_nvrtc
@pytest.mark.long
def test_times_of_the_same_specialised_kernels_are_renewed(script: ModuleType, tmp_path: Path) -> None:
    """Stored times are those of specialised kernels. Here only the generic text has another launch bound."""
    old, new = checkout(tmp_path / "old"), checkout(tmp_path / "new")
    stored = json.loads((new / "benchmarks/results/times.jsonl").read_text().splitlines()[2])
    kernel = new / f"kernels_cu/rms_norm/rms_norm_{stored['tile']['strategy']}.cu"
    edit(kernel, "threads, resident_blocks(", "threads, !is_specialised + resident_blocks(")
    made, changed = script.renewals(old, new)
    assert ([*made], changed) == ([stored["kernel"]], 0)
    edit(kernel, "!is_specialised +", "1 +")
    assert script.renewals(old, new) == ({}, 1)


def test_variables_without_a_use_are_no_code(script: ModuleType) -> None:
    unused, used = ".global .align 4 .u32 most = 4;", ".global .align 4 .u32 _ZN4Tile1bE;"
    kept = [".version 9.0", used, "ld.global.u32 r, [_ZN4Tile1bE];"]
    assert script.code_of("\n".join(["// comment", unused, *kept])).splitlines() == kept


def test_the_stored_digests_are_found(script: ModuleType) -> None:
    found = {path.suffix: [digest for _, digest in script.stored(path)] for path in script.files(ROOT)}
    assert {*found} == {".json", ".jsonl"}
    assert all(len(digests) > 100 for digests in found.values())


def test_a_revision_is_required(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script.main([])
    assert "REVISION: missing" in capsys.readouterr().err
    assert script.main(["no-such-revision"]) == 2
