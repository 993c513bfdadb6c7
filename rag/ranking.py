"""Ranking: every signal's view of all entries, and their fusion weighed by how much the names of the query tell.

Fusion is reciprocal rank fusion (Cormack, Clarke and Büttcher, SIGIR 2009): a ranking gives weight / (60 + rank).
Words rank by their cosine and half of the mean of the three best cosines of the entry's family: a pair whose whole
family is near is a safer answer than a lone neighbour. Weights and constants were set on one half of the queries in
`bench/rag_queries`; `bench/rag.py` reports both halves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rag.describe import Description
from rag.embed import embed, missing_packages
from rag.index import Index
from rag.query import Scores, Signal
from rag.words import LAYOUT_WORDS

FEW_KNOWN_WORDS = 3
"""With fewer telling words that the index knows, names say little: structure leads, and nothing is embedded."""

MANY_KNOWN_WORDS = 8
"""With this many the names tell all they can."""

FAMILY_WEIGHT, FAMILY_NEAREST = 0.5, 3
"""What a family's nearest entries add to each of its entries, and how many of them are asked."""

_RANK_OFFSET = 60

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Ranking:
    """One signal's view of all entries."""

    cosines: Floats
    """Cosine of the query with each entry: [n]."""
    ranks: npt.NDArray[np.int64]
    """Starting at 1, by cosine and, for words, family; what is equal keeps the entries' order: [n]."""
    weight: float
    """What this ranking counts in the fusion."""

    @classmethod
    def of(cls, cosines: Floats, weight: float = 1.0, families: npt.NDArray[np.int64] | None = None) -> Ranking:
        """Rank by falling cosine; with `families` (a number for each entry) by that of the family's nearest, too."""
        near = cosines if families is None else cosines + FAMILY_WEIGHT * _of_family(cosines, families)
        ranks = np.empty(len(cosines), dtype=np.int64)
        ranks[np.argsort(-near, kind="stable")] = np.arange(1, len(cosines) + 1)
        return cls(cosines, ranks, weight)


@dataclass(frozen=True)
class Rankings:
    """All rankings of one query."""

    by_signal: Mapping[Signal, Ranking]
    named: bool
    """Whether names of the query tell something: else structure leads and judges."""

    @property
    def judge(self) -> Signal:
        """The signal whose cosine `min_sim` is compared with."""
        if not self.named:
            return Signal.STRUCTURE
        return Signal.DENSE if Signal.DENSE in self.by_signal else Signal.LEXICAL

    def fused(self) -> Floats:
        """The score that orders the entries: float64 [n], the higher the nearer."""
        rankings = list(self.by_signal.values())
        start = np.zeros(len(rankings[0].ranks))
        return sum((one.weight / (_RANK_OFFSET + one.ranks) for one in rankings), start)

    def scores(self, row: int, fused: float) -> Scores:
        """How the entry of a row compares with the query."""

        def of(signal: Signal) -> tuple[float | None, int | None]:
            ranking = self.by_signal.get(signal)
            return (None, None) if ranking is None else (float(ranking.cosines[row]), int(ranking.ranks[row]))

        (dense, dense_rank), (lexical, lexical_rank), (structure, structure_rank) = map(of, Signal)
        return Scores(
            similarity=float(self.by_signal[self.judge].cosines[row]),
            fused=fused,
            dense=dense,
            dense_rank=dense_rank,
            lexical=lexical,
            lexical_rank=lexical_rank,
            structure=structure,
            structure_rank=structure_rank,
        )


def rank(description: Description, index: Index, notices: list[str], vector: Sequence[float] | None = None) -> Rankings:
    """Rank all entries by every signal that can be had; what cannot is added to the notices.

    `vector` is the embedded description where it is known already.
    """
    cosines = {
        Signal.LEXICAL: index.lexical.cosines(description.terms),
        Signal.STRUCTURE: index.structure.cosines(description.shape),
    }
    known = len(known_words(description, index))
    named = known >= FEW_KNOWN_WORDS
    if not named:
        notices.append("few words of this forward are known to the index: its structure is compared instead")
    elif index.vectors is None:
        notices.append("the index holds no embeddings: lexical search alone")
    elif missing := missing_packages(embedded=vector is not None):
        notices.append(f"no embedding model ({', '.join(missing)} not installed): lexical search alone")
    else:
        cosines[Signal.DENSE] = dense_cosines(description, index, vector)
    weights = weights_of(known)
    by_signal = {
        signal: Ranking.of(cosines[signal], weights[signal], None if signal is Signal.STRUCTURE else index.families)
        for signal in Signal
        if signal in cosines
    }
    return Rankings(by_signal, named)


def weights_of(known: int) -> Mapping[Signal, float]:
    """What each signal counts when so many telling words of the query are known.

    With no such word, structure ranks alone; sentences of strange words mislead an embedding more than they do words.
    """
    telling = min(1.0, known / MANY_KNOWN_WORDS)
    return {Signal.DENSE: telling * telling, Signal.LEXICAL: 2.0 * telling, Signal.STRUCTURE: 1.0}


def _of_family(cosines: Floats, families: npt.NDArray[np.int64]) -> Floats:
    """Mean of the best few cosines of each entry's family: [n]. A small family is asked as a whole."""
    order = np.lexsort((-cosines, families))
    sizes = np.bincount(families)
    starts = np.cumsum(sizes) - sizes
    place = np.arange(len(cosines)) - starts[families[order]]
    best = order[place < FAMILY_NEAREST]
    sums = np.bincount(families[best], weights=cosines[best], minlength=len(sizes))
    means = sums / np.maximum(np.minimum(sizes, FAMILY_NEAREST), 1)
    return np.asarray(means[families], dtype=np.float64)


def known_words(description: Description, index: Index) -> tuple[str, ...]:
    """The description's words that the index knows and that say more than how memory is walked, sorted."""
    telling = (word for word in description.words if len(word) > 1 and word not in LAYOUT_WORDS)
    return tuple(sorted(word for word in telling if word in index.lexical))


def dense_cosines(description: Description, index: Index, vector: Sequence[float] | None = None) -> Floats:
    """Cosines of the embedded descriptor, `vector` where it is known already, with every entry: float64 [n]."""
    query = embed([description.descriptor])[0] if vector is None else np.asarray(vector, dtype=np.float32)
    return index.dense.cosines(query)
