"""How the tensors of one call hang together: who made them, which share memory, which need gradients."""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kernel_agent.compiler.free_names import free_names
from kernel_agent.compiler.stub.source import StubSource
from kernel_agent.compiler.stub.trace import LaunchSeen, TorchSeen, Trace
from kernel_agent.compiler.substitution import Substitution
from kernel_agent.ir.capture.images import declared_dtype

SAME = frozenset(
    {
        *("contiguous", "clone", "alias", "positive", "data", "cuda"),
        *("to", "type_as", "float", "double", "half", "bfloat16"),
    }
)
"""Same shape, same values up to rounding, perhaps the same memory."""
RESHAPED = frozenset(
    {"view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "ravel", "squeeze", "unsqueeze"}
)
PERMUTED = frozenset({"permute", "transpose", "t", "T", "mT", "swapaxes", "swapdims", "movedim", "moveaxis"})
SLICED = frozenset(
    {"__getitem__", "select", "narrow", "chunk", "split", "split_with_sizes", "tensor_split", "unbind", "diagonal"}
)
EXPANDED = frozenset({"expand", "expand_as", "broadcast_to", "broadcast_tensors"})
_NEW = frozenset({"empty", "zeros", "ones", "full", "new_empty", "new_zeros", "new_ones", "new_full", "contiguous"})
"""Their results lie in row-major order whatever they are given."""
_LIKE = frozenset({"empty_like", "zeros_like", "ones_like", "full_like", "clone"})
_ALIKE = frozenset({"clone", "alias", "empty_like", "zeros_like"})
EMPTY = (_NEW | _LIKE | {"rand_like", "randn_like"}) - {"contiguous", "clone"}
"""Their results have no values of what they are given."""


class Flow:
    """Relations between the tensors of a trace."""

    def __init__(self, trace: Trace, source: StubSource, grads: Sequence[str]) -> None:
        self.trace = trace
        self.source = source
        self.in_trip = False
        """Whether tensors of a trip of a loop are spoken of by the names that they have there."""
        inner = {name for loop in source.loops for name in loop.bound}
        of_trips = {name: value for name, value in trace.names.items() if name in inner}
        others = {name: value for name, value in trace.names.items() if name not in inner}
        self._names_behind, self._names_in_trips = {**others, **of_trips}, {**of_trips, **others}
        self.inputs = {id(tensor): name for name, tensor in trace.inputs.items()}
        self.maker: dict[int, TorchSeen] = {}
        self.changes: list[tuple[int, Tensor]] = []
        """Events that write into a tensor that was there before, by their position."""
        self.writes: dict[int, list[Tensor]] = {}
        """What launches write to, by their position."""
        for place, event in enumerate(trace.events):
            if isinstance(event, TorchSeen):
                self._note(place, event)
        self.given = frozenset(_storage(trace.inputs[name]) for name in grads if name in trace.inputs)
        """Storages of differentiable inputs."""
        self.active = set(self.given)
        """Storages that depend on differentiable inputs."""

    @property
    def names(self) -> Mapping[str, Any]:
        """Names at the end of the stub; of a tensor that a trip of a loop hands on first that by which it is known."""
        return self._names_in_trips if self.in_trip else self._names_behind

    def _note(self, place: int, event: TorchSeen) -> None:
        given = {id(part) for part in _tensors(event.args)}
        for part in _tensors((event.result,)):
            if id(part) in given or id(part) in self.inputs:
                if event.name.endswith("_"):
                    self.changes.append((place, part))
            else:
                self.maker.setdefault(id(part), event)
        if event.name == "__setitem__":
            self.changes.append((place, event.args[0]))

    # --- memory

    def maker_of(self, tensor: Tensor) -> TorchSeen | None:
        """The torch function that made a tensor; None for inputs and for what comes from elsewhere."""
        return None if id(tensor) in self.inputs else self.maker.get(id(tensor))

    def base(self, tensor: Tensor) -> Tensor | None:
        """The tensor that one is a view of; None for one that has memory of its own."""
        event = self.maker_of(tensor)
        if event is None:
            return None
        for part in _tensors(event.args):
            if _storage(part) == _storage(tensor):
                return part
        return None

    def root(self, tensor: Tensor) -> Tensor:
        """The first tensor of the memory."""
        while (base := self.base(tensor)) is not None:
            tensor = base
        return tensor

    def chain(self, tensor: Tensor) -> list[TorchSeen]:
        """The views from the root to a tensor, in order."""
        found: list[TorchSeen] = []
        while (base := self.base(tensor)) is not None:
            event = self.maker_of(tensor)
            assert event is not None
            found.insert(0, event)
            tensor = base
        return found

    def is_view_of(self, tensor: Tensor, other: Tensor) -> bool:
        """Whether a tensor is a view of another one."""
        base: Tensor | None = tensor
        while base is not None:
            if base is other:
                return True
            base = self.base(base)
        return False

    def is_slice(self, tensor: Tensor) -> bool:
        """Whether it may lack elements of its root."""
        return any(event.name in SLICED for event in self.chain(tensor))

    def is_expanded(self, tensor: Tensor) -> bool:
        """Whether it is a tensor of the stub whose indices were made to share elements."""
        event = self.maker_of(tensor)
        return event is not None and event.name in EXPANDED

    def expanded(self, tensor: Tensor) -> Tensor:
        """The tensor that such a one was made of."""
        base = self.base(tensor)
        assert base is not None
        return base

    def is_active(self, tensor: Tensor) -> bool:
        """Whether torch functions of it have derivatives: it depends on differentiable inputs, and is not detached."""
        differentiable = _storage(tensor) in self.active and is_float(tensor)
        return differentiable and not any(event.name == "detach" for event in self.chain(tensor))

    def shares(self, one: Tensor, other: Tensor) -> bool:
        """Whether both lie in one memory."""
        return _storage(one) == _storage(other)

    def always_contiguous(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in row-major order in every call of the stub."""
        event = self.maker_of(tensor)
        if event is None or self._conditional(tensor):
            return False
        if event.name in _NEW:
            return True
        parts = _tensors(event.args)
        if event.name in _LIKE or event.name in SAME | RESHAPED:
            return bool(parts) and self.always_contiguous(parts[0])
        return False

    def _conditional(self, tensor: Tensor) -> bool:
        """Whether another call may have made a tensor in another way."""
        name = self.local(tensor)
        return name is not None and not self.source.is_unconditional(name)

    def always_dense(self, tensor: Tensor) -> bool:
        """Whether a tensor's elements lie without gaps and overlaps in every call of the stub."""
        event = self.maker_of(tensor)
        if event is None or self._conditional(tensor):
            return False
        if event.name in _NEW | _LIKE:
            return True
        parts = _tensors(event.args)
        if event.name in SAME | PERMUTED | RESHAPED:
            return bool(parts) and self.always_dense(parts[0])
        return False

    def written_at(self, places: Collection[int]) -> list[Tensor]:
        """What launches and torch functions at some places write to, of what was there before them."""
        found = [part for place in places for part in self.writes.get(place, [])]
        return [*found, *(part for place, part in self.changes if place in places)]

    def written_after(self, place: int, tensor: Tensor) -> bool:
        """Whether something writes into a tensor's memory after the event at a place."""
        later = [part for at, part in self.changes if at > place]
        later += [part for at, parts in self.writes.items() if at > place for part in parts]
        return any(self.shares(part, tensor) for part in later)

    def written_before(self, place: int, tensor: Tensor) -> list[Tensor]:
        """What launches before a place write to in the memory of a tensor."""
        earlier = [part for at, parts in self.writes.items() if at < place for part in parts]
        return [part for part in earlier if self.shares(part, tensor)]

    def held_before(self, place: int, root: Tensor) -> bool:
        """Whether the memory of a root has values that depend on differentiable inputs, and that no launch put there,
        before the event at a place."""
        if id(root) in self.inputs:
            return storage_of(root) in self.given
        event = self.maker.get(id(root))
        filled = [event] if event is not None and event.name not in EMPTY else []
        filled += [self.event(at) for at, part in self.changes if at < place and self.shares(part, root)]
        parts = [part for one in filled for part in tensors_in((one.args, one.kwargs)) if not self.shares(part, root)]
        return any(map(self.is_active, parts))

    def event(self, place: int) -> TorchSeen:
        """The torch function at a place."""
        found = self.trace.events[place]
        assert isinstance(found, TorchSeen)
        return found

    def place_of(self, event: TorchSeen) -> int:
        """Where an event stands."""
        return next(place for place, one in enumerate(self.trace.events) if one is event)

    # --- names

    def local(self, tensor: Tensor) -> str | None:
        """The name of a tensor at the end of the stub."""
        found = [name for name, value in self.names.items() if value is tensor]
        return found[0] if found else None

    def same_form(self, tensor: Tensor) -> str | None:
        """A name at the end of the stub of a tensor that always has this one's shape and dtype."""
        own = self.local(tensor)
        if own is not None:
            return own
        for name, value in self.names.items():
            if isinstance(value, Tensor) and self._identical(value, tensor):
                return name
        return None

    def like(self, tensor: Tensor) -> str | None:
        """The name of another tensor that a tensor always has the shape and dtype of, as `empty_like` gives."""
        for name, value in self.names.items():
            if isinstance(value, Tensor) and value is not tensor and self._identical(tensor, value):
                return name
        return None

    def alike(self, one: Tensor, other: Tensor) -> bool:
        """Whether two tensors always have the same shape and dtype, and strides if neither is part of a larger one."""
        return self._identical(one, other, _ALIKE) or self._identical(other, one, _ALIKE)

    def _identical(self, one: Tensor, other: Tensor, by: frozenset[str] = _ALIKE | {"contiguous"}) -> bool:
        while one is not other:
            event = self.maker_of(one)
            if event is None or event.name not in by:
                return False
            if event.kwargs.get("dtype") is not None or not _tensors(event.args):
                return False
            one = _tensors(event.args)[0]
        return True

    def view_text(self, tensor: Tensor, node: ast.expr | None) -> tuple[ast.expr, str] | None:
        """An expression for a view over a local tensor, and that local's name; None where there is none.

        `node` is what the stub wrote where the view was used.
        """
        if node is not None and not isinstance(node, ast.Name):
            return self._over_tensor(node)
        name = self.local(tensor)
        return None if name is None else self._defined(name)

    def _defined(self, name: str) -> tuple[ast.expr, str] | None:
        bound = self.source.bindings(name)
        if len(bound) != 1 or name in self.source.parameters:
            return None
        for statement in self.source.function.body:
            if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
                continue
            target = statement.targets[0]
            if target is bound[0]:
                return self._over_tensor(statement.value)
            if isinstance(target, ast.Tuple) and any(one is bound[0] for one in target.elts):
                place = next(at for at, one in enumerate(target.elts) if one is bound[0])
                if isinstance(statement.value, ast.Tuple):
                    return self._over_tensor(statement.value.elts[place])
                return self._over_tensor(ast.Subscript(statement.value, ast.Constant(place), ast.Load()))
        return None

    def _over_tensor(self, node: ast.expr) -> tuple[ast.expr, str] | None:
        names = [name for name in free_names(node) if isinstance(self.names.get(name), Tensor)]
        return (node, names[0]) if len(names) == 1 else None


def replaced(node: ast.expr, name: str, other: str) -> str:
    """The text of an expression with another name in place of one."""
    names = {name: ast.Name(other)}
    return ast.unparse(Substitution(names, names).of(node))


def disjoint(tensors: Sequence[Tensor]) -> bool:
    """Whether no element of a memory is in two of some views of it."""
    seen: set[int] = set()
    for tensor in tensors:
        here = set(addresses(tensor).flatten().tolist())
        if here & seen:
            return False
        seen |= here
    return True


def addresses(tensor: Tensor) -> Tensor:
    """Element offset of every index, in the tensor's shape."""
    with torch._C.DisableTorchFunction():
        found = torch.tensor(tensor.storage_offset())
        for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            form = [1] * tensor.dim()
            form[axis] = size
            found = found + (torch.arange(size) * stride).reshape(form)
        return found


def _tensors(values: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += _tensors(value)
        elif isinstance(value, dict):
            found += _tensors(value.values())
    return found


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def storage_of(tensor: Tensor) -> int:
    """Identity of a tensor's memory."""
    return _storage(tensor)


def tensors_in(values: Any) -> list[Tensor]:
    """Every tensor in nested tuples and lists."""
    return _tensors(values)


def is_float(tensor: Tensor) -> bool:
    """Whether what it reports to be has derivatives."""
    return bool(declared_dtype(tensor).is_floating_point)


def launch_places(trace: Trace) -> list[tuple[int, LaunchSeen]]:
    """The launches with their positions among the events."""
    return [(place, event) for place, event in enumerate(trace.events) if isinstance(event, LaunchSeen)]
