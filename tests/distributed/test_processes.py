"""Synchronised BatchNorm with real processes: gloo and MPI, several ranks, ranks that die."""

from __future__ import annotations

import re
import time

import pytest

from tests.distributed.processes import ranks

LIBRARIES = pytest.mark.parametrize("library", ["gloo", "mpi"])


@LIBRARIES
@pytest.mark.parametrize("world", [2, 3])
def test_the_ranks_have_the_results_of_the_whole_batch(library: str, world: int) -> None:
    ended = ranks(library, world, "equal", "same_parameters")
    text = "\n".join(one.printed for one in ended)
    assert [one.code for one in ended] == [0] * len(ended), text
    assert len(re.findall(rf"of {world}: \d+ batches agree", text)) == world
    assert len(re.findall(r"the same bits", text)) == world


@LIBRARIES
@pytest.mark.parametrize("function", ["all_gather", "all_reduce"])
def test_a_rank_that_dies_ends_the_others(library: str, function: str) -> None:
    """gloo reports a closed connection to the other ranks; mpiexec ends all of them."""
    began = time.monotonic()
    ended = ranks(library, 3 if function == "all_reduce" else 2, f"dies_in_{function}")
    assert time.monotonic() - began < 60
    assert all(one.code != 0 for one in ended), ended
    if library == "gloo":
        for one in ended[:-1]:
            assert re.search(r"ends with RuntimeError: .*([Cc]onnection|peer)", one.printed), one.printed


@LIBRARIES
def test_ranks_with_another_dtype_are_an_error_on_all_ranks(library: str) -> None:
    """float16 and float32 have packets of the same size, so the engine cannot see the difference."""
    text = "\n".join(one.printed for one in ranks(library, 2, "other_dtype"))
    assert "rank 0 ends with ValueError: x: float32 with 4 channels, but process 1 has float16 with 4" in text
    assert "rank 1 ends with ValueError: x: float16 with 4 channels, but process 0 has float32 with 4" in text


@LIBRARIES
def test_ranks_with_other_channels_end_with_an_error(library: str) -> None:
    """The packets differ in size. Some engines refuse them, and others deliver what fits."""
    ended = ranks(library, 2, "other_channels")
    text = "\n".join(one.printed for one in ended)
    assert all(one.code != 0 for one in ended), text
    assert "normalises with the statistics of another x" not in text
    assert re.search(r"but process \d has|truncated|size doesn't match|ends with RuntimeError", text), text
