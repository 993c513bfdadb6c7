"""Retrieval of the nearest proven pairs for a forward kernel.

    result = search(Query(source, path, k=4))
    for hit in result.chosen: show(hit.pair.forward, hit.pair.backward)

`docs/retrieval.md` says how pairs are described, ranked and chosen. Importing this package is cheap: search and index
load on first use, the embedding model with the first text that is embedded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rag.query import Exclusion, Hit, Query, QueryVector, RetrievedPair, Scores, SearchResult, Signal

if TYPE_CHECKING:
    from rag.build import add_pairs, build_index, remove_pairs
    from rag.index import Index, IndexProblem, join_indexes
    from rag.retrieval import embedded_text, search
    from rag.schedules import TechniqueMatch, Wanted, search_techniques
    from rag.storage import load_index
    from rag.together import open_index

__all__ = [
    "Exclusion",
    "Hit",
    "Index",
    "IndexProblem",
    "Query",
    "QueryVector",
    "RetrievedPair",
    "Scores",
    "SearchResult",
    "Signal",
    "TechniqueMatch",
    "Wanted",
    "add_pairs",
    "build_index",
    "embedded_text",
    "join_indexes",
    "load_index",
    "open_index",
    "remove_pairs",
    "search",
    "search_techniques",
]

_LATE = {
    "Index": "index",
    "IndexProblem": "index",
    "add_pairs": "build",
    "build_index": "build",
    "remove_pairs": "build",
    "join_indexes": "index",
    "load_index": "storage",
    "open_index": "together",
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
