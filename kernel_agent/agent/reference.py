"""Phase 1 and the search for pairs: what is known of the forward before anybody is asked."""

from __future__ import annotations

from pathlib import Path

from kernel_agent.agent import events as ev
from kernel_agent.agent.desk import Desk
from kernel_agent.agent.gateproof import try_gradients
from kernel_agent.agent.phases import REFERENCE
from kernel_agent.errors import KernelAgentError
from kernel_agent.pairs.spec import KernelSpec
from kernel_agent.pairs.userfile import read_file


class TruthDoubted(KernelAgentError):
    """Exact gradients and central differences disagree, so nothing could be proven."""


def reference(desk: Desk) -> None:
    """Describe the forward, cross-check its exact gradients, try the gate on wrong ones, and read off its kernels."""
    if desk.state.spec is None:
        facts = read_file(desk.folder.source)
        named = facts.model_copy(update={"path": desk.folder.source.with_stem(desk.started.stem)})
        desk.record(described(desk.tools.describe(named)))
    if not desk.begin(REFERENCE):
        return
    if desk.tools.prepare is not None:
        desk.tools.prepare(desk.spec)
    if desk.state.truth is None:
        desk.record(desk.tools.cross_check(desk.spec))
    if desk.state.truth is not None and not desk.state.truth.passed:
        raise TruthDoubted(
            desk.state.truth.line,
            remedy="the forward may jump where it was checked; a `surrogate` can say what is meant",
        )
    try_gradients(desk)
    if desk.state.facts is None and desk.tools.analyse is not None:
        desk.record(ev.ForwardAnalysed(facts=desk.tools.analyse(desk.spec)))
    desk.end(REFERENCE, f"exact gradients of {', '.join(desk.spec.grads)} are known")


def retrieve(desk: Desk) -> None:
    """Find similar pairs."""
    if desk.state.retrieval is None:
        desk.record(desk.tools.retrieve(desk.spec))


def described(spec: KernelSpec) -> ev.SpecDescribed:
    """The event of a described spec, without the folder that its file lies in."""
    facts = spec.facts.model_copy(update={"path": Path(spec.facts.path.name)})
    return ev.SpecDescribed(spec=spec.model_copy(update={"facts": facts}))
