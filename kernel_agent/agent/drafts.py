"""First drafts: several at once, each from another anchor, all asks written before the first reply is waited for."""

from __future__ import annotations

from kernel_agent.agent import events as ev
from kernel_agent.agent import prompts
from kernel_agent.agent.asks import NextAsk, send
from kernel_agent.agent.desk import Desk
from kernel_agent.agent.events import PromptName
from kernel_agent.agent.phases import BACKWARD
from kernel_agent.agent.snapshots import render
from kernel_agent.agent.standing import measured
from kernel_agent.agent.state import Work
from kernel_agent.agent.tools import NotTimed
from kernel_agent.bench.records import Measurement
from kernel_agent.config import Draft

DERIVED = "derived"
"""Stands for the anchor of the draft that is to beat the derived backward."""


def drafts_begun(desk: Desk) -> bool:
    """Whether it was decided what drafts to ask for. Runs of earlier versions asked for one without saying so."""
    return desk.state.drafts is not None or any(r.prompt is PromptName.DRAFT for r in desk.state.rounds)


def plan_drafts(desk: Desk) -> bool:
    """Decide how many drafts the budget allows, and record it. False, with the reason recorded, when it allows none."""
    anchors = anchors_of(desk)
    wanted = desk.config.candidates
    few = "" if len(anchors) == wanted else f"there are {len(anchors)} anchors for the {wanted} drafts asked for"
    fitting = desk.budget.fitting(desk.state, [_draft(desk, anchor).estimated_input for anchor in anchors])
    if fitting.count == 0:
        desk.record(ev.BudgetExhausted(line=fitting.refusal))
        return False
    cut = "" if fitting.count == len(anchors) else f"{fitting.count} of {len(anchors)} drafts fit: {fitting.refusal}"
    desk.record(ev.DraftsPlanned(anchors=anchors[: fitting.count], line=cut or few))
    return True


def send_drafts(desk: Desk) -> bool:
    """Send the drafts that were decided on and not sent yet; after a kill that is a part of them. False: none."""
    planned = desk.state.drafts
    sent = sum(r.prompt is PromptName.DRAFT for r in desk.state.rounds)
    missing = () if planned is None else planned.anchors[sent:]
    for anchor in missing:
        send(desk, BACKWARD, _draft(desk, anchor))
    return bool(missing)


def anchors_of(desk: Desk) -> tuple[str | None, ...]:
    """What the drafts are written after: the plan's choice, then the other pairs by likeness, then none of them.

    A single draft without a plan is left to choose. The first is to beat the derived backward where that is proven.
    """
    count = desk.config.candidates
    if desk.config.draft is Draft.NONE:
        return (None,)
    if desk.state.green:
        return tuple(dict.fromkeys((DERIVED, *(pair.slug for pair in desk.pairs), None)))[:count]
    plan = None if desk.state.plan is None else desk.state.plan.plan
    if plan is None and count == 1:
        return (None,)
    chosen = () if plan is None else (plan.anchor,)
    return tuple(dict.fromkeys((*chosen, *(pair.slug for pair in desk.pairs), None)))[:count]


def _draft(desk: Desk, anchor: str | None) -> NextAsk:
    state = desk.state
    if anchor == DERIVED and state.draft is not None and state.derived is not None:
        left = desk.config.max_iters - state.asks
        code = render(desk.snapshots.get(state.draft.digest))
        prompt = prompts.beat(desk.brief, code, state.derived, _time(desk, state.draft), desk.config.min_rel_impr, left)
        return NextAsk(prompt, anchor=anchor, base=state.draft.digest)
    plan = None if state.plan is None else state.plan.plan
    prices = () if state.plan is None else state.plan.prices
    hits = tuple(hit for found in state.techniques for hit in found.hits) if state.techniques else None
    several = desk.config.candidates > 1 or desk.config.draft is Draft.NONE
    left = desk.config.max_iters - state.asks
    prompt = prompts.draft(desk.brief, plan, prices, hits, anchor, several=several, remaining=left)
    return NextAsk(prompt, anchor=anchor)


def _time(desk: Desk, work: Work) -> Measurement | None:
    if desk.tools.measure is None:
        return None
    try:
        return measured(desk, work.digest)
    except NotTimed:
        return None
