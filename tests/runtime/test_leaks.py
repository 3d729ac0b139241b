"""Many calls of every op leak no memory, open files, threads or cache entries."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.runtime.leaks_worker import KEPT
from tests.support.paths import environment

#: Objects and bytes by which the interpreter itself may grow, whatever the number of calls. One object per two calls
#: exceeds this.
MOST_BLOCKS, MOST_BYTES = 150, 2 << 20


def left_behind(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """The resources by which a process has grown more than allowed."""
    most = {"blocks": MOST_BLOCKS, "resident": MOST_BYTES, "files": 0, "threads": 0}
    found = {name: after[name] - before[name] for name, bound in most.items() if after[name] > before[name] + bound}
    grown = {name: size for name, size in after["caches"].items() if size > before["caches"].get(name, 0)}
    return found | grown


# The count is a multiple of KEPT, so that the caches are half full before and after. The interpreter's own pools grow
# by some hundred blocks during the first thousands of calls, which do not count in the long version.
@pytest.mark.parametrize(
    ("count", "warm"),
    [(5 * KEPT, 7 * KEPT // 2), pytest.param(313 * KEPT, 321 * KEPT // 2, marks=pytest.mark.long)],
)
def test_calls_leak_nothing(count: int, warm: int) -> None:
    """Valid calls, refused calls, calls and plans of new shapes; 20,000 of each in the long version."""
    command = [sys.executable, "-m", "tests.runtime.leaks_worker", str(count), str(warm)]
    done = subprocess.run(command, env=environment(CUNORM_CPU_CORES="3"), capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) > 20
    assert {name: left for name, (before, after) in found.items() if (left := left_behind(before, after))} == {}
    for name in ("calls of new shapes", "plans of new shapes"):
        _, after = found[name]
        assert 0 < after["caches"]["cunorm.runtime.plans._plans"] <= KEPT
    assert 1 < found["calls of new shapes"][1]["caches"]["group_norm.calls"] <= KEPT


def test_left_behind_detects_each_kind_of_leak() -> None:
    before = {"blocks": 0, "resident": 0, "files": 3, "threads": 1, "caches": {"a": 1}}
    assert left_behind(before, before) == {}
    for change in ({"blocks": 151}, {"resident": 3 << 20}, {"files": 4}, {"threads": 2}):
        assert [*left_behind(before, before | change)] == [*change]
    assert left_behind(before, before | {"caches": {"a": 2, "b": 1}}) == {"a": 2, "b": 1}
