"""`settled`: a kernel that asks of its indices only what is not so for every program and trip."""

from __future__ import annotations

from kernel_agent.compiler.schedule.forms import Forms, Launch
from kernel_agent.compiler.schedule.linear import Form, Kind
from kernel_agent.compiler.schedule.polynomial import ONE, ceiling
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.prune import prune
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.value import Kernel, Op


def settled(kernel: Kernel, launch: Launch) -> Kernel:
    """The kernel without conditions that its grid and the bounds of its loops imply."""
    forms = Forms(kernel, launch)
    true = frozenset(op for op in kernel.ops if op.code is Code.CMP and _holds(forms, op))
    return prune(_Settler(kernel, true).copy()) if true else kernel


def _holds(forms: Forms, op: Op) -> bool:
    """Whether a comparison of integers is true, whatever the indices are."""
    left, right = op.operands
    if left.is_float or op.attributes.get("unsigned"):
        return False
    predicate = op.attributes["predicate"]
    if predicate in ("le", "lt"):
        left, right = right, left
    difference = forms.of(left) - forms.of(right)
    if predicate in ("lt", "gt"):
        return (difference - Form(base=ONE)).not_negative or _within(difference)
    return predicate in ("le", "ge") and difference.not_negative


def _within(rest: Form) -> bool:
    """Whether size - step * number is positive where there are as many numbers as steps begin within the size."""
    if len(rest.terms) != 1:
        return False
    ((atom, step),) = rest.terms
    if atom.kind not in (Kind.PROGRAM, Kind.TRIP) or atom.extent is None or not (-step).surely(1):
        return False
    return atom.extent == ceiling(rest.base, -step)


class _Settler(Copier):
    def __init__(self, source: Kernel, true: frozenset[Op]) -> None:
        super().__init__(source)
        self.true = true

    def pure(self, op: Op) -> None:
        if op in self.true:
            self[op.result] = self.b.const(True, "i1")
        else:
            super().pure(op)
