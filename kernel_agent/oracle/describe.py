"""`describe`: from a file that was only read to a spec of what it does, by running it once in a child."""

from __future__ import annotations

from kernel_agent.oracle.job import LIMITS, run_truth
from kernel_agent.oracle.records import TruthError
from kernel_agent.pairs.spec import FileFacts, KernelSpec
from kernel_agent.sandbox import Limits, Sandbox


def describe(facts: FileFacts, sandbox: Sandbox, limits: Limits = LIMITS) -> KernelSpec:
    """Run `pairs.observe` in a truth child: one call of the stub at its smallest SWEEP entry, and some beside it.

    Sizes beside it are none of the user's: where they take too much memory or time, the stub is run without them.

    Raises `InputError` with path, line and remedy, exactly as the child raised it; `TruthError` for a kernel that the
    executor does not know how to run.
    """
    payload = {"facts": facts.model_dump(mode="json"), "beside": True}
    try:
        messages = run_truth(sandbox, "child:observed", facts, payload, limits=limits)
    except TruthError:
        messages = run_truth(sandbox, "child:observed", facts, {**payload, "beside": False}, limits=limits)
    return KernelSpec.model_validate(messages[-1].record["spec"])
