"""Tables in columns, and progress bars."""

from __future__ import annotations

import importlib.util
import io
import sys

import pytest

from cunorm.core.terminal import columns, with_bar


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    rows = [("kernel", "of", "bytes", ""), ("k", "tensor", "1,024", "")]
    assert columns(rows, 2) == ["kernel  of      bytes", "k       tensor  1,024"]
    assert columns(rows, 0) == ["kernel      of  bytes", "     k  tensor  1,024"]
    assert columns([], 1) == []
    with pytest.raises(ValueError, match="zip"):
        columns([("a", "b"), ("c",)], 1)


class Screen(io.StringIO):
    """A stream that may be a terminal."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


@pytest.mark.skipif(importlib.util.find_spec("tqdm") is None, reason="tqdm is not installed")
@pytest.mark.parametrize(("terminal", "shown"), [(True, True), (True, False), (False, True)])
def test_a_progress_bar_is_shown_only_on_a_terminal(
    terminal: bool, shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Screen(terminal)
    monkeypatch.setattr(sys, "stderr", screen)
    items = iter(["first", "second"])
    assert list(with_bar(items, 2, "item", "label of {}".format, shown=shown)) == ["first", "second"]
    found = screen.getvalue()
    assert ("label of second: 100%" in found and "2/2" in found and "item" in found) == (terminal and shown), found
    assert (terminal and shown) or not found


def test_without_tqdm_there_is_no_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None)
    monkeypatch.setattr(sys, "stderr", screen := Screen(True))
    assert list(with_bar([1, 2], 2, "item", str)) == [1, 2]
    assert screen.getvalue() == ""
