"""Search: entries by their fused ranks, near-identical backwards collapsed, whole pairs chosen or none."""

from __future__ import annotations

import ast
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kernel_agent.errors import InputError
from rag.describe import Description, describe
from rag.index import Entry, Index
from rag.query import Exclusion, Hit, Query, RetrievedPair, Scores, SearchResult, Signal, licence_words
from rag.ranking import FEW_KNOWN_WORDS, Rankings, known_words, rank
from rag.storage import load_index
from rag.structure import body_operations, count_grams, overlap

MIN_SIM: Mapping[Signal, float] = {Signal.DENSE: 0.52, Signal.LEXICAL: 0.09, Signal.STRUCTURE: 0.19}
"""Default thresholds: about nine in ten pairs of different families lie below, by `bench/rag_calibration.py`."""

NEAR_IDENTICAL = 0.9
"""Overlap of operation runs from which two backwards count as one."""

SHOWN = 10

SAME_SCHEDULE = 0.95
"""What the score of a pair is worth whose techniques the chosen pairs of its family show already: about three ranks."""

SPEED_BONUS = 0.01
"""What a pair at its bound gains over one far from it: less than one rank, so that speed decides between equals."""

SHARED = 5
"""Shared words or features that an explained hit names."""

_POOL = 40


def search(query: Query, index: Index | None = None) -> SearchResult:
    """Find the pairs nearest to a forward.

    With no index given, the shipped one is loaded. When nothing is similar enough, no hit is chosen and the notice says
    so. Raises InputError for a source that is not Python or an option out of range, IndexProblem for an
    index that cannot be used.
    """
    if min(query.k, query.room or 0) < 0 or not 0.0 <= (query.min_sim or 0.0) <= 1.0:
        told = "top k must not be negative, nor room, and min-sim must lie in [0, 1]"
        raise InputError(told, remedy="correct the option")
    index = load_index() if index is None else index
    description = describe(query.source, query.path)
    notices: list[str] = []
    rankings = rank(description, index, notices, query.vector)
    judge = rankings.judge
    min_sim = default_min_sim(index)[judge] if query.min_sim is None else query.min_sim
    least = _least(rankings, index)
    hits = _choose(query, index, rankings, least, notices)
    if query.k and not any(hit.chosen for hit in hits):
        notices.append(f"no pair is similar enough: {judge.value} similarity of at least {min_sim:.2f} is asked")
    paths = [entry.path.lower() for entry in index.entries]
    unmatched = tuple(term for term in query.terms if not any(term.lower() in path for path in paths))
    if query.explain:
        hits = [dataclasses.replace(hit, shared=_shared(hit, description, index, rankings)) for hit in hits]
    return SearchResult(
        tuple(hits),
        judge,
        min_sim,
        weights={signal: ranking.weight for signal, ranking in rankings.by_signal.items()},
        known=known_words(description, index),
        unmatched_excludes=unmatched,
        notice="\n".join(notices),
    )


def embedded_text(query: Query, index: Index) -> str:
    """What a search for this query embeds; empty when it embeds nothing. Raises InputError as `search` does."""
    description = describe(query.source, query.path)
    if index.vectors is None or len(known_words(description, index)) < FEW_KNOWN_WORDS:
        return ""
    return description.descriptor


def _shared(hit: Hit, description: Description, index: Index, rankings: Rankings) -> tuple[str, ...]:
    """Words that a hit and the query share, or what their kernels share where names say nothing."""
    row = next(row for row, entry in enumerate(index.entries) if Path(entry.path) == hit.pair.path)
    if rankings.named:
        return index.lexical.strongest(description.terms, row, SHARED)
    return index.structure.strongest(description.flow, row, SHARED)


def default_min_sim(index: Index, defaults: Mapping[Signal, float] = MIN_SIM) -> Mapping[Signal, float]:
    """The thresholds for an index: for another embedding model than the bundled one, its own cosines tell by the same
    rule what is similar."""
    if index.vectors is None or index.embedding.bundled or index.unrelated_cosine is None:
        return defaults
    return {**defaults, Signal.DENSE: index.unrelated_cosine}


