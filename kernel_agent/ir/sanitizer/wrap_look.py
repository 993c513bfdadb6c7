"""One call of a stub at sizes of any kind, without memory and without executing anything, to find offsets that wrap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kernel_agent.ir.capture.device import standin
from kernel_agent.ir.capture.inputs import Inputs
from kernel_agent.ir.cost.ghost_images import GhostCapture, GhostImages
from kernel_agent.ir.launch import LaunchOptions
from kernel_agent.ir.memory import Buffer
from kernel_agent.ir.program import Module
from kernel_agent.ir.sanitizer.findings import Finding, Findings
from kernel_agent.ir.sanitizer.provenance import written_buffers
from kernel_agent.ir.sanitizer.sanitizer_report import Launched
from kernel_agent.ir.sanitizer.wraps import find_wraps
from kernel_agent.ir.values import RuntimeValue


@dataclass(frozen=True)
class WrapLook:
    """What a look at a call came to."""

    findings: tuple[Finding, ...]
    """Wrapped offsets."""
    launches: tuple[Launched, ...]
    elements: int
    """Elements of all memory that the call used: what executing it would hold."""
    result: Any = None
    """What the stub returned, tensors in it without contents; None where the look ended before the call did."""
    reason: str = ""
    """Why the look ended before the call did; empty when it did not."""


@dataclass
class _Looker:
    """A `Runner` that looks at launches instead of executing them."""

    findings: Findings = field(default_factory=Findings)
    unknown: set[int] = field(default_factory=set)
    """Identities of buffers whose contents are not known."""

    def __call__(
        self,
        module: Module,
        grid: tuple[int, int, int],
        arguments: Sequence[RuntimeValue],
        buffers: dict[int, Buffer],
        findings: Findings,  # noqa: ARG002
        options: LaunchOptions,  # noqa: ARG002
    ) -> None:
        """See `Runner`."""
        written = written_buffers(module, arguments)
        self.unknown |= {id(buffer) for buffer in buffers.values()} if written is None else written
        find_wraps(module, grid, arguments, self.findings, self.unknown)


def look_for_wraps(stub: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> WrapLook:
    """Call a stub with tensors of any device, `meta` too; their floating contents are never read.

    Whatever ends the call early is the `reason`: executing the call says more about it.
    """
    looker = _Looker()
    capture = GhostCapture(options=LaunchOptions(sanitize=False), runner=looker)
    looker.unknown = capture.unknown
    reason, result = "", None
    try:
        inputs = Inputs(stub, tuple(args), dict(kwargs or {}), (), capture, GhostImages())
        with standin(), capture.running():
            result = stub(*inputs.args, **inputs.kwargs)
    except Exception as error:  # the stub is the user's code, and may ask for values that are not there
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
    launches = tuple(Launched(launch.kernel, launch.grid) for launch in capture.launches)
    elements = sum(buffer.size for buffer in capture.buffers.values())
    return WrapLook(looker.findings.all(), launches, elements, result, reason)
