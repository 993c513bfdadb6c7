"""How a tensor lies in memory: whether its elements have places of their own, and whose memory it is."""

from __future__ import annotations

from torch import Tensor


def shares_memory(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether the layout may put two indices at one place: dimensions from the narrowest must each step over the last.

    Layouts that interleave and never meet are said to share as well; no kernel has a reason for one.
    """
    if 0 in shape or len(shape) != len(strides):
        return len(shape) != len(strides)
    reach = 0
    for step, size in sorted(zip(strides, shape, strict=True)):
        if size > 1:
            if step <= reach:
                return True
            reach += step * (size - 1)
    return False


def is_handed_back(value: Tensor, given: Tensor) -> bool:
    """Whether a tensor is an argument of the call as it came, or a part of one whose elements share memory anyhow."""
    if value.untyped_storage()._cdata != given.untyped_storage()._cdata:
        return False
    same = value.data_ptr() == given.data_ptr() and value.size() == given.size() and value.stride() == given.stride()
    return bool(same) or shares_memory(tuple(given.size()), tuple(given.stride()))
