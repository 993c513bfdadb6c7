"""Memory of kernels under autograd.

Loads, stores and atomics of one buffer during one launch are chained by a token, and share one adjoint buffer. The
autograd engine therefore replays them in exact reverse order: overwritten values get no gradient, values read before an
overwrite do, and the cost is the traffic of the kernel instead of a copy of the buffer per access.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from kernel_agent.ir.errors import CaptureError
from kernel_agent.ir.sanitizer.views import Extents, Geometry

CPU = torch.device("cpu")

ADDRESS_BITS = 40
"""Every buffer owns 2**40 virtual bytes."""

_NUMBERS = itertools.count(1)


def number_buffers_from(first: int) -> None:
    """Give buffers that are made from now on the numbers from `first`, and with them addresses that code may know."""
    global _NUMBERS
    _NUMBERS = itertools.count(first)


class Buffer:
    """The storage behind one or more tensors, as kernels see it."""

    def __init__(self, name: str, root: Tensor, declared: torch.dtype, *, written: bool) -> None:
        self.name = name
        self.root = root
        """A tensor over the whole storage, contiguous; kernels' results are copied into it."""
        self.declared = declared
        self.size = int(root.numel())
        self.itemsize = int(declared.itemsize)
        self.base = next(_NUMBERS) << ADDRESS_BITS
        """Virtual address of the first element."""
        self.extents = Extents(self.size, Geometry((self.size,), (1,), 0))
        """What arguments reach of it."""
        self.written = None if written else torch.zeros(self.size, dtype=torch.bool, device=root.device)
        """Which elements hold a value; None when all do."""
        self.changed = False
        """Whether a launch wrote into it."""
        self.read = False
        """Whether one read it and wrote nothing into it."""

    @property
    def is_float(self) -> bool:
        """Whether elements can carry gradients."""
        return bool(self.root.is_floating_point())

    def mark_written(self, view: Tensor, key: Any = ...) -> None:
        """Note that torch wrote `view[key]`, where `view` is a tensor over this storage."""
        if self.written is not None:
            self.written.as_strided(view.size(), view.stride(), view.storage_offset())[key] = True

    def unwritten(self, view: Tensor) -> Tensor:
        """Indices that nothing wrote of a tensor over this storage, shape (n, rank), int64."""
        if self.written is None:
            return torch.empty((0, view.dim()), dtype=torch.int64, device=CPU)
        return (~self.written.as_strided(view.size(), view.stride(), view.storage_offset())).nonzero()


