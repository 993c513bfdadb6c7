"""Embeddings of OpenAI, or of a server that speaks its protocol, through its SDK.

The SDK reads the server's address from OPENAI_BASE_URL. The texts are descriptions of forwards, never their source.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kernel_agent.config import Backend
from rag.embedding import EmbeddingProblem

if TYPE_CHECKING:
    import openai

    from kernel_agent.models.keys import Key

BATCH = 128
"""Texts of one request. OpenAI takes 2048 texts and 300,000 tokens."""

LONGEST = 8_000
"""Characters of a text that are sent: the models read 8192 tokens."""

RETRIES, CONNECT_S, SILENCE_S = 2, 5.0, 30.0
"""How patient a request is: a search goes on without embeddings."""

_INSTEAD = "or build the index with another --embedding-model"


def embed_openai(name: str, texts: Sequence[str]) -> npt.NDArray[np.float32]:
    """Embed texts as float32 [n, d], in their order. Raises EmbeddingProblem when the server gives no such vectors."""
    import openai

    from kernel_agent.models.errors import MissingKey
    from kernel_agent.models.keys import find_key

    try:
        key = find_key(Backend.OPENAI, os.environ)
    except MissingKey as error:
        told = f"OPENAI_API_KEY is not set, and openai:{name} needs it"
        raise EmbeddingProblem(told, remedy=f"export it, {_INSTEAD}") from error
    timeout = openai.Timeout(SILENCE_S, connect=CONNECT_S)
    rows: list[list[float]] = []
    with openai.OpenAI(api_key=key.secret, max_retries=RETRIES, timeout=timeout) as client:
        server = client.base_url.host
        for start in range(0, len(texts), BATCH):
            with _told(server, name, key):
                rows += _ask(client, name, [text[:LONGEST] for text in texts[start : start + BATCH]])
    if len({len(row) for row in rows}) > 1:
        raise _strange(server, "vectors of different lengths")
    return np.asarray(rows, dtype=np.float32).reshape(len(texts), -1)


def _ask(client: openai.OpenAI, name: str, texts: list[str]) -> list[list[float]]:
    """The vectors of one batch, ordered by the place that the server gives with each."""
    from openai.types import CreateEmbeddingResponse

    reply = client.embeddings.create(model=name, input=texts, encoding_format="float")
    server = client.base_url.host
    if not isinstance(reply, CreateEmbeddingResponse) or not isinstance(reply.data, list):
        raise _strange(server, "no embeddings; most servers want /v1 at the end of OPENAI_BASE_URL")
    places = {one.index: one.embedding for one in reply.data}
    if len(reply.data) != len(texts) or places.keys() != set(range(len(texts))):
        raise _strange(server, f"{len(reply.data)} vectors for {len(texts)} texts")
    return [places[place] for place in range(len(texts))]


def _strange(server: str, answer: str) -> EmbeddingProblem:
    return EmbeddingProblem(f"{server} answered with {answer}", remedy=f"check OPENAI_BASE_URL, {_INSTEAD}")


@contextmanager
def _told(server: str, name: str, key: Key) -> Iterator[None]:
    """What went wrong with a request, in our words and without the key; the SDK has retried what can be retried."""
    import openai

    from kernel_agent.models.errors import said

    try:
        yield
    except openai.APIStatusError as error:
        status, message = error.status_code, key.redact(said(error.body))
        if status in {401, 403}:
            told, remedy = f"{server} does not accept the key in {key.variable} ({status})", "check the key"
        elif status == 429 or status >= 500:
            told, remedy = f"{server} did not answer ({status}): {message}", "try again later"
        else:
            told, remedy = f"{server} refused to embed with {name} ({status}): {message}", "check the model's name"
        raise EmbeddingProblem(told, remedy=f"{remedy}, {_INSTEAD}") from error
    except openai.APIError as error:
        told = f"cannot reach {server} for embeddings: {key.redact(error.message)}"
        raise EmbeddingProblem(told, remedy=f"check the network and OPENAI_BASE_URL, {_INSTEAD}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise _strange(server, "what is no JSON") from error
