"""A round: what becomes of one ask, from the text of its reply to a verdict, and whether its candidate is kept."""

from __future__ import annotations

from kernel_agent.agent import events as ev
from kernel_agent.agent.desk import Desk
from kernel_agent.agent.edits import EditProblem
from kernel_agent.agent.events import PromptName
from kernel_agent.agent.locks import partners
from kernel_agent.agent.planning import read_answer
from kernel_agent.agent.replies import receive
from kernel_agent.agent.reply import extract
from kernel_agent.agent.splice import Piece, splice
from kernel_agent.agent.standing import compare
from kernel_agent.agent.state import Round
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
            fingerprint=_fingerprint(desk, digest),
        )
    )


def _fingerprint(desk: Desk, digest: str) -> str | None:
    """Of a candidate that can be assembled; what cannot is refused by the gate, which says why."""
    if desk.tools.fingerprint is None:
        return None
    try:
        return desk.tools.fingerprint(desk.spec, desk.file(digest))
    except InputError:
        return None


def _judge(desk: Desk, asked: Round) -> None:
    if asked.candidate is None or asked.verdict is not None:
        return
    same = desk.state.judged(asked.candidate, asked.fingerprint)
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
