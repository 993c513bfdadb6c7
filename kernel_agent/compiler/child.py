"""What runs in the child that derives: the user's file is imported here, its stub followed, and the pair written.

The parent imports this module for nothing but its entry's name.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from kernel_agent.compiler.adjoint import adjoint_text
from kernel_agent.compiler.configurations import configurations
from kernel_agent.compiler.emit import comments_above
from kernel_agent.compiler.emit.printed import Printed
from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.inplace import Apart, kept_apart, overwritten
from kernel_agent.compiler.plan import BackwardPlan, Fact
from kernel_agent.compiler.planning import LaunchPlans, Wanted, planned
from kernel_agent.compiler.saved.joint import Joint
from kernel_agent.compiler.schedule.calls import Calls, Entry
from kernel_agent.compiler.schedule.erase import erasing
from kernel_agent.compiler.schedule.schedules import SCHEDULES
from kernel_agent.compiler.stub.calls import calls_of
from kernel_agent.compiler.stub.clones import with_clones
from kernel_agent.compiler.stub.flow import launch_places
from kernel_agent.compiler.stub.inline import without_helpers
from kernel_agent.compiler.stub.loops import flattened
from kernel_agent.compiler.stub.own_names import with_own_names
from kernel_agent.compiler.stub.returns import returned_once
from kernel_agent.compiler.stub.section import Sections, write_sections
from kernel_agent.compiler.stub.source import StubSource
from kernel_agent.compiler.stub.spelled import spelled
from kernel_agent.compiler.stub.trace import LaunchSeen
from kernel_agent.compiler.stub.unroll import unrolled
from kernel_agent.compiler.stub.ways import Way
from kernel_agent.errors import InternalError, KernelAgentError
from kernel_agent.ir import LoweringError, standin
from kernel_agent.oracle.child import Stub, answered
from kernel_agent.pairs.blame import essence
from kernel_agent.pairs.load import load_truth
from kernel_agent.pairs.spec import KernelSpec

if TYPE_CHECKING:
    from kernel_agent.sandbox import Call


OBJECTS = (50_000, 20, 100)
"""After how many new objects the collector looks at these, at those that it left once, and at all."""


@dataclass(frozen=True)
class _Text:
    """A stub and its text."""

    stub: Stub
    """With loops that launch as their first trips."""
    source: StubSource


@dataclass(frozen=True)
class _Followed:
    """A stub whose calls were followed."""

    stub: Stub
    source: StubSource
    configurations: list[Apart]
    remarks: list[str]
    clones: Mapping[str, str] = field(default_factory=dict)
    """Locals that were put into the stub -> the local that each is a clone of."""
    typical: bool = True
    """See `Calls`."""
    adjoints: dict[str, str] | None = None
    """Of kernels, by name, as far as they were printed; None where nobody reads them."""
    calls: dict[int, Calls] = field(default_factory=dict)
    """Of launches that are planned, by identity."""
    plans: dict[Wanted, LaunchPlans] = field(default_factory=dict)
    """What schedules have in common."""
    printed: Printed = field(default_factory=Printed)


def derived(call: Call) -> None:
    """Payload: `spec`, `schedules` to try in order, `most`, the pairs that are enough (None: all), `known`, digests of
    candidates that are not sent again, `typical`, as of `Calls`, and `adjoint`, whether its text is wanted.

    Sends a message per pair that can be written, best first: the sections of `Candidate`, `schedules`, `remarks`,
    `adjoint`, `seconds`; for one that cannot: `schedule`, `refused`, `remedy`, `line`, `defect`.
    """
    with answered(call), standin(), _rarely_collected():
        try:
            followed = _followed(call, _loaded(call))
        except KernelAgentError as error:
            call.send(refusal("", error))
            return
        known: set[str] = set(call.payload["known"])
        enough = call.payload["most"] and len(known) + call.payload["most"]
        for schedule in call.payload["schedules"] or SCHEDULES:
            if len(known) == enough:
                return
            start = time.perf_counter()
            try:
                sections = _sections(followed, schedule)
            except KernelAgentError as error:
                call.send(refusal(schedule, error))
                continue
            except Exception as error:  # a defect of a pass costs its schedule, not those behind it
                call.send(refusal(schedule, InternalError.of(error)))
                continue
            if sections.candidate.digest in known:
                continue
            known.add(sections.candidate.digest)
            call.send(
                {
                    "schedule": schedule,
                    "forward": sections.candidate.forward,
                    "backward": sections.candidate.backward,
                    "torch_ops": list(sections.candidate.torch_ops),
                    "schedules": [plan.schedule for plan in sections.plans],
                    "remarks": [
                        *followed.remarks,
                        *sections.remarks,
                        *dict.fromkeys(text for plan in sections.plans for text in plan.remarks),
                    ],
                    "adjoint": "\n".join(filter(None, (followed.adjoints or {}).values())),
                    "seconds": time.perf_counter() - start,
                }
            )


@contextmanager
def _rarely_collected() -> Iterator[None]:
    """Values and operations name each other, so that only the collector frees them; as often as it usually runs it
    takes a seventh of the time, and finds most of them in use."""
    before = gc.get_threshold()
    gc.set_threshold(*OBJECTS)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _loaded(call: Call) -> _Text:
    """The stub with loops and helpers that launch for it written out, one return, and names for what launches are
    given and for what each loop binds; its lines are counted in that text."""
    spec = KernelSpec.model_validate(call.payload["spec"])
    facts = spec.facts
    text = unrolled(without_helpers(unrolled(facts.source, facts.stub), facts.stub), facts.stub)
    text = returned_once(text, facts.stub)
    text = spelled(without_helpers(text, facts.stub), facts.stub)
    return _of_text(call, spec, with_own_names(text, facts.stub))


def _of_text(call: Call, spec: KernelSpec, text: str) -> _Text:
    """The stub of a spec with another text."""
    flat, loops = flattened(text, spec.facts.stub)
    facts = spec.facts.model_copy(update={"source": flat})
    module = load_truth(facts, call.scratch, compiles=False)
    stub = Stub(spec.model_copy(update={"facts": facts}), module, getattr(module, facts.stub))
    return _Text(stub, StubSource(flat, facts.stub, module, loops, text))


def _followed(call: Call, text: _Text) -> _Followed:
    """A stub with its configurations. Where launches update memory in place it keeps what was there before."""
    stub, source = text.stub, text.source
    found, remarks = configurations(stub, source)
    wanted = overwritten(source, found)
    typical: bool = call.payload["typical"]
    adjoints: dict[str, str] | None = {} if call.payload["adjoint"] else None
    if not wanted:
        unchanged = [Apart(one, {}) for one in found]
        return _Followed(stub, source, unchanged, remarks, typical=typical, adjoints=adjoints)
    cloning, clones = with_clones(source.whole, wanted)
    text = _of_text(call, stub.spec, cloning)
    stub, source = text.stub, text.source
    found, remarks = configurations(stub, source)
    apart = [kept_apart(source, one, clones) for one in found]
    return _Followed(stub, source, apart, remarks, clones, typical, adjoints)


def _sections(followed: _Followed, schedule: str) -> Sections:
    stub, source = followed.stub, followed.source
    ways = [_way(followed, one, schedule) for one in followed.configurations]
    printer = partial(followed.printed.source, comments=comments_above(source.text))
    return write_sections(stub.spec, source, ways, printer, followed.clones)


def _way(followed: _Followed, apart: Apart, schedule: str) -> Way:
    one, adjoints, calls = apart.configuration, followed.adjoints, followed.calls
    places = {id(seen): place for place, seen in launch_places(one.trace)}
    for number, seen in enumerate(one.trace.launches):
        if id(seen) not in calls:
            swept = [Entry(call.sizes, call.asked) for call in one.calls]
            entries = swept if one.real else []
            launches = (call.launches[number] for call in one.calls)
            calls[id(seen)] = calls_of(launches, typical=followed.typical, entries=entries, swept=swept)

    def planner(
        seen: LaunchSeen,
        read: frozenset[str],
        written: frozenset[str],
        lost: frozenset[str],
        joint: Joint | None,
    ) -> BackwardPlan:
        kernel = one.programs[places[id(seen)]]
        if adjoints is not None and kernel.name not in adjoints:
            adjoints[kernel.name] = adjoint_text(kernel, len(seen.grid), read, written)
        wanted = Wanted(kernel, len(seen.grid), calls[id(seen)], read, written, lost, joint)
        plan = planned(schedule, wanted, followed.plans)
        facts = apart.facts.get(places[id(seen)], ())
        return replace(plan, facts=(*plan.facts, *(Fact(text, "no trip reads what another stored") for text in facts)))

    def eraser(seen: LaunchSeen, name: str, whole: bool) -> BackwardPlan:
        kernel = one.programs[places[id(seen)]]
        return erasing(kernel, name, len(seen.grid), calls[id(seen)], whole=whole)

    return Way(one.trace, one.programs, planner, eraser, one.conditions, one.decisions, one.optional)


def refusal(schedule: str, error: KernelAgentError) -> dict[str, object]:
    """What is told of a schedule that is not had, or of the whole forward."""
    line = error.line if isinstance(error, CannotDerive) else getattr(error, "line", None)
    defect = isinstance(error, InternalError)
    said = essence(error.message) if isinstance(error, LoweringError) else error.message
    return {"schedule": schedule, "refused": said, "remedy": error.remedy, "line": line, "defect": defect}
