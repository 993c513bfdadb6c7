"""Which gradients of a candidate are right, and which earlier candidate has those that it lacks."""

from __future__ import annotations

from dataclasses import dataclass

from kernel_agent.agent.state import Round, RunState, Work
from kernel_agent.gate.verdict import STAGE_OF, Stage, Verdict


def right_gradients(verdict: Verdict) -> frozenset[str]:
    """Gradients that were compared and are right in every case.

    Empty unless the candidate came as far as its values: a race or a crash cannot be laid to one gradient. Empty, too,
    where a red verdict finds no gradient wrong.
    """
    if STAGE_OF[verdict.status] < Stage.VALUES:
        return frozenset()
    scores = [score for case in verdict.cases for score in case.grads]
    wrong = {score.grad for score in scores if not score.passed}
    return frozenset(score.grad for score in scores) - wrong if wrong or verdict.green else frozenset()


def red_gradients(verdict: Verdict, grads: tuple[str, ...]) -> tuple[str, ...]:
    """The gradients that a red verdict finds wrong, in order; empty where it cannot be laid to single ones."""
    right = right_gradients(verdict)
    return tuple(name for name in grads if name not in right) if right or verdict.grad else ()


@dataclass(frozen=True)
class Partners:
    """Two candidates that have all gradients right between them."""

    first: str
    """Digest of the earlier one."""
    first_grads: frozenset[str]
    """What is taken from it."""
    second: str
    second_grads: frozenset[str]


def partners(state: RunState, asked: Round, grads: tuple[str, ...]) -> Partners | None:
    """The earlier candidate that completes the red one of this ask, the best such; None when there is none.

    A reply to an ask with locked gradients may leave those out: then it is completed by the candidate it was shown.
    """
    if asked.candidate is None or asked.verdict is None or asked.verdict.green or asked.same_as is not None:
        return None
    wanted = frozenset(grads)
    locked = frozenset(asked.locked)
    if locked and asked.base is not None and STAGE_OF[asked.verdict.status] is Stage.FORM:
        return Partners(asked.base, locked, asked.candidate, wanted - locked)
    right = right_gradients(asked.verdict)
    for work in _earlier(state, asked):
        theirs = right_gradients(work.verdict)
        if right and theirs and right | theirs == wanted and not work.verdict.green:
            return Partners(work.digest, theirs, asked.candidate, wanted - theirs)
    return None


def _earlier(state: RunState, asked: Round) -> list[Work]:
    """Judged candidates of asks before this one, the best first."""
    works = [work for known in state.rounds[: asked.number - 1] for work in known.works]
    return sorted(works, key=lambda work: work.verdict.rank, reverse=True)
