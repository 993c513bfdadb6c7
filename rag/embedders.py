"""Embedding with the model that an index was built with: the bundled one, one of a local folder, or OpenAI's.

Each is loaded with the first text that it embeds.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kernel_agent.errors import InputError
from rag.embed import MODEL_NAME, embed, missing_packages
from rag.embedding import BUNDLED, OPENAI, Embedding, EmbeddingProblem

_PROBE = "kernel"
"""A text whose vector tells how long a model's vectors are."""


def embedding_named(name: str | None) -> Embedding:
    """The model of a name as `--embedding-model` takes it; None: the bundled one.

    Another than the bundled one embeds a word, to see that it can be used. Raises InputError for a name that is none,
    EmbeddingProblem for a model that cannot be used here.
    """
    if name is None or name == MODEL_NAME:
        return BUNDLED
    if name.startswith(OPENAI):
        if name == OPENAI:
            raise InputError("openai: names no model", remedy=f"for example {OPENAI}text-embedding-3-small")
        embedding = Embedding(model=name, sha256="", dimensions=0)
    else:
        from rag.embed_folder import digest_of, model_folder

        folder = model_folder(Path(name))
        embedding = Embedding(model=str(folder), sha256=digest_of(folder), dimensions=0)
    return embedding.model_copy(update={"dimensions": _vectors(embedding, [_PROBE]).shape[1]})


def embed_with(embedding: Embedding, texts: Sequence[str]) -> npt.NDArray[np.float32]:
    """Embed texts as float32 [n, d] vectors of unit length, in their order.

    Raises EmbeddingProblem for a model that cannot be used here or is no longer the one remembered; for the bundled
    one EnvironmentProblem, as `embed` does.
    """
    if not texts:
        return np.zeros((0, embedding.dimensions), np.float32)
    vectors = embed(texts) if embedding.bundled else _vectors(embedding, texts)
    if vectors.shape[1] != embedding.dimensions:
        told = f"{embedding.model} gave vectors of {vectors.shape[1]} numbers, the index has {embedding.dimensions}"
        raise EmbeddingProblem(told, remedy="it is another model now: build the index again")
    return vectors


def missing_for(embedding: Embedding, *, embedded: bool = False) -> tuple[str, ...]:
    """Distributions that dense search with a model needs and this environment lacks; nothing is imported.

    `embedded`: the vector of the query is known already.
    """
    if embedding.bundled or embedded:
        return missing_packages(embedded=embedded)
    wanted = "openai" if embedding.remote else "sentence_transformers"
    absent = () if importlib.util.find_spec(wanted) else (wanted.replace("_", "-"),)
    return (*missing_packages(embedded=True), *absent)


def _vectors(embedding: Embedding, texts: Sequence[str]) -> npt.NDArray[np.float32]:
    if missing := missing_for(embedding):
        told = f"{embedding.model} needs {', '.join(missing)}, which is not installed"
        raise EmbeddingProblem(told, remedy=f"pip install {' '.join(missing)}")
    if embedding.remote:
        from rag.embed_openai import embed_openai

        vectors = embed_openai(embedding.model.removeprefix(OPENAI), texts)
    else:
        from rag.embed_folder import embed_folder

        vectors = embed_folder(Path(embedding.model), embedding.sha256, texts)
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    if not (np.isfinite(lengths).all() and lengths.all()):
        raise EmbeddingProblem(f"{embedding.model} gave a vector without direction", remedy="name another model")
    return np.asarray(vectors / lengths, dtype=np.float32)
