"""Triton IR on any machine: capture launches, lower, parse, execute exactly in float64, sanitize.

The forward kernel itself is the truth: `execute` runs a stub with autograd through every kernel it launches.
"""

from kernel_agent.ir.budget import OutOfDeviceMemory
from kernel_agent.ir.capture.capture import Launch
from kernel_agent.ir.capture.configurations import Configs
from kernel_agent.ir.capture.device import standin
from kernel_agent.ir.capture.host_memory import made_on_host, own_attributes
from kernel_agent.ir.capture.images import as_image, declared_dtype
from kernel_agent.ir.capture.module import import_module
from kernel_agent.ir.capture.torch_calls import CallClass, TorchCall
from kernel_agent.ir.errors import CaptureError, IRError, LaunchError, LoweringError, ParseError, UnsupportedOp
from kernel_agent.ir.execution import ExecOptions, Execution, Safety, execute
from kernel_agent.ir.numerics import Numerics
from kernel_agent.ir.operations.assembly import Assembly, register_asm
from kernel_agent.ir.sanitizer.findings import Finding, FindingKind, Unordered

__all__ = [
    "Assembly",
    "CallClass",
    "CaptureError",
    "Configs",
    "ExecOptions",
    "Execution",
    "Finding",
    "FindingKind",
    "IRError",
    "Launch",
    "LaunchError",
    "LoweringError",
    "Numerics",
    "OutOfDeviceMemory",
    "ParseError",
    "Safety",
    "TorchCall",
    "Unordered",
    "UnsupportedOp",
    "as_image",
    "declared_dtype",
    "execute",
    "import_module",
    "made_on_host",
    "own_attributes",
    "register_asm",
    "standin",
]
