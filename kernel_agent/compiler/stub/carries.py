"""`Carries`: cotangents of what a loop of the stub hands from trip to trip, which its backward hands back."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.stub.cotangents import Grad
from kernel_agent.compiler.stub.flow import tensors_in
from kernel_agent.compiler.stub.lines import Line
from kernel_agent.compiler.stub.loops import Carry, Loop
from kernel_agent.compiler.stub.trace import LaunchSeen, TorchSeen
from kernel_agent.compiler.stub.writer import Writer

Event = LaunchSeen | TorchSeen


class Carries:
    """Of one loop."""

    def __init__(self, writer: Writer, loop: Loop, part: Sequence[tuple[int, Event]], made: Collection[int]) -> None:
        """`part`: events of the trip that is followed; `made`: tensors that it makes, by identity. Raises
        `CannotDerive` for what it cannot hand on."""
        self.body, self.flow, self.references = writer.body, writer.flow, writer.references
        self.grads = writer.cotangents
        self.loop, self.part, self.made = loop, part, made
        final = writer.names.final
        self.handed = {one: (final[one.before], final[one.behind]) for one in loop.carries}
        """What a trip is handed, and what it hands on."""
        self.cotangents: dict[Carry, str] = {}
        """Variables for the cotangents of that."""
        self._refuse()

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in memory that is handed on."""
        return any(self.flow.shares(tensor, behind) for _, behind in self.handed.values())

    def _refuse(self) -> None:
        """Raise `CannotDerive` for what trips hand on that is no tensor of a trip's own."""
        written = self.flow.written_at([place for place, _ in self.part])
        for carry, (before, behind) in self.handed.items():
            why = ""
            if not isinstance(before, Tensor) or not isinstance(behind, Tensor):
                why = "is no tensor"
            elif id(behind) not in self.made or self.flow.base(behind) is not None or behind is before:
                why = "lies in memory that a trip does not allocate"
            elif any(self.flow.shares(one, before) for one in written):
                why = "is overwritten by the trip that is handed it"
            if why:
                raise CannotDerive(
                    f"`{carry.name}`, which a loop (line {self.loop.first}) hands from trip to trip, {why}",
                    remedy=f"Allocate the next `{carry.name}` in each trip, and hand that tensor on.",
                    line=self.loop.first,
                )

    def handed_by(self, event: Event) -> Carry | None:
        """What an event hands to the trip."""
        made = made_by(event)
        return next((carry for carry, (one, _) in self.handed.items() if any(one is two for two in made)), None)

    def begin(self) -> None:
        """Bind the cotangents of what the last trip handed on."""
        for carry, (_, behind) in self.handed.items():
            if not self.flow.is_active(behind):
                continue
            grad = self.grads.settled(behind)
            if grad is None:
                shape = f"torch.zeros({self.references.shape(behind)}, dtype=torch.float32"
                text = f"{shape}, device={self.references.device()})"
            else:
                text = grad.wide
            self.cotangents[carry] = self.body.bind(f"d{carry.name}", text)
            self.grads.add(behind, Grad(self.cotangents[carry], "f32"))

    def end(self) -> None:
        """Bind those of what the trip was handed, in their place."""
        values = []
        for carry, name in self.cotangents.items():
            grad = self.grads.settled(self.handed[carry][0])
            values.append(f"torch.zeros_like({name})" if grad is None else grad.wide)
        if values:
            self.body.write(Line(f"{', '.join(self.cotangents.values())} = {', '.join(values)}"))

    def hand_back(self) -> None:
        """Hand the cotangents of what the first trip was handed to what that was."""
        for _, event in self.part:
            carry = self.handed_by(event)
            if carry is not None and carry in self.cotangents:
                self.grads.add(given_to(event)[0], Grad(self.cotangents[carry], "f32"))


def made_by(event: Event) -> list[Tensor]:
    """What a torch function made that was not there before."""
    if not isinstance(event, TorchSeen):
        return []
    given = given_to(event)
    return [one for one in tensors_in((event.result,)) if not any(one is other for other in given)]


def given_to(event: Event) -> list[Tensor]:
    """What a launch or a function gets."""
    return list(event.tensors.values()) if isinstance(event, LaunchSeen) else tensors_in((event.args, event.kwargs))
