"""Reverse-mode differentiation: from a forward kernel to one that recomputes what it needs of it and goes backwards."""

from kernel_agent.compiler.reverse.adjoint import Adjoint, Tape
from kernel_agent.compiler.reverse.differentiate import differentiate

__all__ = ["Adjoint", "Tape", "differentiate"]
