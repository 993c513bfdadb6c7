"""Images without contents: torch code between launches runs on shapes alone.

Floating tensors have no memory here. Integers, which addresses may depend on, and small floats keep their values as
long as nothing unknown is written into them; whoever asks for a value that is not there gets `NeedsValues`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from kernel_agent.ir.capture.capture import Capture
from kernel_agent.ir.capture.device import names_gpu
from kernel_agent.ir.capture.images import Images, declare, declared_dtype, held_dtype
from kernel_agent.ir.capture.torch_calls import CallClass, class_of
from kernel_agent.ir.cost.ghost import NeedsValues
from kernel_agent.ir.cost.traffic import TorchMove, TrafficMode, storage_of
from kernel_agent.ir.launch import LaunchOptions, Runner
from kernel_agent.ir.memory import Buffer

SMALL = 4096
"""Elements up to which a floating argument keeps its values."""

META = torch.device("meta")

COPY_OF = "copy of "
"""Stands before the name of an argument in that of a copy which the stub made of all of it."""

_ASKS = frozenset(
    {
        *("item", "tolist", "numpy", "nonzero", "argwhere", "unique", "unique_consecutive", "masked_select", "equal"),
        *("allclose", "is_nonzero", "__bool__", "__int__", "__float__", "__index__", "__contains__", "__array__"),
    }
)
"""Torch functions whose result, or its shape, is made of values."""

_OVERWRITES = frozenset({"fill_", "zero_", "copy_"})
_WITH_VALUES = frozenset({"tensor", "as_tensor", "scalar_tensor", "from_numpy", "arange", "linspace"})
_FAILURES = (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError)
"""What torch raises on tensors without contents where a result depends on values."""


class GhostImages(Images):
    """Images of arguments: large floats are meta tensors unless `values` are wanted, the rest are copies on the CPU."""

    def __init__(self, *, values: bool = False) -> None:
        super().__init__(device=torch.device("cpu"))
        self.values = values

    def storage(self, tensor: Tensor, held: torch.dtype) -> Tensor:
        """See `Images.storage`."""
        elements = tensor.untyped_storage().nbytes() // tensor.element_size()
        if not tensor.is_meta and (self.values or elements <= SMALL or not held.is_floating_point):
            return super().storage(tensor, held)
        key = storage_of(tensor)
        if key not in self._storages:
            self._storages[key] = torch.empty(elements, dtype=held, device=META)
            self._kept.append(tensor)
        return self._storages[key]


class CountingCapture(Capture):
    """A capture that adds up what torch functions move."""

    def __init__(self, *, options: LaunchOptions, runner: Runner) -> None:
        super().__init__(grad=False, poison=False, options=options, runner=runner)
        self.moves: list[TorchMove] = []
        self._holds: dict[int, str] = {}
        """Identity of a buffer -> the argument whose elements it holds, once each."""

    def buffer(self, tensor: Tensor, *, written: bool = True, name: str = "") -> Buffer:
        """See `Capture.buffer`."""
        buffer = super().buffer(tensor, written=written, name=name)
        if name:
            self._holds.setdefault(id(buffer), name.removeprefix(COPY_OF))
        return buffer

    def moved(self, move: TorchMove) -> None:
        """See `Mover.moved`."""
        if move.read or move.written:
            self.moves.append(move)

    def copied(self, source: Tensor, copy: Tensor) -> None:
        """See `Mover.copied`. A copy of a whole argument is named after it."""
        buffer = self.known_buffer(source)
        if buffer is not None and id(buffer) in self._holds and source.numel() == buffer.size:
            self.buffer(copy, name=f"{COPY_OF}{self._holds[id(buffer)]}")

    def mode(self) -> TrafficMode:
        """See `Capture.mode`."""
        return TrafficMode(self, grad=False, poison=False, device=self.options.device)


class GhostCapture(CountingCapture):
    """A capture whose tensors may be without contents."""

    def __init__(self, *, options: LaunchOptions, runner: Runner, values: bool = False) -> None:
        super().__init__(options=options, runner=runner)
        self.values = values
        """New floating tensors have contents, too."""
        self.unknown: set[int] = set()
        """Identities of buffers whose contents are not known."""
        self.fresh: set[int] = set()
        """Those of them that nothing wrote yet."""

    def buffer(self, tensor: Tensor, *, written: bool = True, name: str = "") -> Buffer:
        """See `Capture.buffer`. Who wrote what is not followed."""
        buffer = super().buffer(tensor, written=True, name=name)
        if not written:
            self.allocated(tensor)
        return buffer

    def is_unknown(self, tensor: Tensor) -> bool:
        """Whether a tensor's values cannot be read."""
        buffer = self.known_buffer(tensor)
        return bool(tensor.is_meta) or (buffer is not None and id(buffer) in self.unknown)

    def forget(self, tensor: Tensor) -> None:
        """Something unknown was written to the memory of a tensor."""
        self.unknown.add(id(self.buffer(tensor)))
        self.fresh.discard(id(self.buffer(tensor)))

    def allocated(self, tensor: Tensor) -> None:
        """A tensor was made whose memory nothing wrote yet."""
        self.unknown.add(id(self.buffer(tensor)))
        self.fresh.add(id(self.buffer(tensor)))

    def learn(self, tensor: Tensor) -> None:
        """Known values were written to a whole tensor."""
        if tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes():
            self.unknown.discard(id(self.buffer(tensor)))

    def mode(self) -> TrafficMode:
        """See `Capture.mode`."""
        return GhostMode(self)


