"""What a checkout has checked out, read from the files of git without running it."""

from __future__ import annotations

from pathlib import Path


def commit_of(root: Path) -> str:
    """The commit's hash; empty where the folder is no checkout or its state cannot be read."""
    folder = root / ".git"
    try:
        if folder.is_file():  # a worktree: `gitdir: PATH`
            folder = (root / folder.read_text(encoding="utf-8").partition(":")[2].strip()).resolve()
        head = (folder / "HEAD").read_text(encoding="utf-8").strip()
        if not head.startswith("ref:"):
            return head
        name = head.partition(":")[2].strip()
        common = folder / "commondir"
        home = (folder / common.read_text(encoding="utf-8").strip()) if common.is_file() else folder
        for place in (folder / name, home / name):
            if place.is_file():
                return place.read_text(encoding="utf-8").strip()
        packed = (home / "packed-refs").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return ""
    return next((line.split()[0] for line in packed if line.endswith(f" {name}")), "")
