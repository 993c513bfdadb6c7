"""Making an index, and changing one by the pair: what is known by content hash is never described or embedded again."""

from __future__ import annotations

import functools
import multiprocessing
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kernel_agent.errors import InputError
from kernel_agent.pairs.meta import read_meta
from kernel_agent.pairs.sections import has_all_markers
from kernel_agent.pairs.spec import content_hash
from kernel_agent.pairs.userfile import read_text
from rag.counts import Counts
from rag.describe import DESCRIPTION_VERSION, Description, describe
from rag.embedders import embed_with, embedding_named
from rag.embedding import BUNDLED, Embedding
from rag.index import MANIFEST, SCHEMA, Entry, Index, IndexProblem, Manifest, content_address, pair_files
from rag.storage import load_index, unit_length, write_index

MANY = 2_000
"""New pairs that are worth starting processes for."""


@dataclass(frozen=True)
class Described:
    """A pair file and what is known of its forward."""

    entry: Entry
    """What the index says of it."""
    description: Description
    """What is compared."""


def build_index(pairs: Path, output: Path, *, dense: bool = True, model: str | None = None) -> Index:
    """Index every pair file below `pairs` in the folder `output`, replacing an older index there.

    Pairs that the older index knows by their content hash are taken from it. Python files without the three section
    markers are no pairs and are passed over. With `dense` off, the index serves lexical search alone. `model` embeds
    them, and every query later: the path of a sentence-transformers folder, or `openai:` and a name; None: the bundled
    one. A harvested pair that the older index does not know counts as unverified. Raises InputError for a folder
    without pairs, a pair that cannot be read or a name that is no model, EnvironmentProblem if the model cannot be
    used.
    """
    sources = dict(pair_files(pairs))
    if not sources:
        raise InputError(
            f"no pair files below {pairs}", remedy="a pair file has the sections forward, backward and check"
        )
    older = _older(output, pairs, embedding_named(model) if dense else None)
    hashes = {path: content_hash(source) for path, source in sources.items()}
    known = {entry.path: row for row, entry in enumerate(older.entries) if hashes.get(entry.path) == entry.hash}
    new = {path: source for path, source in sources.items() if path not in known}
    return _changed(older, list(known.values()), describe_pairs(pairs, new))


def add_pairs(index: Path, pairs: Path, paths: Sequence[Path], *, verified: bool = True, dense: bool = True) -> Index:
    """Let the index in the folder `index` learn these pair files; nothing else below `pairs` is read.

    `paths` lie below `pairs`, or are relative to it; those known already are described anew. `verified` is kept with
    them. Their vectors are of the index's model. Where there is no index yet, one is made, with vectors of the
    bundled model if `dense` says so. Raises InputError for a path that
    is no pair file or lies elsewhere, IndexProblem for an index that cannot be used or belongs to another folder.
    """
    older = load_index(index) if (index / MANIFEST).is_file() else _empty(index, pairs, BUNDLED if dense else None)
    if older.pairs != pairs.resolve():
        raise IndexProblem(f"the index {index} is one over {older.pairs}", remedy=f"name another index for {pairs}")
    sources: dict[str, str] = {}
    for path in paths:
        whole = (pairs / path).resolve()
        source = read_text(whole)
        if not whole.is_relative_to(pairs.resolve()) or not has_all_markers(source):
            told = f"it is no pair file below {pairs}"
            raise InputError(told, remedy="a pair file has the sections forward, backward and check", path=whole)
        sources[whole.relative_to(pairs.resolve()).as_posix()] = source
    kept = [row for row, entry in enumerate(older.entries) if entry.path not in sources]
    return _changed(older, kept, describe_pairs(pairs, sources, verified=verified))


def remove_pairs(index: Path, paths: Sequence[Path]) -> Index:
    """Let the index in the folder `index` forget pairs, named by paths relative to the folder of pairs.

    No file is touched. Raises InputError for a path that is not indexed, IndexProblem as `load_index` does.
    """
    older = load_index(index)
    gone = {path.as_posix() for path in paths}
    unknown = gone - {entry.path for entry in older.entries}
    if unknown:
        raise InputError(f"the index {index} holds no {min(unknown)}", remedy="name pairs as the index does")
    return _changed(older, [row for row, entry in enumerate(older.entries) if entry.path not in gone], ())


def describe_pairs(pairs: Path, sources: Mapping[str, str], *, verified: bool | None = None) -> tuple[Described, ...]:
    """Describe pair files given as text by path relative to `pairs`; raises InputError with the path of a bad one.

    Where `verified` is not said, a pair that was harvested counts as unverified. Of many, each core takes its share.
    """
    described = functools.partial(_described, pairs, verified)
    if len(sources) < MANY:
        return tuple(map(described, sources.items()))
    # A forked child would inherit the threads of faiss and torch, and their locks with them.
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        return tuple(pool.map(described, sources.items(), chunksize=100))


def _described(pairs: Path, verified: bool | None, item: tuple[str, str]) -> Described:
    path, source = item
    try:
        meta = read_meta(source)
        slug, family = meta.slug or Path(path).stem, meta.family or Path(path).parent.name
        description = describe(source, pairs / path, titles=(slug, meta.op, family))
    except InputError as error:
        raise InputError(error.message, remedy=error.remedy, path=pairs / path, line=error.line) from error
    entry = Entry(
        path=path,
        hash=content_hash(source),
        slug=slug,
        family=family,
        docstring=description.docstring,
        techniques=meta.techniques,
        grads=meta.grads,
        verified=not meta.repository if verified is None else verified,
    )
    return Described(entry, description)


def _changed(older: Index, kept: Sequence[int], new: Sequence[Described]) -> Index:
    """The older index with only the kept rows and with what is new, written in its place."""
    entries = [*(older.entries[row] for row in kept), *(one.entry for one in new)]
    order = sorted(range(len(entries)), key=lambda row: entries[row].path)
    descriptions = [one.description for one in new]
    terms = older.terms.take(kept).joined(Counts.of([description.terms for description in descriptions]))
    shape = older.shape.take(kept).joined(Counts.of([description.shape for description in descriptions]))
    vectors: npt.NDArray[np.float32] | None = None
    if older.vectors is not None:
        fresh = unit_length(embed_with(older.embedding, [description.descriptor for description in descriptions]))
        vectors = np.concatenate([older.vectors[np.asarray(kept, dtype=np.int64)], fresh])[order]
    address = content_address({entry.path: entry.hash for entry in entries})
    index = Index(
        older.folder,
        older.manifest.model_copy(update={"entries": len(entries), "content": address}),
        tuple(entries[row] for row in order),
        terms.take(order),
        shape.take(order),
        vectors,
    )
    write_index(index)
    return index


def _older(output: Path, pairs: Path, embedding: Embedding | None) -> Index:
    """The index in the folder if it can be built upon, else an empty one."""
    empty = _empty(output, pairs, embedding)
    try:
        older = load_index(output)
    except IndexProblem:
        return empty
    usable = (older.manifest.pairs, older.manifest.embedding) == (empty.manifest.pairs, empty.manifest.embedding)
    return older if usable else empty


def _empty(folder: Path, pairs: Path, embedding: Embedding | None) -> Index:
    manifest = Manifest(
        schema=SCHEMA,
        description=DESCRIPTION_VERSION,
        pairs=Path(os.path.relpath(pairs.resolve(), folder.resolve())).as_posix(),
        embedding=embedding,
        entries=0,
        content=content_address({}),
    )
    vectors = None if embedding is None else np.zeros((0, embedding.dimensions), np.float32)
    return Index(folder, manifest, (), Counts.of([]), Counts.of([]), vectors)
