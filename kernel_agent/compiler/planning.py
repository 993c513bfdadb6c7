"""`planned`: the backward of one launch by a schedule, or the best one behind it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.plan import BackwardPlan
from kernel_agent.compiler.reverse import Adjoint, differentiate
from kernel_agent.compiler.reverse.checkpoints import checkpointed
from kernel_agent.compiler.saved.prepare import prepared
from kernel_agent.compiler.schedule.calls import Calls
from kernel_agent.compiler.schedule.schedules import SCHEDULES, Defect, atomics, plans
from kernel_agent.compiler.ssa.value import Kernel
from kernel_agent.errors import InternalError


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


def planned(schedule: str, wanted: Wanted) -> BackwardPlan:
    """The plan of a launch by a schedule or, where that does not apply, the best one behind it. A pass with a defect
    costs what is made by it, and a remark says so. Raises CannotDerive."""
    said: list[str] = []

    def defect(name: str, error: Exception) -> None:
        said.append(f"`{name}` failed on {wanted.kernel.name}: {InternalError.of(error).message}")

    found = _Ways(schedule, wanted, defect, said).best()
    return replace(found, remarks=(*found.remarks, *said))


class _Ways:
    """Adjoints of a launch, and what schedules make of them."""

    def __init__(self, schedule: str, wanted: Wanted, defect: Defect, said: list[str]) -> None:
        self.schedule = schedule
        self.wanted = wanted
        self.defect = defect
        self.said = said
        """What is to be told of the plan."""

    def best(self) -> BackwardPlan:
        """The plan with the fewest atomics; of two with as many the one with the shorter tapes."""
        spared = shorter = None
        if self.schedule != "plain":
            spared, shorter = self._spared()
        try:
            plain = self._differentiated(self.wanted.kernel)
        except CannotDerive:
            if spared is None:
                raise
            plain, spared = spared, None
        found = self._plan(plain, spared)
        if shorter is not None:
            other = self._plan(plain, shorter)
            found = other if atomics(other) <= atomics(found) and other.schedule != "plain" else found
        return found

    def _plan(self, adjoint: Adjoint, spared: Adjoint | None) -> BackwardPlan:
        """The best of the schedules. `spared`: see `plans`."""
        wanted = self.wanted
        behind = SCHEDULES[SCHEDULES.index(self.schedule) :]
        return plans(
            wanted.kernel,
            adjoint,
            wanted.axes,
            spared=spared,
            calls=wanted.calls,
            schedules=behind,
            defect=self.defect,
        )[0]

    def _spared(self) -> tuple[Adjoint | None, Adjoint | None]:
        """The adjoint that reads back what the forward stored, which `plain` does not rely on, and the same with
        shorter tapes; None where they cannot be had, or are the same."""
        found = shorter = None
        try:
            saved = prepared(self.wanted.kernel, self.wanted.written)
            overwritten = sorted(saved.read & self.wanted.lost)
            if overwritten:
                raise CannotDerive(f"{', '.join(overwritten)} is overwritten later")
            found = self._differentiated(saved.kernel, self.wanted.calls)
            found = replace(found, remarks=(*found.remarks, *saved.remarks))
            cut = checkpointed(saved.kernel, found, self.wanted.calls)
            if cut is not None:
                shorter = self._differentiated(cut.kernel, self.wanted.calls)
                shorter = replace(shorter, settings=cut.settings, remarks=found.remarks)
        except CannotDerive as reason:
            if found is None:
                self.said.append(f"what the forward stored is not read back: {reason.message}")
        except Exception as error:
            self.defect("saved" if found is None else "checkpoints", error)
        return found, shorter

    def _differentiated(self, kernel: Kernel, calls: Calls | None = None) -> Adjoint:
        return differentiate(kernel, read=self.wanted.read, written=self.wanted.written, calls=calls)
