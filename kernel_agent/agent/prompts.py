"""Prompts: the templates in `agent/prompts` rendered into conversations.

A conversation is the system text, the opening (the task with its pairs: the stable prefix that providers cache), then
the candidate in work as if it were the model's last reply, then what is wanted of it. It does not grow with the asks.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined

from kernel_agent.agent.brief import Brief
from kernel_agent.agent.events import PromptName, TechniqueHit
from kernel_agent.agent.explain import cases_in_words, excerpt, gradients_in_words, headline, ratio_words
from kernel_agent.agent.plan import GradientPrice, Plan
from kernel_agent.bench.records import Measurement
from kernel_agent.gate.verdict import Verdict
from kernel_agent.models.protocol import Conversation, Role, Turn
from kernel_agent.pairs.spec import ArgumentFacts, ArgumentKind


@dataclass(frozen=True)
class Prompt:
    """A conversation ready to be sent."""

    name: PromptName
    conversation: Conversation

    @property
    def digest(self) -> str:
        """SHA-256 over the whole conversation."""
        return hashlib.sha256(self.conversation.model_dump_json().encode()).hexdigest()


@dataclass(frozen=True)
class Progressing:
    """What every later prompt says about the run."""

    attempts: tuple[str, ...]
    """One line per judged ask since the last progress that is worth telling, oldest first."""
    remaining: int
    """Asks left, the one that is being made included."""
    rolled_back: bool = False
    """The candidate in work is an older one that later attempts did not improve."""


def plan(brief: Brief) -> Prompt:
    """The first ask of phase 2, when a plan is wanted before code."""
    return _prompt(PromptName.PLAN, brief, None, _render("plan.md.j2", brief=brief))


def plan_refused(brief: Brief, answer: str, problem: str) -> Prompt:
    """Ask for the plan once more; `problem` says what is wrong with `answer`."""
    return _prompt(PromptName.PLAN, brief, answer.strip() or "(no text)", _render("plan.md.j2", brief=brief) + problem)


def draft(
    brief: Brief,
    planned: Plan | None = None,
    prices: tuple[GradientPrice, ...] = (),
    technique_hits: tuple[TechniqueHit, ...] = (),
    anchor: str | None = None,
) -> Prompt:
    """Ask for the first code, after a plan if there is one. `anchor`: slug of the pair to write after."""
    request = _render("start.md.j2", plan=planned, prices=prices, technique_hits=technique_hits, anchor=anchor)
    return _prompt(PromptName.DRAFT, brief, None, request if request.strip() else None)


def repair(
    brief: Brief,
    code: str,
    source: str,
    verdict: Verdict,
    run: Progressing,
    locked: tuple[str, ...] = (),
    technique_hits: tuple[TechniqueHit, ...] = (),
) -> Prompt:
    """Ask to repair `code`. `source` is the whole file that was judged: `verdict.line` counts its lines.

    `locked`: gradients that are right in every case. A reply need not bring them: it may return None for them, and the
    tool takes them from `code`.
    """
    request = _render(
        "repair.md.j2",
        verdict=verdict,
        cases=cases_in_words(verdict),
        gradients=gradients_in_words(verdict.cases),
        excerpt=excerpt(source, verdict.line) if verdict.line is not None else "",
        attempts=run.attempts,
        rolled_back=run.rolled_back,
        remaining=run.remaining,
        locked=locked,
        technique_hits=technique_hits,
    )
    return _prompt(PromptName.REPAIR, brief, fenced(code), request)


def edit_failed(brief: Brief, code: str, edits_text: str, problem: str, run: Progressing) -> Prompt:
    """Ask for the same change once more: the edits in `edits_text` do not apply to `code`, as `problem` says."""
    request = _render("edit_failed.md.j2", edits=edits_text, problem=problem, remaining=run.remaining)
    return _prompt(PromptName.EDIT_FAILED, brief, fenced(code), request)


def no_code(brief: Brief, answer: str, problem: str, verdict: Verdict | None, run: Progressing) -> Prompt:
    """Ask again after a reply without usable code.

    `answer` is that reply, or the fenced candidate in work with its `verdict`; `problem` says what was wrong.
    """
    request = _render("no_code.md.j2", brief=brief, problem=problem, verdict=verdict, remaining=run.remaining)
    return _prompt(PromptName.NO_CODE, brief, answer.strip() or "(no text)", request)


def optimize(brief: Brief, code: str, measurement: Measurement | None, min_rel_impr: float, run: Progressing) -> Prompt:
    """Ask to make the green `code` faster."""
    request = _render(
        "optimize.md.j2",
        measurement=measurement,
        min_rel_impr=min_rel_impr,
        attempts=run.attempts,
        remaining=run.remaining,
    )
    return _prompt(PromptName.OPTIMIZE, brief, fenced(code), request)


def fenced(code: str) -> str:
    """Code as a reply would hold it."""
    return "```python\n" + code.strip("\n") + "\n```"


def _prompt(name: PromptName, brief: Brief, answer: str | None = None, request: str | None = None) -> Prompt:
    turns = [Turn(role=Role.USER, text=_render("draft.md.j2", brief=brief))]
    if answer is not None:
        turns.append(Turn(role=Role.ASSISTANT, text=answer))
    if request is not None:
        turns.append(Turn(role=Role.USER, text=request))
    return Prompt(name, Conversation(system=_render("system.md.j2"), turns=tuple(turns)))


def _render(template: str, **context: object) -> str:
    text = _environment().get_template(template).render(**context)
    return "\n".join(line.rstrip() for line in text.strip("\n").split("\n")) + "\n"


@cache
def _environment() -> Environment:
    # Prompts are text for a model, not HTML: nothing is to be escaped.
    environment = Environment(
        loader=PackageLoader("kernel_agent.agent", "prompts"),
        undefined=StrictUndefined,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(
        words=_words,
        block=_block,
        ratio=ratio_words,
        headline=headline,
        remaining=_remaining,
        microseconds=_microseconds,
    )
    return environment


def _words(facts: ArgumentFacts) -> str:
    if facts.kind is ArgumentKind.TENSOR:
        return f"tensor, {facts.dtype}, shape {_block(facts.shape)}"
    return "None" if facts.kind is ArgumentKind.NONE else f"plain value, {facts.text}"


def _block(index: tuple[int, ...]) -> str:
    return f"({', '.join(map(str, index))}{',' if len(index) == 1 else ''})"


def _remaining(count: int) -> str:
    return "This is the last reply." if count == 1 else f"{count} replies are left, this one included."


def _microseconds(value: float) -> str:
    return f"{value:.1f} us" if value < 1000 else f"{value / 1000:.2f} ms"
