"""The examples in the docstrings of public functions and classes run and print what they show."""

from __future__ import annotations

import doctest
import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

import cunorm
from cunorm import ascend, reference

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


def test_the_example_of_an_exception_runs() -> None:
    docstring = inspect.getdoc(cunorm.UnsupportedTile)
    assert docstring is not None
    assert ">>>" in docstring
    assert not failures(docstring, "UnsupportedTile")


def test_a_wrong_example_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert failures(">>> 1 + 1\n3\n", "wrong") == 1
    assert "Expected" in capsys.readouterr().out
