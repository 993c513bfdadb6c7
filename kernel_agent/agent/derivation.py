"""What the compiler makes of a run's forward: the adjoint that asks show, and a proven backward to begin with."""

from __future__ import annotations

import time

from kernel_agent.agent.derived import Derived
from kernel_agent.agent.tools import DerivedDraft, OnCase
from kernel_agent.compiler.derive import derive, drafts
from kernel_agent.compiler.derived import DraftCost
from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.errors import InputError
from kernel_agent.gate.options import GateOptions
from kernel_agent.oracle import TruthError, Truths
from kernel_agent.pairs.spec import KernelSpec
from kernel_agent.sandbox import Sandbox


def derivation(
    spec: KernelSpec, sandbox: Sandbox, truths: Truths | None, options: GateOptions, on_case: OnCase
) -> DerivedDraft:
    """The best derived backward that the gate accepts; without `truths`, the adjoint alone. A refusal is an answer."""
    start = time.perf_counter()
    try:
        if truths is None:
            adjoint = drafts(spec, sandbox, most=1, adjoint=True)[0][0].adjoint
            return DerivedDraft(Derived(adjoint=adjoint, seconds=time.perf_counter() - start))
        found = derive(spec, sandbox, options=options, truths=truths, on_case=on_case, adjoint=True)
    except (CannotDerive, TruthError, InputError) as error:  # the forward itself was run before: a model still may
        line = getattr(error, "line", None)
        place = f" (line {line})" if line else ""
        seconds = time.perf_counter() - start
        return DerivedDraft(Derived(reason=f"{error.message}{place}", remedy=error.remedy, seconds=seconds))
    draft = found.draft
    event = Derived(
        digest=draft.candidate.digest,
        schedules=tuple(dict.fromkeys(draft.schedules)) or (draft.schedule,),
        remarks=draft.remarks,
        refused=(*found.refused, *(_costlier(cost) for cost in found.costs if cost.microseconds and cost.why)),
        verdict=found.verdict,
        adjoint=draft.adjoint,
        seconds=time.perf_counter() - start,
    )
    return DerivedDraft(event, draft.candidate)


def _costlier(cost: DraftCost) -> str:
    """Why a pair that could be written is not the first to be tried."""
    schedules = ", ".join(dict.fromkeys(cost.schedules))
    return f"{schedules}: modelled, not measured, at {cost.microseconds:.1f} us for {cost.label} ({cost.why})"
