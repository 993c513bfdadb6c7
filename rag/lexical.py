"""Search by shared words: tf-idf over the terms of descriptions. Needs numpy alone, so it works on every machine."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt


class Lexicon:
    """How rare each term is among the described pairs."""

    def __init__(self, documents: Sequence[Mapping[str, int]]) -> None:
        self.size = len(documents)
        self.frequency = Counter(term for document in documents for term in document)

    def __contains__(self, term: str) -> bool:
        return term in self.frequency

    def rarity(self, term: str) -> float:
        """Smoothed inverse document frequency, log((1 + n) / (1 + df)) + 1; at its largest for a term never seen."""
        return math.log((1 + self.size) / (1 + self.frequency[term])) + 1

    def weigh(self, terms: Mapping[str, int]) -> dict[str, float]:
        """Weights (1 + log count) * rarity, scaled to unit length. A term never seen keeps its share of the length."""
        raw = {term: (1 + math.log(count)) * self.rarity(term) for term, count in terms.items() if count > 0}
        length = math.sqrt(sum(weight * weight for weight in raw.values())) or 1.0
        return {term: weight / length for term, weight in raw.items()}


class LexicalIndex:
    """An inverted index over the pairs' terms."""

    def __init__(self, documents: Sequence[Mapping[str, int]]) -> None:
        self.lexicon = Lexicon(documents)
        self._postings: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for row, document in enumerate(documents):
            for term, weight in self.lexicon.weigh(document).items():
                self._postings[term].append((row, weight))

    def cosines(self, terms: Mapping[str, int]) -> npt.NDArray[np.float64]:
        """Cosine of a query with every pair: float64 [n], in [0, 1]."""
        result = np.zeros(self.lexicon.size)
        for term, weight in self.lexicon.weigh(terms).items():
            for row, other in self._postings.get(term, ()):
                result[row] += weight * other
        return result
