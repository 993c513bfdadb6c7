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
from kernel_agent.agent.events import PromptName
from kernel_agent.agent.explain import cases_in_words, excerpt, gradients_in_words, headline, ratio_words
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


def draft(brief: Brief) -> Prompt:
    """The first ask."""
    return _prompt(PromptName.DRAFT, brief)


def repair(brief: Brief, code: str, source: str, verdict: Verdict, run: Progressing) -> Prompt:
    """Ask to repair `code`. `source` is the whole file that was judged: `verdict.line` counts its lines."""
    request = _render(
        "repair.md.j2",
        verdict=verdict,
        cases=cases_in_words(verdict),
        gradients=gradients_in_words(verdict.cases),
        excerpt=excerpt(source, verdict.line) if verdict.line is not None else "",
        attempts=run.attempts,
        rolled_back=run.rolled_back,
        remaining=run.remaining,
    )
    return _prompt(PromptName.REPAIR, brief, fenced(code), request)


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
    if answer is not None and request is not None:
        turns += [Turn(role=Role.ASSISTANT, text=answer), Turn(role=Role.USER, text=request)]
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
