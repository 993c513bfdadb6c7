"""Bytes that torch functions move between launches, coarsely, from the shapes of what goes in and comes out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from torch.utils._pytree import tree_leaves

from kernel_agent.ir.capture.image_mode import ImageMode, Session
from kernel_agent.ir.capture.images import declared_dtype
from kernel_agent.ir.capture.torch_calls import CallClass, class_of

_OVERWRITES = frozenset({"fill_", "zero_", "copy_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_"})
_UNWRITTEN = ("empty", "new_empty")
_SAME_ELEMENTS = frozenset({"clone", "contiguous", "reshape", "flatten", "to", "type", "float", "half", "bfloat16"})
"""Functions whose result, where it has memory of its own, holds each element of their argument once."""


@dataclass(frozen=True)
class TorchMove:
    """One call of a torch function."""

    name: str
    kind: CallClass
    read: int
    """Bytes of arguments that it reads."""
    written: int
    """Bytes of results that it writes."""


class Mover(Session, Protocol):
    """A session that is told what calls move."""

    def moved(self, move: TorchMove) -> None:
        """A torch function was called."""

    def copied(self, source: Tensor, copy: Tensor) -> None:
        """All elements of a tensor were copied into memory of their own."""


class TrafficMode(ImageMode):
    """Runs torch code on images and tells what it moves."""

    session: Mover

    def _note(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, inputs: list[Tensor]
    ) -> None:
        super()._note(name, args, kwargs, result, inputs)
        outputs = [leaf for leaf in tree_leaves(args[0] if name == "__setitem__" else result) if _is_tensor(leaf)]
        kind = class_of(name, floats=any(tensor.is_floating_point() for tensor in (*inputs, *outputs)))
        if kind is not None:
            self.session.moved(move(name, kind, inputs, outputs))
        alone = name in _SAME_ELEMENTS and len(inputs) == len(outputs) == 1
        if alone and storage_of(inputs[0]) != storage_of(outputs[0]):
            self.session.copied(inputs[0], outputs[0])


def move(name: str, kind: CallClass, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> TorchMove:
    """What a call moves. Views and results that share memory with an argument move nothing."""
    known = {storage_of(tensor) for tensor in inputs}
    fresh = sum(bytes_of(tensor) for tensor in outputs if storage_of(tensor) not in known)
    in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    if kind is CallClass.ALLOCATION:
        return TorchMove(name, kind, 0, 0 if name.startswith(_UNWRITTEN) else fresh)
    if in_place and kind is not CallClass.VIEW:
        target, *sources = inputs
        if name == "__setitem__":
            written = sum(bytes_of(source) for source in sources[-1:])
            return TorchMove(name, kind, written, written)
        read = sum(bytes_of(source) for source in sources)
        return TorchMove(name, kind, read + (0 if name in _OVERWRITES else bytes_of(target)), bytes_of(target))
    if kind in (CallClass.VIEW, CallClass.COPY):
        converted = fresh and name in _SAME_ELEMENTS and len(inputs) == 1
        return TorchMove(name, kind, bytes_of(inputs[0]) if converted else fresh, fresh)
    return TorchMove(name, kind, sum(bytes_of(tensor) for tensor in inputs), fresh)


def bytes_of(tensor: Tensor) -> int:
    """Bytes behind a tensor at its declared dtype; what is expanded counts once."""
    elements = 1
    for size, stride in zip(tensor.size(), tensor.stride(), strict=True):
        elements *= 1 if stride == 0 and size else size
    return elements * int(declared_dtype(tensor).itemsize)


def storage_of(tensor: Tensor) -> int:
    """Identity of the memory behind a tensor."""
    return int(tensor.untyped_storage()._cdata)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)
