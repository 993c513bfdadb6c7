"""What is different between the verdict of a certificate and the one that its sources get now."""

from __future__ import annotations

from pydantic import Field

from kernel_agent.certificate.issue import gradient_records
from kernel_agent.certificate.record import GradientRecord
from kernel_agent.gate.verdict import Suite, Tier, Verdict
from kernel_agent.machine import Machine
from kernel_agent.pairs.values import Values
from kernel_agent.record import Record


class GradientChange(Record):
    """One gradient in one tier, then and now."""

    grad: str
    tier: Tier
    then: GradientRecord | None = Field(description="its worst case then; None where it was not judged")
    now: GradientRecord | None = Field(description="its worst case now")


def gradient_changes(then: Verdict, now: Verdict | None) -> tuple[GradientChange, ...]:
    """Every gradient of either verdict, those of the earlier one first."""
    old = {(record.tier, record.grad): record for record in gradient_records(then)}
    new = {} if now is None else {(record.tier, record.grad): record for record in gradient_records(now)}
    return tuple(
        GradientChange(grad=grad, tier=tier, then=old.get((tier, grad)), now=new.get((tier, grad)))
        for tier, grad in {**old, **new}
    )


def machine_changes(then: Machine | None, now: Machine | None) -> tuple[str, ...]:
    """What is another device or version, in words."""
    if now is None:
        return ()
    return ("it does not say what it was made with",) if then is None else now.unlike(then)


def gate_changes(then: Suite | None, now: Suite) -> tuple[str, ...]:
    """What is asked otherwise, in words; the seed that every check draws for itself aside."""
    if then is None:
        return ("it does not say what was asked",)
    names = {
        "rule": "rule",
        "seeds": "seeds",
        "values": "distributions of inputs",
        "odd_sizes": "odd sizes at most",
        "max_elements": "elements at most",
        "max_volume": "product of dims at most",
    }
    said = [
        f"{what}: {_words(getattr(now, name))} instead of {_words(getattr(then, name))}"
        for name, what in names.items()
        if getattr(now, name) != getattr(then, name)
    ]
    if then.max_cases < now.max_cases - len(now.drawn[1:]) * len(now.values):
        said.append(f"cases at most: {now.max_cases} instead of {then.max_cases}")
    return tuple(said)


def missing_cases(then: Verdict, now: Verdict) -> tuple[str, ...]:
    """Names of cases of the earlier verdict that the later one lacks, in the tiers that it has."""
    names, tiers = {case.case for case in now.cases}, {case.tier for case in now.cases}
    return tuple(case.case for case in then.cases if case.case not in names and case.tier in tiers)


def new_cases(then: Verdict, now: Verdict) -> tuple[str, ...]:
    """Names of cases of the later verdict that the earlier one does not have."""
    names = {case.case for case in then.cases}
    return tuple(case.case for case in now.cases if case.case not in names)


def _words(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(one.value if isinstance(one, Values) else str(one) for one in value) or "none"
    return str(value)
