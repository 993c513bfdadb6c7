"""A round: what becomes of one ask, from the text of its reply to a verdict, and whether its candidate is kept."""

from __future__ import annotations

from kernel_agent.agent import events as ev
from kernel_agent.agent.desk import Desk
from kernel_agent.agent.edits import EditProblem
from kernel_agent.agent.events import PhaseName, PromptName
from kernel_agent.agent.locks import partners
from kernel_agent.agent.planning import read_answer
from kernel_agent.agent.replies import receive
from kernel_agent.agent.reply import extract
from kernel_agent.agent.splice import Piece, splice
from kernel_agent.agent.standing import compare
from kernel_agent.agent.state import Round, Work
from kernel_agent.errors import InputError


def finish_open(desk: Desk) -> None:
    """Bring all open rounds to their end: first all replies, then one candidate after the other."""
    receive(desk)
    for asked in desk.state.open:
        _finish(desk, asked.number)


def _finish(desk: Desk, number: int) -> None:
    """Take the steps of a round that its ledger lacks."""
    asked = desk.state.round(number)
    if asked.prompt is PromptName.PLAN:
        read_answer(desk, asked)
        return
    if asked.candidate is None and asked.verdict is None:
        _extract(desk, asked)
    if not desk.state.round(number).settled:
        _judge(desk, desk.state.round(number))
        _splice(desk, desk.state.round(number))
        _settle(desk, desk.state.round(number))


def _extract(desk: Desk, asked: Round) -> None:
    assert asked.reply is not None
    shown = None if asked.base is None else desk.snapshots.get(asked.base)
    try:
        found = extract(
            asked.reply.text,
            given_forward=desk.given_forward,
            freeze_forward=desk.config.freeze_forward,
            stop=asked.reply.stop,
            shown=shown,
        )
    except EditProblem as problem:
        desk.record(ev.EditFailed(number=asked.number, line=problem.message))
        return
    if found.candidate is None:
        assert found.refusal is not None
        desk.record(ev.Judged(number=asked.number, digest=None, verdict=found.refusal))
        return
    digest = desk.snapshots.put(found.candidate)
    desk.record(
        ev.CandidateExtracted(
            number=asked.number,
            digest=digest,
            has_forward=found.candidate.forward is not None,
            notes=found.notes,
            edits=found.edits,
            fingerprint=_fingerprint(desk, digest, asked.phase),
        )
    )


def _fingerprint(desk: Desk, digest: str, phase: PhaseName) -> str | None:
    """Of a candidate that can be assembled; what cannot is refused by the gate, which says why.

    Compiled code is compared where it is needed anyway: in the optimize phase, whose candidates are timed.
    """
    if desk.tools.fingerprint is None:
        return None
    try:
        return desk.tools.fingerprint(desk.spec, desk.file(digest), phase is PhaseName.OPTIMIZE)
    except InputError:
        return None


def _same(desk: Desk, asked: Round) -> Work | None:
    """An earlier candidate with the same text or the same code."""
    assert asked.candidate is not None
    best = desk.state.best
    found = desk.state.judged(asked.candidate, asked.fingerprint)
    if found is not None or best is None or asked.fingerprint is None or asked.phase is not PhaseName.OPTIMIZE:
        return found
    # The best may come from the phase before, which compares texts alone.
    return best if _fingerprint(desk, best.digest, asked.phase) == asked.fingerprint else None


def _judge(desk: Desk, asked: Round) -> None:
    if asked.candidate is None or asked.verdict is not None:
        return
    same = _same(desk, asked)
    if same is None:
        verdict = desk.tools.check(desk.spec, desk.file(asked.candidate), desk.observer.on_case)
        desk.record(ev.Judged(number=asked.number, digest=asked.candidate, verdict=verdict))
    else:
        desk.record(ev.Judged(number=asked.number, digest=asked.candidate, verdict=same.verdict, same_as=same.number))


def _splice(desk: Desk, asked: Round) -> None:
    """Complete a red candidate with the right gradients of an earlier one, and judge what comes of it."""
    if asked.spliced is None:
        joined = _join(desk, asked)
        if joined is None:
            return
        desk.record(joined)
    asked = desk.state.round(asked.number)
    if asked.spliced is not None and asked.spliced_verdict is None:
        verdict = desk.tools.check(desk.spec, desk.file(asked.spliced.digest), desk.observer.on_case)
        desk.record(ev.Judged(number=asked.number, digest=asked.spliced.digest, verdict=verdict))


def _join(desk: Desk, asked: Round) -> ev.Spliced | None:
    grads = desk.spec.grads
    found = partners(desk.state, asked, grads)
    if found is None:
        return None
    first = Piece(desk.snapshots.get(found.first), found.first_grads)
    second = Piece(desk.snapshots.get(found.second), found.second_grads)
    try:
        candidate = splice(first, second, grads=grads, cotangents=desk.brief.cotangents)
    except InputError:  # one of them is no valid Python, which its verdict says
        return None
    if candidate is None:
        return None
    digest = desk.snapshots.put(candidate)
    if desk.state.judged(digest) is not None:
        return None
    sources = tuple(tuple(name for name in grads if name in piece.grads) for piece in (first, second))
    return ev.Spliced(
        number=asked.number, digest=digest, from_digests=(found.first, found.second), grads=(sources[0], sources[1])
    )


def _settle(desk: Desk, asked: Round) -> None:
    works = asked.works
    if not works:
        desk.record(ev.SetAside(number=asked.number, digest=None, line="the reply holds no candidate"))
        return
    work = max(works, key=lambda one: one.verdict.rank)
    standing = compare(desk, work, asked)
    event = ev.SnapshotKept if standing.better else ev.SetAside
    desk.record(event(number=asked.number, digest=work.digest, line=standing.line))


def roll_back_if_stuck(desk: Desk) -> None:
    """Go back to the best candidate when the last one is proven but not better, or when patience has ended."""
    state = desk.state
    best, base = state.best, state.base
    if best is None or base is None:
        return
    dropped = base.verdict.green and base.digest != best.digest
    if dropped or state.stale >= desk.config.patience:
        desk.record(ev.RolledBack(digest=best.digest, asks_without_progress=state.stale))
