"""Search: dense and lexical ranks fused, near-identical backwards collapsed, whole pairs chosen or none.

Fusion is reciprocal rank fusion (Cormack, Clarke and Büttcher, SIGIR 2009): each ranking gives 1 / (60 + rank).
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kernel_agent.errors import InputError
from rag.describe import Description, describe
from rag.embed import embed, missing_packages
from rag.index import Entry, Index
from rag.query import Exclusion, Hit, Query, RetrievedPair, Scores, SearchResult, Signal, licence_words
from rag.storage import load_index
from rag.structure import body_operations, count_grams, overlap
from rag.words import LAYOUT_WORDS

MIN_SIM: Mapping[Signal, float] = {Signal.DENSE: 0.51, Signal.LEXICAL: 0.09, Signal.STRUCTURE: 0.22}
"""Default thresholds: about nine in ten pairs of different families lie below, by `bench/rag_calibration.py`."""

FEW_KNOWN_WORDS = 3
"""With fewer telling words that the index knows, words say little and structure ranks in place of the dense signal."""

NEAR_IDENTICAL = 0.9
"""Overlap of operation runs from which two backwards count as one."""

SHOWN = 10
_RANK_OFFSET = 60


@dataclass(frozen=True)
class Ranking:
    """One signal's view of all entries."""

    cosines: npt.NDArray[np.float64]
    ranks: npt.NDArray[np.int64]
    """Starting at 1; equal cosines keep the entries' order."""

    @classmethod
    def of(cls, cosines: npt.NDArray[np.float64]) -> Ranking:
        """Rank by falling cosine."""
        ranks = np.empty(len(cosines), dtype=np.int64)
        ranks[np.argsort(-cosines, kind="stable")] = np.arange(1, len(cosines) + 1)
        return cls(cosines, ranks)


def search(query: Query, index: Index | None = None) -> SearchResult:
    """Find the pairs nearest to a forward.

    With no index given, the shipped one is loaded. When nothing is similar enough, no hit is chosen and the notice says
    so. Raises InputError for a source that is not Python or a `min_sim` or `k` out of range, IndexProblem for an index
    that cannot be used.
    """
    if query.k < 0 or not 0.0 <= (query.min_sim or 0.0) <= 1.0:
        raise InputError("top k must not be negative and min-sim must lie in [0, 1]", remedy="correct the option")
    index = load_index() if index is None else index
    description = describe(query.source, query.path)
    notices: list[str] = []
    rankings = rank(description, index, notices, query.vector)
    judge = _judge(rankings)
    min_sim = MIN_SIM[judge] if query.min_sim is None else query.min_sim
    hits = _choose(query, index, rankings, min_sim, notices)
    if query.k and not any(hit.chosen for hit in hits):
        notices.append(f"no pair is similar enough: {judge.value} similarity of at least {min_sim:.2f} is asked")
    paths = [entry.path.lower() for entry in index.entries]
    unmatched = tuple(term for term in query.terms if not any(term.lower() in path for path in paths))
    return SearchResult(tuple(hits), judge, min_sim, unmatched, "\n".join(notices))


def embedded_text(query: Query, index: Index) -> str:
    """What a search for this query embeds; empty when it embeds nothing. Raises InputError as `search` does."""
    description = describe(query.source, query.path)
    if index.vectors is None or len(known_words(description, index)) < FEW_KNOWN_WORDS:
        return ""
    return description.descriptor


def rank(
    description: Description, index: Index, notices: list[str], vector: Sequence[float] | None = None
) -> dict[Signal, Ranking]:
    """Rank all entries by every signal that can be had; what cannot is added to the notices.

    `vector` is the embedded description where it is known already.
    """
    rankings = {Signal.LEXICAL: Ranking.of(index.lexical.cosines(description.terms))}
    if len(known_words(description, index)) < FEW_KNOWN_WORDS:
        notices.append("few words of this forward are known to the index: its structure is compared instead")
        rankings[Signal.STRUCTURE] = Ranking.of(structure_cosines(description, index))
        return rankings
    if index.vectors is None:
        notices.append("the index holds no embeddings: lexical search alone")
    elif missing := missing_packages(embedded=vector is not None):
        notices.append(f"no embedding model ({', '.join(missing)} not installed): lexical search alone")
    else:
        rankings[Signal.DENSE] = Ranking.of(dense_cosines(description, index, vector))
    return rankings


def _judge(rankings: Mapping[Signal, Ranking]) -> Signal:
    return next(signal for signal in (Signal.STRUCTURE, Signal.DENSE, Signal.LEXICAL) if signal in rankings)


