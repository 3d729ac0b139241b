"""Synchronised BatchNorm with real processes: gloo and MPI, several ranks, ranks that die."""

from __future__ import annotations

import re
import time

import pytest

from tests.distributed.processes import ranks

LIBRARIES = pytest.mark.parametrize("library", ["gloo", "mpi"])


@pytest.mark.parametrize(
    ("library", "world"), [("gloo", 2), pytest.param("gloo", 3, marks=pytest.mark.long), ("mpi", 2), ("mpi", 3)]
)
def test_the_ranks_have_the_results_of_the_whole_batch(library: str, world: int) -> None:
    ended = ranks(library, world, "other_dtype", "equal", "same_parameters")
    text = "\n".join(one.printed for one in ended)
    assert [one.code for one in ended] == [0] * len(ended), text
    assert len(re.findall(rf"of {world}: \d+ batches agree", text)) == world
    assert len(re.findall(r"the same bits", text)) == world
    last, expected = world - 1, "expected the same dtype and number of channels on all processes"
    says = f"x: float32 with 4 channels, but process {last} has float16 with 4; {expected}"
    assert text.count(f"ends with ValueError: {says}") == world - 1
    says = f"x: float16 with 4 channels, but process 0 has float32 with 4; {expected}"
    assert f"rank {last} ends with ValueError: {says}" in text


#: MPI's processes start faster than those that import PyTorch.
SLOW_GLOO = pytest.mark.parametrize("library", [pytest.param("gloo", marks=pytest.mark.long), "mpi"])


def assert_the_others_end(library: str, function: str, world: int) -> None:
    began = time.monotonic()
    ended = ranks(library, world, f"dies_in_{function}")
    assert time.monotonic() - began < 100  # less than the patience of gloo
    assert all(one.code != 0 for one in ended), ended
    if library == "gloo":
        for one in ended[:-1]:
            assert re.search(r"ends with RuntimeError: .*([Cc]onnection|peer)", one.printed), one.printed


@LIBRARIES
def test_a_rank_that_dies_in_a_forward_ends_the_others(library: str) -> None:
    """gloo reports a closed connection to the other ranks; mpiexec ends all of them."""
    assert_the_others_end(library, "all_gather", 2)


@SLOW_GLOO
def test_a_rank_that_dies_in_a_backward_ends_the_others(library: str) -> None:
    assert_the_others_end(library, "all_reduce", 3)


@SLOW_GLOO
def test_ranks_with_other_channels_end_with_an_error(library: str) -> None:
    """The packets differ in size. Some engines refuse them, and others deliver what fits."""
    ended = ranks(library, 2, "other_channels")
    text = "\n".join(one.printed for one in ended)
    assert all(one.code != 0 for one in ended), text
    assert "normalises with the statistics of another x" not in text
    assert re.search(r"but process \d has|truncate|size doesn't match|ends with RuntimeError", text, re.I), text