class Tape:
    """One buffer during one launch (or one replay of a part of it)."""

    def __init__(self, buffer: Buffer, contents: Tensor, *, keep: bool, padded: bool = False) -> None:
        self.buffer = buffer
        self.initial = contents
        self.contents = contents
        """Live elements, shape (size,), detached. Equal to `initial` until the first write when that must be kept."""
        self.keep = keep
        self.stable = False
        """Whether nobody else changes `initial` either."""
        self.padded = padded
        """Written contents and adjoints have one more element, which takes what lanes that do not take part write."""
        self.token = torch.zeros((), dtype=torch.float64, device=contents.device)
        self.changed = False
        self.faithful = False
        """What atomic updates make is rounded to the buffer's dtype."""
        self.shared: Tensor | None = None
        """Adjoint buffer of an enclosing tape, for replays."""
        self.log: list[tuple[Tensor, Tensor]] | None = None
        """(Elements, what they held) of every write, while somebody wants to know."""
        self._adjoint: Tensor | None = None
        self._snapshot: Tensor | None = None
        self._last_lane: Tensor | None = None
        self._numbered = 0
        self._task = -1

    @property
    def adjoint(self) -> Tensor:
        """The adjoint buffer of the backward pass that is running now, shape (size,)."""
        if self.shared is not None:
            return self.shared
        task = torch._C._current_graph_task_id()
        if self._adjoint is None or task != self._task:
            self._task, self._adjoint = task, self.initial.new_zeros(self.buffer.size + self.padded)
        return self._adjoint

    def set_adjoint(self, value: Tensor | None) -> None:
        """Start (or, with None, end) this tape's part in the running backward pass; `value` has shape (size,)."""
        if value is not None and self.padded:
            value = torch.cat([value, value.new_zeros(1)])
        self._task, self._adjoint = torch._C._current_graph_task_id(), value

    def open_for_writing(self, index: Tensor) -> Tensor:
        """Live contents, of which the elements `index` (n,) are going to be changed in place."""
        if self.padded and self.contents.numel() == self.buffer.size:
            self.contents = torch.cat([self.contents, self.contents.new_zeros(1)])
        elif self.keep and not self.changed:
            self.contents = self.contents.clone()
        self.changed = True
        if self.log is not None:
            self.log.append((index, self.contents.index_select(0, index)))
        self._snapshot = None
        return self.contents

    def snapshot(self) -> Tensor:
        """The contents as they are now, in a tensor that no later write changes; not to be changed by the caller."""
        if self._snapshot is None:
            self._snapshot = self.contents if self.stable and self.keep and not self.changed else self.contents.clone()
        return self._snapshot

    def close(self) -> None:
        """The launch is over: keep what a backward pass needs. Tokens and tapes would hold each other alive."""
        self.token = torch.zeros_like(self.token)
        self.contents = self.initial
        self.log = self._snapshot = self._last_lane = None

    def owners(self, index: Tensor) -> Tensor | None:
        """Whose value each element keeps, as lanes (n,), when some of `index` (n,) are equal; None when none are.

        Lanes are given for a padded tape in any case: nobody waits for the device to learn whether some are equal.
        """
        if index.numel() < 2 or (index.device.type == "cpu" and bool((index[1:] > index[:-1]).all())):
            return None
        if self.padded:
            return self._last_of_equal(index)
        if self._last_lane is None:
            self._last_lane = torch.empty(self.buffer.size, dtype=torch.int64, device=index.device)
        lane = torch.arange(index.numel(), device=index.device)
        self._last_lane.scatter_(0, index, lane)  # several times faster than index_copy_
        owner = self._last_lane.index_select(0, index)
        return None if torch.equal(owner, lane) else owner

    def _last_of_equal(self, index: Tensor) -> Tensor:
        """As a maximum of lanes, which does not depend on their order; later accesses number their lanes higher."""
        if self._last_lane is None:
            self._last_lane = index.new_zeros(self.buffer.size + 1)
        lane = torch.arange(self._numbered, self._numbered + index.numel(), device=index.device)
        self._last_lane.scatter_reduce_(0, index, lane, "amax")
        owner = self._last_lane.index_select(0, index) - self._numbered
        self._numbered += index.numel()
        return owner

    def put(self, index: Tensor, values: Tensor, owner: Tensor | None) -> None:
        """Write values (n,) to elements (n,); of equal elements the owner's value stays."""
        if owner is not None:
            values = values.index_select(0, owner)
        self.open_for_writing(index).scatter_(0, index, values)

    def records(self, *values: Tensor) -> bool:
        """Whether an access must be recorded for the backward pass."""
        if not (torch.is_grad_enabled() and self.buffer.is_float):
            return False
        return bool(self.token.requires_grad or any(value.requires_grad for value in values))


def _token_gradient(gradient: Tensor | None, tape: Tape) -> Tensor:
    return torch.zeros((), dtype=torch.float64, device=tape.initial.device) if gradient is None else gradient


class Enter(torch.autograd.Function):  # type: ignore[misc]
    """Contents of a buffer (size,) -> token at the start of a launch."""

    @staticmethod
    def forward(ctx: Any, contents: Tensor, tape: Tape) -> Tensor:
        """Begin the chain."""
        ctx.tape = tape
        return contents.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        """Hand the finished adjoint buffer to whatever made the contents."""
        if torch.is_grad_enabled():
            raise CaptureError(
                "second derivatives through kernels are not recorded", remedy="Call grad without create_graph."
            )
        gradient = ctx.tape.adjoint[: ctx.tape.buffer.size]
        ctx.tape.set_adjoint(None)
        return gradient, None


class Leave(torch.autograd.Function):  # type: ignore[misc]
    """Token at the end of a launch -> contents of the buffer (size,)."""

    @staticmethod
    def forward(ctx: Any, _token: Tensor, tape: Tape) -> Tensor:
        """End the chain."""
        ctx.tape = tape
        return tape.contents[: tape.buffer.size].clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """The cotangent of the final contents starts the adjoint buffer."""
        ctx.tape.set_adjoint(gradient.clone(memory_format=torch.contiguous_format))
        return gradient.new_zeros(()), None