def _least(rankings: Rankings, index: Index) -> Mapping[Signal, float]:
    """The thresholds of which a pair reaches one. Without names, what words say is not asked."""
    signals = rankings.by_signal if rankings.named else (Signal.STRUCTURE,)
    least = default_min_sim(index)
    return {signal: least[signal] for signal in signals}


def _choose(
    query: Query, index: Index, rankings: Rankings, least: Mapping[Signal, float], notices: list[str]
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
    fused = rankings.fused()
    order = [int(row) for row in np.argsort(-_worth(fused, index), kind="stable")]
    hits: list[Hit] = []
    chosen: list[RetrievedPair] = []
    while order and (len(hits) < SHOWN or len(chosen) < query.k):
        row = _next(order, fused, index, chosen)
        order.remove(row)
        entry = index.entries[row]
        pair = None if entry.path in unusable else index.read(row)
        if pair is None:
            continue
        scores = rankings.scores(row, float(fused[row]))
        asked = {signal: bound for signal, bound in least.items() if scores.of(signal) is not None}
        if query.min_sim is not None:
            asked = {rankings.judge_of(row): query.min_sim}
        excluded, detail = _exclusion(query, entry, pair, scores, asked, chosen)
        if excluded is None:
            chosen.append(pair)
        if excluded is None or len(hits) < SHOWN:
            hits.append(Hit(pair, scores, excluded, detail))
    return hits


def _worth(fused: npt.NDArray[np.float64], index: Index) -> npt.NDArray[np.float64]:
    """Fused scores with what measured speed adds: [n]."""
    return fused * (1.0 + SPEED_BONUS * index.shares_of_bound)


def _next(order: Sequence[int], fused: npt.NDArray[np.float64], index: Index, chosen: Sequence[RetrievedPair]) -> int:
    """The row that comes next: the best one, unless all it shows is shown by chosen pairs of its family."""
    shown: dict[str, set[str]] = {}
    for pair in chosen:
        shown.setdefault(pair.family, set()).update(pair.techniques)

    worth = _worth(fused, index)

    def score(row: int) -> float:
        entry = index.entries[row]
        again = entry.family in shown and shown[entry.family].issuperset(entry.techniques)
        return float(worth[row]) * (SAME_SCHEDULE if again else 1.0)

    return max(order[:_POOL], key=score)  # the first of equals


def _exclusion(
    query: Query,
    entry: Entry,
    pair: RetrievedPair,
    scores: Scores,
    least: Mapping[Signal, float],
    chosen: Sequence[RetrievedPair],
) -> tuple[Exclusion | None, str]:
    for term in query.terms:
        if term.lower() in entry.path.lower():
            return Exclusion.TERM, term
    if not (pair.may_be_shown or query.unlicensed):
        return Exclusion.UNLICENSED, licence_words(pair.licence)
    if all((scores.of(signal) or 0.0) < bound for signal, bound in least.items()):
        told = (f"{signal.value} {scores.of(signal) or 0.0:.2f} < {bound:.2f}" for signal, bound in least.items())
        return Exclusion.DISSIMILAR, ", ".join(told)
    for other in chosen:
        if overlap(backward_grams(pair.backward), backward_grams(other.backward)) >= NEAR_IDENTICAL:
            return Exclusion.NEAR_IDENTICAL, other.slug
    if len(chosen) >= query.k:
        return Exclusion.BEYOND_K, f"k = {query.k}"
    left = None if query.room is None else query.room - sum(other.size for other in chosen)
    if left is not None and pair.size > left:
        return Exclusion.NO_ROOM, f"{pair.size} characters, {max(left, 0)} left"
    return None, ""


@functools.lru_cache(maxsize=256)
def backward_grams(backward: str) -> Mapping[str, int]:
    """Runs of three operations in all functions of a backward section."""
    functions = [node for node in ast.parse(backward).body if isinstance(node, ast.FunctionDef)]
    return count_grams(body_operations(functions))
