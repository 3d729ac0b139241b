"""Folders of the repository, and the environment in which a child process finds them."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: Folder of the test kernels.
KERNELS = ROOT / "tests" / "kernels"


def environment(**more: str) -> dict[str, str]:
    """Environment of a child process that runs a test module, as in ``python -m tests.mutation.worker``."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, **more}
