"""`sanitize`: run any function that launches Triton kernels, without a GPU, and report every memory error and race."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from kernel_agent.errors import EnvironmentProblem, InputError, KernelAgentError
from kernel_agent.ir.budget import memory_for
from kernel_agent.ir.capture.capture import Capture
from kernel_agent.ir.capture.device import standin, start_cuda
from kernel_agent.ir.capture.inputs import Inputs
from kernel_agent.ir.capture.signature_names import callable_name
from kernel_agent.ir.errors import IRError
from kernel_agent.ir.execution import device_of, find_unwritten
from kernel_agent.ir.launch import LaunchOptions
from kernel_agent.ir.sanitizer.sanitizer_report import Launched, SanitizerReport, Stop
from kernel_agent.ir.sanitizer.wrap_look import WrapLook, look_for_wraps

EXECUTED_ELEMENTS = 1 << 26
"""Elements of memory up to which a call is executed: about 2 GiB with all that is known of them."""
_LARGE = 1 << 16
"""Elements, or integers, from which on a call is looked at before it is executed."""
_FOREIGN = ("/torch/", "/triton/", "/kernel_agent/")


def sanitize(stub: Callable[..., Any], *args: Any, **kwargs: Any) -> SanitizerReport:
    """Call `stub(*args, **kwargs)` with every kernel watched, and report what is wrong.

    Found are accesses out of bounds of the argument (not only of its storage), wild pointers, races between programs,
    several lanes of one store that disagree, reads of memory that nothing wrote, returned elements that nothing wrote,
    32-bit offsets that wrap, and failed device assertions; each with file and line, program, lane, argument, offset
    and the variables the address is made of. Values are exact (float64), and the arguments are not changed.

    What is found is in the report and never raised, nor is what the stub raises or the executor cannot run: then
    `report.stop` says so, and `report.clean` is False. Raises `InputError` when `stub` cannot be called, and
    `EnvironmentProblem` where this machine lacks something.
    """
    if not callable(stub):
        raise InputError(f"a {type(stub).__name__} cannot be sanitized", remedy="Pass the function that launches.")
    return sanitize_and_keep(stub, args, kwargs).report


@dataclass(frozen=True)
class SanitizedCall:
    """A report with what the call returned."""

    report: SanitizerReport
    result: Any = None
    """The stub's return value, images in it; None where the call did not come to its end."""


def sanitize_and_keep(stub: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> SanitizedCall:
    """`sanitize`, for callers that go on with the result."""
    look = look_for_wraps(stub, args, kwargs) if _could_be_large((args, kwargs)) else None
    without = any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_leaves((args, kwargs)))
    if look is not None and (without or look.elements > EXECUTED_ELEMENTS):
        return SanitizedCall(_looked_at(callable_name(stub), look, "has tensors without contents" if without else ""))
    device = device_of((args, kwargs))
    start_cuda(device)
    capture = Capture(grad=False, poison=True, options=LaunchOptions(device=device, memory=memory_for(device)))
    stop, result = None, None
    try:
        with standin(device):
            inputs = Inputs(stub, tuple(args), kwargs, (), capture)
            with capture.running():
                result = stub(*inputs.args, **inputs.kwargs)
        find_unwritten(result, capture)
    except EnvironmentProblem:
        raise
    except Exception as error:  # the stub is the user's code: what it raises is part of the report
        stop = stop_of(error)
    launches = tuple(Launched(launch.kernel, launch.grid) for launch in capture.launches)
    return SanitizedCall(SanitizerReport(callable_name(stub), capture.findings.all(), launches, stop), result)


def _could_be_large(values: Any) -> bool:
    """Whether a call may use much memory, by its arguments."""
    for leaf in tree_leaves(values):
        size = leaf.numel() if isinstance(leaf, Tensor) else leaf
        if (isinstance(leaf, Tensor) and leaf.is_meta) or (type(size) is int and size >= _LARGE):
            return True
    return False


def _looked_at(name: str, look: WrapLook, why: str) -> SanitizerReport:
    """The report of a call that cannot be executed."""
    why = why or f"uses {look.elements} elements of memory, too many to execute"
    notes = [
        f"the call {why}: only 32-bit offsets were judged, at points of each grid; call it with smaller tensors that "
        "have contents for everything else"
    ]
    notes += [f"not followed to its end: {look.reason}"] if look.reason else []
    return SanitizerReport(name, look.findings, look.launches, None, tuple(notes))


def stop_of(error: Exception) -> Stop:
    """What ended a call, at the last line of the user's code."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not any(part in frame.filename for part in _FOREIGN)]
    file, line = (own[-1].filename, own[-1].lineno) if own else ("", None)
    if isinstance(error, IRError):
        return Stop(error.message, error.file or file, error.line or line, error.remedy)
    if isinstance(error, KernelAgentError):
        return Stop(error.message, file, line, error.remedy)
    text = str(error).strip()
    return Stop(f"{type(error).__name__}: {text}" if text else type(error).__name__, file, line)
