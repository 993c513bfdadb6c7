"""`use_picks`: a function of the element that an index picks, for the element that it picks of the function's values.

sum(where(lane == i, f(x), 0)) is f(sum(where(lane == i, x, 0))), if i is a lane of x. Written so, the derivative of f
is a number for each row, and where that follows from the value, as a sigmoid's does, which the forward may have stored,
the backward reads no row.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernel_agent.compiler.saved.outputs import Saved
from kernel_agent.compiler.schedule.forms import Forms, Launch
from kernel_agent.compiler.schedule.linear import Kind
from kernel_agent.compiler.schedule.polynomial import ONE
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.value import Kernel, Op, Value, bare, is_constant, unspread

_FUNCTIONS = frozenset((
    Code.EXP, Code.EXP2, Code.LOG, Code.LOG2, Code.SQRT, Code.RSQRT, Code.SIN, Code.COS, Code.TANH, Code.ERF,
    Code.SIGMOID,
))  # fmt: skip


@dataclass(frozen=True)
class Pick:
    """A sum that picks an element of a row."""

    hit: Value
    """Whether a lane is the one."""
    functions: tuple[Op, ...]
    """Of each element, the last one first."""

    @property
    def source(self) -> Value:
        """What the first of them is of."""
        return self.functions[-1].operands[0]


def use_picks(kernel: Kernel) -> Saved:
    """A kernel that picks first, where what is picked are functions of what was loaded."""
    forms = Forms(kernel, Launch.like_forward(3))
    found = {op: pick for op in kernel.ops if op.code is Code.SUM and (pick := _pick(forms, op)) is not None}
    return Saved(_Picked(kernel, found).copy() if found else kernel, frozenset())


def _pick(forms: Forms, op: Op) -> Pick | None:
    choice = op.operands[0].producer
    if choice is None or choice.code is not Code.SELECT or not is_constant(unspread(choice.operands[2]), 0):
        return None
    hit, value = choice.operands[:2]
    if value.shape != op.operands[0].shape or not _is_one_lane(forms, hit, op.attributes["axis"], value):
        return None
    functions = []
    while (maker := value.producer) is not None and maker.code in _FUNCTIONS | {Code.CAST}:
        functions.append(maker)
        value = maker.operands[0]
    while functions and functions[-1].code is Code.CAST:
        functions.pop()
    return Pick(hit, tuple(functions)) if functions and all(one.result.is_float for one in functions) else None


def _is_one_lane(forms: Forms, hit: Value, axis: int, tile: Value) -> bool:
    """Whether a condition holds in exactly one lane along an axis, in every row."""
    test = hit.producer
    if test is None or test.code is not Code.CMP or test.attributes["predicate"] != "eq":
        return False
    for lanes, other in (test.operands, test.operands[::-1]):
        index, counted = bare(other).producer, forms.of(lanes)
        if index is None or index.code not in (Code.ARG_MAX, Code.ARG_MIN) or len(counted.terms) != 1:
            continue
        searched = index.operands[0].shape
        ((atom, step),) = counted.terms
        own = atom.kind is Kind.LANE and atom.number == axis and step == ONE and not counted.base.terms
        spread = unspread(other)
        one_for_all = not spread.shape or spread.shape[axis] == 1
        if own and searched == tile.shape and index.attributes["axis"] == axis and one_for_all:
            return True
    return False


class _Picked(Copier):
    """Picks before it computes."""

    def __init__(self, source: Kernel, found: dict[Op, Pick]) -> None:
        super().__init__(source)
        self.found = found

    def op(self, op: Op) -> None:
        pick = self.found.get(op)
        if pick is None:
            super().op(op)
            return
        b, axis = self.b, op.attributes["axis"]
        source = self[pick.source]
        number = b.sum(b.select(self[pick.hit], source, b.zero(source)), axis)
        for function in reversed(pick.functions):
            cast = function.code is Code.CAST
            number = b.cast(number, function.result.element) if cast else b.unary(function.code, number)
        self[op.result] = number