def known_words(description: Description, index: Index) -> tuple[str, ...]:
    """The description's words that the index knows and that say more than how memory is walked, sorted."""
    telling = (word for word in description.words if len(word) > 1 and word not in LAYOUT_WORDS)
    return tuple(sorted(word for word in telling if word in index.lexical))


def dense_cosines(
    description: Description, index: Index, vector: Sequence[float] | None = None
) -> npt.NDArray[np.float64]:
    """Cosines of the embedded descriptor, `vector` where it is known already, with every entry: float64 [n]."""
    import faiss

    assert index.vectors is not None
    flat = faiss.IndexFlatIP(index.vectors.shape[1])
    flat.add(index.vectors)
    if vector is None:
        query = embed([description.descriptor])
    else:
        query = np.asarray([vector], dtype=np.float32)
    found, rows = flat.search(query, len(index.entries))
    cosines = np.empty(len(index.entries))
    cosines[rows[0]] = found[0]
    return cosines


def structure_cosines(description: Description, index: Index) -> npt.NDArray[np.float64]:
    """Cosines of operations and runs of three: float64 [n]."""
    return index.structure.cosines(description.shape)


def _choose(
    query: Query, index: Index, rankings: Mapping[Signal, Ranking], min_sim: float, notices: list[str]
) -> list[Hit]:
    stale = index.staleness()
    if stale:
        notices.append(
            f"the index is older than the pairs ({len(stale.changed)} changed, {len(stale.missing)} gone,"
            f" {len(stale.added)} new: these are left out); rebuild it with kernel-agent rag build"
        )
    unusable = {*stale.changed, *stale.missing}
    if index.speeds.notice:
        notices.append(index.speeds.notice)
    fused = fuse(rankings, index)
    hits: list[Hit] = []
    chosen: list[RetrievedPair] = []
    for row in np.argsort(-fused, kind="stable"):
        if len(hits) >= SHOWN and len(chosen) >= query.k:
            break
        entry = index.entries[row]
        if entry.path in unusable:
            continue
        pair = index.read(row)
        if pair is None:
            continue
        scores = scores_of(row, float(fused[row]), rankings)
        excluded, detail = _exclusion(query, entry, pair, scores, min_sim, chosen)
        if excluded is None:
            chosen.append(pair)
        if excluded is None or len(hits) < SHOWN:
            hits.append(Hit(pair, scores, excluded, detail))
    return hits


def _exclusion(
    query: Query, entry: Entry, pair: RetrievedPair, scores: Scores, min_sim: float, chosen: Sequence[RetrievedPair]
) -> tuple[Exclusion | None, str]:
    for term in query.terms:
        if term.lower() in entry.path.lower():
            return Exclusion.TERM, term
    if not (pair.may_be_shown or query.unlicensed):
        return Exclusion.UNLICENSED, licence_words(pair.licence)
    if scores.similarity < min_sim:
        return Exclusion.DISSIMILAR, f"{scores.similarity:.2f} < {min_sim:.2f}"
    for other in chosen:
        if overlap(backward_grams(pair.backward), backward_grams(other.backward)) >= NEAR_IDENTICAL:
            return Exclusion.NEAR_IDENTICAL, other.slug
    if len(chosen) >= query.k:
        return Exclusion.BEYOND_K, f"k = {query.k}"
    return None, ""


@functools.lru_cache(maxsize=256)
def backward_grams(backward: str) -> Mapping[str, int]:
    """Runs of three operations in all functions of a backward section."""
    functions = [node for node in ast.parse(backward).body if isinstance(node, ast.FunctionDef)]
    return count_grams(body_operations(functions))


def fuse(rankings: Mapping[Signal, Ranking], index: Index) -> npt.NDArray[np.float64]:
    """The score that orders the entries: float64 [n], the higher the nearer."""
    return sum((1.0 / (_RANK_OFFSET + ranking.ranks) for ranking in rankings.values()), np.zeros(len(index.entries)))


def scores_of(row: int, fused: float, rankings: Mapping[Signal, Ranking]) -> Scores:
    """How the entry of a row compares with the query."""

    def of(signal: Signal) -> tuple[float | None, int | None]:
        ranking = rankings.get(signal)
        return (None, None) if ranking is None else (float(ranking.cosines[row]), int(ranking.ranks[row]))

    (dense, dense_rank), (lexical, lexical_rank), (structure, structure_rank) = map(of, Signal)
    return Scores(
        similarity=float(rankings[_judge(rankings)].cosines[row]),
        fused=fused,
        dense=dense,
        dense_rank=dense_rank,
        lexical=lexical,
        lexical_rank=lexical_rank,
        structure=structure,
        structure_rank=structure_rank,
    )
