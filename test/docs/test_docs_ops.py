"""docs/ops.md is what the command prints that it names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_table_of_operations_is_fresh():
    # An operation that was added, or dropped, without printing the page again would be missing from one of both.
    run = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "supported_ops.py")],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
    )
    assert run.stdout == (ROOT / "docs" / "ops.md").read_text(encoding="utf-8")
