"""Cosines of a query's vector with those of every entry, through faiss: exact for thousands, by a graph for more."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

EXACT_UP_TO = 20_000
"""Entries that are compared one by one: some milliseconds. Beyond, a graph of neighbours (HNSW) is searched."""

NEIGHBOURS, BUILD_EFFORT, SEARCH_EFFORT = 16, 64, 512
"""Links per entry of the graph, and how many candidates are kept while it is built and searched."""

FOUND = 512
"""Entries that a search of the graph gives. The others count as just below the last of them."""


class DenseIndex:
    """Vectors of unit length, searched by inner product."""

    def __init__(self, vectors: npt.NDArray[np.float32]) -> None:
        self.size, dimensions = vectors.shape
        self.exact = self.size <= EXACT_UP_TO
        self._vectors = vectors
        self._index = _exact(dimensions) if self.exact else _graph(dimensions)
        self._index.add(vectors)

    def cosines(self, query: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
        """Cosine of a query [d] with every entry: float64 [n]; beyond `EXACT_UP_TO`, of the nearest ones."""
        wanted = self.size if self.exact else min(FOUND, self.size)
        found, rows = self._index.search(np.asarray([query], dtype=np.float32), wanted)
        near = rows[0] >= 0
        cosines = np.full(self.size, float(found[0][near].min()) - 1e-6 if near.any() else 0.0)
        cosines[rows[0][near]] = found[0][near]
        return cosines


def _exact(dimensions: int) -> Any:
    import faiss

    return faiss.IndexFlatIP(dimensions)


def _graph(dimensions: int) -> Any:
    import faiss

    graph = faiss.IndexHNSWFlat(dimensions, NEIGHBOURS, faiss.METRIC_INNER_PRODUCT)
    graph.hnsw.efConstruction, graph.hnsw.efSearch = BUILD_EFFORT, SEARCH_EFFORT
    return graph
