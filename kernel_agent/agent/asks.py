"""Asks: which one comes next, and sending it if the budget allows."""

from __future__ import annotations

from dataclasses import dataclass

from kernel_agent.agent import events as ev
from kernel_agent.agent import prompts
from kernel_agent.agent.attempts import progressing
from kernel_agent.agent.desk import Desk
from kernel_agent.agent.events import PhaseName, PromptName
from kernel_agent.agent.locks import red_gradients, right_gradients
from kernel_agent.agent.phases import Phase
from kernel_agent.agent.prompts import Prompt
from kernel_agent.agent.snapshots import render
from kernel_agent.agent.state import Round, Work
from kernel_agent.models.protocol import Conversation
from kernel_agent.models.tokens import estimate_tokens


@dataclass(frozen=True)
class NextAsk:
    """An ask that is not sent yet."""

    prompt: Prompt
    anchor: str | None = None
    """The pair that a draft is to be written after."""
    free: bool = False
    """It does not count as an ask."""
    base: str | None = None
    """Digest of the candidate it shows."""

    @property
    def estimated_input(self) -> int:
        """Tokens."""
        return input_tokens(self.prompt.conversation)


def input_tokens(conversation: Conversation) -> int:
    """Estimated tokens of a conversation."""
    return estimate_tokens(conversation.system) + sum(estimate_tokens(turn.text) for turn in conversation.turns)


def send_if_affordable(desk: Desk, phase: Phase, ask: NextAsk) -> bool:
    """Send an ask unless the budget refuses it; then why is recorded, and the result is False."""
    refusal = desk.budget.refusal(desk.state, ask.estimated_input, free=ask.free) or _nobody_answers(desk, phase)
    if refusal:
        desk.record(ev.BudgetExhausted(line=refusal))
        return False
    send(desk, phase, ask)
    return True


def _nobody_answers(desk: Desk, phase: Phase) -> str:
    """A recorded run that ends with a proven backward is no error: there is nothing more to be had from it."""
    limit = desk.model.limit
    if phase.name is not PhaseName.OPTIMIZE or limit is None or len(desk.state.rounds) < limit:
        return ""
    return f"{desk.model.name} holds no further reply"


def send(desk: Desk, phase: Phase, ask: NextAsk) -> None:
    """Write an ask to its file and record it. What the ask before said already is not repeated in the ledger."""
    rounds, conversation = desk.state.rounds, ask.prompt.conversation
    number = len(rounds) + 1
    if not desk.exchange.has_reply(number):
        desk.exchange.write_ask(number, conversation)
    before = rounds[-1].conversation if rounds else None
    opening = conversation.turns[0].text
    desk.record(
        ev.Asked(
            number=number,
            phase=phase.name,
            prompt=ask.prompt.name,
            system=None if before is not None and before.system == conversation.system else conversation.system,
            opening=None if before is not None and before.turns[0].text == opening else opening,
            turns=conversation.turns[1:],
            digest=ask.prompt.digest,
            estimated_input=ask.estimated_input,
            anchor=ask.anchor,
            free=ask.free,
            base=ask.base,
        )
    )


def next_ask(desk: Desk, phase: Phase) -> NextAsk:
    """What to ask after the drafts: repair or optimise the candidate in work, or ask again for what was unusable."""
    state, base = desk.state, desk.state.base
    last = _last(desk, phase)
    run = progressing(state, phase.name, desk.config.max_iters)
    if base is None:
        answer = last.reply.text if last is not None and last.reply is not None else ""
        return NextAsk(prompts.no_code(desk.brief, answer, _problem(last), None, run))
    code = render(desk.snapshots.get(base.digest))
    if last is not None and last.edit_failed and not last.free and last.reply is not None:
        prompt = prompts.edit_failed(desk.brief, code, last.reply.text, last.edit_failed, run)
        return NextAsk(prompt, free=True, base=base.digest)
    if last is not None and _held_no_code(last) and not state.rolled_back:
        prompt = prompts.no_code(desk.brief, prompts.fenced(code), _problem(last), base.verdict, run)
        return NextAsk(prompt, base=base.digest)
    if base.verdict.green:
        time = state.measured(base.digest)
        tuned = "" if state.tuned is None else state.tuned.tuned.line
        prompt = prompts.optimize(desk.brief, code, time, desk.config.min_rel_impr, run, tuned)
        return NextAsk(prompt, base=base.digest)
    return NextAsk(_repair(desk, base, code, run), base=base.digest)


def _last(desk: Desk, phase: Phase) -> Round | None:
    """The last ask of this phase: a phase knows nothing of what was asked before it."""
    last = desk.state.rounds[-1] if desk.state.rounds else None
    return last if last is not None and last.phase is phase.name else None


def _held_no_code(last: Round) -> bool:
    """True when the last reply was unusable; of several drafts, those that were usable go on."""
    return last.candidate is None and not last.edit_failed and last.prompt not in {PromptName.DRAFT, PromptName.PLAN}


def _problem(last: Round | None) -> str:
    return last.verdict.message if last is not None and last.verdict is not None else ""


def _repair(desk: Desk, base: Work, code: str, run: prompts.Progressing) -> Prompt:
    """Ask for what is wrong alone: gradients that are right are locked, and pairs are looked up for the others."""
    grads = desk.spec.grads
    right = right_gradients(base.verdict)
    locked = tuple(name for name in grads if name in right)
    lock = desk.state.lock
    if locked and (lock is None or (lock.digest, lock.grads) != (base.digest, locked)):
        desk.record(ev.Locked(grads=locked, digest=base.digest))
    red = red_gradients(base.verdict, grads)
    searched = [found for found in desk.state.techniques if set(found.grads) & set(red)]
    hits = dict.fromkeys(hit for found in searched for hit in found.hits if hit.grad in red) if searched else None
    verdict = base.verdict
    return prompts.repair(
        desk.brief, code, desk.file(base.digest), verdict, run, locked, None if hits is None else tuple(hits)
    )
