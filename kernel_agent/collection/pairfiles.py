"""Which pair files a command speaks of, and where the records about them lie."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kernel_agent.errors import InputError

PAIRS = "kernel_pairs"
RESULTS = "results"
"""Folder of records, beside the folder of pairs."""


def pair_files(paths: Sequence[Path]) -> list[Path]:
    """Pair files named or found below the folders named, sorted, each once. Raises `InputError` when there is none."""
    files: dict[Path, None] = {}
    for path in paths:
        if not path.exists():
            raise InputError(
                "there is no such file or folder", path=path, remedy="name a pair file or a folder of them"
            )
        files.update(dict.fromkeys(sorted(path.rglob("*.py")) if path.is_dir() else [path]))
    if not files:
        raise InputError("no pair files here", path=paths[0], remedy="pair files lie in <family>/<slug>.py")
    return list(files)


def results_folder(pair: Path) -> Path | None:
    """`datasets/results` for an entry of a dataset, `datasets/kernel_pairs/<family>/<slug>.py`; None for others."""
    root = pair.resolve().parent.parent
    return root.parent / RESULTS if root.name == PAIRS else None
