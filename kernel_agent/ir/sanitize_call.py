"""`sanitize`: run any function that launches Triton kernels, without a GPU, and report every memory error and race."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

from kernel_agent.errors import EnvironmentProblem, InputError, KernelAgentError
from kernel_agent.ir.capture import Capture
from kernel_agent.ir.device import standin, start_cuda
from kernel_agent.ir.errors import IRError
from kernel_agent.ir.execution import device_of, find_unwritten
from kernel_agent.ir.inputs import Inputs
from kernel_agent.ir.launch import LaunchOptions
from kernel_agent.ir.sanitizer_report import Launched, SanitizerReport, Stop

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
    device = device_of((args, kwargs))
    start_cuda(device)
    capture = Capture(grad=False, poison=True, options=LaunchOptions(device=device))
    stop = None
    try:
        inputs = Inputs(stub, args, kwargs, (), capture)
        with standin(), capture.running():
            result = stub(*inputs.args, **inputs.kwargs)
        find_unwritten(result, capture)
    except EnvironmentProblem:
        raise
    except Exception as error:  # the stub is the user's code: what it raises is part of the report
        stop = stop_of(error)
    launches = tuple(Launched(launch.kernel, launch.grid) for launch in capture.launches)
    return SanitizerReport(name_of(stub), capture.findings.all(), launches, stop)


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


def name_of(stub: Callable[..., Any]) -> str:
    """What people call a function."""
    return str(getattr(stub, "__name__", None) or type(stub).__name__)
