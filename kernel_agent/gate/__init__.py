"""The gate: the one judge of every backward, whoever wrote it."""

from typing import TYPE_CHECKING, Any

from kernel_agent.gate.verdict import CaseResult, ForwardChange, GradientScore, Status, Verdict

if TYPE_CHECKING:
    from kernel_agent.gate.checking import check, foresee
    from kernel_agent.gate.options import GateOptions

__all__ = ["CaseResult", "ForwardChange", "GateOptions", "GradientScore", "Status", "Verdict", "check", "foresee"]


def __getattr__(name: str) -> Any:
    """What judges, loaded when it is wanted: verdicts are read by commands that need no torch."""
    if name not in {"GateOptions", "check", "foresee"}:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kernel_agent.gate.checking import check, foresee
    from kernel_agent.gate.options import GateOptions

    globals().update(check=check, foresee=foresee, GateOptions=GateOptions)
    return globals()[name]
