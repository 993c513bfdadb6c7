"""The index over a folder of pairs: built once, shipped beside the pairs, the same bytes from the same pairs.

It holds what is derived from the pairs, never their text: a hit is read from its own file, and a file whose content
hash differs from the index's is stale. The index refers to the pairs by a relative path: the two move together.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kernel_agent.data import index_path
from kernel_agent.errors import EnvironmentProblem, InputError
from kernel_agent.pairs.meta import read_meta
from kernel_agent.pairs.sections import has_all_markers, split_sections
from kernel_agent.pairs.spec import content_hash
from rag.describe import DESCRIPTION_VERSION, describe
from rag.embed import DIMENSIONS, MODEL_NAME, WEIGHTS_SHA256, embed
from rag.lexical import LexicalIndex, Lexicon
from rag.query import RetrievedPair
from rag.speeds import FOLDER, Speeds, read_speeds

SCHEMA = 1
"""Version of the files below."""

MANIFEST, ENTRIES, VECTORS = "manifest.json", "entries.jsonl", "vectors.npy"


class IndexProblem(EnvironmentProblem):
    """The index is missing, damaged, or was written by another version."""


class _Stored(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Embedding(_Stored):
    """Which model made the vectors."""

    model: str = Field(description="name of the embedding model")
    sha256: str = Field(description="SHA-256 of its weights file")
    dimensions: int = Field(description="length of a vector")


class Manifest(_Stored):
    """What the index was made of."""

    schema_version: int = Field(alias="schema", description="version of the index's files")
    description: int = Field(description="version of the descriptions, `DESCRIPTION_VERSION`")
    pairs: str = Field(description="the folder of pairs, relative to the index's folder")
    embedding: Embedding | None = Field(description="None: built without vectors, for lexical search alone")
    sources: dict[str, str] = Field(description="content hash of each pair by its path, sorted")


class Entry(_Stored):
    """One described pair."""

    path: str = Field(description="relative to the folder of pairs, with forward slashes")
    slug: str
    family: str
    docstring: str
    descriptor: str = Field(description="the text that was embedded")
    terms: dict[str, int] = Field(description="weighted counts of words and Triton operations")
    ops: dict[str, int] = Field(description="counts of operations in the kernels")
    grams: dict[str, int] = Field(description="counts of runs of three operations")


@dataclass(frozen=True)
class Staleness:
    """How the folder of pairs differs from what was indexed. Paths, sorted."""

    changed: tuple[str, ...]
    missing: tuple[str, ...]
    added: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.changed or self.missing or self.added)


@dataclass(frozen=True)
class Index:
    """A loaded index."""

    folder: Path
    """Where it lies."""
    manifest: Manifest
    """What it was made of."""
    entries: tuple[Entry, ...]
    """Described pairs, sorted by path."""
    vectors: npt.NDArray[np.float32] | None
    """Embedded descriptors, float32 [n, 384] of unit length, one row per entry; None without a dense part."""

    @property
    def pairs(self) -> Path:
        """The folder of pairs."""
        return (self.folder.resolve() / self.manifest.pairs).resolve()

    @functools.cached_property
    def lexical(self) -> LexicalIndex:
        """The tf-idf index over the entries' terms, made on first use."""
        return LexicalIndex([entry.terms for entry in self.entries])

    def staleness(self) -> Staleness:
        """Compare the pairs on disk with the ones indexed, by content hash."""
        known = self.manifest.sources
        present = {path: content_hash(source) for path, source in _pair_files(self.pairs)}
        return Staleness(
            changed=tuple(path for path in known if path in present and present[path] != known[path]),
            missing=tuple(path for path in known if path not in present),
            added=tuple(path for path in present if path not in known),
        )

    @functools.cached_property
    def speeds(self) -> Speeds:
        """What was measured of these pairs, read on first use."""
        return read_speeds(self.pairs.parent / FOLDER)

    def read(self, entry: Entry) -> RetrievedPair:
        """Read the whole pair of an entry from its file."""
        source = (self.pairs / entry.path).read_text(encoding="utf-8")
        sections = split_sections(source)
        meta = read_meta(sections.head)
        return RetrievedPair(
            entry.slug,
            entry.family,
            Path(entry.path),
            entry.docstring,
            sections.forward.strip(),
            sections.backward.strip(),
            techniques=meta.techniques,
            grads=meta.grads,
            speed=self.speeds.words(entry.slug, content_hash(source)),
        )


