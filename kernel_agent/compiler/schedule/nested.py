"""`nested`: remainders of one number by several divisors, as digits of each other.

A grid over planes of rows by columns of tiles is one number, `tile % tiles // tiles_w` and `tile % tiles_w`. That the
second is the rest of the first is so where `tiles` is a multiple of `tiles_w`, which the kernel does not know: of a
launch for which it holds, `tile % tiles_w` is `tile % tiles % tiles_w`.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernel_agent.compiler.schedule.forms import Forms, Launch
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.prune import prune
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.value import Kernel, Op, Value, beneath


@dataclass(frozen=True)
class Nested:
    """A kernel whose remainders are digits of each other."""

    kernel: Kernel
    facts: tuple[str, ...] = ()
    """Python: divisors are multiples of others."""


def nested(kernel: Kernel, launch: Launch) -> Nested:
    """The kernel with remainders of remainders, where the kernel divides those by the same number."""
    forms = Forms(kernel, launch)
    rests = [op for op in kernel.ops if op.code is Code.REM and not op.result.shape]
    found: dict[Op, Op] = {}
    facts: dict[str, None] = {}
    for quotient in kernel.ops:
        if quotient.code is not Code.FLOORDIV or quotient.result.shape:
            continue
        wide = _remainder(quotient.operands[0])
        narrow = None if wide is None else forms.of(quotient.operands[1]).invariant
        width = None if wide is None else forms.of(wide.operands[1]).invariant
        if wide is None or narrow is None or width is None or width.quotient(narrow) is not None:
            continue
        fact = f"({width.text()}) % ({narrow.text()}) == 0"
        if not (narrow.printable and width.printable and launch.calls.show((fact,))):
            continue
        for rest in rests:
            same = forms.of(rest.operands[0]) == forms.of(wide.operands[0])
            if same and forms.of(rest.operands[1]).invariant == narrow:
                found[rest] = wide
                facts[fact] = None
    return Nested(prune(_Nester(kernel, found).copy()), tuple(facts)) if found else Nested(kernel)


def _remainder(value: Value) -> Op | None:
    """The remainder of a number of a program that a value is."""
    op = beneath(value, (Code.CAST,)).producer
    if op is None or op.code is not Code.REM:
        return None
    number = beneath(op.operands[0], (Code.CAST,)).producer
    return op if number is not None and number.code is Code.PROGRAM_ID else None


class _Nester(Copier):
    def __init__(self, source: Kernel, found: dict[Op, Op]) -> None:
        super().__init__(source)
        self.found = found

    def pure(self, op: Op) -> None:
        """Remainders."""
        wide = self.found.get(op)
        if wide is None:
            super().pure(op)
            return
        b = self.b
        rest = b.cast(self[wide.result], op.operands[0].element)
        self[op.result] = b.cast(b.elementwise(Code.REM, (rest, self[op.operands[1]])), op.result.element)
