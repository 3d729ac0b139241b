"""The page on several devices: its programs run and print what they say, and its byte counts are right."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cunorm.distributed import LocalEngine, sync_batch_norm, sync_batch_norm_backward
from tests.distributed.processes import missing, mpi
from tests.docs.pages import runs
from tests.support.paths import ROOT, environment

PAGE = (ROOT / "docs" / "guide" / "distributed.md").read_text(encoding="utf-8")


def program(text: str, tmp_path: Path) -> str:
    path = tmp_path / "program.py"
    path.write_text(text)
    return str(path)


def assert_printed(text: str, printed: str) -> None:
    """The comment behind the print is what both processes print."""
    (said,) = re.findall(r"print\(.*\)  # (.*)", text)
    assert printed.count(said) == 2, printed


@runs("docs/guide/distributed.md", "from mpi4py import MPI")
def test_the_program_for_mpi(text: str, tmp_path: Path) -> None:
    if (reason := missing("mpi")) is not None:
        pytest.skip(reason)
    (ended,) = mpi([sys.executable, "-m", "mpi4py", program(text, tmp_path)], 2)
    assert ended.code == 0, ended.printed
    assert_printed(text, ended.printed)


@pytest.mark.long
@runs("docs/guide/distributed.md", 'init_process_group("gloo")')
def test_the_program_for_gloo(text: str, tmp_path: Path) -> None:
    if (reason := missing("gloo")) is not None:
        pytest.skip(reason)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, program(text, tmp_path)],
        **{"env": environment(), "timeout": 100, "check": False, "text": True},
        **{"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT},
    )
    assert done.returncode == 0, done.stdout
    assert_printed(text, done.stdout)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_bytes_of_the_exchanges(dtype: type) -> None:
    class Counting(LocalEngine):
        def all_gather(self, send: np.ndarray, receive: np.ndarray) -> None:
            sent.append(send.nbytes)
            super().all_gather(send, receive)

        def all_reduce(self, buffer: np.ndarray) -> None:
            sent.append(buffer.nbytes)

    sent: list[int] = []
    x = np.ones((2, 48, 3), dtype)
    _, saved = sync_batch_norm(x, engine=Counting())
    sync_batch_norm_backward(x, x, saved, engine=Counting())
    expected = []
    for line in re.findall(r"^\| (?:forward|backward, with dx) .*$", PAGE, re.MULTILINE):
        plain, wide = re.findall(r"(?:(\d+) \+ )?(\d+) C", line)
        fixed, each = plain if dtype is np.float32 else wide
        expected.append(int(fixed or 0) + 48 * int(each))
    assert sent == expected
