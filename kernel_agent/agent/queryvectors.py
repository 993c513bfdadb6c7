"""`QueryVectors`: the embedded description of a forward, made once for a run, in a child, beside other work.

Importing what embeds takes seconds and a gigabyte; the parent, and every process that goes on with the run, is spared
both.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from kernel_agent.agent.runcache import RunCache
from kernel_agent.config import RunConfig
from kernel_agent.errors import KernelAgentError
from kernel_agent.pairs.spec import KernelSpec
from kernel_agent.sandbox import Job, Limits, Sandbox

Vector = tuple[float, ...]

VectorOf = Callable[[KernelSpec, RunConfig], Vector | None]
"""Gives the vector that a search for a forward uses; None where it uses none, or has to embed for itself."""

LIMITS = Limits(wall_s=120.0)
"""Embedding takes seconds, most of them for imports."""


class QueryVectors:
    """The vectors of one run."""

    def __init__(self, sandbox: Sandbox, cache: RunCache, beside: ThreadPoolExecutor) -> None:
        self._sandbox, self._cache, self._beside = sandbox, cache, beside
        self._begun: dict[str, Future[Vector | None]] = {}

    def begin(self, spec: KernelSpec, config: RunConfig) -> None:
        """Start embedding unless the vector is known; what is wrong with the index is left for the search to say."""
        try:
            self._start(_text(spec, config))
        except KernelAgentError:
            return

    def of(self, spec: KernelSpec, config: RunConfig) -> Vector | None:
        """See `VectorOf`. Raises what `rag.load_index` raises."""
        text = _text(spec, config)
        known = self._known(text)
        if known is not None:
            return known
        self._start(text)
        begun = self._begun.get(text)
        return None if begun is None else begun.result()

    def _start(self, text: str) -> None:
        from rag.embed import missing_packages

        if text and text not in self._begun and self._known(text) is None and not missing_packages():
            self._begun[text] = self._beside.submit(self._embed, text)

    def _known(self, text: str) -> Vector | None:
        from rag.embed import DIMENSIONS, WEIGHTS_SHA256

        kept = self._cache.get("query-vector", WEIGHTS_SHA256, text) if text else None
        try:
            numbers = [] if kept is None else json.loads(kept)
            vector = tuple(float(number) for number in numbers)
        except (ValueError, TypeError):
            return None
        return vector if len(vector) == DIMENSIONS else None

    def _embed(self, text: str) -> Vector | None:
        from rag.embed import WEIGHTS_SHA256
        from rag.embed_child import readable

        job = Job("rag.embed_child:embedded", {"text": text}, limits=LIMITS, label="embedding", readable=readable())
        report = self._sandbox.run(job)
        if not report.finished or not report.messages:
            return None  # the search embeds in this process, and says what is wrong
        vector = [float(number) for number in report.messages[-1].record["vector"]]
        self._cache.put(json.dumps(vector), "query-vector", WEIGHTS_SHA256, text)
        return tuple(vector)


def _text(spec: KernelSpec, config: RunConfig) -> str:
    """What the search would embed; empty where it embeds nothing."""
    import rag
    from kernel_agent.agent.retrieval import query_of

    return rag.embedded_text(query_of(spec, config), rag.open_index(config.rag_index))
