"""What a job left in its scratch folder, looked at when all its processes are gone and before the folder is removed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kernel_agent.sandbox import environment

_COUNTED = 10_000
_NAMED = 5
_LONGEST = 60
_CACHES = ("_CACHE_DIR", "_CACHE_PATH", "_CACHE_HOME")
"""Variables with these ends name the caches of libraries."""


@dataclass(frozen=True)
class LeftFiles:
    """Files, links and the like; folders count by what lies in them, and the libraries' own caches do not."""

    count: int = 0
    """At most `_COUNTED`: a child can make more than anybody wants to count."""
    names: tuple[str, ...] = ()
    """Some of them, below the scratch folder, as text that can be printed."""


def look_for_files(scratch: Path, own: tuple[str, ...] = ()) -> LeftFiles:
    """Count what lies in `scratch`, if it is there; `own` are names in it that are the entry's, not the candidate's."""
    if not scratch.is_dir():
        return LeftFiles()
    caches = {Path(place).name for name, place in environment.in_scratch(scratch).items() if name.endswith(_CACHES)}
    names: list[str] = []
    count = 0
    for path in _files(scratch, caches.union(own)):
        count += 1
        if len(names) < _NAMED:
            names.append(ascii(os.path.relpath(path, scratch))[1:-1][:_LONGEST])
        if count == _COUNTED:
            break
    return LeftFiles(count, tuple(sorted(names)))


def _files(scratch: Path, left_out: set[str]) -> Iterator[str]:
    """Whatever is no folder. Folders that cannot be opened, also for the length of their path, are files here."""
    folders = [str(scratch)]
    while folders:
        folder = folders.pop()
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if folder == str(scratch) and entry.name in left_out:
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    else:
                        yield entry.path
        except OSError:
            yield folder
