"""Ranking: every signal's view of all entries, and their fusion weighed by how much the names of the query tell.

Fusion is reciprocal rank fusion (Cormack, Clarke and Büttcher, SIGIR 2009): a ranking gives weight / (60 + rank).
Words rank by their cosine and half of the mean of the three best cosines of the entry's family: a pair whose whole
family is near is a safer answer than a lone neighbour. Weights and constants were set on one half of the queries in
`bench/rag_queries`; `bench/rag.py` reports both halves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rag.describe import Description
from rag.embedders import embed_with, missing_for
from rag.embedding import EmbeddingProblem
from rag.index import Index
from rag.query import QueryVector, Scores, Signal
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
    compared: npt.NDArray[np.bool_] | None = None
    """Entries that this signal can compare: [n]; None: all. The others have the cosine -1, and ranks of words."""

    @classmethod
    def of(cls, cosines: Floats, weight: float = 1.0, families: npt.NDArray[np.int64] | None = None) -> Ranking:
        """Rank by falling cosine; with `families` (a number for each entry) by that of the family's nearest, too."""
        near = cosines if families is None else cosines + FAMILY_WEIGHT * _of_family(cosines, families)
        ranks = np.empty(len(cosines), dtype=np.int64)
        ranks[np.argsort(-near, kind="stable")] = np.arange(1, len(cosines) + 1)
        return cls(cosines, ranks, weight)

    def only(self, compared: npt.NDArray[np.bool_], families: npt.NDArray[np.int64], words: Ranking) -> Ranking:
        """This ranking among the entries it can compare; the others keep the rank that words give them.

        So a pair that cannot be compared neither gains nor loses by this signal: its words count in its place.
        """
        among = Ranking.of(self.cosines[compared], self.weight, families[compared])
        cosines, ranks = np.full(len(compared), -1.0), words.ranks.copy()
        cosines[compared], ranks[compared] = among.cosines, among.ranks
        return Ranking(cosines, ranks, self.weight, compared)

    def compares(self, row: int) -> bool:
        """Whether this signal can compare the entry of a row."""
        return self.compared is None or bool(self.compared[row])


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

    def judge_of(self, row: int) -> Signal:
        """The judge of the entry of a row: words where it cannot be compared by the embedding."""
        return self.judge if self.by_signal[self.judge].compares(row) else Signal.LEXICAL

    def fused(self) -> Floats:
        """The score that orders the entries: float64 [n], the higher the nearer."""
        rankings = list(self.by_signal.values())
        start = np.zeros(len(rankings[0].ranks))
        return sum((one.weight / (_RANK_OFFSET + one.ranks) for one in rankings), start)

    def scores(self, row: int, fused: float) -> Scores:
        """How the entry of a row compares with the query."""

        def of(signal: Signal) -> tuple[float | None, int | None]:
            ranking = self.by_signal.get(signal)
            if ranking is None or not ranking.compares(row):
                return None, None
            return float(ranking.cosines[row]), int(ranking.ranks[row])

        (dense, dense_rank), (lexical, lexical_rank), (structure, structure_rank) = map(of, Signal)
        return Scores(
            similarity=float(self.by_signal[self.judge_of(row)].cosines[row]),
            fused=fused,
            dense=dense,
            dense_rank=dense_rank,
            lexical=lexical,
            lexical_rank=lexical_rank,
            structure=structure,
            structure_rank=structure_rank,
        )


def rank(description: Description, index: Index, notices: list[str], vector: QueryVector | None = None) -> Rankings:
    """Rank all entries by every signal that can be had; what cannot is added to the notices.

    `vector` is the embedded description where it is known already; one that another model made is not used.
    """
    vector = fitting(vector, index)
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
    elif missing := missing_for(index.embedding, embedded=vector is not None):
        notices.append(f"no embedding model ({', '.join(missing)} not installed): lexical search alone")
    else:
        try:
            cosines[Signal.DENSE] = dense_cosines(description, index, vector)
        except EmbeddingProblem as problem:
            notices.append(f"{problem.message}: lexical search alone ({problem.remedy})")
    weights = weights_of(known)
    by_signal = {
        signal: Ranking.of(cosines[signal], weights[signal], None if signal is Signal.STRUCTURE else index.families)
        for signal in Signal
        if signal in cosines
    }
    if Signal.DENSE in by_signal and not index.embedded.all():
        by_signal[Signal.DENSE] = by_signal[Signal.DENSE].only(
            index.embedded, index.families, by_signal[Signal.LEXICAL]
        )
        notices.extend(_other_model(other, index) for other in index.uncompared)
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


def dense_cosines(description: Description, index: Index, vector: QueryVector | None = None) -> Floats:
    """Cosines of the embedded descriptor, `vector` where it is known already, with every entry: float64 [n].

    Raises what `embed_with` raises.
    """
    known = fitting(vector, index)
    if known is None:
        return index.dense.cosines(embed_with(index.embedding, [description.descriptor])[0])
    return index.dense.cosines(np.asarray(known.numbers, dtype=np.float32))


def fitting(vector: QueryVector | None, index: Index) -> QueryVector | None:
    """The vector if the model of the index made it, else None."""
    if vector is None or index.vectors is None:
        return None
    same = vector.made_by == index.embedding.identity and len(vector.numbers) == index.vectors.shape[1]
    return vector if same else None


def _other_model(other: Index, index: Index) -> str:
    theirs = "no embeddings" if other.manifest.embedding is None else f"embeddings of {other.embedding.model}"
    return (
        f"{len(other.entries)} pairs of {other.pairs} have {theirs}, the others of {index.embedding.model}:"
        " they are compared by words and structure (build their index again with that model)"
    )
