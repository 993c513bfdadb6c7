"""Prompts: the templates in `agent/prompts` rendered into conversations.

A conversation is the system text and the opening (the stable prefix, one and the same for all asks of a run, which
providers cache), then the candidate in work as if it were the model's last reply, then what is wanted. It does not grow
with the asks: what went before is told in one line per attempt.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined

from kernel_agent.agent.brief import Brief, listed
from kernel_agent.agent.derived import Derived
from kernel_agent.agent.diagnosiswords import matrix_lines, other_details, what_lines, where_lines
from kernel_agent.agent.events import PromptName, TechniqueHit
from kernel_agent.agent.explain import cases_in_words, excerpt, gradients_in_words, headline, ratio_words
from kernel_agent.agent.factwords import MOST_LINES, launch_lines
from kernel_agent.agent.hits import shown_hits
from kernel_agent.agent.plan import GradientPrice, Plan
from kernel_agent.agent.planform import MEANINGS, extra_form, plan_json
from kernel_agent.agent.shapewords import argument_words
from kernel_agent.agent.skeleton import gradient_name
from kernel_agent.agent.speedwords import kernel_table, shape_table
from kernel_agent.bench.records import SLOWER_ALLOWED, Measurement
from kernel_agent.gate.verdict import STAGE_OF, Stage, Verdict
from kernel_agent.models.protocol import Conversation, Role, Turn
from kernel_agent.models.tokens import estimate_tokens
from kernel_agent.pairs.techniques import TECHNIQUES

_EDITS = re.compile(r"^<{5,9} ?SEARCH.*^>{5,9} ?REPLACE *$", re.DOTALL | re.MULTILINE)

PREFIX_SHARE = 0.8
"""Least part of a conversation that pairs found by technique leave to the prefix, which is cached and they are not."""

ROOM_FOR_HITS = 2500
"""Tokens for such pairs where the opening shows none, whatever their share."""


@dataclass(frozen=True)
class Prompt:
    """A conversation ready to be sent."""

    name: PromptName
    conversation: Conversation

    @property
    def digest(self) -> str:
        """SHA-256 over the whole conversation."""
        return hashlib.sha256(self.conversation.model_dump_json().encode()).hexdigest()

    @property
    def prefix_tokens(self) -> int:
        """Estimated tokens of the system text and the opening, which every ask of a run shares."""
        return estimate_tokens(self.conversation.system) + estimate_tokens(self.conversation.turns[0].text)

    @property
    def tokens(self) -> int:
        """Estimated tokens of the whole conversation."""
        return self.prefix_tokens + sum(estimate_tokens(turn.text) for turn in self.conversation.turns[1:])


@dataclass(frozen=True)
class Progressing:
    """What every later prompt says about the run."""

    attempts: tuple[str, ...]
    """One line per judged ask that is worth telling, oldest first: what was changed, and its verdict."""
    remaining: int
    """Asks left, the one that is being made included."""
    rolled_back: bool = False
    """The candidate in work is an older one that later attempts did not improve."""


def plan(brief: Brief, remaining: int | None = None) -> Prompt:
    """Ask for a plan before any code. `remaining` asks are left, this one included; None: all of them."""
    request = _render(
        "plan.md.j2",
        brief=brief,
        extra=extra_form(),
        reductions=[(kind.value, meaning) for kind, meaning in MEANINGS.items()],
        techniques=tuple(TECHNIQUES),
        remaining=brief.max_asks if remaining is None else remaining,
    )
    return _prompt(PromptName.PLAN, brief, None, request)


def plan_refused(brief: Brief, answer: str, problem: str, remaining: int | None = None) -> Prompt:
    """Ask again for a plan; `problem` says what was wrong with `answer`."""
    request = _render(
        "plan_refused.md.j2",
        brief=brief,
        problem=problem,
        remaining=brief.max_asks if remaining is None else remaining,
    )
    return _prompt(PromptName.PLAN, brief, answer.strip() or "(no text)", request)


def draft(
    brief: Brief,
    planned: Plan | None = None,
    prices: Sequence[GradientPrice] = (),
    technique_hits: Sequence[TechniqueHit] | None = None,
    anchor: str | None = None,
    *,
    several: bool = False,
    remaining: int | None = None,
) -> Prompt:
    """Ask for the first code, with the checked plan and its prices where there is one.

    `anchor`: slug of the pair to write after. With `several` drafts, None means that this one is to follow no pair.
    `technique_hits`: what a search by technique found; None where there was none.
    """
    answer = None if planned is None else f"```json\n{plan_json(planned)}\n```"

    def request(hits: Sequence[TechniqueHit] | None, room: int) -> str:
        return _render(
            "draft.md.j2",
            plan=planned,
            prices=prices,
            hits=shown_hits(brief, hits, room),
            anchor=anchor if anchor is not None or several or planned is None else planned.anchor,
            several=several,
            remaining=brief.max_asks if remaining is None else remaining,
        )

    return _prompt(PromptName.DRAFT, brief, answer, _within(brief, answer, request, technique_hits))


def beat(
    brief: Brief, code: str, derived: Derived, measurement: Measurement | None, min_rel_impr: float, remaining: int
) -> Prompt:
    """Ask for a backward that is better than the derived `code`, which is proven."""
    request = _render(
        "beat.md.j2",
        derived=derived,
        measurement=measurement,
        shapes="" if measurement is None else shape_table(measurement.shapes),
        kernels="" if measurement is None or not measurement.kernels else kernel_table(measurement.kernels),
        min_rel_impr=min_rel_impr,
        remaining=remaining,
    )
    return _prompt(PromptName.DRAFT, brief, fenced(code), request)


def repair(
    brief: Brief,
    code: str,
    source: str,
    verdict: Verdict,
    run: Progressing,
    locked: tuple[str, ...] = (),
    technique_hits: Sequence[TechniqueHit] | None = None,
) -> Prompt:
    """Ask to repair `code`. `source` is the whole file that was judged: `verdict.line` counts its lines.

    `locked` are gradients that are right in every case. A reply need not bring them: it may return None for them, and
    the tool takes them from `code`.
    """
    diagnosis = verdict.diagnosis
    suspect = None if diagnosis is None else diagnosis.suspect
    line = suspect.line if suspect is not None else verdict.line
    matrix = matrix_lines(verdict)

    def request(hits: Sequence[TechniqueHit] | None, room: int) -> str:
        return _render(
            "repair.md.j2",
            header="exception" if STAGE_OF[verdict.status] <= Stage.LAUNCH else "correctness",
            verdict=verdict,
            cases=cases_in_words(verdict),
            gradients=() if matrix else gradients_in_words(verdict.cases),
            what=what_lines(diagnosis, brief.source_lines, said=verdict.message),
            where=where_lines(diagnosis),
            matrix=matrix,
            details=other_details(verdict),
            suspect="" if suspect is None else f"First suspect line: {suspect.statement}",
            excerpt="" if line is None else excerpt(source, line),
            locked=tuple(name for name in brief.grads if name in locked),
            open=tuple(name for name in brief.grads if name not in locked),
            hits=shown_hits(brief, hits, room),
            attempts=run.attempts,
            rolled_back=run.rolled_back,
            remaining=run.remaining,
        )

    answer = fenced(code)
    return _prompt(PromptName.REPAIR, brief, answer, _within(brief, answer, request, technique_hits))


def edit_failed(brief: Brief, code: str, edits_text: str, problem: str, run: Progressing) -> Prompt:
    """Ask for the same change again, as the edits in `edits_text` do not apply to `code`. This ask is not counted."""
    edits = _EDITS.search(edits_text)
    request = _render(
        "edit_failed.md.j2", problem=problem, edits=edits[0] if edits else edits_text, remaining=run.remaining
    )
    return _prompt(PromptName.EDIT_FAILED, brief, fenced(code), request)


def no_code(brief: Brief, answer: str, problem: str, verdict: Verdict | None, run: Progressing) -> Prompt:
    """Ask again after a reply without usable code.

    `answer` is that reply, or the fenced candidate in work with its `verdict`; `problem` says what was wrong.
    """
    request = _render("no_code.md.j2", brief=brief, problem=problem, verdict=verdict, remaining=run.remaining)
    return _prompt(PromptName.NO_CODE, brief, answer.strip() or "(no text)", request)


def optimize(
    brief: Brief, code: str, measurement: Measurement | None, min_rel_impr: float, run: Progressing, tuned: str = ""
) -> Prompt:
    """Ask to make the green `code` faster. `tuned`: what a sweep over launch parameters came to, if there was one."""
    request = _render(
        "optimize.md.j2",
        measurement=measurement,
        shapes="" if measurement is None else shape_table(measurement.shapes),
        kernels="" if measurement is None or not measurement.kernels else kernel_table(measurement.kernels),
        min_rel_impr=min_rel_impr,
        slower_allowed=SLOWER_ALLOWED,
        tuned=tuned,
        attempts=run.attempts,
        rolled_back=run.rolled_back,
        remaining=run.remaining,
    )
    return _prompt(PromptName.OPTIMIZE, brief, fenced(code), request)


def fenced(code: str) -> str:
    """Code as a reply would hold it."""
    return "```python\n" + code.strip("\n") + "\n```"


def _prompt(name: PromptName, brief: Brief, answer: str | None, request: str) -> Prompt:
    turns = [Turn(role=Role.USER, text=_opening(brief))]
    if answer is not None:
        turns.append(Turn(role=Role.ASSISTANT, text=answer))
    turns.append(Turn(role=Role.USER, text=request))
    return Prompt(name, Conversation(system=_system(), turns=tuple(turns)))


def _within(
    brief: Brief,
    answer: str | None,
    request: Callable[[Sequence[TechniqueHit] | None, int], str],
    hits: Sequence[TechniqueHit] | None,
) -> str:
    """The request with as many of the pairs found by technique as leave the prefix its share of the conversation."""
    prefix = estimate_tokens(_system()) + estimate_tokens(_opening(brief))
    rest = estimate_tokens(answer or "") + estimate_tokens(request(None, 0))
    return request(hits, max(int(prefix * (1 / PREFIX_SHARE - 1)) - rest, ROOM_FOR_HITS if not brief.pairs else 0))


def _opening(brief: Brief) -> str:
    return _render("opening.md.j2", brief=brief, most_lines=MOST_LINES)


def _system() -> str:
    return _render("system.md.j2")


def _render(template: str, **context: object) -> str:
    text = _environment().get_template(template).render(**context)
    lines = [line.rstrip() for line in text.strip("\n").split("\n")]
    kept: list[str] = []
    fence = False
    for line in lines:
        fence ^= line.startswith("```")
        if line or fence or (kept and kept[-1]):  # parts that are left out leave no second blank line
            kept.append(line)
    return "\n".join(kept) + "\n"


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
        words=argument_words,
        block=_block,
        ratio=ratio_words,
        headline=headline,
        remaining=_remaining,
        gradient=gradient_name,
        names=_names,
        proven=_proven,
        lines=launch_lines,
        meaning=lambda tag: TECHNIQUES.get(tag, ""),
    )
    return environment


def _block(index: tuple[int, ...]) -> str:
    return f"({', '.join(map(str, index))}{',' if len(index) == 1 else ''})"


def _remaining(count: int) -> str:
    return "This is the last reply." if count == 1 else f"{count} replies are left, this one included."


def _names(grads: Sequence[str]) -> str:
    return listed(tuple(gradient_name(name) for name in grads)).replace("`", "")


def _proven(grads: Sequence[str]) -> str:
    one = len(grads) == 1
    code = f"keep {'its' if one else 'their'} code unchanged, or return None for {'it' if one else 'them'}"
    return f"{_names(grads)} {'is' if one else 'are'} right in every case: {code}, and that code is put beside yours."