class GhostMode(TrafficMode):
    """Runs torch code on images that may be without contents."""

    session: GhostCapture

    def __init__(self, session: GhostCapture) -> None:
        super().__init__(session, grad=False, poison=False)

    def _compute(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        unknown = [tensor for tensor in inputs if self.session.is_unknown(tensor)]
        kind = class_of(name, floats=True)
        if not inputs and kind is CallClass.ALLOCATION and name not in _WITH_VALUES:
            return self._allocate(name, func, args, kwargs)
        if not unknown:
            return super()._compute(name, func, args, kwargs)
        if name in ("cuda", "cpu") or (kind is CallClass.VIEW and name != "__getitem__"):
            return super()._compute(name, func, args, kwargs)
        if name in _ASKS:
            raise _needs(name)
        if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or "out" in kwargs:
            return self._in_place(name, func, args, kwargs)
        return self._on_shapes(name, func, args, kwargs)

    def _allocate(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a floating tensor without contents, any other with them."""
        kwargs = {key: value for key, value in kwargs.items() if key not in ("generator", "pin_memory")}
        args = tuple(META if names_gpu(value) else value for value in args)
        made = func(*tree_map(_held, args), **{**tree_map(_held, kwargs), "device": META})
        if made.is_floating_point() and made.numel() > 1 and not self.session.values:
            return made
        return super()._compute(name, func, args, kwargs)

    def _note(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, inputs: list[Tensor]
    ) -> None:
        super()._note(name, args, kwargs, result, inputs)
        if name.startswith(("empty", "new_empty")):
            self.session.allocated(result)

    def _in_place(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target = kwargs.get("out", args[0] if args else None)
        if not isinstance(target, Tensor):
            raise _needs(name)
        others = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf is not target]
        if not target.is_meta:
            if any(self.session.is_unknown(tensor) for tensor in others):
                self.session.forget(target)
            else:
                super()._compute(name, func, args, kwargs)
                if name in _OVERWRITES:
                    self.session.learn(target)
        elif "out" in kwargs:
            kwargs = {key: value for key, value in kwargs.items() if key != "out"}
            self._on_shapes(name, func, args, kwargs)
        return None if name == "__setitem__" else target

    def _on_shapes(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call on tensors without contents. A view of known memory that was overwritten stays a view."""
        if name == "__getitem__" and not args[0].is_meta:
            return super()._compute(name, func, args, kwargs)
        kwargs = {key: value for key, value in kwargs.items() if key != "generator"}
        try:
            if name == "__getitem__":
                return func(*args)
            twins = tree_map(_without_contents, (args, kwargs))
            result = super()._compute(name, func, *twins)
        except _FAILURES as error:
            raise _needs(name) from error
        real = {id(twin): value for twin, value in zip(tree_leaves(twins), tree_leaves((args, kwargs)), strict=True)}
        return tree_map(
            lambda leaf: real.get(id(leaf), leaf), result
        )  # a call that changes nothing returns its argument


def _without_contents(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return META if names_gpu(value) else value
    if value.is_meta:
        return value
    twin = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=META)
    return declare(twin, declared_dtype(value))


def _held(value: Any) -> Any:
    return held_dtype(value) if isinstance(value, torch.dtype) else value


def _needs(name: str) -> NeedsValues:
    return NeedsValues(f"torch's {name} asks for values that kernels compute", remedy="Execute the kernels instead.")
