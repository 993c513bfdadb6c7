"""What a file may give Triton as the allocator of launches: a function that makes a tensor and nothing else.

Kernels that make tensor descriptors need memory, and the one way to lend it is `triton.set_allocator`, which has no way
back. So a plain allocator may stay. Any other one is code that runs at launches of the user's program.
"""

from __future__ import annotations

import dis
import types
from typing import Any

import torch
from torch import Tensor
from triton.runtime import _allocation

PLAIN = "memory and nothing else"
_NAMES = frozenset({"torch", "empty", "int8", "uint8", "device"})
"""What the code of a plain allocator names."""
_VALUES = (str, int, type(None), torch.device, torch.dtype)
_STEPS = ("LOAD_", "CALL", "PRECALL", "KW_NAMES", "RETURN_", "RESUME", "PUSH_NULL", "COPY_FREE_VARS", "CACHE")
"""How instructions begin that look things up and call them: none computes or assigns."""


def told_of_allocator(allocator: Any) -> Any:
    """`PLAIN` for none and for one that only calls `torch.empty`, on whatever it is given; else the allocator itself.

    What a function's code names, holds and closes over is all that it can do.
    """
    if allocator is _allocation._NULL_ALLOCATOR or (type(allocator) is types.FunctionType and _is_plain(allocator)):
        return PLAIN
    return allocator


def _is_plain(function: types.FunctionType) -> bool:
    code = function.__code__
    held = [*code.co_consts, *(cell.cell_contents for cell in function.__closure__ or ())]
    held += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return (
        _NAMES.issuperset(code.co_names)
        and "empty" in code.co_names
        and function.__globals__.get("torch") is torch
        and all(_is_value(value) or (type(value) is Tensor and _only_asks(code)) for value in held)
    )


def _only_asks(code: types.CodeType) -> bool:
    """Whether code that holds a tensor cannot write to it: it asks where the tensor is, and makes another one."""
    steps = all(step.opname.startswith(_STEPS) for step in dis.get_instructions(code))
    return steps and not any("out" in (value if type(value) is tuple else (value,)) for value in code.co_consts)


def _is_value(value: Any) -> bool:
    return all(map(_is_value, value)) if type(value) is tuple else isinstance(value, _VALUES)
