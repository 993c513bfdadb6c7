"""A verdict in words, the same for model, trace and terminal. It quotes no number of the truth."""

from __future__ import annotations

import math
from collections.abc import Iterable

from kernel_agent.gate.verdict import CaseResult, Status, Verdict

CONTEXT = 4
"""Lines shown above and below a line that a verdict points at."""


def headline(verdict: Verdict) -> str:
    """One line: status, gradient, case and how far off."""
    if verdict.green:
        return f"GREEN: {_count(len(verdict.cases), 'case')} passed, every gradient right"
    if verdict.message and not verdict.grad:
        where = f" (case {verdict.case})" if verdict.case and verdict.case not in verdict.message else ""
        return f"{verdict.status.value}: {_first_sentence(verdict.message)}{where}"
    parts = [verdict.status.value]
    if verdict.grad:
        parts.append(f"gradient {verdict.grad}")
    if verdict.case:
        parts.append(f"case {verdict.case}")
    if verdict.ratio is not None:
        parts.append(f"{ratio_words(verdict.ratio)} the allowed error")
    return ", ".join(parts)


def ratio_words(ratio: float) -> str:
    """`41.2 times`, or that the two cannot be compared."""
    if math.isinf(ratio) or math.isnan(ratio):
        return "not comparable within"
    return f"{ratio:.3g} times" if ratio < 1000 else f"{ratio:,.0f} times"


def gradients_in_words(cases: Iterable[CaseResult]) -> tuple[str, ...]:
    """One sentence per gradient: in how many of the cases it was right."""
    right: dict[str, int] = {}
    wrong: dict[str, list[str]] = {}
    for case in cases:
        for score in case.grads:
            right.setdefault(score.grad, 0)
            if score.passed:
                right[score.grad] += 1
            else:
                wrong.setdefault(score.grad, []).append(f"{case.case} ({ratio_words(score.ratio)} the allowed error)")
    sentences = []
    for grad, count in right.items():
        bad = wrong.get(grad, [])
        if not bad:
            sentences.append(
                f"{grad}: right in {'the one case' if count == 1 else f'all {count} cases'} that compared it"
            )
            continue
        more = f"; and in {_count(len(bad) - 1, 'more case')}" if len(bad) > 1 else ""
        sentences.append(f"{grad}: right in {count} of {count + len(bad)} cases; wrong in {bad[0]}{more}")
    return tuple(sentences)


def cases_in_words(verdict: Verdict) -> str:
    """How many cases ran and passed, and which failed with what."""
    if not verdict.cases:
        return f"no case was run of {verdict.cases_planned} planned" if verdict.cases_planned else "no case was run"
    passed = sum(case.status is Status.GREEN for case in verdict.cases)
    planned = max(verdict.cases_planned, len(verdict.cases))
    text = f"{passed} passed of {len(verdict.cases)} run"
    return text if planned == len(verdict.cases) else f"{text} ({planned} planned)"


def excerpt(source: str, line: int) -> str:
    """The lines around a line of a source, numbered, with a mark at the line itself; empty when it is out of range."""
    lines = source.splitlines()
    if not 1 <= line <= len(lines):
        return ""
    first, last = max(1, line - CONTEXT), min(len(lines), line + CONTEXT)
    width = len(str(last))
    shown = (
        f"{'>' if number == line else ' '} {number:>{width}}  {lines[number - 1]}" for number in range(first, last + 1)
    )
    return "\n".join(text.rstrip() for text in shown)


def _first_sentence(text: str) -> str:
    return text.split(". ")[0].rstrip(".")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
