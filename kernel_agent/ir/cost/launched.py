"""Which kernels a call launches at real sizes, specialised how: neither executed nor counted, so it takes no time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kernel_agent.ir.capture.capture import Launch
from kernel_agent.ir.cost.cost import captured, shapes_of_result, walk_call
from kernel_agent.ir.cost.ghost_images import GhostCapture, GhostImages
from kernel_agent.ir.launch import LaunchOptions
from kernel_agent.ir.memory import Buffer
from kernel_agent.ir.program import Module
from kernel_agent.ir.sanitizer.findings import Findings
from kernel_agent.ir.values import RuntimeValue


@dataclass(frozen=True)
class Launched:
    """The launches of one call."""

    launches: tuple[Launch, ...]
    result: Any
    """The return value; tensors in it may be without contents."""


class _Forgetful:
    """A `Runner` that runs nothing: what a kernel was given may have been written by it, and is unknown afterwards."""

    capture: GhostCapture

    def __call__(
        self,
        module: Module,  # noqa: ARG002
        grid: tuple[int, int, int],  # noqa: ARG002
        arguments: Sequence[RuntimeValue],  # noqa: ARG002
        buffers: dict[int, Buffer],
        findings: Findings,  # noqa: ARG002
        options: LaunchOptions,  # noqa: ARG002
    ) -> None:
        """See `Runner`."""
        touched = {id(buffer) for buffer in buffers.values()}
        self.capture.unknown |= touched
        self.capture.fresh -= touched


def launched_by(stub: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> Launched:
    """The launches of a call, without running any. Raises `NeedsValues` where torch code asks for what they compute."""
    runner = _Forgetful()
    runner.capture = GhostCapture(options=LaunchOptions(sanitize=False), runner=runner)
    result = captured(stub, args, kwargs or {}, runner.capture, GhostImages())
    return Launched(tuple(runner.capture.launches), shapes_of_result(result, runner.capture))


def walked_launches(stub: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> Launched:
    """As `launched_by`, with kernels that write integers executed: torch code may ask for those."""
    counts = walk_call(stub, args, kwargs, values=True)
    return Launched(tuple(launch for launch, _ in counts.launches), counts.result)
