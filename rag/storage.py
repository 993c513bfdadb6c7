"""Reading and writing an index's files. A half-written index is never taken for a whole one."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from kernel_agent.data import index_path
from rag.counts import Counts
from rag.describe import DESCRIPTION_VERSION
from rag.embedding import BUNDLED
from rag.index import MANIFEST, SCHEMA, Entry, Index, IndexProblem, Manifest, content_address

ENTRIES, FEATURES, VECTORS = "entries.jsonl", "features.npz", "vectors.npy"


def load_index(path: Path | None = None) -> Index:
    """Load an index from its folder; None: the one that ships with the pairs.

    Raises IndexProblem if it is missing, damaged, or written by another version of the package or another embedding.
    """
    folder = index_path() if path is None else path
    if not (folder / MANIFEST).is_file():
        raise _problem(folder, "there is no retrieval index here")
    try:
        manifest = Manifest.model_validate_json((folder / MANIFEST).read_bytes())
    except (OSError, ValidationError) as error:
        made = _make(folder / MANIFEST)
        if made is not None and made != SCHEMA:
            raise _problem(folder, "the retrieval index was written by another version of kernel-agent") from error
        raise _problem(folder, f"the retrieval index cannot be read ({type(error).__name__})") from error
    if (manifest.schema_version, manifest.description) != (SCHEMA, DESCRIPTION_VERSION):
        raise _problem(folder, "the retrieval index was written by another version of kernel-agent")
    if manifest.embedding and manifest.embedding.bundled and manifest.embedding != BUNDLED:
        raise _problem(folder, "the vectors of the retrieval index come from other weights than the ones in use")
    try:
        with (folder / ENTRIES).open("rb") as lines:
            entries = tuple(Entry.model_validate_json(line) for line in lines)
        with np.load(folder / FEATURES, allow_pickle=False) as arrays:
            terms, shape = (_counts(arrays, name, manifest.entries) for name in ("terms", "shape"))
        vectors = np.load(folder / VECTORS, allow_pickle=False) if manifest.embedding else None
    except (OSError, ValueError, KeyError, ValidationError) as error:
        raise _problem(folder, f"the retrieval index cannot be read ({type(error).__name__})") from error
    if not _whole(manifest, entries, vectors):
        raise _problem(folder, "the files of the retrieval index do not belong together")
    return Index(folder, manifest, entries, terms, shape, None if vectors is None else unit_length(vectors))


def write_index(index: Index) -> None:
    """Write an index to its folder, replacing an older one file by file, the manifest last."""
    folder = index.folder
    folder.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(entry.model_dump(), ensure_ascii=False, sort_keys=True) + "\n" for entry in index.entries)
    _replace(folder / ENTRIES, "".join(lines).encode())
    arrays = {
        f"{name}_{part}": array
        for name, counts in (("terms", index.terms), ("shape", index.shape))
        for part, array in counts.arrays().items()
    }
    _replace(folder / FEATURES, _bytes_of(lambda stream: np.savez(stream, **arrays)))  # type: ignore[arg-type]
    if index.vectors is None:
        (folder / VECTORS).unlink(missing_ok=True)
    else:
        half = index.vectors.astype(np.float16)
        _replace(folder / VECTORS, _bytes_of(lambda stream: np.save(stream, half, allow_pickle=False)))
    manifest = json.dumps(index.manifest.model_dump(by_alias=True), indent=2, ensure_ascii=False)
    _replace(folder / MANIFEST, f"{manifest}\n".encode())


def unit_length(vectors: npt.NDArray[np.floating]) -> npt.NDArray[np.float32]:
    """Vectors as float32 of unit length, rounded as the files keep them: float16 before the length is restored."""
    kept = vectors.astype(np.float16).astype(np.float32)
    lengths = np.linalg.norm(kept, axis=1, keepdims=True)
    return np.asarray(kept / np.where(lengths > 0, lengths, 1.0), dtype=np.float32)


def _whole(manifest: Manifest, entries: tuple[Entry, ...], vectors: npt.NDArray[np.float16] | None) -> bool:
    """Whether the files were written together."""
    if len(entries) != manifest.entries or content_address({e.path: e.hash for e in entries}) != manifest.content:
        return False
    if manifest.embedding is None or vectors is None:
        return manifest.embedding is None
    return bool(vectors.shape == (len(entries), manifest.embedding.dimensions))


def _counts(arrays: np.lib.npyio.NpzFile, name: str, size: int) -> Counts:
    keys, starts, rows, values = (arrays[f"{name}_{part}"] for part in ("keys", "starts", "rows", "values"))
    if len(starts) != len(keys) + 1 or len(rows) != len(values) or (len(rows) and not 0 <= rows.max() < size):
        raise ValueError("counts that fit no entries")
    return Counts(keys, starts, rows, values, size)


def _make(manifest: Path) -> int | None:
    try:
        made = json.loads(manifest.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    schema = made.get("schema") if isinstance(made, dict) else None
    return schema if isinstance(schema, int) else None


def _bytes_of(write: Callable[[io.BytesIO], None]) -> bytes:
    stream = io.BytesIO()
    write(stream)
    return stream.getvalue()


def _replace(path: Path, content: bytes) -> None:
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(content)
    os.replace(new, path)


def _problem(folder: Path, message: str) -> IndexProblem:
    return IndexProblem(f"{message}: {folder}", remedy=f"build it: kernel-agent rag build PAIRS --output {folder}")
