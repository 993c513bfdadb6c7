"""Stand-ins for the arguments of a call: `SWEEP` and `make_args` of a file that calls the stub alike, and small."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernel_agent.jit.errors import CannotTrain
from kernel_agent.jit.literals import literal
from kernel_agent.jit.sizes import Relation, Shrinking, small_sizes

_LARGEST = 1 << 19
"""Elements of arguments that are used at their own sizes."""
_LOOKED_AT = 1 << 20
"""Elements of a tensor whose values are looked at."""


def check_section(stub: Callable[..., Any], arguments: Mapping[str, Any], shrinking: Shrinking) -> str | None:
    """Text of `SWEEP` and `make_args`; None where a call of this size cannot be used as it is.

    Raises `CannotTrain` for an argument that cannot be written down.
    """
    tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
    own = {size for tensor in tensors for size in tensor.shape}
    if shrinking.relation is Relation.OWN and sum(tensor.numel() for tensor in tensors) > _LARGEST:
        return None
    sizes = small_sizes(own, shrinking)
    names = {size: f"D{place}" for place, size in enumerate(sizes)}
    writer = _Writer(names, sizes)
    lines = [writer.line(name, value) for name, value in arguments.items()]
    parameters = inspect.signature(stub).parameters
    keyword = [name for name in arguments if parameters[name].kind is inspect.Parameter.KEYWORD_ONLY]
    positional = [name for name in arguments if name not in keyword]
    dims = ", ".join(f"{names[size]}={small}" for size, small in sizes.items())
    given = "".join(f"{name}, " for name in names.values())
    args = f"({', '.join(f'a_{name}' for name in positional)}{',' if len(positional) == 1 else ''})"
    kwargs = f"dict({', '.join(f'{name}=a_{name}' for name in keyword)})"
    return "\n".join(
        [
            f"SWEEP = [dict({dims})]" if sizes else "SWEEP = [dict(count=1)]",
            "",
            "",
            f"def make_args({given or 'count, '}device='cuda', seed=0):",
            "    generator = torch.Generator().manual_seed(seed)",
            *(f"    {line}" for line in lines),
            f"    return {args}, {kwargs}",
            "",
        ]
    )


@dataclass(frozen=True)
class _Axis:
    """One axis of a tensor as it lies in memory."""

    axis: int
    size: int
    stride: int


class _Writer:
    """Expressions for arguments in the names of sizes."""

    def __init__(self, names: Mapping[int, str], sizes: Mapping[int, int]) -> None:
        self.names, self.sizes = names, sizes

    def line(self, name: str, value: Any) -> str:
        """`a_x = ...`"""
        if isinstance(value, Tensor):
            return f"a_{name} = {self._laid_out(value)}"
        return f"a_{name} = {self._plain(name, value)}"

    def _plain(self, name: str, value: Any) -> str:
        if type(value) is int and value in self.names:
            return self.names[value]
        if type(value) in (tuple, list):
            inner = ", ".join(self._plain(name, part) for part in value)
            return f"[{inner}]" if type(value) is list else f"({inner}{',' if len(value) == 1 else ''})"
        text = literal(value)
        if text is None:
            raise CannotTrain(
                f"the argument `{name}` is a {type(value).__name__}, which cannot be written down to prove a backward",
                remedy="Pass tensors, numbers, flags, names, dtypes, or tuples and lists of such.",
            )
        return text

    def _size(self, size: int) -> str:
        return self.names.get(size, str(size))

    def _laid_out(self, tensor: Tensor) -> str:
        """A tensor whose axes lie in memory as those of the argument do."""
        if tensor.is_contiguous() or tensor.numel() == 0:
            return self._filled(tensor, [self._size(size) for size in tensor.shape])
        axes = [_Axis(axis, size, tensor.stride(axis)) for axis, size in enumerate(tensor.shape)]
        order = sorted(axes, key=lambda one: (one.stride != 0, -one.stride, one.axis))
        shape: list[str] = []
        taken: list[str] = []
        reach = 0
        for one in reversed(order):
            size = "1" if one.stride == 0 else self._size(one.size)
            if one.stride and one.size > 1:
                if reach > one.stride:
                    raise CannotTrain("elements of an argument share memory", remedy="Pass it with .contiguous().")
                if reach and reach < one.stride:
                    shape[0] = f"{shape[0]} + 8"  # rows that lie apart
                if not reach and one.stride > 1:
                    size = f"{size} * 2"
                    taken.insert(0, f":{size}:2")
                else:
                    taken.insert(0, f":{size}")
                reach = one.stride * one.size
            else:
                taken.insert(0, ":")
            shape.insert(0, size)
        text = f"{self._filled(tensor, shape)}[{', '.join(taken)}]"
        back = [order.index(one) for one in axes]
        if back != list(range(len(back))):
            text += f".permute({', '.join(map(str, back))})"
        if any(one.stride == 0 and one.size > 1 for one in axes):
            text += f".expand({', '.join(self._size(one.size) for one in axes)})"
        return text

    def _filled(self, tensor: Tensor, shape: list[str]) -> str:
        """New values of the kind that the tensor has."""
        extents = f"({', '.join(shape)}{',' if len(shape) == 1 else ''})"
        with torch.no_grad():
            seen = tensor.detach().flatten()[:_LOOKED_AT]
            if tensor.dtype is torch.bool:
                return f"(torch.rand({extents}, generator=generator) < 0.7)"
            if not tensor.is_floating_point():
                return self._whole(seen, tensor, extents)
            made = self._real(seen, extents)
        return made if tensor.dtype is torch.float32 else f"{made}.to({tensor.dtype})"

    def _whole(self, seen: Tensor, tensor: Tensor, extents: str) -> str:
        """Numbers below the size that bounds those of the argument: they may be places in another one."""
        dtype = tensor.dtype
        low, high = (int(seen.min()), int(seen.max())) if seen.numel() else (0, 0)
        bound = min((size for size in self.names if size > high), default=None)
        rising = tensor.dim() == 1 and len(seen) > 1 and bool((seen.long().diff() >= 0).all())
        if rising and high in self.names and low == 0:  # offsets of rows, up to their number
            return f"torch.linspace(0, {self.names[high]}, {extents[1:-2]}).to({dtype})"
        if rising and high == len(seen) - 1 and low == 0:
            return f"torch.arange({extents[1:-2]}).to({dtype})"
        top = str(high + 1) if bound is None else self.names[bound]
        made = f"torch.randint({max(low, 0)}, {top}, {extents}, generator=generator)"
        if low < 0:
            made = f"torch.where(torch.rand({extents}, generator=generator) < 0.2, {low}, {made})"
        return made if dtype is torch.int64 else f"{made}.to({dtype})"

    @staticmethod
    def _real(seen: Tensor, extents: str) -> str:
        """Random numbers of the sign and the range that the argument's have."""
        finite = seen[seen.isfinite()].double()
        low, high = (float(finite.min()), float(finite.max())) if finite.numel() else (-1.0, 1.0)
        if low < 0 < high or low == high == 0:
            return f"torch.randn({extents}, generator=generator)"
        near, far = sorted((abs(low), abs(high)))
        near, far = float(f"{min(near, far * 0.5):.2g}"), float(f"{far:.2g}")
        sign = "" if high > 0 else "-"
        return f"({sign}(torch.rand({extents}, generator=generator) * {far - near!r} + {near!r}))"
