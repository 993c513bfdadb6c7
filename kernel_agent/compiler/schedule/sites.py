"""`Site`: where in a kernel an operation stands: the loops and branches around it, and what bounds indices there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kernel_agent.compiler.schedule.forms import Forms
from kernel_agent.compiler.schedule.linear import Form
from kernel_agent.compiler.schedule.polynomial import ONE, Polynomial
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Block, Op, Value

_NEGATED = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt"}


@dataclass(frozen=True)
class Bound:
    """0 <= form < below wherever an operation takes part."""

    form: Form
    """Without a base, none of its atoms opaque, all coefficients at least 0."""
    below: Polynomial

    @property
    def size(self) -> int:
        """Atoms that it bounds together."""
        return len(self.form.terms)


@dataclass(frozen=True, eq=False)
class Site:
    """An operation and what is around it."""

    op: Op
    block: Block
    """That it stands in."""
    loops: tuple[Op, ...] = ()
    """FORs and WHILEs, the outermost first."""
    conditions: tuple[tuple[Value, bool], ...] = ()
    """What is known to hold, or with False not to hold: of branches around, and of programs that have not ended."""
    branches: int = 0
    """IFs around it."""


def sites(block: Block, codes: frozenset[Code]) -> list[Site]:
    """All operations of some kinds, in order."""
    return list(_sites(block, codes, Site(Op(Code.BARRIER, (), ()), block)))


def _sites(block: Block, codes: frozenset[Code], around: Site) -> Iterator[Site]:
    conditions = around.conditions
    for op in block.ops:
        here = Site(op, block, around.loops, conditions, around.branches)
        if op.code in codes:
            yield here
        if op.code is Code.LEAVE_IF:
            conditions = (*conditions, (op.operands[0], False))
        elif op.code is Code.IF:
            for side, inner in zip((True, False), op.blocks, strict=True):
                known = (*conditions, (op.operands[0], side))
                yield from _sites(inner, codes, Site(op, inner, around.loops, known, around.branches + 1))
        elif op.code in (Code.FOR, Code.WHILE):
            for inner in op.blocks:
                yield from _sites(inner, codes, Site(op, inner, (*around.loops, op), conditions, around.branches))


def bounds(forms: Forms, site: Site) -> list[Bound]:
    """What holds of indices where the operation takes part: by its mask, loops and conditions."""
    found: list[Bound] = []
    if site.op.attributes.get("masked") and site.op.mask is not None:
        found += mask_bounds(forms, site.op.mask)
    found += [bound for loop in site.loops if (bound := loop_bound(forms, loop)) is not None]
    for condition, holds in site.conditions:
        found += mask_bounds(forms, condition, holds=holds)
    kept: dict[Form, Bound] = {}
    for bound in found:
        kept.setdefault(bound.form, bound)
    return sorted(kept.values(), key=lambda bound: -bound.size)


def loop_bound(forms: Forms, loop: Op) -> Bound | None:
    """That a loop's index is less than its end; None where that says nothing."""
    if loop.code is not Code.FOR:
        return None
    found = _below(forms.of(loop.blocks[0].arguments[0]) - forms.of(loop.operands[1]))
    return found[0] if found else None


def mask_bounds(forms: Forms, mask: Value, *, holds: bool = True) -> list[Bound]:
    """What a condition says of indices, as seen from the axes of the mask."""
    op = mask.producer
    if op is None:
        return []
    if op.code is (Code.AND if holds else Code.OR):
        return [bound for operand in op.operands for bound in mask_bounds(forms, operand, holds=holds)]
    if op.code in (Code.FULL, Code.BROADCAST):
        return mask_bounds(forms, op.operands[0], holds=holds)
    if op.code is Code.EXPAND:
        axis = op.attributes["axis"]
        inner = mask_bounds(forms, op.operands[0], holds=holds)
        return [Bound(bound.form.moved(lambda old: old + (old >= axis)), bound.below) for bound in inner]
    if op.code is Code.TRANS:
        inner = mask_bounds(forms, op.operands[0], holds=holds)
        return [Bound(bound.form.moved(op.attributes["order"].index), bound.below) for bound in inner]
    if op.code is not Code.CMP or op.attributes.get("unsigned") or op.operands[0].is_float:
        return []
    predicate = op.attributes["predicate"]
    if not holds:
        predicate = _NEGATED.get(predicate, "")
    left, right = (forms.of(operand) for operand in op.operands)
    if predicate in ("gt", "ge"):
        left, right = right, left
    if predicate in ("lt", "gt"):
        return _below(left - right)
    return _below(left - right - Form(base=ONE)) if predicate in ("le", "ge") else []


def _below(difference: Form) -> list[Bound]:
    """Of difference < 0."""
    if difference.terms and difference.rises:
        return [Bound(Form(difference.terms), -difference.base)]
    return []
