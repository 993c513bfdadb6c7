"""Retrieval of the nearest proven pairs for a forward kernel.

    result = search(Query(source, path, k=4))
    for hit in result.chosen: show(hit.pair.forward, hit.pair.backward)

`docs/retrieval.md` says how pairs are described, ranked and chosen. Importing this package is cheap: search and index
load on first use, the embedding model with the first text that is embedded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rag.query import Exclusion, Hit, Query, RetrievedPair, Scores, SearchResult, Signal

if TYPE_CHECKING:
    from rag.index import Index, IndexProblem, build_index, load_index
    from rag.retrieval import embedded_text, search
    from rag.schedules import TechniqueMatch, Wanted, search_techniques

__all__ = [
    "Exclusion",
    "Hit",
    "Index",
    "IndexProblem",
    "Query",
    "RetrievedPair",
    "Scores",
    "SearchResult",
    "Signal",
    "TechniqueMatch",
    "Wanted",
    "build_index",
    "embedded_text",
    "load_index",
    "search",
    "search_techniques",
]

_LATE = {
    "Index": "index",
    "IndexProblem": "index",
    "build_index": "index",
    "load_index": "index",
    "embedded_text": "retrieval",
    "search": "retrieval",
    "TechniqueMatch": "schedules",
    "Wanted": "schedules",
    "search_techniques": "schedules",
}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module 'rag' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"rag.{_LATE[name]}"), name)
