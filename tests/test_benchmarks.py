"""The benchmarks still run: their numbers are nobody's business here."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_host_overhead_runs(tmp_path: Path) -> None:
    script, found = ROOT / "benchmarks" / "host_overhead.py", tmp_path / "found.json"
    command = [sys.executable, str(script), "--rounds", "2", "--profile", "--json", str(found)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads(found.read_text(encoding="utf-8"))["results"]
    kinds = {"numpy"} | ({"cupy"} if importlib.util.find_spec("cupy") else set())
    assert set(results) == kinds
    for kind in kinds:
        calls = results[kind]["calls"]
        assert {"group_norm", "group_norm_backward"} <= set(calls)
        assert all(times["wall_median_us"] > 0 for times in calls.values())
