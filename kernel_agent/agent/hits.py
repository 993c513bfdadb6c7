"""Pairs found by technique for single gradients, as a request shows them: named when the opening has them, else whole.

The opening is cached, a request is not: what is shown whole in a request is limited by the request's share of the
conversation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kernel_agent.agent.brief import Brief
from kernel_agent.agent.events import RetrievedPair, TechniqueHit
from kernel_agent.agent.skeleton import gradient_name
from kernel_agent.models.tokens import estimate_tokens
from kernel_agent.pairs.techniques import TECHNIQUES

_FRAME = 80
"""Tokens of the words around a pair."""


@dataclass(frozen=True)
class FreshPair:
    """A pair that the opening does not show."""

    pair: RetrievedPair
    why: str
    """`dweight (two-stage-partials)`."""
    with_forward: bool
    """False: its backward alone is shown."""


@dataclass(frozen=True)
class ShownHits:
    """What a request says of the pairs found by technique."""

    known: tuple[str, ...] = ()
    """Lines on pairs that the opening shows."""
    fresh: tuple[FreshPair, ...] = ()
    none: bool = False
    """There was a search, and it found no pair that is near enough."""


def shown_hits(brief: Brief, hits: Sequence[TechniqueHit] | None, room: int) -> ShownHits:
    """What to show of `hits` in `room` estimated tokens: pairs whole while they fit, else without their forward.

    None: nothing was searched for. An example is never cut in the middle. What does not fit is left out.
    """
    if not hits:
        return ShownHits(none=hits is not None)
    opening = {pair.slug for pair in brief.pairs}
    known: list[str] = []
    wanted: dict[str, list[TechniqueHit]] = {}
    for hit in hits:
        if hit.pair.slug in opening:
            known.append(f"{hit.pair.slug}, for {_why([hit])}")
        else:
            wanted.setdefault(hit.pair.slug, []).append(hit)
    fresh: list[FreshPair] = []
    for group in wanted.values():
        pair = group[0].pair
        back, front = estimate_tokens(pair.backward), estimate_tokens(pair.forward)
        if back + front + _FRAME <= room:
            fresh.append(FreshPair(pair, _why(group), with_forward=True))
            room -= back + front + _FRAME
        elif back + _FRAME <= room:
            fresh.append(FreshPair(pair, _why(group), with_forward=False))
            room -= back + _FRAME
    return ShownHits(tuple(dict.fromkeys(known)), tuple(fresh))


def _why(hits: Sequence[TechniqueHit]) -> str:
    """`dweight, dbias (two-stage-partials: programs store partial sums, a second step adds them)`."""
    grads = ", ".join(dict.fromkeys(gradient_name(hit.grad) for hit in hits))
    tags = dict.fromkeys(hit.technique for hit in hits)
    return f"{grads} ({'; '.join(f'{tag}: {TECHNIQUES[tag]}' if tag in TECHNIQUES else tag for tag in tags)})"
