"""`QueryVectors`: the embedded description of a forward, made once for a run, in a child, beside other work.

Importing what embeds takes seconds and a gigabyte; the parent, and every process that goes on with the run, is spared
both. A model that is asked over the network is asked by the parent: children have no network and no keys.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernel_agent.agent.runcache import RunCache
from kernel_agent.config import RunConfig
from kernel_agent.errors import KernelAgentError
from kernel_agent.pairs.spec import KernelSpec
from kernel_agent.sandbox import Job, Limits, Sandbox

if TYPE_CHECKING:
    from rag import QueryVector
    from rag.embedding import Embedding

VectorOf = Callable[[KernelSpec, RunConfig], "QueryVector | None"]
"""Gives the vector that a search for a forward uses; None where it uses none, or has to embed for itself."""

LIMITS = Limits(wall_s=120.0)
"""Embedding takes seconds, most of them for imports."""


@dataclass(frozen=True)
class _Text:
    """What is to be embedded."""

    text: str
    """The description; empty where the search embeds nothing."""
    embedding: Embedding
    """The model of the index that is searched."""

    @property
    def place(self) -> tuple[str, str, str]:
        """Where the vector is kept."""
        return "query-vector", self.embedding.identity, self.text


class QueryVectors:
    """The vectors of one run."""

    def __init__(self, sandbox: Sandbox, cache: RunCache, beside: ThreadPoolExecutor) -> None:
        self._sandbox, self._cache, self._beside = sandbox, cache, beside
        self._begun: dict[_Text, Future[QueryVector | None]] = {}

    def begin(self, spec: KernelSpec, config: RunConfig) -> None:
        """Start embedding unless the vector is known; what is wrong with the index is left for the search to say."""
        try:
            self._start(_text(spec, config))
        except KernelAgentError:
            return

    def of(self, spec: KernelSpec, config: RunConfig) -> QueryVector | None:
        """See `VectorOf`. Raises what `rag.load_index` raises."""
        text = _text(spec, config)
        known = self._known(text)
        if known is not None:
            return known
        self._start(text)
        begun = self._begun.get(text)
        return None if begun is None else begun.result()

    def _start(self, text: _Text) -> None:
        from rag.embedders import missing_for

        if text.text and text not in self._begun and self._known(text) is None and not missing_for(text.embedding):
            self._begun[text] = self._beside.submit(self._embed, text)

    def _known(self, text: _Text) -> QueryVector | None:
        from rag import QueryVector

        kept = self._cache.get(*text.place) if text.text else None
        try:
            numbers = [] if kept is None else json.loads(kept)
            vector = tuple(float(number) for number in numbers)
        except (ValueError, TypeError):
            return None
        return QueryVector(text.embedding.identity, vector) if len(vector) == text.embedding.dimensions else None

    def _embed(self, text: _Text) -> QueryVector | None:
        from rag import QueryVector

        vector = self._asked(text) if text.embedding.remote else self._in_child(text)
        if vector is None:
            return None  # the search embeds in this process, and says what is wrong
        self._cache.put(json.dumps(vector), *text.place)
        return QueryVector(text.embedding.identity, tuple(vector))

    def _asked(self, text: _Text) -> list[float] | None:
        from rag.embedders import embed_with
        from rag.embedding import EmbeddingProblem

        try:
            return [float(number) for number in embed_with(text.embedding, [text.text])[0]]
        except EmbeddingProblem:
            return None

    def _in_child(self, text: _Text) -> list[float] | None:
        from rag.embed_child import readable

        payload = {"text": text.text, "embedding": text.embedding.model_dump()}
        places = readable(text.embedding)
        job = Job("rag.embed_child:embedded", payload, limits=LIMITS, label="embedding", readable=places)
        report = self._sandbox.run(job)
        if not report.finished or not report.messages:
            return None
        return [float(number) for number in report.messages[-1].record["vector"]]


def _text(spec: KernelSpec, config: RunConfig) -> _Text:
    """What the search would embed."""
    import rag
    from kernel_agent.agent.retrieval import query_of

    index = rag.open_index(config.rag_index)
    return _Text(rag.embedded_text(query_of(spec, config), index), index.embedding)
