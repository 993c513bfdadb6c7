"""`Trips`: the backward of a loop of the stub that launches kernels, as a loop.

A trip of the backward computes again what the trip of the forward left in memory that later trips overwrite, and takes
its launches back. Gradients of what all trips read are added up in memory that is there before the loop.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.stub.carries import Carries, Event, given_to, made_by
from kernel_agent.compiler.stub.chains import Chains
from kernel_agent.compiler.stub.cotangents import Grad
from kernel_agent.compiler.stub.flow import EMPTY, PERMUTED, SLICED, addresses, storage_of
from kernel_agent.compiler.stub.hoist import hoisted
from kernel_agent.compiler.stub.lines import ROOM, Line
from kernel_agent.compiler.stub.loops import Loop
from kernel_agent.compiler.stub.remains import Remains
from kernel_agent.compiler.stub.replay import Replay
from kernel_agent.compiler.stub.shares import is_own_share
from kernel_agent.compiler.stub.torchcall import TorchCall
from kernel_agent.compiler.stub.trace import LaunchSeen, TorchSeen
from kernel_agent.compiler.stub.wording import Launched
from kernel_agent.compiler.stub.writer import Writer

_VIEWS = PERMUTED | SLICED | {"view", "view_as", "unsqueeze", "squeeze"}
"""Functions whose results lie in the memory of what they are given, whatever that is."""


class LoopWriter(Writer, Protocol):
    """What writes the backward around the loop."""

    launched: list[Launched]
    replayed: set[int]
    remarks: list[str]
    remains: Remains

    def back_through(self, place: int, event: Event) -> None:
        """Write the backward of an event."""


class Trips:
    """Writes one loop."""

    def __init__(self, writer: LoopWriter, loop: Loop, part: Sequence[tuple[int, Event]]) -> None:
        """`part`: events of the trip that is followed."""
        self.writer = writer
        self.loop = loop
        self.part = part
        self.source, self.body, self.names = writer.source, writer.body, writer.names
        self.flow, self.references, self.cotangents = writer.flow, writer.references, writer.cotangents
        self.made = {id(one): one for _, event in part for one in made_by(event)}
        """Tensors that the trip makes."""
        self.written = self._written()
        """What a trip stores to in memory that is there before the loop, by memory."""
        self.lost = self._lost()
        """That in which trips may meet."""
        self.rooms: dict[int, str] = {}
        """What gradients of tensors that the trip reads are added to."""
        self.carries = Carries(writer, loop, part, self.made)
        self.chains = Chains(
            writer, loop, part, {key: one for key, one in self.written.items() if key not in self.lost}
        )
        self.left: dict[int, Grad] = {}
        """By memory: cotangents from behind the loop that trips take what they stored out of."""
        self.spent: list[tuple[Launched, Tensor]] = []
        """Launches that stored what a trip takes out as it ends, and to which memory."""

    def write(self) -> None:
        """Write it. Raises `CannotDerive` where a trip needs what another one left."""
        lines, launched, before = self.body.lines, len(self.writer.launched), len(self.body.lines)
        self._take_over()
        self.carries.begin()
        self.names.trip, self.names.scratch, self.flow.in_trip = self.loop, self._scratch(), True
        aside = {id(one): (one, self.cotangents.set_aside(one)) for one in self._read()}
        outer = [one for one, _ in aside.values()]
        rooms = {self.rooms[id(one)]: line for one in outer for line in [self._room(one)]}
        shares = dict(self._share(event) for _, event in self.part if self._is_view(event))
        start = len(lines)
        for place, event in reversed(self.part):
            viewed = [one for one in made_by(event) if id(one) in self.rooms]
            if viewed:
                self._add_up(viewed[0])
            elif self.carries.handed_by(event) is None:
                self.writer.back_through(place, event)
                self.chains.add_up()
        for one in outer:
            self._add_up(one)
        for launched_there, root in self.spent:
            self.writer.remains.take_out(launched_there, root, self.left[storage_of(root)])
        begun = len(lines) > start
        self.carries.end()
        written = lines[start:] if begun else []
        del lines[start if written else before :]
        used = [one.place for one in self.writer.launched[launched:]]
        if written:
            self._write_loop(rooms, shares, written, used)
        named = _named(lines[start:])
        for one, grads in aside.values():
            if self.rooms[id(one)] in named:
                self.cotangents.add(one, Grad(self.rooms[id(one)], "f32", own=True))
            for grad in grads:
                self.cotangents.add(one, grad)
        self.names.trip, self.names.scratch, self.flow.in_trip = None, frozenset(), False
        if begun:
            self.carries.hand_back()

    def _write_loop(
        self, rooms: Mapping[str, Line], shares: Mapping[str, Line], written: Sequence[Line], used: Sequence[int]
    ) -> None:
        """Write the statements ahead of the loop, its head and its body. `used`: launches that are taken back."""
        shares = _needed(shares, written)
        inner = [*shares.values(), *written]
        replay = Replay(self.writer, self.loop, self.part, self.lost)
        again = replay.statements(inner)
        self._refuse_again(replay)
        self.writer.replayed |= replay.places
        self._tell(replay)
        for place in sorted({*used, *replay.places}):
            self.refuse_carried(self.writer.launches[place])
        self.body.write(*replay.allocations(), *_needed(rooms, inner).values())
        head = self._head(replay)
        ahead, trip = hoisted([*again, *inner], {self.loop.target, *(one.before for one in self.loop.carries)})
        self.body.write(*ahead, head)
        self.body.write(*(line.deeper() for line in trip))

    def _head(self, replay: Replay) -> Line:
        """The head of the loop, from the last trip to the first where one takes what another one left."""
        steps, target = self.names.expression(self.loop.steps, self.loop.first, "steps"), self.loop.target
        wanted = [one for one in self.loop.carries if replay.wants(one.before)]
        if not self.left and not self.carries.cotangents and not self.chains.held:
            return Line(f"for {target} in {steps}:")
        if not wanted:
            return Line(f"for {target} in reversed({steps}):")
        states = self.names.keep_states(self.loop, wanted)
        self.writer.remarks.append(
            f"the forward keeps what each trip of the loop in line {self.loop.first} begins with: "
            + ", ".join(f"`{one.name}`" for one in wanted)
        )
        targets = ", ".join((target, *(one.before for one in wanted)))
        parts = ", ".join((f"reversed({steps})", *(f"reversed({states.of(one)})" for one in wanted)))
        return Line(f"for {targets} in zip({parts}):")

    def _tell(self, replay: Replay) -> None:
        """Remarks on what the loop costs."""
        again = dict.fromkeys(self.writer.launches[place].seen.name for place in sorted(replay.places))
        if again:
            launches = ", ".join(f"`{name}`" for name in again)
            self.writer.remarks.append(
                f"trips of the loop in line {self.loop.first} launch {launches} again, of which the next trip of the "
                "forward overwrites the results"
            )
        for memory, parts in self.written.items():
            if memory not in self.left:
                continue
            hint, what = self.references.hint(self.flow.root(parts[0])), "each clears what it took of the cotangent"
            if memory in self.lost:
                text = next(text for text in map(self._shown, parts) if text)
                told = f"nothing shows that no later trip stores to the elements of `{text}`, too: {what}; slices with "
                told += f"both ends, as `{hint}[i : i + step]` in steps of `step`, show it, and cost no clearing"
            else:
                told = f"what `{hint}` held ahead of the loop in line {self.loop.first} has a gradient, too: {what}"
            self.writer.remarks.append(told)

    def _shown(self, tensor: Tensor) -> str:
        """What the stub writes for a part that trips may meet in; empty for another one."""
        if self._is_own(tensor):
            return ""
        nodes = [self.source.expression(event.site) for event in self.flow.chain(tensor)]
        texts = [ast.unparse(node) for node in nodes if node is not None]
        return texts[-1] if texts else self.references.hint(tensor)

    # --- memory

    def _written(self) -> dict[int, list[Tensor]]:
        """See `written`."""
        found: dict[int, list[Tensor]] = {}
        for one in self.flow.written_at([place for place, _ in self.part]):
            if id(self.flow.root(one)) not in self.made:
                found.setdefault(storage_of(one), []).append(one)
        return found

    def _is_own(self, tensor: Tensor) -> bool:
        """Whether a trip has the part of a memory alone that it stores to by a tensor."""
        nodes = [self.source.expression(event.site) for event in self.flow.chain(tensor)]
        return any(is_own_share(node, self.loop, self.source.definition) for node in nodes)

    def _lost(self) -> frozenset[int]:
        """Memory in which trips may meet: what one left there is not to be had behind the loop."""
        return frozenset(memory for memory, parts in self.written.items() if not all(map(self._is_own, parts)))

    def _scratch(self) -> frozenset[str]:
        """Names of that."""
        tensors = {name: one for name, one in self.names.final.items() if isinstance(one, Tensor)}
        return frozenset(
            name for name, one in tensors.items() if storage_of(one) in self.lost and name not in self.loop.bound
        )

    def _read(self) -> list[Tensor]:
        """Tensors that are there before the loop, and to which a trip's launches and functions have derivatives."""
        found: dict[int, Tensor] = {}
        for place, event in self.part:
            if isinstance(event, LaunchSeen):
                read = self.writer.launches[place].accesses.read
                given = [one for name, one in event.tensors.items() if name in read]
            else:
                given = [] if event.name in EMPTY else given_to(event)
            if self.carries.handed_by(event) is not None:
                continue
            for one in given:
                if id(one) not in self.made and storage_of(one) not in self.written and self.flow.is_active(one):
                    found[id(one)] = one
        for one in found.values():
            self.rooms[id(one)] = self.body.fresh(f"d{self.references.hint(one)}")
        return list(found.values())

    def refuse_carried(self, launched: Launched) -> None:
        """Raise `CannotDerive` where a launch reads what an earlier trip stored."""
        names = {op.base.name for op in launched.kernel.ops if op.code in (Code.LOAD, Code.ATOMIC)}
        clones = {name: clone.of for name, clone in launched.seen.clones.items()}
        for name in sorted({clones.get(name, name) for name in names} & launched.seen.tensors.keys()):
            tensor = launched.seen.tensors[name]
            if storage_of(tensor) not in self.written or self.chains.has(tensor):
                continue
            stored = self.flow.written_at([place for place, _ in self.part if place < launched.place])
            wanted = set(addresses(tensor).flatten().tolist())
            if not any(
                self.flow.shares(one, tensor) and wanted <= set(addresses(one).flatten().tolist()) for one in stored
            ):
                text = ast.unparse(launched.text.arguments[name])
                if self._is_updated(tensor):
                    raise CannotDerive(
                        f"`{launched.seen.name}` overwrites `{text}`, which it reads: behind the loop (line "
                        f"{self.loop.first}) nothing has what was there before",
                        remedy="Store to another tensor, of which each trip has its part.",
                        line=self.loop.first,
                    )
                raise CannotDerive(
                    f"`{launched.seen.name}` reads `{text}`, which earlier trips of the loop (line {self.loop.first}) "
                    "stored to",
                    remedy="Have the kernel do all trips itself, or one launch of each trip write a slice of a tensor "
                    "from an earlier one: `h[t + 1]` from `h[t]`.",
                    line=launched.seen.site.line,
                )

    def _refuse_again(self, replay: Replay) -> None:
        """Raise `CannotDerive` where a launch is done again that stores what later trips read: it would store, and
        read, elsewhere."""
        for place in sorted(replay.places):
            launched = self.writer.launches[place]
            if any(storage_of(one) in self.chains.read for one in self.flow.written_at([place])):
                raise CannotDerive(
                    f"`{launched.seen.name}` stores what later trips of the loop (line {self.loop.first}) read, and "
                    "other memory that they overwrite",
                    remedy="Have two launches store these, or each trip store to a part of its own of both.",
                    line=launched.seen.site.line,
                )

    def _is_updated(self, tensor: Tensor) -> bool:
        """Whether it is the trip's own part of a memory, that trips store to their own parts of, and no other."""
        memory = storage_of(tensor)
        alike = [addresses(one).flatten().tolist() for one in self.written[memory]]
        return memory not in self.lost and all(one == addresses(tensor).flatten().tolist() for one in alike)

    # --- cotangents

    def _take_over(self) -> None:
        """Settle what is known of memory that trips store to; what must not be counted twice, in memory of its own."""
        for one in self.cotangents.waiting():
            if id(self.flow.root(one)) in self.made and not self.carries.has(one):
                raise CannotDerive(
                    f"tensors that trips of a loop (line {self.loop.first}) make are collected and used behind it",
                    remedy="Allocate one tensor ahead of the loop, and have each trip write to its part.",
                    line=self.loop.first,
                )
        first = self.part[0][0]
        for memory, parts in self.written.items():
            root = self.flow.root(parts[0])
            chained = self.chains.adds_to(root)
            if not chained and not self.cotangents.sharing(root):
                continue
            grad = self.cotangents.settled(root)
            if grad is None and not chained:
                continue
            hint = self.references.hint(root)
            there = self.flow.held_before(first, root) or self.flow.written_before(first, root)
            if chained or grad is None:
                grad = self.chains.take_over(root, grad)
                self.left |= {memory: grad} if there else {}
            elif there or (memory in self.lost and self._is_stored_to(memory)):
                grad = Grad(self.body.bind(f"left_of_{hint}", f"{grad.text}.clone()"), grad.element)
                self.left[memory] = grad
            elif not grad.text.isidentifier():
                grad = Grad(self.body.bind(f"d{hint}", grad.text), grad.element)
            self.cotangents.add(root, grad)

    def _is_stored_to(self, memory: int) -> bool:
        """Whether a trip does more to a memory than to add to it."""
        launches = [self.writer.launches[place] for place, event in self.part if isinstance(event, LaunchSeen)]
        stored = [
            one.seen.tensors[name] for one in launches for name in one.accesses.stored if name in one.seen.tensors
        ]
        stored += [one for place, one in self.flow.changes if place in {at for at, _ in self.part}]
        return any(storage_of(one) == memory for one in stored)

    def _room(self, tensor: Tensor) -> Line:
        """The statement that makes memory for the gradient of what all trips read. Raises `CannotDerive`."""
        name, room = self.references.named(tensor, "a tensor that trips of a loop read"), self.rooms[id(tensor)]
        self.cotangents.add(tensor, Grad(room, "f32", own=True))
        if self.flow.always_dense(tensor):
            return Line(f"{room} = torch.zeros_like({name}, dtype=torch.float32)")
        self.body.helpers[ROOM] = None
        return Line(f"{room} = gradient_room({name}, dtype=torch.float32)")

    def _is_view(self, event: Event) -> bool:
        """Whether it makes a view of a tensor whose gradient has room, and that view's has."""
        if not isinstance(event, TorchSeen) or event.name not in _VIEWS or not isinstance(event.result, Tensor):
            return False
        if id(event.args[0]) not in self.rooms:
            return False
        self.rooms[id(event.result)] = self.body.fresh(f"d{self.references.hint(event.result)}")
        return True

    def _share(self, event: Event) -> tuple[str, Line]:
        """The statement that takes the part of a room that a view is of the tensor."""
        assert isinstance(event, TorchSeen)
        call = TorchCall.of(event, self.references, self.body.helpers.setdefault)
        room, whole = self.rooms[id(event.result)], self.rooms[id(event.args[0])]
        if call is None:
            raise CannotDerive(
                f"the part of a tensor that a trip takes (line {event.site.line}) cannot be told from the stub's text",
                remedy="Take parts in plain assignments.",
                line=event.site.line or None,
            )
        self.cotangents.add(event.result, Grad(room, "f32", own=True, fresh=self._is_alone(event)))
        return room, Line(f"{room} = {call.over(whole)}")

    def _is_alone(self, event: TorchSeen) -> bool:
        """Whether a trip reads nothing of a tensor but what one view has, which no other trip reads."""
        whole = event.args[0]
        readers = [one for _, one in self.part if any(part is whole for part in given_to(one))]
        return len(readers) == 1 and id(whole) not in self.made and self._is_own(event.result)

    def _add_up(self, tensor: Tensor) -> None:
        """Add what is not there yet to the room of a tensor's gradient."""
        room = self.rooms[id(tensor)]
        held = self.cotangents.set_aside(tensor)
        found = [one for one in held if one.text != room]
        if len(found) == 1 and any(one.fresh for one in held):
            self.body.write(Line(f"{room}.copy_({found[0].text})"))
        elif found:
            parts = [room, *(one.wide for one in found)]
            self.body.write(Line(f"{room}.copy_(torch.stack(({', '.join(parts)})).sum(0))"))


def _needed(candidates: Mapping[str, Line], lines: Sequence[Line]) -> dict[str, Line]:
    """Of statements that bind a variable each those that lines behind them need."""
    found: dict[str, Line] = {}
    for name, line in reversed(list(candidates.items())):
        if name in _named([*found.values(), *lines]):
            found[name] = line
    return dict(reversed(list(found.items())))


def _named(lines: Sequence[Line]) -> set[str]:
    """Names in some statements."""
    text = "\n".join(row for line in lines for row in line.shown(str, 0))
    return {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
