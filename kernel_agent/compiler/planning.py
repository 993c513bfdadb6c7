"""`planned`: the backward of one launch by a schedule, or the best one behind it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.plan import BackwardPlan
from kernel_agent.compiler.reverse import Adjoint, differentiate
from kernel_agent.compiler.reverse.checkpoints import checkpointed
from kernel_agent.compiler.reverse.early import early
from kernel_agent.compiler.reverse.undo import UNDONE, freed, undoable
from kernel_agent.compiler.saved.joint import Joint
from kernel_agent.compiler.saved.prepare import prepared
from kernel_agent.compiler.schedule.calls import Calls
from kernel_agent.compiler.schedule.forms import Launch
from kernel_agent.compiler.schedule.onetile import widened
from kernel_agent.compiler.schedule.restepped import Restepped, restepped
from kernel_agent.compiler.schedule.schedules import SCHEDULES, atomics, plans
from kernel_agent.compiler.schedule.slabs import Whole, unslabbed
from kernel_agent.compiler.schedule.tries import Tries
from kernel_agent.compiler.schedule.unstepped import WholeRows, unstepped
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Kernel
from kernel_agent.errors import InternalError

Forward = Whole | Restepped | WholeRows
_FORWARDS: tuple[Callable[[Kernel, Launch], Forward | None], ...] = (unslabbed, restepped, unstepped)
"""The same forward with other tiles, of which gradients may have owners."""


@dataclass(frozen=True)
class Wanted:
    """A launch whose backward is wanted."""

    kernel: Kernel
    axes: int
    """Of its grid."""
    calls: Calls
    """Launches of it that were seen."""
    read: frozenset[str]
    """Tensors whose gradients are wanted."""
    written: frozenset[str]
    """Tensors whose cotangents are given."""
    lost: frozenset[str] = frozenset()
    """Tensors that something overwrites after the launch: what it stored to them cannot be read back."""
    joint: Joint | None = None
    """What later launches read no more of than its shift leaves."""


def planned(schedule: str, wanted: Wanted, known: dict[Wanted, LaunchPlans] | None = None) -> BackwardPlan:
    """The plan of a launch by a schedule or, where that does not apply, the best one behind it. A pass with a defect
    costs what is made by it, and a remark says so. `known`: what was made for other schedules. Raises CannotDerive."""
    known = {} if known is None else known
    if wanted not in known:
        known[wanted] = LaunchPlans(wanted)
    found = known[wanted].best(schedule)
    return replace(found, remarks=(*found.remarks, *known[wanted].said))


class LaunchPlans:
    """Adjoints of a launch, and what schedules make of them. What they have in common is made once."""

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted
        self.said: list[str] = []
        """What is to be told of the plan that was asked for last."""
        self._said_of_spared: list[str] = []
        self._tries: dict[int, Tries] = {}
        """By the identity of the adjoint that the better schedules are made of, which is kept here."""
        self._others: dict[str, tuple[Forward, LaunchPlans] | None] = {}
        """Forwards with other tiles, by what makes them."""

    def best(self, schedule: str) -> BackwardPlan:
        """The plan with the fewest atomics; of those with as many one with short tapes, or none. Where programs share
        gradients, that of the forward without slabs, if they share fewer then."""
        found = self._best(schedule)
        for make in _FORWARDS if schedule != "plain" else ():
            if not _shared(found):
                break
            other = self._other(make)
            if other is not None:
                forward, plans_of_it = other
                plan = plans_of_it.best(schedule)
                if _shared(plan) < _shared(found) and plan.schedule != "plain" and not _sums_in_memory(plan):
                    found = forward.plan(plan)
        return self._rows(found) if schedule == "rows" and found.schedule != "rows" else found

    def _rows(self, found: BackwardPlan) -> BackwardPlan:
        """Rows of a forward that walks through them in tiles, if they are to be had with a row in one tile."""
        other = self._other(widened)
        if other is None:
            return found
        forward, plans_of_it = other
        plan = plans_of_it.best("rows")
        return forward.plan(plan) if plan.schedule == "rows" and atomics(plan) <= atomics(found) else found

    def _best(self, schedule: str) -> BackwardPlan:
        """Of the forward as it is."""
        spared = shorter = None
        self.said = []
        if schedule != "plain":
            spared, shorter = self._spared_and_shorter
            self.said += self._said_of_spared
        try:
            plain = self._plain
        except CannotDerive:
            if spared is None:
                raise
            plain, spared = spared, None
        soon, sooner = self._early if spared is not None else (None, None)
        if soon is None or soon is spared:
            return self._shortest(schedule, plain, spared, shorter)
        found = self._shortest(schedule, plain, soon, sooner)
        if not atomics(found):
            return found
        other = self._shortest(schedule, plain, spared, shorter)
        return min(found, other, key=lambda plan: (atomics(plan), plan.schedule == "plain"))

    def _shortest(self, schedule: str, plain: Adjoint, spared: Adjoint | None, shorter: Adjoint | None) -> BackwardPlan:
        """The plan of two adjoints with the fewest atomics; of two with as many the one with the shorter tapes."""
        found = self._plan(schedule, plain, spared)
        if shorter is not None:
            other = self._plan(schedule, plain, shorter)
            found = other if atomics(other) <= atomics(found) and other.schedule != "plain" else found
        return found

    def _plan(self, schedule: str, adjoint: Adjoint, spared: Adjoint | None) -> BackwardPlan:
        """The best of the schedules. `spared`: see `plans`."""
        wanted = self.wanted
        return plans(
            wanted.kernel,
            adjoint,
            wanted.axes,
            spared=spared,
            calls=wanted.calls,
            schedules=SCHEDULES[SCHEDULES.index(schedule) :],
            defect=functools.partial(self._defect, self.said),
            tries=self._tries.setdefault(id(spared or adjoint), Tries()),
        )[0]

    def _defect(self, said: list[str], name: str, error: Exception) -> None:
        said.append(f"`{name}` failed on {self.wanted.kernel.name}: {InternalError.of(error).message}")

    def _other(self, make: Callable[[Kernel, Launch], Forward | None]) -> tuple[Forward, LaunchPlans] | None:
        """A forward with other tiles, and its plans; None where it has none that compute the same."""
        wanted, name = self.wanted, make.__name__
        if name not in self._others:
            self._others[name] = None
            try:
                found = make(wanted.kernel, Launch.like_forward(wanted.axes, wanted.calls))
                if found is not None:
                    again = LaunchPlans(replace(wanted, kernel=found.kernel, calls=found.calls))
                    self._others[name] = (found, again)
            except Exception as error:
                self._defect(self._said_of_spared, name, error)
        return self._others[name]

    @functools.cached_property
    def _plain(self) -> Adjoint:
        return self._differentiated(self.wanted.kernel)

    @functools.cached_property
    def _spared_and_shorter(self) -> tuple[Adjoint | None, Adjoint | None]:
        """The adjoint that reads back what the forward stored, which `plain` does not rely on, and the same with
        shorter tapes; None where they cannot be had, or are the same."""
        found = shorter = None
        try:
            wanted = self.wanted
            saved = prepared(wanted.kernel, wanted.written, wanted.lost, wanted.calls, wanted.joint)
            found, undoes = self._differentiated(saved.kernel, self.wanted.calls), False
            if any(op.code is Code.FOR and undoable(op) for op in saved.kernel.ops) and early(found).tapes:
                undone = self._differentiated(saved.kernel, self.wanted.calls, undoes=True)
                spare = _lanes(found) - _lanes(undone)
                if spare > 0:
                    found, undoes = replace(undone, kernel=freed(undone.kernel, spare), remarks=(UNDONE,)), True
            facts = tuple(dict.fromkeys((*found.facts, *saved.facts)))
            found = replace(found, remarks=(*found.remarks, *saved.remarks), facts=facts)
            cut = checkpointed(saved.kernel, found, self.wanted.calls)
            if cut is not None:
                shorter = self._differentiated(cut.kernel, self.wanted.calls, undoes=undoes)
                shorter = replace(shorter, settings=cut.settings, remarks=found.remarks, facts=found.facts)
        except CannotDerive as reason:
            if found is None:
                self._said_of_spared.append(f"what the forward stored is not read back: {reason.message}")
        except Exception as error:
            self._defect(self._said_of_spared, "saved" if found is None else "checkpoints", error)
        return found, shorter

    @functools.cached_property
    def _early(self) -> tuple[Adjoint | None, Adjoint | None]:
        """What reads back, and the same with shorter tapes where tapes are left, with additions as soon as they can be
        made; as they are where that fails."""
        spared, shorter = self._spared_and_shorter
        try:
            soon = None if spared is None else early(spared)
            return soon, early(shorter) if soon is not None and soon.tapes and shorter is not None else None
        except Exception as error:
            self._defect(self._said_of_spared, "early", error)
            return spared, shorter

    def _differentiated(self, kernel: Kernel, calls: Calls | None = None, *, undoes: bool = False) -> Adjoint:
        return differentiate(kernel, read=self.wanted.read, written=self.wanted.written, calls=calls, undoes=undoes)


def _shared(plan: BackwardPlan) -> int:
    """Sums that several programs have a part in. Rows of slabs do not count: recurrences need their programs more."""
    return atomics(plan) + (len(plan.totals) if plan.schedule == "rows" else 0)


def _sums_in_memory(plan: BackwardPlan) -> bool:
    """Whether a program adds to what it stored of a gradient: each addition is a load and a store."""
    names = set(plan.gradients.values())
    return any(op.code is Code.LOAD and op.base.name in names for step in plan.steps for op in step.kernel.ops)


def _lanes(adjoint: Adjoint) -> int:
    """Numbers that a trip leaves on tapes."""
    return sum(math.prod(tape.shape) for tape in adjoint.tapes)
