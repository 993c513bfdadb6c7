"""`tied`: tiles of two names that are as large in every launch, as tiles of one.

A loss of pairs has a tile of BLOCK_I rows and goes through tiles of BLOCK_J others of the same tensor: what it adds to
its own rows and to theirs has one owner only where both tiles are as large (see `ownrows`). Where they are in all calls
that were seen, the kernel with one name for both is the same kernel, as long as it depends on neither by more than
symbols; that they are is a fact, which the backward checks.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import permutations
from typing import TYPE_CHECKING

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.free_names import read_names
from kernel_agent.compiler.plan import Fact
from kernel_agent.compiler.schedule.forms import Forms, Launch
from kernel_agent.compiler.schedule.owner import own_loops
from kernel_agent.compiler.schedule.sites import sites
from kernel_agent.compiler.ssa.code import ELEMENTWISE, REDUCTIONS, Code
from kernel_agent.compiler.ssa.prune import prune
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.shapes import WHOLE
from kernel_agent.compiler.ssa.value import Kernel, Op, Value, is_smaller
from kernel_agent.compiler.substitution import Substitution

if TYPE_CHECKING:
    from kernel_agent.compiler.schedule.draft import Draft

_SPREADS = frozenset((Code.FULL, Code.BROADCAST))
_KNOWN = (
    ELEMENTWISE
    | REDUCTIONS
    | _SPREADS
    | {Code.CONST, Code.PROGRAM_ID, Code.NUM_PROGRAMS, Code.ARANGE, Code.EXPAND, Code.TRANS, Code.DOT}
    | {Code.RESHAPE, Code.LOAD, Code.STORE, Code.ATOMIC_ADD, Code.FOR, Code.IF}
)
"""What takes its shape from its operands, or names it."""


@dataclass(frozen=True)
class Tied:
    """A kernel with one name less."""

    kernel: Kernel
    fact: Fact
    """Under which it does the same."""


def or_tied(draft: Draft | None, make: Callable[[Kernel], Draft], kernel: Kernel, launch: Launch) -> Draft | None:
    """What a schedule makes of the kernel with two of its tiles as one, where that leaves fewer additions in memory
    than the draft does; else the draft."""
    for one in tied(kernel, launch):
        try:
            found = make(one.kernel)
        except CannotDerive:
            continue
        if draft is None or found.additions < draft.additions:
            found.facts.append(one.fact)
            draft = found
    return draft


def with_one_name(kernel: Kernel, kept: str, given: str) -> Kernel | None:
    """The kernel as it is where two tiles are as large, with one name for both; None where an operation is not known to
    depend on neither by more than symbols. Raises CannotDerive."""
    return prune(_Tier(kernel, kept, given).copy()) if all(op.code in _KNOWN for op in kernel.ops) else None


def tied(kernel: Kernel, launch: Launch) -> Iterator[Tied]:
    """The kernel with two of its tiles as one, for every two that a gradient is added to in."""
    if any(op.code not in _KNOWN for op in kernel.ops):
        return
    calls = launch.calls
    for kept, given in _candidates(Forms(kernel, launch)):
        expression = f"{kept} == {given}"
        if {kept, given} & kernel.fixed or calls.most(kept) is None or not calls.show((expression,)):
            continue
        try:
            made = with_one_name(kernel, kept, given)
        except CannotDerive:
            continue
        assert made is not None
        yield Tied(made, Fact(expression, "rows of a program and of a trip are as many", of_forward=True))


def _candidates(forms: Forms) -> dict[tuple[str, str], None]:
    """Names of the extent in which the places of two additions to one gradient differ: that of a program's own rows,
    which the grid goes by, and that of a trip's."""
    kernel = forms.kernel
    added: dict[str, dict[tuple[int, ...], bool]] = {}
    for site in sites(kernel.body, frozenset((Code.ATOMIC_ADD,))):
        added.setdefault(site.op.base.name, {})[site.op.offset.shape] = bool(own_loops(forms, site))
    found: dict[tuple[str, str], None] = {}
    for shapes in added.values():
        for still, moving in permutations(shapes, 2):
            names = [(kernel.extents.get(a, ""), kernel.extents.get(b, "")) for a, b in _unequal(still, moving)]
            alike = len(still) == len(moving) and len(names) == 1 and shapes[moving] and not shapes[still]
            if alike and all(name in kernel.constants for name in names[0]):
                found[names[0]] = None
    return found