def build_index(pairs: Path, output: Path, *, dense: bool = True) -> Index:
    """Describe every pair file below `pairs` and write the index to the folder `output`, replacing an older one.

    Python files without the three section markers are no pairs and are passed over. With `dense` off, the index serves
    lexical search alone. Raises InputError for a folder without pairs or a pair that cannot be read, EnvironmentProblem
    if the embedding model is missing.
    """
    sources = dict(_pair_files(pairs))
    if not sources:
        raise InputError(
            f"no pair files below {pairs}", remedy="a pair file has the sections forward, backward and check"
        )
    entries = describe_pairs(pairs, sources)
    manifest = Manifest(
        schema=SCHEMA,
        description=DESCRIPTION_VERSION,
        pairs=Path(os.path.relpath(pairs.resolve(), output.resolve())).as_posix(),
        embedding=Embedding(model=MODEL_NAME, sha256=WEIGHTS_SHA256, dimensions=DIMENSIONS) if dense else None,
        sources={path: content_hash(source) for path, source in sources.items()},
    )
    index = Index(output, manifest, entries, embed([entry.descriptor for entry in entries]) if dense else None)
    _write(index)
    return index


def describe_pairs(pairs: Path, sources: Mapping[str, str]) -> tuple[Entry, ...]:
    """Describe pair files given as text by path relative to `pairs`; raises InputError with the path of a bad one."""
    found = []
    for path, source in sources.items():
        try:
            meta = read_meta(source)
            slug, family = meta.slug or Path(path).stem, meta.family or Path(path).parent.name
            found.append((path, slug, family, describe(source, pairs / path, titles=(slug, meta.op, family))))
        except InputError as error:
            raise InputError(error.message, remedy=error.remedy, path=pairs / path, line=error.line) from error
    lexicon = Lexicon([description.terms for *_, description in found])
    return tuple(
        Entry(
            path=path,
            slug=slug,
            family=family,
            docstring=description.docstring,
            descriptor=description.descriptor(lexicon.rarity),
            terms=description.terms,
            ops=dict(description.ops),
            grams=dict(description.grams),
        )
        for path, slug, family, description in found
    )


def load_index(path: Path | None = None) -> Index:
    """Load an index from its folder; None: the one that ships with the pairs.

    Raises IndexProblem if it is missing, damaged, or written by another version of the package or another embedding.
    """
    folder = index_path() if path is None else path
    if not (folder / MANIFEST).is_file():
        raise _problem(folder, "there is no retrieval index here")
    try:
        manifest = Manifest.model_validate_json((folder / MANIFEST).read_bytes())
        lines = (folder / ENTRIES).read_text(encoding="utf-8").splitlines()
        entries = tuple(Entry.model_validate_json(line) for line in lines)
        vectors = np.load(folder / VECTORS, allow_pickle=False) if manifest.embedding else None
    except (OSError, ValueError, ValidationError) as error:
        raise _problem(folder, f"the retrieval index cannot be read ({type(error).__name__})") from error
    if (manifest.schema_version, manifest.description) != (SCHEMA, DESCRIPTION_VERSION):
        raise _problem(folder, "the retrieval index was written by another version of kernel-agent")
    if manifest.embedding and manifest.embedding.sha256 != WEIGHTS_SHA256:
        raise _problem(folder, "the vectors of the retrieval index come from other weights than the ones in use")
    whole = [entry.path for entry in entries] == list(manifest.sources)
    if not whole or (vectors is not None and vectors.shape != (len(entries), DIMENSIONS)):
        raise _problem(folder, "the files of the retrieval index do not belong together")
    return Index(folder, manifest, entries, vectors)


def _problem(folder: Path, message: str) -> IndexProblem:
    return IndexProblem(f"{message}: {folder}", remedy=f"build it: kernel-agent rag build PAIRS --output {folder}")


def _pair_files(folder: Path) -> Iterable[tuple[str, str]]:
    """Paths relative to the folder, with forward slashes, and texts of its pair files, sorted by path."""
    for path in sorted(folder.rglob("*.py"), key=lambda path: path.relative_to(folder).as_posix()):
        source = path.read_text(encoding="utf-8")
        if has_all_markers(source):
            yield path.relative_to(folder).as_posix(), source


def _write(index: Index) -> None:
    folder = index.folder
    folder.mkdir(parents=True, exist_ok=True)
    for name in (MANIFEST, ENTRIES, VECTORS):
        (folder / name).unlink(missing_ok=True)
    if index.vectors is not None:
        np.save(folder / VECTORS, index.vectors, allow_pickle=False)
    lines = (json.dumps(entry.model_dump(), ensure_ascii=False, sort_keys=True) + "\n" for entry in index.entries)
    (folder / ENTRIES).write_text("".join(lines), encoding="utf-8")
    # Last: an interrupted build leaves no manifest, hence no index that looks whole.
    manifest = json.dumps(index.manifest.model_dump(by_alias=True), indent=2, ensure_ascii=False)
    (folder / MANIFEST).write_text(manifest + "\n", encoding="utf-8")
