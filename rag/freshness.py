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

    def compare(self, known: Mapping[str, str]) -> Staleness:
        """Compare with content hashes by path."""
        present = {path: hashed for path, hashed in self._present() if hashed}
        return Staleness(
            changed=tuple(path for path, hashed in known.items() if present.get(path, hashed) != hashed),
            missing=tuple(path for path in known if path not in present),
            added=tuple(sorted(path for path in present if path not in known)),
        )

    def _present(self) -> Iterator[tuple[str, str]]:
        """Path relative to the folder, with forward slashes, and content hash if it is a pair, of each Python file."""
        for place, _, names in os.walk(self.folder):
            for name in names:
                if not name.endswith(".py"):
                    continue
                file = os.path.join(place, name)
                told = os.stat(file)
                path = os.path.relpath(file, self.folder).replace(os.sep, "/")
                stamp = (told.st_mtime_ns, told.st_size)
                if self._hashes.get(path, ((0, 0), ""))[0] != stamp:
                    with open(file, encoding="utf-8") as stream:
                        source = stream.read()
                    self._hashes[path] = stamp, content_hash(source) if has_all_markers(source) else ""
                yield path, self._hashes[path][1]
