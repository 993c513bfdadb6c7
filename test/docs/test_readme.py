"""The figures of README.md are those of the records."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_figures_of_the_readme_are_those_of_the_records():
    # Records are made anew more often than the README is read: figures copied by hand would stay behind.
    printed = subprocess.run(
        [sys.executable, "bench/readme_figures.py"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.split("<!-- figures -->\n")[1].split("<!-- /figures -->")[0] == printed
