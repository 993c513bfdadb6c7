"""The index over a folder of pairs: the same bytes from the same pairs, in whatever order they were added.

It holds what is derived from the pairs, never their text: a hit is read from its own file, and a file whose content
hash differs from the index's is stale. The index refers to the pairs by a relative path: the two move together.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

from kernel_agent.data import is_own
from kernel_agent.errors import EnvironmentProblem
from kernel_agent.pairs.meta import read_meta
from kernel_agent.pairs.sections import has_all_markers, split_sections
from kernel_agent.pairs.spec import content_hash
from rag.counts import Counts
from rag.dense import DenseIndex, unrelated_cosine
from rag.embedding import BUNDLED, Embedding
from rag.freshness import PairFolder, Staleness
from rag.lexical import CosineIndex
from rag.query import RetrievedPair
from rag.speeds import FOLDER, Speeds, read_speeds

SCHEMA = 2
"""Version of the index's files."""
MANIFEST = "manifest.json"
"""The file of an index that is written last."""
READ_UP_TO = 5_000
"""Entries of an index whose pairs are all compared by content at every search."""


class IndexProblem(EnvironmentProblem):
    """The index is missing, damaged, or was written by another version."""


class _Stored(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Manifest(_Stored):
    """What the index was made of."""

    schema_version: int = Field(alias="schema", description="version of the index's files")
    description: int = Field(description="version of the descriptions, `DESCRIPTION_VERSION`")
    pairs: str = Field(description="the folder of pairs, relative to the index's folder")
    embedding: Embedding | None = Field(description="None: built without vectors, for lexical search alone")
    entries: int = Field(description="number of pairs")
    content: str = Field(description="SHA-256 over paths and content hashes of the pairs: the index's own address")


class Entry(_Stored):
    """One indexed pair."""

    path: str = Field(description="relative to the folder of pairs, with forward slashes")
    hash: str = Field(description="content hash of the pair's file")
    slug: str
    family: str
    docstring: str = Field(description="first paragraph of the module's docstring")
    techniques: tuple[str, ...] = Field(description="tags of the closed list, as META says")
    grads: tuple[str, ...] = Field(description="inputs whose gradients the backward returns")
    verified: bool = Field(default=True, description="False: no gate has passed it yet")


@dataclass(frozen=True)
class Index:
    """A loaded index: one folder's, or several joined."""

    folder: Path
    """Where it lies."""
    manifest: Manifest
    """What it was made of."""
    entries: tuple[Entry, ...]
    """Indexed pairs, sorted by path."""
    terms: Counts
    """Weighted counts of words and Triton operations, one row per entry."""
    shape: Counts
    """Counts of operations and of runs of three, names taken away, one row per entry."""
    vectors: npt.NDArray[np.float32] | None
    """Embedded descriptors of unit length, one row per entry: float32 [n, d]; None without a dense part."""
    joined: tuple[Index, ...] = ()
    """Further indexes whose entries stand behind these in all of the above."""

    @property
    def pairs(self) -> Path:
        """The folder of pairs."""
        return (self.folder.resolve() / self.manifest.pairs).resolve()

    @functools.cached_property
    def lexical(self) -> CosineIndex:
        """Searches the entries' terms, made on first use."""
        return CosineIndex(self.terms)

    @functools.cached_property
    def structure(self) -> CosineIndex:
        """Searches the entries' shapes, made on first use."""
        return CosineIndex(self.shape)

    @functools.cached_property
    def dense(self) -> DenseIndex:
        """Searches the entries' vectors, made on first use; only for an index that has some."""
        assert self.vectors is not None
        return DenseIndex(self.vectors)

    @property
    def embedding(self) -> Embedding:
        """The model that embeds a query; only for an index that has vectors."""
        return self.manifest.embedding or BUNDLED

    @functools.cached_property
    def uncompared(self) -> tuple[Index, ...]:
        """Joined indexes whose vectors cannot be compared with these: another model made them, or there are none."""
        return tuple(one for one in self.joined if one.entries and one.manifest.embedding != self.manifest.embedding)

    @functools.cached_property
    def embedded(self) -> npt.NDArray[np.bool_]:
        """Whether each entry has a vector of `embedding`: bool [n]."""
        parts = [np.full(len(self.entries) - sum(len(one.entries) for one in self.joined), True)]
        parts += [np.full(len(one.entries), all(one is not other for other in self.uncompared)) for one in self.joined]
        return np.concatenate(parts)

    @functools.cached_property
    def unrelated_cosine(self) -> float | None:
        """See `rag.dense.unrelated_cosine`; only for an index that has vectors."""
        assert self.vectors is not None
        return unrelated_cosine(self.vectors[self.embedded], self.families[self.embedded])

    @functools.cached_property
    def families(self) -> npt.NDArray[np.int64]:
        """Number of each entry's family: [n]."""
        numbers = {family: number for number, family in enumerate(dict.fromkeys(e.family for e in self.entries))}
        return np.fromiter((numbers[entry.family] for entry in self.entries), dtype=np.int64)

    @functools.cached_property
    def shares_of_bound(self) -> npt.NDArray[np.float64]:
        """Of each entry the measured share of the cost counter's bound, in [0, 1]; 0 where nothing is known: [n]."""
        rows = ((self._home(row).speeds, entry) for row, entry in enumerate(self.entries))
        return np.fromiter((speeds.share(entry.slug, entry.hash) for speeds, entry in rows), dtype=np.float64)

    def staleness(self) -> Staleness:
        """Compare the pairs on disk with the ones indexed, by content hash. A file is read again only if it changed.

        Of an index of more than `READ_UP_TO` entries, only files written after it are read, and the folder is walked
        once.
        """
        own = self._staleness_once if self.manifest.entries > READ_UP_TO else self._staleness(None)
        return sum((index.staleness() for index in self.joined), own)

    def _staleness(self, since_ns: int | None) -> Staleness:
        own = {entry.path: entry.hash for entry in self.entries[: self.manifest.entries]}
        return self._files.compare(own, since_ns)

    @functools.cached_property
    def _staleness_once(self) -> Staleness:
        return self._staleness((self.folder / MANIFEST).stat().st_mtime_ns)

    @functools.cached_property
    def _files(self) -> PairFolder:
        return PairFolder(self.pairs)

    @functools.cached_property
    def speeds(self) -> Speeds:
        """What was measured of these pairs, read on first use."""
        return read_speeds(self.pairs.parent / FOLDER)

    def source(self, row: int) -> str | None:
        """Text of the pair of a row; None if its file is gone or differs from what was indexed."""
        home, entry = self._home(row), self.entries[row]
        try:
            source = (home.pairs / entry.path).read_text(encoding="utf-8")
        except (FileNotFoundError, UnicodeDecodeError):
            return None
        return source if content_hash(source) == entry.hash else None

    def read(self, row: int) -> RetrievedPair | None:
        """The whole pair of a row, from its file; None where `source` is."""
        source = self.source(row)
        if source is None:
            return None
        entry, sections, home = self.entries[row], split_sections(source), self._home(row)
        own = is_own(home.pairs)
        meta = read_meta(sections.head) if own else None
        return RetrievedPair(
            entry.slug,
            entry.family,
            Path(entry.path),
            entry.docstring,
            sections.forward.strip(),
            sections.backward.strip(),
            techniques=entry.techniques,
            grads=entry.grads,
            speed=home.speeds.words(entry.slug, entry.hash),
            verified=entry.verified,
            own=own,
            repository=meta.repository if meta is not None else "",
            licence=meta.license if meta is not None else "",
        )

    def _home(self, row: int) -> Index:
        """The index of the folder that a row's pair lies in."""
        first = self.manifest.entries
        for index in self.joined:
            if first <= row < first + len(index.entries):
                return index
            first += len(index.entries)
        return self


def join_indexes(first: Index, *others: Index) -> Index:
    """Search several folders as one. Vectors of another model than the first one's are left out: such pairs are
    found by words and structure alone."""
    terms, shape, vectors = first.terms, first.shape, first.vectors
    for other in others:
        terms, shape = terms.joined(other.terms), shape.joined(other.shape)
        if vectors is not None:
            comparable = other.vectors is not None and other.manifest.embedding == first.manifest.embedding
            rows = other.vectors if comparable else np.zeros((len(other.entries), vectors.shape[1]), np.float32)
            vectors = np.concatenate([vectors, rows])
    entries = tuple(entry for index in (first, *others) for entry in index.entries)
    return Index(first.folder, first.manifest, entries, terms, shape, vectors, joined=others)


def content_address(hashes: Mapping[str, str]) -> str:
    """SHA-256 over content hashes by path, in the order of paths."""
    digest = hashlib.sha256()
    for path in sorted(hashes):
        digest.update(f"{path}\0{hashes[path]}\n".encode())
    return digest.hexdigest()


def pair_files(folder: Path) -> Iterable[tuple[str, str]]:
    """Paths relative to the folder, with forward slashes, and texts of its pair files, sorted by path."""
    for path in sorted(folder.rglob("*.py"), key=lambda path: path.relative_to(folder).as_posix()):
        source = path.read_text(encoding="utf-8")
        if has_all_markers(source):
            yield path.relative_to(folder).as_posix(), source
