"""Search by technique: for each gradient of a plan, a proven pair whose backward is organised as the plan wants.

Resemblance of forwards finds what computes alike; a schedule may be shown well by a pair that computes something else,
so here one signal is enough: the pair says similar things (dense), shares words and operations (lexical), or its
kernels are built alike (structure). A pair that reaches no threshold is not given: none is better than a poor one.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rag.describe import describe
from rag.index import Entry, Index
from rag.query import Query, RetrievedPair, Scores, Signal
from rag.ranking import rank
from rag.retrieval import NEAR_IDENTICAL, backward_grams, default_min_sim
from rag.storage import load_index
from rag.structure import overlap

GENERIC_SHARE = 0.4
"""A technique that a larger share of the pairs has singles out no schedule, and is not searched for."""

LEAST_LIKE: Mapping[Signal, float] = {Signal.DENSE: 0.52, Signal.LEXICAL: 0.15, Signal.STRUCTURE: 0.21}
"""A pair that is shown for a technique reaches one of these. By words it has to be nearer than a pair that is shown for
its forward: a few shared words brought a table look-up to the sums of a norm."""

FEW_PAIRS = 10
"""With fewer pairs that have it, a technique is never generic."""

_PARAMETERS = "weight bias w b gamma beta alpha scale shift u w1 w2 b1 b2 wq wk wv wo emb embedding table sink"
PARAMETERS = frozenset(_PARAMETERS.split())
"""Names of inputs that many rows share, as authors call them: their gradients are sums over those rows."""


@dataclass(frozen=True)
class Wanted:
    """What one gradient is to be computed with."""

    grad: str
    """Name of the input whose gradient it is."""
    techniques: tuple[str, ...]
    """Tags of the closed list, most wanted first."""


@dataclass(frozen=True)
class TechniqueMatch:
    """A pair that shows a wanted technique."""

    grad: str
    technique: str
    pair: RetrievedPair
    scores: Scores
    """How its forward compares with the query."""


@dataclass
class _Shelf:
    """What may still be taken, and what was. Pairs are read only when they are looked at."""

    index: Index
    usable: list[int]
    """Rows, nearest first."""
    shown: list[RetrievedPair]
    room: int
    unlicensed: bool
    """Harvested pairs without a licence may be given."""

    def take(
        self, wanted: Wanted, technique: str, size: Callable[[RetrievedPair], int]
    ) -> tuple[int, RetrievedPair] | None:
        entries = self.index.entries
        having = [row for row in self.usable if technique in entries[row].techniques]
        for row in sorted(having, key=lambda row: _distance(wanted.grad, entries[row].grads)):  # stable: nearest first
            pair = None if any(entries[row].slug == other.slug for other in self.shown) else self.index.read(row)
            if pair is None or size(pair) > self.room or not (pair.may_be_shown or self.unlicensed) or self._twin(pair):
                continue
            self.room -= size(pair)
            self.shown.append(pair)
            return row, pair
        return None

    def _twin(self, pair: RetrievedPair) -> bool:
        grams = backward_grams(pair.backward)
        return any(overlap(grams, backward_grams(other.backward)) >= NEAR_IDENTICAL for other in self.shown)


def search_techniques(
    wanted: Sequence[Wanted],
    query: Query,
    *,
    shown: Collection[str] = (),
    again: bool = False,
    n: int = 2,
    room: int = 24_000,
    size: Callable[[RetrievedPair], int] = operator.attrgetter("size"),
    index: Index | None = None,
) -> tuple[TechniqueMatch, ...]:
    """Find pairs for the techniques that gradients want: at most `n` whole ones, together no larger than `room`.

    Gradients take turns, each with its most wanted technique first. Of the pairs that have a technique, those with a
    gradient of the same name come first, then those with one of the same kind (of a shared parameter, of data), then
    the nearest forwards. A technique that a pair of `shown` (slugs) has already is passed over, unless `again`; a
    shown pair itself, or one with a near-identical backward, is never given, nor is one whose forward is like the
    query's in no respect. `query.exclude` holds here, too.
    Raises what `search` raises.
    """
    index = load_index() if index is None else index
    description = describe(query.source, query.path)
    rankings = rank(description, index, [], query.vector)
    fused = rankings.fused()
    judging = rankings.by_signal.items()
    least = default_min_sim(index, LEAST_LIKE)
    relevant = np.any([ranking.cosines >= least[signal] for signal, ranking in judging], axis=0)
    allowed = [row for row in np.argsort(-fused, kind="stable") if relevant[row]]
    entries = index.entries
    given = (index.read(row) for row, entry in enumerate(entries) if entry.slug in shown)
    shelf = _Shelf(
        index=index,
        usable=[int(row) for row in allowed if not _excluded(query, entries[row].path)],
        shown=[pair for pair in given if pair is not None],
        room=room,
        unlicensed=query.unlicensed,
    )
    generic = _generic(entries)
    queues = [(one, [tag for tag in dict.fromkeys(one.techniques) if tag not in generic]) for one in wanted]
    known = set() if again else {tag for pair in shelf.shown for tag in pair.techniques}
    found: list[TechniqueMatch] = []
    while any(queue for _, queue in queues):
        for one, queue in queues:
            taken = None
            while queue and taken is None and len(found) < n:
                technique = queue.pop(0)
                taken = None if technique in known else shelf.take(one, technique, size)
            if taken is not None:
                row, pair = taken
                scores = rankings.scores(row, float(fused[row]))
                found.append(TechniqueMatch(one.grad, technique, pair, scores))
                known.update(pair.techniques)
        if len(found) >= n:
            break
    return tuple(found)


def _excluded(query: Query, path: str) -> bool:
    return any(term.lower() in path.lower() for term in query.terms)


def _generic(entries: Sequence[Entry]) -> set[str]:
    counts = Counter(tag for entry in entries for tag in set(entry.techniques))
    return {tag for tag, count in counts.items() if count >= FEW_PAIRS and count > GENERIC_SHARE * len(entries)}


def _distance(grad: str, grads: Sequence[str]) -> int:
    """0 for a pair with a gradient of this name, 1 for one of this kind, 2 else."""
    if grad in grads:
        return 0
    kinds = {name.lower() in PARAMETERS for name in grads}
    return 1 if (grad.lower() in PARAMETERS) in kinds else 2
