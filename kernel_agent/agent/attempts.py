"""What later asks are told of earlier ones: a line each, what was changed and what came of it."""

from __future__ import annotations

import re

from kernel_agent.agent.edits import without_edits
from kernel_agent.agent.events import PhaseName, PromptName
from kernel_agent.agent.explain import headline
from kernel_agent.agent.prompts import Progressing
from kernel_agent.agent.reply import outside_blocks
from kernel_agent.agent.state import Round, RunState

TOLD = 12
"""Earlier attempts that a prompt lists, the last ones."""
_LONGEST = 160
"""Characters of the change that are quoted."""
_CHANGE = re.compile(r"^[ *_#>`-]*Change:[ *_`]*(?P<change>.+)$", re.MULTILINE)
_SENTENCE = re.compile(r"(?<=[.!?:])\s")


def progressing(state: RunState, phase: PhaseName, max_asks: int) -> Progressing:
    """The attempts of this phase alone, the asks that are left, and whether the last attempts were given up."""
    told = [r for r in state.rounds if r.settled and r.phase is phase and r.prompt is not PromptName.PLAN]
    lines = tuple(attempt_line(r) for r in told[-TOLD:])
    return Progressing(lines, max_asks - state.asks, state.rolled_back)


def attempt_line(asked: Round) -> str:
    """`reply 3: masks the tail -> WRONG_GRADIENT, gradient w, ...`."""
    change = "" if asked.reply is None else change_of(asked.reply.text)
    return f"reply {asked.number}{': ' + change if change else ''} -> {_result(asked)}"


def change_of(reply: str) -> str:
    """What a reply says on its line `Change: ...`, else its first sentence beside the code; empty for code alone."""
    told = _CHANGE.search(reply)
    if told is not None:
        return _cut(told["change"])
    prose = without_edits(outside_blocks(reply))
    lines = [line.strip().lstrip("#*->` ").rstrip("*` ") for line in prose.splitlines()]
    said = " ".join(line for line in lines if line)
    sentence = _SENTENCE.split(said, maxsplit=1)[0].rstrip(".:") if said else ""
    return _cut(sentence)


def _cut(text: str) -> str:
    text = text.strip().rstrip(".*_`")
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3].rstrip() + "..."


def _result(asked: Round) -> str:
    if asked.edit_failed:
        return f"the edits did not apply: {asked.edit_failed}"
    if asked.spliced_verdict is not None and asked.spliced is not None:
        first = ", ".join(asked.spliced.grads[0])
        return f"with {first} of an earlier reply {headline(asked.spliced_verdict)}"
    if asked.verdict is None:
        return "not judged"
    if asked.verdict.green and asked.outcome:
        return f"GREEN; {'kept' if asked.kept else 'dropped'}: {asked.outcome}"
    return headline(asked.verdict)