def _unequal(one: tuple[int, ...], other: tuple[int, ...]) -> list[tuple[int, int]]:
    """Extents that differ, axis by axis."""
    return [(a, b) for a, b in zip(one, other, strict=False) if a != b]


def _long(shape: tuple[int, ...]) -> list[int]:
    """Extents but those of 1."""
    return [extent for extent in shape if extent != 1]


class _Tier(Copier):
    """Copies a kernel with `kept` for what is named `given`."""

    def __init__(self, source: Kernel, kept: str, given: str) -> None:
        super().__init__(source)
        self.name, self.other = kept, given
        made = self.b.kernel
        made.constants = {**source.constants, given: source.constants[kept]}
        self.sizes: dict[int, int] = {}
        """What extents become."""
        made.extents = {}
        for size, symbol in source.extents.items():
            text = self.renamed(symbol)
            new = self.number(text)
            if new in made.extents and made.extents[new] != text:
                raise CannotDerive(f"tiles of {made.extents[new]} and {text} would have one size")
            self.sizes[size] = new
            made.extents[new] = text

    def renamed(self, symbol: str) -> str:
        """An expression over constexprs."""
        whole = ast.parse(symbol, mode="eval").body
        if self.other not in read_names(whole):
            return symbol
        return ast.unparse(Substitution({self.other: ast.Name(self.name)}).of(whole))

    def number(self, symbol: str) -> int:
        """What an expression is now. Raises CannotDerive where constexprs alone do not say."""
        try:
            return int(eval(symbol, dict(self.b.kernel.constants)))
        except (NameError, TypeError, AttributeError, ZeroDivisionError) as error:
            raise CannotDerive(f"{symbol} is no number that constexprs alone make") from error

    def shape(self, old: tuple[int, ...]) -> tuple[int, ...]:
        """What a shape becomes."""
        return tuple(self.sizes.get(size, size) for size in old)

    def whole(self, old: Value) -> Value:
        """With the extents that it has now."""
        new, like = self[old], Value(old.element, self.shape(old.shape))
        return self.b.whole(new, like.shape) if is_smaller(new, like) else new

    def pure(self, op: Op) -> None:
        """A number, lanes, and what has a shape of its own."""
        b, symbol = self.b, op.attributes.get("symbol")
        if op.code is Code.ARANGE and symbol:
            text, start = self.renamed(symbol), op.attributes["start"]
            self[op.result] = b.arange(start, start + self.number(text), text)
        elif op.code is Code.ARANGE and op.result.shape != self.shape(op.result.shape):
            raise CannotDerive("lanes that the source does not name are as many as a tile's")
        elif op.code is Code.CONST and symbol and not op.attributes.get("open") and self.renamed(symbol) != symbol:
            text = self.renamed(symbol)
            self[op.result] = b.const(self.number(text), op.result.element, text)
        elif op.code is Code.RESHAPE:
            (old,) = op.operands
            if _long(old.shape) != _long(op.result.shape):
                raise CannotDerive("the elements of a tile are put in other rows")
            self[op.result] = b.reshape(self.whole(old), self.shape(op.result.shape))
        elif op.code in _SPREADS:
            self[op.result] = b.whole(self[op.operands[0]], self.shape(op.result.shape))
        elif op.code in WHOLE:
            new = b.again(op, [self.whole(operand) for operand in op.operands])
            self.results(op, new if isinstance(new, tuple) else (new,))
        else:
            super().pure(op)
