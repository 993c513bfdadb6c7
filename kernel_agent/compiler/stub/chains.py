"""`Chains`: memory in which each trip of a loop reads what an earlier one stored, and stores what a later one reads.

`h[t + 1]` from `h[t]`: no trip overwrites what another one left, so that all of `h` is there behind the loop, and
nothing is computed again. Cotangents of the slices that a trip reads are added to where those of the slices lie that it
stored, from the last trip to the first.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence

from torch import Tensor

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.stub.carries import Event, given_to
from kernel_agent.compiler.stub.cotangents import Grad
from kernel_agent.compiler.stub.flow import EMPTY, SLICED, addresses, storage_of
from kernel_agent.compiler.stub.lines import ROOM, Line
from kernel_agent.compiler.stub.loops import Loop
from kernel_agent.compiler.stub.shares import counted
from kernel_agent.compiler.stub.torchcall import TorchCall
from kernel_agent.compiler.stub.trace import LaunchSeen
from kernel_agent.compiler.stub.wording import Launched
from kernel_agent.compiler.stub.writer import Writer


class Chains:
    """Of one loop."""

    def __init__(
        self, writer: Writer, loop: Loop, part: Sequence[tuple[int, Event]], written: Mapping[int, Sequence[Tensor]]
    ) -> None:
        """`part`: events of the trip that is followed; `written`: what it stores to in memory of which trips each have
        their part, by memory."""
        self.writer, self.loop, self.part = writer, loop, part
        self.flow, self.references = writer.flow, writer.references
        self.cotangents, self.body = writer.cotangents, writer.body
        self.read: dict[int, list[Tensor]] = {}
        """By memory: what earlier trips stored."""
        for memory, stored in written.items():
            read = self._read(memory, stored)
            if read:
                self.read[memory] = read
        self.held: dict[int, str] = {}
        """By memory: a variable for the cotangent."""

    def adds_to(self, root: Tensor) -> bool:
        """Whether trips add to the cotangent of a memory."""
        return storage_of(root) in self.read and self.flow.is_active(root)

    def has(self, tensor: Tensor) -> bool:
        """Whether a trip reads by a tensor what an earlier one stored."""
        return any(one is tensor for one in self.read.get(storage_of(tensor), ()))

    def take_over(self, root: Tensor, grad: Grad | None) -> Grad:
        """Bind the cotangent of a memory, to which trips add. `grad`: what it is behind the loop. Raises
        `CannotDerive`."""
        name = self.references.named(root, "a tensor that trips of a loop read")
        if self.flow.always_dense(root):
            text = f"torch.zeros_like({name}, dtype=torch.float32)"
        else:
            self.body.helpers[ROOM] = None
            text = f"gradient_room({name}, dtype=torch.float32)"
        if grad is not None:
            text += f".copy_({grad.text})"
        self.held[storage_of(root)] = held = self.body.bind(f"d{self.references.hint(root)}", text)
        return Grad(held, "f32")

    def lend(self, launched: Launched) -> None:
        """Have a launch add to where cotangents lie of slices that it reads. Raises `CannotDerive`."""
        for name in sorted(launched.accesses.read & launched.seen.tensors.keys()):
            tensor = launched.seen.tensors[name]
            held = self.held.get(storage_of(tensor))
            if held is not None and self.cotangents.own(tensor) is None:
                self.cotangents.add(tensor, Grad(self._part(tensor, held), "f32", own=True))

    def add_up(self) -> None:
        """Add what was found of slices otherwise to where their cotangents lie. Raises `CannotDerive`."""
        for tensor in self.cotangents.waiting():
            held = self.held.get(storage_of(tensor))
            if held is None:
                continue
            part, found = self._part(tensor, held), self.cotangents.set_aside(tensor)
            there = {part, *self._bound_to(part)}
            grads = [grad.wide for grad in found if grad.text not in there]
            if grads:
                self.body.write(Line(f"{part}.copy_(torch.stack(({', '.join([part, *grads])})).sum(0))"))
            if self.flow.base(tensor) is None and len(grads) < len(found):
                self.cotangents.add(tensor, Grad(held, "f32"))

    def _bound_to(self, part: str) -> list[str]:
        """Variables that are a part of a variable: what kernels have added to them is there."""
        bound = (line.opening.partition(" = ") for line in self.body.lines)
        return [name for name, _, value in bound if value in (part, f"{part}.float()")]

    def _part(self, tensor: Tensor, held: str) -> str:
        """What of a variable for the cotangent of a memory belongs to a slice, or to all of it."""
        event = self.flow.maker_of(tensor)
        if self.flow.base(tensor) is None or event is None:
            return held
        call = TorchCall.of(event, self.references, self.body.helpers.setdefault)
        if call is None or not self._is_slice(tensor):
            raise CannotDerive(
                f"the part of a tensor that a trip takes (line {event.site.line}) cannot be told from the stub's text",
                remedy="Take parts in plain assignments.",
                line=event.site.line or None,
            )
        return call.over(held)

    def _read(self, memory: int, stored: Sequence[Tensor]) -> list[Tensor]:
        """What a trip reads of a memory that earlier ones stored, and none will; none where anything else is read that
        the trip has not stored itself, or where more than one launch stores."""
        places = [place for place, _ in self.part]
        changed = any(place in places and storage_of(one) == memory for place, one in self.flow.changes)
        if len(stored) != 1 or changed or self.flow.written_after(places[-1], stored[0]):
            return []
        place = next(at for at in places if any(one is stored[0] for one in self.flow.writes.get(at, ())))
        found: dict[int, Tensor] = {}
        for at, event in self.part:
            for one in self._given(at, event):
                if storage_of(one) != memory:
                    continue
                if at > place and addresses(one).tolist() == addresses(stored[0]).tolist() and self._is_slice(one):
                    continue
                if not self._is_earlier(one, stored[0]):
                    return []
                found[id(one)] = one
        return list(found.values())

    def _given(self, place: int, event: Event) -> list[Tensor]:
        """Tensors that an event reads more than the form of, and makes no view of."""
        if isinstance(event, LaunchSeen):
            read = self.writer.launches[place].accesses.read
            return [one for name, one in event.tensors.items() if name in read]
        return [] if event.name in EMPTY | SLICED else given_to(event)

    def _is_slice(self, tensor: Tensor) -> bool:
        """Whether it is taken of a memory's root at once."""
        chain = self.flow.chain(tensor)
        return len(chain) == 1 and chain[0].name == "__getitem__"

    def _is_earlier(self, read: Tensor, stored: Tensor) -> bool:
        """Whether what a trip reads lies, along one axis, behind all that it and later ones store."""
        if not self._is_slice(read) or not self._is_slice(stored) or not isinstance(self.loop.step, ast.Constant):
            return False
        for axis, (one, other) in enumerate(zip(self._places(read), self._places(stored), strict=False)):
            ahead, behind = counted(one, self.loop), counted(other, self.loop)
            if ahead is not None and behind is not None:
                kinds = [self._kinds(tensor)[: axis + 1] for tensor in (read, stored)]
                plain = all(kind is slice or kind is int for kind in (*kinds[0], *kinds[1]))
                return plain and ahead < behind
        return False

    def _places(self, tensor: Tensor) -> list[ast.expr]:
        """What a slice is taken at, by axis."""
        node = self.writer.source.expression(self.flow.chain(tensor)[0].site)
        if not isinstance(node, ast.Subscript):
            return []
        return list(node.slice.elts) if isinstance(node.slice, ast.Tuple) else [node.slice]

    def _kinds(self, tensor: Tensor) -> list[type]:
        """Of what kinds these are."""
        places = self.flow.chain(tensor)[0].args[1]
        return list(map(type, places if isinstance(places, tuple) else (places,)))
