"""Torch code on uint16, uint32 and uint64, whose images hold the same bits signed.

torch itself computes little with these dtypes: they are allocated, viewed, copied and converted. Conversions extend the
bits as unsigned numbers; what else would read them as signed numbers is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from kernel_agent.ir.capture.torch_calls import CallClass, class_of
from kernel_agent.ir.errors import CaptureError

HELD_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""Declared dtype -> dtype that images are held in."""

_CONVERSION_NAMES = "to type type_as int long short char byte bool float double half bfloat16 _to_copy"
_NUMBER_NAMES = "item tolist __int__ __float__ __index__ __bool__"
_BITWISE_NAMES = (
    "eq ne equal __eq__ __ne__ bitwise_and bitwise_or bitwise_xor bitwise_not __and__ __or__ __xor__ __invert__"
)
"""Functions to which the sign makes no difference, when all operands are tensors of one dtype."""

_CONVERSIONS, _NUMBERS, _BITWISE = (
    frozenset(names.split()) for names in (_CONVERSION_NAMES, _NUMBER_NAMES, _BITWISE_NAMES)
)


def unsigned_followed(
    name: str, args: tuple[Any, ...], dtypes: list[torch.dtype], result: torch.dtype | None
) -> tuple[Any, ...]:
    """Positional arguments with which a torch function gives what it gives for unsigned numbers.

    `dtypes` are the declared dtypes of all tensor arguments, the first of which is `args[0]`; `result` is the dtype the
    call has on the GPU, if known. Raises `CaptureError` for functions that are not followed.
    """
    wide = [dtype for dtype in dtypes if dtype in HELD_SIGNED]
    if not wide:
        return args
    if name in _CONVERSIONS or name in _NUMBERS:
        if dtypes[0] not in HELD_SIGNED or result == dtypes[0]:
            return args
        return (_extended(args[0], floats=result is not None and result.is_floating_point), *args[1:])
    alike = all(dtype == wide[0] for dtype in dtypes)
    moves = class_of(name, floats=False) not in (CallClass.COMPUTE, CallClass.INDEX, CallClass.REDUCTION)
    numbers = any(isinstance(value, (bool, int, float)) for value in tree_leaves(args[1:]))
    if alike and (moves or (name in _BITWISE and not numbers)):
        return args
    raise CaptureError(
        f"torch function {name} on {str(wide[0]).removeprefix('torch.')} is not followed",
        remedy="Convert the tensor with .to(torch.int64) first.",
    )


def _extended(image: Tensor, *, floats: bool) -> Tensor:
    """The unsigned numbers behind an image, in a signed dtype (or float64) that holds them; uint64 keeps its bits."""
    bits = 8 * image.element_size()
    if bits < 64:
        return image.to(torch.int64) & ((1 << bits) - 1)
    return torch.where(image < 0, image.double() + 2.0**64, image.double()) if floats else image
