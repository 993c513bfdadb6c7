"""Sentence embeddings with a sentence-transformers model of a local folder: no network; the files are those remembered.

Loading such a folder may run code of it, as sentence-transformers allows: it is as trusted as an installed package.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kernel_agent.errors import InputError
from rag.embed import no_progress_bar, one_thread
from rag.embedding import EmbeddingProblem

_MODULES = "modules.json"
_UNREADABLE = (OSError, ValueError, RuntimeError, ImportError, LookupError, TypeError, AttributeError)


def model_folder(folder: Path) -> Path:
    """The absolute path of a model folder; raises InputError for anything else."""
    if not (folder / _MODULES).is_file():
        raise InputError(
            f"there is no sentence-transformers model in {folder}",
            remedy=f"name a folder with {_MODULES}, as SentenceTransformer.save writes it, or openai:NAME",
        )
    return folder.resolve()


def model_files(folder: Path) -> Iterator[Path]:
    """The files of a model, sorted; hidden ones and texts for readers are none of it."""
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        if path.is_file() and path.suffix != ".md" and not any(part.startswith(".") for part in inside.parts):
            yield path


def digest_of(folder: Path) -> str:
    """SHA-256 over names and contents of the files of a model."""
    digest = hashlib.sha256()
    for path in model_files(folder):
        content = hashlib.sha256()
        with path.open("rb") as stream:
            while block := stream.read(1 << 20):
                content.update(block)
        digest.update(f"{path.relative_to(folder).as_posix()}\0{content.hexdigest()}\n".encode())
    return digest.hexdigest()


def embed_folder(folder: Path, sha256: str, texts: Sequence[str]) -> npt.NDArray[np.float32]:
    """Embed texts one by one as float32 [n, d]; raises EmbeddingProblem if the folder is gone or is another model."""
    model = _model(folder, sha256)
    with one_thread():
        vectors = [model.encode(text, normalize_embeddings=True, show_progress_bar=False) for text in texts]
    return np.asarray(vectors, dtype=np.float32)


@functools.lru_cache(maxsize=2)
def _model(folder: Path, sha256: str) -> Any:
    if not (folder / _MODULES).is_file():
        raise EmbeddingProblem(
            f"the embedding model {folder} is not there",
            remedy="put it there, or build the index again with another --embedding-model",
        )
    if digest_of(folder) != sha256:
        raise EmbeddingProblem(
            f"the embedding model {folder} is not the one that the index was built with",
            remedy="build the index again with --embedding-model",
        )
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with one_thread():
        from sentence_transformers import SentenceTransformer

        try:
            with no_progress_bar():
                return SentenceTransformer(str(folder), device="cpu", local_files_only=True)
        except _UNREADABLE as error:
            told = f"the embedding model {folder} cannot be loaded: {error}"
            raise EmbeddingProblem(told, remedy="name another --embedding-model") from error
