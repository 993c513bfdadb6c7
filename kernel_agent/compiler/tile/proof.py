"""`proven_adjoint`: the adjoint of a function in a file, derived and compared in a child."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kernel_agent.errors import EnvironmentProblem, InputError, InternalError
from kernel_agent.oracle.records import raise_again
from kernel_agent.sandbox import Ending, Job, Limits, Sandbox

LIMITS = Limits(wall_s=120.0)


@dataclass(frozen=True)
class ProvenAdjoint:
    """An adjoint that agrees with the executor's derivative."""

    text: str
    """A module with it alone."""
    verdict: str
    """Of how many cases."""


def proven_adjoint(
    path: Path, source: str, function: str, shapes: str, wrt: Sequence[str] | None, sandbox: Sandbox
) -> ProvenAdjoint:
    """Derive the adjoint of a `@triton.jit` function in a file of this source, and prove it.

    `shapes` and `wrt` are those of `kernel_agent.grad`. Raises InputError for what is wrong in the file or cannot be
    derived, InternalError where the adjoint is not the derivative: it is not given out then.
    """
    payload = {"source": source, "stem": path.stem, "function": function, "shapes": shapes, "wrt": wrt}
    job = Job("kernel_agent.compiler.tile.child:proven", payload, limits=LIMITS, label=f"adjoint of {function}")
    report = sandbox.run(job)
    for message in report.messages:
        if "error" in message.record:
            raise_again({**message.record["error"], "path": str(path)})
    if report.ending is not Ending.FINISHED:
        said = f"{report.error.type}: {report.error.message}" if report.error else report.message
        problem = InputError if report.ending in (Ending.EXITED, Ending.SIGNALLED) else EnvironmentProblem
        raise problem(
            f"the child that derives ended: {said}", remedy="Take smaller extents, or run kernel-agent doctor."
        )
    record = report.messages[-1].record
    if not record["green"]:
        raise InternalError(
            f"the derived adjoint of {function} is not its derivative, and is not printed: {record['verdict']}",
            remedy="Please report this function; until then write the adjoint by hand, and compare it by check_tile.",
        )
    return ProvenAdjoint(record["text"], record["verdict"])
