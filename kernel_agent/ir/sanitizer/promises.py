"""What a kernel promises the compiler: `tl.assume`, `tl.multiple_of`, `tl.max_contiguous`, `tl.max_constancy`.

No promise changes what exact execution computes, and each may change what a device does: behind a false one the
compiler loads a vector where elements lie apart, or leaves out a branch. So each is looked at where it is given.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kernel_agent.ir.attributes import Dense
from kernel_agent.ir.program import Op
from kernel_agent.ir.values import Pointer, RuntimeValue

_CONTIGUITY, _DIVISIBILITY, _CONSTANCY = "tt.contiguity", "tt.divisibility", "tt.constancy"
_WORDS = {_CONTIGUITY: "tl.max_contiguous", _DIVISIBILITY: "tl.multiple_of", _CONSTANCY: "tl.max_constancy"}


def broken_promises(op: Op, value: RuntimeValue) -> Iterator[tuple[str, Tensor]]:
    """What an operation's result breaks of what is promised of it: in words, and where, shape (programs or 1, *tile).

    As Triton reads them: along each dimension values stand in aligned groups of contiguous ones, as many as promised or
    as there really are; of each group the first value is a multiple.
    """
    numbers = _numbers(op, value)
    if numbers is None:
        return
    unit, start = 1, 0
    if isinstance(value, Pointer) and value.buffer is not None:  # multiples of pointers are counted in bytes
        unit, start = value.buffer.itemsize, value.buffer.base
    groups: dict[int, int] = {}
    for name in (_CONTIGUITY, _CONSTANCY, _DIVISIBILITY):
        for dim, promised in enumerate(_per_dimension(op.attributes.get(name)), start=1):
            if promised <= 1 or (dim >= numbers.dim() and name != _DIVISIBILITY):
                continue
            if name == _DIVISIBILITY:
                size = groups.get(dim) or _longest_run(numbers, dim)
                bad = (_first_of_groups(numbers, dim, size) * unit + start) % promised != 0
            else:
                groups |= {dim: promised} if name == _CONTIGUITY else {}
                bad = _off_course(numbers, dim, promised, 1 if name == _CONTIGUITY else 0)
            if bool(bad.any()):
                yield f"{_WORDS[name]} of {promised} is promised of what is not so", bad


def breaks_loop(op: Op, first: Tensor, step: Tensor, trips: Tensor) -> Tensor | None:
    """Programs whose loop counts otherwise than `tl.multiple_of` of its variable promises, shape (programs or 1,)."""
    promised = _per_dimension(op.attributes.get(f"{_DIVISIBILITY}_arg0"))
    if not promised:
        return None
    bad = (trips > 0) & ((first % promised[0] != 0) | ((trips > 1) & (step % promised[0] != 0)))
    return bad if bool(bad.any()) else None


def _numbers(op: Op, value: RuntimeValue) -> Tensor | None:
    """The values over the whole tile, shape (programs or 1, *tile); pointers count elements."""
    value = value.offset if isinstance(value, Pointer) else value
    if not isinstance(value, Tensor) or value.is_complex():
        return None
    shape = op.results[0].type.shape
    value = value.detach()
    return value.expand(value.shape[0], *shape) if value.dim() == 1 + len(shape) else None


def _per_dimension(attribute: Any) -> list[int]:
    if not isinstance(attribute, Dense):
        return []
    data = attribute.data
    if isinstance(data, int):
        return [data] * (attribute.type.shape[0] if attribute.type.shape else 1)
    return [int(number) for number in data] if isinstance(data, (list, tuple)) else []


def _off_course(numbers: Tensor, dim: int, size: int, step: int) -> Tensor:
    """Which values are not `step` per place behind the first one of their aligned group of `size`."""
    place = torch.arange(numbers.shape[dim], device=numbers.device)
    first = numbers.index_select(dim, place // size * size)
    along = (place % size * step).view(-1, *[1] * (numbers.dim() - 1 - dim))
    return numbers != first + along


def _longest_run(numbers: Tensor, dim: int) -> int:
    """The largest power of two so that each aligned group of as many values goes up by one."""
    size = 1
    while dim < numbers.dim() and size < numbers.shape[dim] and not bool(_off_course(numbers, dim, 2 * size, 1).any()):
        size *= 2
    return size


def _first_of_groups(numbers: Tensor, dim: int, size: int) -> Tensor:
    if dim >= numbers.dim():
        return numbers
    return numbers.index_select(dim, torch.arange(0, numbers.shape[dim], size, device=numbers.device))
