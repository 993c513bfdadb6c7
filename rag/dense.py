"""Cosines of a query's vector with those of every entry, through faiss: exact, and by inverted lists for very many.

Comparing 100,000 vectors one by one is fast enough (`bench/rag.py`); lists take longer to build than that saves.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

EXACT_UP_TO = 200_000
"""Entries that are compared one by one."""

SAMPLED, VISITED = 40, 8
"""Vectors per list that its centre is learned from, and one in how many lists is visited by a query."""

UNRELATED, SAMPLED_ENTRIES = 0.9, 2_000
"""Share of pairs of different families that a default threshold shuts out, and of how many entries it is learned."""

FOUND = 512
"""Entries that a search of the lists gives. The others count as just below the last of them."""


class DenseIndex:
    """Vectors of unit length, searched by inner product."""

    def __init__(self, vectors: npt.NDArray[np.float32]) -> None:
        self.size, dimensions = vectors.shape
        self.exact = self.size <= EXACT_UP_TO
        self._index = _exact(dimensions) if self.exact else _lists(vectors)
        self._index.add(vectors)

    def cosines(self, query: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
        """Cosine of a query [d] with every entry: float64 [n]; beyond `EXACT_UP_TO`, of the nearest ones."""
        wanted = self.size if self.exact else min(FOUND, self.size)
        found, rows = self._index.search(np.asarray([query], dtype=np.float32), wanted)
        near = rows[0] >= 0
        cosines = np.full(self.size, float(found[0][near].min()) - 1e-6 if near.any() else 0.0)
        cosines[rows[0][near]] = found[0][near]
        return cosines


def unrelated_cosine(vectors: npt.NDArray[np.float32], families: npt.NDArray[np.int64]) -> float | None:
    """Cosine that nine in ten pairs of entries of different families stay below; None with fewer than two families.

    Of many entries, evenly spaced ones are compared.
    """
    step = max(1, len(vectors) // SAMPLED_ENTRIES)
    some, numbers = vectors[::step], families[::step]
    different = numbers[:, None] != numbers[None, :]
    return float(np.quantile((some @ some.T)[different], UNRELATED)) if different.any() else None


def _exact(dimensions: int) -> Any:
    import faiss

    return faiss.IndexFlatIP(dimensions)


def _lists(vectors: npt.NDArray[np.float32]) -> Any:
    """Inverted lists, four times the root of the entries, whose centres are learned from evenly spaced rows."""
    import faiss

    number = int(4 * len(vectors) ** 0.5)
    lists = faiss.IndexIVFFlat(_exact(vectors.shape[1]), vectors.shape[1], number, faiss.METRIC_INNER_PRODUCT)
    lists.cp.niter = 8
    lists.train(vectors[:: max(1, len(vectors) // (SAMPLED * number))])
    lists.nprobe = max(1, number // VISITED)
    return lists