class Load(torch.autograd.Function):  # type: ignore[misc]
    """Token -> (values at `index`, token). `valid` masks lanes that do not read, or is None."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, tape: Tape, index: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
        """Gather."""
        ctx.set_materialize_grads(False)
        ctx.tape = tape
        ctx.save_for_backward(index, valid)
        return tape.contents.index_select(0, index.reshape(-1)).view(index.shape), token.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None, token: Tensor | None) -> tuple[Tensor, None, None, None]:
        """Scatter-add."""
        index, valid = ctx.saved_tensors
        if gradient is not None:
            if valid is not None:
                index, gradient = index.masked_select(valid), gradient.masked_select(valid)
            ctx.tape.adjoint.scatter_add_(0, index.reshape(-1), gradient.reshape(-1))
        return _token_gradient(token, ctx.tape), None, None, None


class Store(torch.autograd.Function):  # type: ignore[misc]
    """(Token, values (n,)) -> token; `index` (n,) are the elements written, `owner` is `Tape.owners(index)`."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, values: Tensor, tape: Tape, index: Tensor, owner: Tensor | None) -> Tensor:
        """Scatter."""
        ctx.set_materialize_grads(False)
        ctx.tape = tape
        ctx.save_for_backward(index, owner)
        tape.put(index, values, owner)
        return token.clone()

    @staticmethod
    def backward(ctx: Any, token: Tensor | None) -> tuple[Tensor, Tensor, None, None, None]:
        """Gather for the lanes whose value stayed, then clear: what was there before has no influence."""
        index, owner = ctx.saved_tensors
        adjoint = ctx.tape.adjoint
        gradient = adjoint.index_select(0, index)
        if owner is not None:
            gradient = torch.where(owner == torch.arange(owner.numel(), device=owner.device), gradient, 0.0)
        adjoint.scatter_(0, index, adjoint.new_zeros(()).expand_as(index))
        return _token_gradient(token, ctx.tape), gradient, None, None, None


class Add(torch.autograd.Function):  # type: ignore[misc]
    """(Token, values (n,)) -> token: atomic addition."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, values: Tensor, tape: Tape, index: Tensor) -> Tensor:
        """Scatter-add."""
        ctx.set_materialize_grads(False)
        ctx.tape = tape
        ctx.save_for_backward(index)
        tape.open_for_writing(index).index_add_(0, index, values)
        return token.clone()

    @staticmethod
    def backward(ctx: Any, token: Tensor | None) -> tuple[Tensor, Tensor, None, None]:
        """Gather."""
        (index,) = ctx.saved_tensors
        return _token_gradient(token, ctx.tape), ctx.tape.adjoint.index_select(0, index), None, None


def _winners(tape: Tape, index: Tensor, wins: Tensor) -> Tensor:
    """Elements of the winning lanes; others go where a padded tape keeps nothing."""
    return torch.where(wins, index, tape.buffer.size) if tape.padded else index[wins]


class Extreme(torch.autograd.Function):  # type: ignore[misc]
    """(Token, values (n,)) -> token: atomic maximum (`largest`) or minimum. The winning lane takes the gradient."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, values: Tensor, tape: Tape, index: Tensor, largest: bool) -> Tensor:
        """Scatter-reduce, and find per element the first lane that made the result."""
        ctx.set_materialize_grads(False)
        ctx.tape = tape
        contents = tape.open_for_writing(index)
        before = contents.index_select(0, index)
        contents.scatter_reduce_(0, index, values, "amax" if largest else "amin")
        wins = (contents.index_select(0, index) == values) & (before != values)
        lane = torch.arange(index.numel(), device=index.device)
        first = torch.full((contents.numel(),), index.numel(), device=index.device)
        first.scatter_reduce_(0, _winners(tape, index, wins), lane if tape.padded else lane[wins], "amin")
        ctx.save_for_backward(index, wins & (first.index_select(0, index) == lane))
        return token.clone()

    @staticmethod
    def backward(ctx: Any, token: Tensor | None) -> tuple[Tensor, Tensor, None, None, None]:
        """Gather for winners; a beaten old value gets none."""
        index, wins = ctx.saved_tensors
        adjoint = ctx.tape.adjoint
        gradient = torch.where(wins, adjoint.index_select(0, index), 0.0)
        adjoint.index_fill_(0, _winners(ctx.tape, index, wins), 0)
        return _token_gradient(token, ctx.tape), gradient, None, None, None
