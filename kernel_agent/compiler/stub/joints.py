"""`joints`: results of launches that shift and scale together, as all that reads them shows.

A launch that leaves parts of softmaxes may take any maximum for each, and so be differentiated as if it were given, if
whatever reads them does not answer to that: launches that are proved not to, and nothing else. See `saved/joint.py`.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from itertools import combinations

from torch import Tensor

from kernel_agent.compiler.free_names import free_names
from kernel_agent.compiler.saved.joins import accepted, offered
from kernel_agent.compiler.saved.joint import Joint
from kernel_agent.compiler.schedule.polynomial import Polynomial
from kernel_agent.compiler.stub.flow import Flow, disjoint, tensors_in
from kernel_agent.compiler.stub.source import StubSource
from kernel_agent.compiler.stub.trace import LaunchSeen
from kernel_agent.compiler.stub.wording import Launched

_EMPTY = frozenset(("empty", "empty_like", "new_empty"))


def joints(launches: Mapping[int, Launched], flow: Flow, outputs: Sequence[Tensor]) -> dict[int, Joint]:
    """By position of the launch that stores them. `outputs`: of the stub, those that have cotangents."""
    found: dict[int, Joint] = {}
    for place, launched in launches.items():
        later = [one for at, one in launches.items() if at > place]
        if not any(flow.shares(mine, its) for mine in _written(launched) for one in later for its in _tensors(one)):
            continue
        joint = offered(launched.kernel)
        if joint is not None and _Readers(launches, flow, launched, joint).accept(outputs):
            found[place] = joint
    return found


class _Readers:
    """Whatever else has to do with the results of a joint."""

    def __init__(self, launches: Mapping[int, Launched], flow: Flow, launched: Launched, joint: Joint) -> None:
        self.launches, self.flow, self.launched, self.joint = launches, flow, launched, joint
        self.results = {name: launched.seen.tensors[name] for name in joint.names}

    def accept(self, outputs: Sequence[Tensor]) -> bool:
        """Whether none of it minds, and the memory held nothing before."""
        tensors = list(self.results.values())
        apart = all(disjoint([one, two]) for one, two in combinations(tensors, 2) if self.flow.shares(one, two))
        if not apart or self.launched.seen.clones or any(self._touch(output) for output in outputs):
            return False
        if any(self._touch(tensor) for _, tensor in self.flow.changes):
            return False
        return all(map(self._began_empty, tensors)) and all(
            self._accepts(place, event) for place, event in enumerate(self.flow.trace.events)
        )

    def _began_empty(self, tensor: Tensor) -> bool:
        maker = self.flow.maker_of(self.flow.root(tensor))
        return maker is not None and maker.name in _EMPTY

    def _touch(self, tensor: Tensor) -> bool:
        """Whether a tensor has elements of the results."""
        return any(
            mine is tensor or (self.flow.shares(mine, tensor) and not disjoint([mine, tensor]))
            for mine in self.results.values()
        )

    def _accepts(self, place: int, event: object) -> bool:
        """Whether an event leaves the results alone, makes the memory or views of it, or is a launch that reads them
        and does not mind."""
        if not isinstance(event, LaunchSeen):
            before = place < self.launched.place
            return before or not any(map(self._touch, tensors_in((event.args, event.kwargs))))  # type: ignore[attr-defined]
        reader = self.launches[place]
        names = [name for name, tensor in event.tensors.items() if self._touch(tensor)]
        if not names:
            return True
        if place == self.launched.place:
            return set(names) == self.joint.names
        return place > self.launched.place and not reader.accesses.written & set(names) and self._read_by(reader, names)

    def _read_by(self, reader: Launched, names: Sequence[str]) -> bool:
        """Whether a launch that has some of the results reads them as one, and does not mind."""
        tensors = reader.seen.tensors
        theirs: dict[str, str] = {}
        for name in names:
            mine = [own for own, tensor in self.results.items() if tensor is tensors[name]]
            if len(mine) != 1 or mine[0] in theirs:
                return False
            theirs[mine[0]] = name
        if self.joint.pivot not in theirs:
            return False
        scaled = [one for one in self.joint.scaled if one.name in theirs]
        widths = accepted(reader.kernel, theirs[self.joint.pivot], {theirs[one.name]: one.rate for one in scaled})
        if widths is None:
            return False
        source = self.flow.source
        pairs = [(_told(self.launched, one.width, source), widths.get(theirs[one.name])) for one in scaled]
        return all(
            width is None or (mine is not None and mine == _told(reader, width, source)) for mine, width in pairs
        )


def _told(launched: Launched, width: Polynomial, source: StubSource) -> str | None:
    """A number of a launch as the stub has it, in names that stand for one value each; None where it is not told."""
    number, names = width.number, {symbol.text for symbol in width.symbols}
    if number is not None:
        return str(number)
    (name,) = names if len(names) == 1 else ("",)
    node = launched.text.arguments.get(name)
    if width.text() != name or node is None or any(len(source.bindings(one)) > 1 for one in free_names(node)):
        return None
    return ast.unparse(node)


def _tensors(launched: Launched) -> list[Tensor]:
    return list(launched.seen.tensors.values())


def _written(launched: Launched) -> list[Tensor]:
    return [tensor for name, tensor in launched.seen.tensors.items() if name in launched.accesses.written]
