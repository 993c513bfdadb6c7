"""The gate: the one judge of every backward, whoever wrote it."""

from kernel_agent.gate.check import check
from kernel_agent.gate.options import GateOptions
from kernel_agent.gate.verdict import CaseResult, ForwardChange, GradientScore, Status, Verdict

__all__ = ["CaseResult", "ForwardChange", "GateOptions", "GradientScore", "Status", "Verdict", "check"]
