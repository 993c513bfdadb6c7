"""Reflection before code: the ask for a plan, what its answer says, its price, and pairs for its techniques."""

from __future__ import annotations

from kernel_agent.agent import events as ev
from kernel_agent.agent import prompts
from kernel_agent.agent.asks import NextAsk
from kernel_agent.agent.desk import Desk
from kernel_agent.agent.events import PromptName
from kernel_agent.agent.locks import red_gradients
from kernel_agent.agent.plan import Wanted
from kernel_agent.agent.reflection import read_plan
from kernel_agent.agent.retrieval import wanted_by
from kernel_agent.agent.state import Round

PLAN_ASKS = 2
"""Asks for a plan at most: one, and one more when its answer is not valid."""


def plan_ask(desk: Desk) -> NextAsk | None:
    """The ask for a plan, where one is wanted and at least one ask would be left for code."""
    state = desk.state
    asked = [r for r in state.rounds if r.prompt is PromptName.PLAN]
    done = len(asked) < len(state.rounds) or state.drafts is not None or len(asked) >= PLAN_ASKS
    left = desk.config.max_iters - state.asks
    if not desk.config.reflect or done or left < 2 or (state.plan is not None and state.plan.plan is not None):
        return None
    if state.plan is None:
        return NextAsk(prompts.plan(desk.brief, left))
    answer = asked[-1].reply
    return NextAsk(prompts.plan_refused(desk.brief, answer.text if answer else "", state.plan.problem, left))


def read_answer(desk: Desk, asked: Round) -> None:
    """Record what the answer to an ask for a plan says."""
    assert asked.reply is not None
    reading = read_plan(
        asked.reply.text,
        desk.spec,
        desk.pairs,
        facts=desk.state.facts,
        freeze_forward=desk.config.freeze_forward,
        stop=asked.reply.stop,
    )
    plan = reading.plan
    price = desk.tools.price
    prices = () if plan is None or price is None else price(desk.spec, plan, desk.state.facts)
    desk.record(ev.Planned(number=asked.number, plan=plan, problem=reading.problem, notes=reading.notes, prices=prices))


def look_up_techniques(desk: Desk) -> None:
    """Search pairs for the gradients that need some and were not searched for yet."""
    wanted = _wanted(desk)
    if not wanted or desk.tools.retrieve_techniques is None:
        return
    found = (hit.pair.slug for event in desk.state.techniques for hit in event.hits)
    shown = tuple(dict.fromkeys((*(pair.slug for pair in desk.pairs), *found)))
    hits = desk.tools.retrieve_techniques(desk.spec, wanted, shown)
    base = desk.state.base
    number = desk.state.rounds[-1].number if base is None else base.number
    desk.record(ev.TechniquesRetrieved(number=number, grads=tuple(one.grad for one in wanted), hits=hits))


def _wanted(desk: Desk) -> tuple[Wanted, ...]:
    """After a plan every gradient with its techniques; after a red verdict the gradients that are wrong."""
    state = desk.state
    if not state.rounds or not desk.config.rag:
        return ()
    plan = None if state.plan is None else state.plan.plan
    planned = () if plan is None else wanted_by(plan)
    if state.base is None:
        return () if state.techniques else planned
    if state.base.verdict.green:
        return ()
    # Once for each gradient: what a plan searched for does not count.
    searches = (event for event in state.techniques if state.round(event.number).prompt is not PromptName.PLAN)
    searched = {name for event in searches for name in event.grads}
    techniques = {one.grad: one.techniques for one in planned}
    red = (name for name in red_gradients(state.base.verdict, desk.spec.grads) if name not in searched)
    return tuple(Wanted(grad=name, techniques=techniques.get(name, ()), red=True) for name in red)
