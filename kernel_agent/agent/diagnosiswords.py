"""A diagnosis in lines, the same for model and trace: what, where, and the matrix of cases and gradients."""

from __future__ import annotations

from collections.abc import Sequence

from kernel_agent.agent.factwords import source_text
from kernel_agent.agent.skeleton import gradient_name
from kernel_agent.gate.diagnosis.records import Diagnosis, MatrixRow
from kernel_agent.gate.verdict import Verdict

_IN_MATRIX = ("red: ", "green at this shape: ", "right in every case at this shape: ")
_SEPARATORS = (" cotangent=", " needs=")


def what_lines(diagnosis: Diagnosis | None, forward_lines: Sequence[str] = (), *, said: str = "") -> tuple[str, ...]:
    """One line per explained gradient, with the line of the user's forward that a term belongs to.

    What `said`, the message of the verdict, has already is left out.
    """
    if diagnosis is None:
        return ()
    lines = []
    for found in diagnosis.what:
        if found.statement in said:
            continue
        text = source_text(tuple(forward_lines), found.line)
        at = f" (of the forward's `{text}`)" if text and text not in found.statement else ""
        lines.append(f"{gradient_name(found.grad)}: {found.statement}{at}")
    return tuple(lines)


def where_lines(diagnosis: Diagnosis | None) -> tuple[str, ...]:
    """One line per gradient that is wrong somewhere, and what the pattern of the cases says."""
    if diagnosis is None:
        return ()
    places = tuple(
        f"{gradient_name(region.grad)}: {region.statement}"
        + (f"; {region.wrong_tiles} of {region.tiles} tiles" if region.tiles > 1 else "")
        for region in diagnosis.where
    )
    return (*places, *diagnosis.readings)


def matrix_lines(verdict: Verdict) -> tuple[str, ...]:
    """The case × gradient matrix, cases with one pattern in one line; patterns that break a required case first."""
    if verdict.diagnosis is None:
        return ()
    optional = {case.case for case in verdict.cases if not case.required}
    patterns: dict[tuple[tuple[str, ...], tuple[str, ...]], list[MatrixRow]] = {}
    for row in verdict.diagnosis.matrix:
        patterns.setdefault((row.passed, row.failed), []).append(row)

    def urgency(item: tuple[tuple[tuple[str, ...], tuple[str, ...]], list[MatrixRow]]) -> tuple[bool, bool]:
        (_, failed), rows = item
        return not failed, all(row.case in optional for row in rows)

    lines = []
    for (passed, failed), rows in sorted(patterns.items(), key=urgency):
        order = [*failed, *passed]
        marks = "  ".join(f"{gradient_name(name)} {'WRONG' if name in failed else 'right'}" for name in order)
        lines.append(f"{marks}   {_together([row.case for row in rows])}")
    return tuple(lines)


def other_details(verdict: Verdict) -> str:
    """The details without what the matrix says already."""
    if verdict.diagnosis is None or not verdict.diagnosis.matrix:
        return verdict.details
    kept = [line for line in verdict.details.split("\n") if not line.startswith(_IN_MATRIX)]
    return "\n".join(kept).strip("\n")


def _together(cases: Sequence[str]) -> str:
    """`N=64 seed=0: cotangent=random, strided; needs=(True, False)`: what cases share is said once."""
    groups: dict[str, dict[str, list[str]]] = {}
    for case in cases:
        separator = next((part for part in _SEPARATORS if part in case), "")
        place, _, kind = case.partition(separator) if separator else (case, "", "")
        groups.setdefault(place, {}).setdefault(separator.strip(), []).append(kind)
    parts = []
    for place, kinds in groups.items():
        said = "; ".join(f"{name}{', '.join(values)}" for name, values in kinds.items() if name)
        parts.append(f"{place}: {said}" if said else place)
    return " | ".join(parts)
