"""The training example and the benchmark of the host's time run."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from tests.support.paths import ROOT

RESULTS = ROOT / "benchmarks" / "results" / "host_overhead_torch.json"


def test_the_training_example() -> None:
    """It learns, with every norm replaced and each SiLU fused; the script is short enough to be read at once."""
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    script = ROOT / "examples" / "train_torch.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.startswith("replaced: 2 GroupNorm, 1 LayerNorm; fused: 2; left: 0\n")
    found = re.search(r"^test accuracy (\d\.\d+)$", done.stdout, re.MULTILINE)
    assert found is not None and float(found[1]) > 0.8
    code = script.read_text(encoding="utf-8").split('"""')[2]
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 35


def test_the_benchmark_writes_its_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    benchmark = importlib.import_module("host_overhead_torch")
    monkeypatch.setattr(benchmark, "quartiles", lambda task, names, rounds: (task(), dict.fromkeys(KEYS, 1.0))[1])
    assert benchmark.main(["--rounds", "2", "--json", str(tmp_path / "new.json")]) == 0
    document = json.loads((tmp_path / "new.json").read_text())
    committed = json.loads(RESULTS.read_text())
    assert document["schema"] == committed["schema"]
    assert list(document["results"]) == list(committed["results"])
    monkeypatch.setattr(benchmark, "TARGET_US", 0.5)
    assert benchmark.main(["--rounds", "2"]) == 1


KEYS = [f"{clock}_{part}_us" for clock in ("wall", "cpu") for part in ("q25", "median", "q75")]


def test_the_committed_cost_is_within_the_target() -> None:
    document = json.loads(RESULTS.read_text())
    assert document["results"]["cunorm.torch, forward and backward"]["cpu_median_us"] <= 80
