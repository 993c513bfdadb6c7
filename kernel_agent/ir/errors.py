"""Failures of this room. Each names the kernel, the operation and the source line it is about."""

from __future__ import annotations

from kernel_agent.errors import KernelAgentError


class IRError(KernelAgentError):
    """A kernel could not be lowered, read or executed."""

    def __init__(
        self,
        message: str,
        *,
        remedy: str = "",
        kernel: str = "",
        op: str = "",
        file: str = "",
        line: int | None = None,
        column: int | None = None,
    ) -> None:
        super().__init__(message, remedy=remedy)
        self.kernel = kernel
        self.op = op
        self.file = file
        self.line = line
        self.column = column


class UnsupportedOp(IRError):
    """The executor has no rule for an operation, or not for this form of it."""


class LoweringError(IRError):
    """Triton refused the kernel. Carries Triton's own message and the line it points at."""


class ParseError(IRError):
    """Triton printed IR in a form this parser does not know; a Triton version we have not met."""


class LaunchError(IRError):
    """A kernel was launched with arguments it does not take."""


class CaptureError(IRError):
    """Code outside kernels did something that cannot be followed, such as a foreign autograd function."""
