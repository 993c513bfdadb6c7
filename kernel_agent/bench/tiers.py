"""`joined`: the verdict over a candidate that two tiers have judged."""

from __future__ import annotations

from kernel_agent.gate.verdict import Status, Verdict


def joined(exact: Verdict, native: Verdict) -> Verdict:
    """One verdict of two: green when both are, else the native one with the cases that were right before it.

    Where no required shape can be checked on the GPU, the exact verdict stands and its notes say so.
    """
    if native.status is Status.NO_CASE:
        return exact.model_copy(update={"notes": (*exact.notes, native.message, *native.notes)})
    both = {
        "cases": (*exact.cases, *native.cases),
        "cases_planned": exact.cases_planned + native.cases_planned,
        "notes": (*exact.notes, *native.notes),
        "faults": (*exact.faults, *native.faults),
        "unordered": (*exact.unordered, *native.unordered),
        "forward": exact.forward,
        "suite": exact.suite,
        "machine": native.machine,
        "seconds": exact.seconds + native.seconds,
    }
    if native.green:
        return exact.model_copy(
            update={**both, "message": f"{exact.message}; {native.message}", "tier": f"{exact.tier} and {native.tier}"}
        )
    return native.model_copy(update=both)
