"""What a run begins with before anybody is asked: the backward that the compiler derives, proven, or its refusal."""

from __future__ import annotations

from kernel_agent.agent.confirm import confirmed
from kernel_agent.agent.desk import Desk
from kernel_agent.config import Backend, Draft
from kernel_agent.models.compiler import MODELS, NothingDerived


def derive_draft(desk: Desk) -> None:
    """Have the compiler read the forward, unless nothing of it is wanted. A proven backward is the first candidate.

    Raises `NothingDerived` where the compiler is all there is and can derive nothing.
    """
    config, state = desk.config, desk.state
    if desk.tools.derive is None or config.draft in (None, Draft.NONE):
        return
    if state.derived is None:
        found = desk.tools.derive(desk.spec, config.draft is Draft.COMPILER, desk.observer.on_case)
        event = found.event
        if found.candidate is not None:
            event = event.model_copy(update={"digest": desk.snapshots.put(found.candidate)})
        desk.record(event)
        confirmed(desk)  # with its real kernels, where there is a GPU, before it is timed for an ask
    derived = desk.state.derived
    if derived is not None and derived.reason and config.backend is Backend.COMPILER:
        raise NothingDerived(
            f"the compiler cannot derive this forward: {derived.reason}", remedy=f"{derived.remedy} {MODELS}".lstrip()
        )
