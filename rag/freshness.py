"""Whether the pairs on disk are still those of an index, told by content; files that stand untouched are read once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kernel_agent.pairs.sections import has_all_markers
from kernel_agent.pairs.spec import content_hash


@dataclass(frozen=True)
class Staleness:
    """How the folder of pairs differs from what was indexed. Paths, sorted."""

    changed: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    added: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.changed or self.missing or self.added)

    def __add__(self, other: Staleness) -> Staleness:
        return Staleness(
            self.changed + other.changed,
            self.missing + other.missing,
            self.added + other.added,
        )


@dataclass
class PairFolder:
    """A folder of pair files."""

    folder: Path
    _hashes: dict[str, tuple[tuple[int, int], str]] = field(default_factory=dict)
    """By path: time of change and size when the file was read, and its content hash; no hash of what is no pair."""

    def compare(self, known: Mapping[str, str], since_ns: int | None = None) -> Staleness:
        """Compare with content hashes by path. A known file not written since a time counts as unchanged."""
        present = {path: hashed for path, hashed in self._present(known, since_ns) if hashed}
        return Staleness(
            changed=tuple(path for path, hashed in known.items() if present.get(path, hashed) != hashed),
            missing=tuple(path for path in known if path not in present),
            added=tuple(sorted(path for path in present if path not in known)),
        )

    def _present(self, known: Mapping[str, str], since_ns: int | None) -> Iterator[tuple[str, str]]:
        """Path relative to the folder, with forward slashes, and content hash if it is a pair, of each Python file."""
        for path, file in _python_files(str(self.folder), ""):
            told = file.stat()
            stamp = (told.st_mtime_ns, told.st_size)
            if since_ns is not None and told.st_mtime_ns < since_ns and path in known:
                yield path, known[path]
                continue
            if self._hashes.get(path, ((0, 0), ""))[0] != stamp:
                with open(file.path, encoding="utf-8") as stream:
                    source = stream.read()
                self._hashes[path] = stamp, content_hash(source) if has_all_markers(source) else ""
            yield path, self._hashes[path][1]


def _python_files(folder: str, above: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Python files below a folder, by relative path. A search walks all of them: one `stat` each, no `relpath`."""
    with os.scandir(folder) as found:
        for entry in found:
            if entry.is_dir(follow_symlinks=False):
                yield from _python_files(entry.path, f"{above}{entry.name}/")
            elif entry.name.endswith(".py"):
                yield f"{above}{entry.name}", entry
