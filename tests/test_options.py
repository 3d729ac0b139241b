"""The options that add tests: without an option, its tests are left out, and the summary says why."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from tests import conftest


def item_of(mark: str | None, given: bool) -> Any:
    """A test with a mark, in a run with all options or none."""
    config = SimpleNamespace(getoption=lambda option: given)
    return SimpleNamespace(config=config, get_closest_marker=lambda name: name == mark)


@pytest.mark.parametrize("name", ["gpu", "long", "sanitise"])
def test_a_test_without_its_option_is_left_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conftest, "gpu_missing", lambda: None)
    assert str(conftest.reason_to_leave_out(item_of(name, given=False))).endswith(f": run with --{name}")
    assert conftest.reason_to_leave_out(item_of(name, given=True)) is None
    assert conftest.reason_to_leave_out(item_of(None, given=False)) is None


def test_a_missing_gpu_is_the_reason_if_the_option_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conftest, "gpu_missing", lambda: "there is none")
    assert conftest.reason_to_leave_out(item_of("gpu", given=True)) == "needs a GPU: there is none"
    assert conftest.reason_to_leave_out(item_of("long", given=True)) is None


def test_the_counts_of_the_workers_are_not_added_up() -> None:
    """All workers collect the same tests. One that ended early has sent fewer counts, or none."""
    stash = pytest.Stash()
    stash[conftest.LEFT_OUT] = Counter()
    config: Any = SimpleNamespace(stash=stash)
    for output in ({"left out": {"long": 3, "gpu": 2}}, {"left out": {"long": 3}}, {}):
        conftest.pytest_testnodedown(SimpleNamespace(config=config, workeroutput=output))
    assert stash[conftest.LEFT_OUT] == {"long": 3, "gpu": 2}
