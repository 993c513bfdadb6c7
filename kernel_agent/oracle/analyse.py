"""`analyse`: what a forward does with memory and how its gradients flow, asked of a truth child."""

from __future__ import annotations

import time

from kernel_agent.errors import KernelAgentError
from kernel_agent.oracle.job import run_truth
from kernel_agent.oracle.truth import Truths
from kernel_agent.pairs.forward_facts import ForwardFacts
from kernel_agent.pairs.spec import KernelSpec
from kernel_agent.sandbox import Limits, Message, Sandbox

LIMITS = Limits(wall_s=60.0)
"""Facts help a reader; nobody waits long for them."""


def analyse(truths: Truths, limits: Limits = LIMITS) -> ForwardFacts:
    """Facts of the forward of a spec; see `analyse_spec`."""
    return analyse_spec(truths.spec, truths.sandbox, limits)


def analyse_spec(spec: KernelSpec, sandbox: Sandbox, limits: Limits = LIMITS) -> ForwardFacts:
    """Facts of a forward, seen at a small entry of its SWEEP.

    Raises nothing that the forward could cause: what cannot be told is said in `notes`, and a child that ends badly
    leaves what it told before.
    """
    start = time.perf_counter()
    parts: list[ForwardFacts] = []

    def keep(message: Message) -> None:
        if "facts" in message.record:
            parts.append(ForwardFacts.model_validate(message.record["facts"]))

    problem = ""
    try:
        payload = {"spec": spec.model_dump(mode="json")}
        run_truth(sandbox, "analysis_child:analysed", spec.facts, payload, limits=limits, on_message=keep)
    except KernelAgentError as error:
        problem = error.message
    found = parts[-1] if parts else ForwardFacts(launches=())
    notes = (*found.notes, f"facts are not complete: {problem}") if problem else found.notes
    return found.model_copy(update={"notes": notes, "seconds": time.perf_counter() - start})
