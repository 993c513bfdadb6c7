"""Retrieval for a run: pairs like the forward, and pairs that show how one gradient is to be computed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kernel_agent.agent.events import PairsRetrieved, RetrievedPair, TechniqueHit
from kernel_agent.agent.plan import Plan, Reduction, Wanted
from kernel_agent.agent.recorded import pairs_as_recorded
from kernel_agent.config import RunConfig
from kernel_agent.models.tokens import estimate_tokens
from kernel_agent.pairs.spec import KernelSpec

if TYPE_CHECKING:
    import rag
    from kernel_agent.agent.queryvectors import VectorOf

HITS = 2
"""Pairs that a search by technique adds at most."""

HIT_TOKENS = 3000
"""Room for them together, in estimated tokens; only their backwards are shown."""

SHOWN_BY = {
    Reduction.PARTIALS: "two-stage-partials",
    Reduction.ATOMICS: "atomics",
    Reduction.LOOP_SWAP: "loop-swap",
    Reduction.SCAN: "reverse-scan",
}
"""The technique of pairs in which a reduction can be seen; a plain store needs no example."""


def retrieve(spec: KernelSpec, config: RunConfig, vector_of: VectorOf | None = None) -> PairsRetrieved:
    """Search for similar pairs as the configuration says. Without `vector_of` the search embeds for itself.

    A replay is given the pairs of the recorded run: the collection may have changed since, and replies name them.
    """
    if not config.rag:
        return PairsRetrieved(pairs=(), notice="retrieval is switched off (--no-rag)")
    recorded = None if config.replay is None else pairs_as_recorded(config.replay)
    if recorded is not None:
        return recorded.model_copy(update={"notice": "the pairs are those of the recorded run"})
    import rag

    started = time.monotonic()
    result = rag.search(query_of(spec, config, vector_of), rag.open_index(config.rag_index))
    return retrieved(result, time.monotonic() - started)


def retrieved(result: rag.SearchResult, seconds: float) -> PairsRetrieved:
    """A search result as an event. The text of a pair is kept only when it is shown."""
    pairs = tuple(_event(hit.pair, hit.scores, chosen=hit.chosen, reason=hit.reason) for hit in result.hits)
    return PairsRetrieved(
        pairs=pairs, unmatched_excludes=result.unmatched_excludes, notice=result.notice, seconds=seconds
    )


def wanted_by(plan: Plan) -> tuple[Wanted, ...]:
    """What to search for before code is written: the reduction of each gradient first, then its techniques."""
    return tuple(
        Wanted(grad=one.grad, techniques=tuple(dict.fromkeys((*_shown_by(one.reduction), *one.techniques))))
        for one in plan.gradients
    )


def _shown_by(reduction: Reduction) -> tuple[str, ...]:
    return (SHOWN_BY[reduction],) if reduction in SHOWN_BY else ()


def retrieve_techniques(
    spec: KernelSpec,
    config: RunConfig,
    wanted: tuple[Wanted, ...],
    shown: tuple[str, ...],
    vector_of: VectorOf | None = None,
) -> tuple[TechniqueHit, ...]:
    """Find pairs by how they compute the wanted gradients.

    `shown`: slugs of pairs the model has seen, best first. They are not given again; what they show is searched for
    once more only where a gradient is red. A gradient for which nothing was planned wants what the best shown pair
    does. Raises what `rag.search` raises.
    """
    if not config.rag or not wanted:
        return ()
    import rag

    index = rag.open_index(config.rag_index)
    instead = next((e.techniques for slug in shown for e in index.entries if e.slug == slug), ())
    query = query_of(spec, config, vector_of)
    matches: list[rag.TechniqueMatch] = []
    room = HIT_TOKENS
    for red in (True, False):
        found = rag.search_techniques(
            [rag.Wanted(one.grad, one.techniques or instead) for one in wanted if one.red is red],
            query,
            shown=(*shown, *(match.pair.slug for match in matches)),
            again=red,
            n=HITS - len(matches),
            room=room,
            size=_tokens,
            index=index,
        )
        matches += found
        room -= sum(_tokens(match.pair) for match in found)
    return tuple(
        TechniqueHit(
            grad=match.grad,
            technique=match.technique,
            pair=_event(match.pair, match.scores, chosen=True, reason=f"{match.technique} for {match.grad}"),
        )
        for match in matches
    )


def query_of(spec: KernelSpec, config: RunConfig, vector_of: VectorOf | None = None) -> rag.Query:
    """What is searched for."""
    from rag import Query

    return Query(
        source=spec.facts.source,
        path=spec.facts.path,
        k=config.topk,
        min_sim=config.min_sim,
        unlicensed=config.rag_unlicensed,
        exclude=config.rag_exclude,
        vector=None if vector_of is None else vector_of(spec, config),
    )


def _event(pair: rag.RetrievedPair, scores: rag.Scores, *, chosen: bool, reason: str) -> RetrievedPair:
    return RetrievedPair(
        slug=pair.slug,
        family=pair.family,
        path=pair.path.as_posix(),
        score=scores.fused,
        similarity=scores.similarity,
        chosen=chosen,
        reason=reason,
        forward=pair.forward if chosen else "",
        backward=pair.backward if chosen else "",
        techniques=pair.techniques,
        speed=pair.speed,
        standing=pair.standing,
        verified=pair.verified,
    )


def _tokens(pair: rag.RetrievedPair) -> int:
    return estimate_tokens(pair.backward)
