"""``python -m cunorm``: the same command as ``cunorm``."""

from __future__ import annotations

import sys

from cunorm.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
