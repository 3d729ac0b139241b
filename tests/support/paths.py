"""Where things are, and how a child process finds them."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: The kernels of the tests.
KERNELS = ROOT / "tests" / "kernels"


def environment(**more: str) -> dict[str, str]:
    """The environment of a child that runs a module of the tests: ``python -m tests.mutation.worker``."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, **more}
