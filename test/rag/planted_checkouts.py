"""Lays out the small checkouts of `test/rag/checkouts` in a folder of a test, with licences planted where wanted.

What each checkout holds stands in its `manifest.json`: `complete` lists `file:name` of every pair that a harvest should
find, `skipped` the other candidates with the reason. Licence texts are planted, so that this repository holds none but
its own.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

CHECKOUTS = Path(__file__).parent / "checkouts"
NAMES = tuple(sorted(path.parent.name for path in CHECKOUTS.glob("*/manifest.json")))

MIT = "MIT License\n\nPermission is hereby granted, free of charge, to any person obtaining a copy of this software ..."
GPL = "GNU GENERAL PUBLIC LICENSE\n  Version 3, 29 June 2007\n"
APACHE = "                              Apache License\n                        Version 2.0, January 2004\n"


@dataclass(frozen=True)
class Manifest:
    """What a checkout holds."""

    complete: frozenset[str]
    """`file:name` of the pairs."""
    skipped: dict[str, str]
    """`file:name` of the other candidates, and why they are none."""


def manifest(name: str) -> Manifest:
    """What stands in a checkout's manifest."""
    said = json.loads((CHECKOUTS / name / "manifest.json").read_text())
    return Manifest(frozenset(said["complete"]), said["skipped"])


def plant(name: str, folder: Path) -> Path:
    """Copy a checkout; files that are no Python get their name."""
    root = folder / name
    shutil.copytree(CHECKOUTS / name, root, ignore=shutil.ignore_patterns("__pycache__"))
    for path in root.rglob("*.py.txt"):
        path.rename(path.with_suffix(""))
    return root


def prepend(path: Path, notice: str) -> None:
    """Put a notice at the head of a file."""
    path.write_text(notice + "\n" + path.read_text())
