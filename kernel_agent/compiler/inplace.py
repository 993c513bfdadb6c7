"""`kept_apart`: configurations of a stub whose launches update memory in place, with what that memory held before.

The forward clones what such a launch overwrites, if the backward needs it; to the compiler the launch reads the clone.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from kernel_agent.compiler.configurations import Configuration
from kernel_agent.compiler.reverse.before import Separated, separated
from kernel_agent.compiler.ssa.value import Kernel
from kernel_agent.compiler.stub.calls import calls_of
from kernel_agent.compiler.stub.clones import clone_before
from kernel_agent.compiler.stub.flow import launch_places
from kernel_agent.compiler.stub.source import StubSource
from kernel_agent.compiler.stub.trace import Clone, LaunchSeen, TorchSeen, Trace


@dataclass(frozen=True)
class Apart:
    """A configuration whose launches read what they overwrite from arguments of their own."""

    configuration: Configuration
    facts: Mapping[int, tuple[str, ...]]
    """By position of a launch among the trace's events: what has to hold for that."""


def overwritten(source: StubSource, found: Sequence[Configuration]) -> list[tuple[int, str]]:
    """Launches that read what they overwrite, by line, with the local of the stub that they are given. Raises
    `CannotDerive` as `StubSource.launch` does."""
    wanted: dict[tuple[int, str], None] = {}
    for one in found:
        for number, (place, seen) in enumerate(launch_places(one.trace)):
            for name in _separated(one, number, place).names:
                local = _local(source, seen, name)
                if local:
                    wanted[seen.site.line, local] = None
    return list(wanted)


def kept_apart(source: StubSource, one: Configuration, clones: Mapping[str, str]) -> Apart:
    """A configuration of the stub with clones (see `with_clones`), whose launches read them."""
    facts: dict[int, tuple[str, ...]] = {}
    programs: dict[int, Kernel] = dict(one.programs)
    given: dict[int, dict[str, Clone]] = {}
    for number, (place, seen) in enumerate(launch_places(one.trace)):
        found = _separated(one, number, place)
        kept = {
            before: clone_before(source, seen.site.line, _local(source, seen, name), clones)
            for name, before in found.names.items()
        }
        if found.names and all(kept.values()):
            programs[place], facts[place] = found.kernel, found.facts
            given[number] = {before: Clone(name, kept[before] or "") for name, before in found.names.items()}
    if not given:
        return Apart(one, {})
    return Apart(
        replace(
            one,
            trace=_with_clones(one.trace, given),
            programs=programs,
            calls=tuple(_with_clones(call, given) for call in one.calls),
        ),
        facts,
    )


def _separated(one: Configuration, number: int, place: int) -> Separated:
    return separated(one.programs[place], calls_of(call.launches[number] for call in one.calls))


def _local(source: StubSource, seen: LaunchSeen, name: str) -> str:
    """The local that a launch is given for a parameter; empty for another expression."""
    node = source.launch(seen).arguments.get(name)
    known = isinstance(node, ast.Name) and isinstance(seen.site.names.get(node.id), Tensor)
    return node.id if known and isinstance(node, ast.Name) else ""


def _with_clones(trace: Trace, given: Mapping[int, Mapping[str, Clone]]) -> Trace:
    """The call with its launches given clones, by number of a launch and argument."""
    events: list[LaunchSeen | TorchSeen] = []
    numbers = itertools.count()
    for event in trace.events:
        clones = given.get(next(numbers), {}) if isinstance(event, LaunchSeen) else {}
        if clones and isinstance(event, LaunchSeen):
            values = {name: event.site.names[clone.local] for name, clone in clones.items()}
            types = {name: event.build.types[clone.of] for name, clone in clones.items()}
            build = replace(event.build, types={**event.build.types, **types})
            event = replace(event, values={**event.values, **values}, build=build, clones=clones)
        events.append(event)
    return replace(trace, events=tuple(events))
