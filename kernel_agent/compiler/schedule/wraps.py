"""`unwrapped`: additions at `index % size` or `min(index, last)` as additions at `index`, where beyond only zeros are
added.

Forwards wrap or clamp indices so that loads need no mask. What lies beyond contributes nothing to the output, so its
gradient is zero: the wrapped lanes add zeros to elements that other lanes own.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernel_agent.compiler.schedule.forms import Forms, Launch, relabelled
from kernel_agent.compiler.schedule.linear import Form
from kernel_agent.compiler.schedule.polynomial import ONE
from kernel_agent.compiler.schedule.sites import Bound, sites
from kernel_agent.compiler.schedule.zeros import Zeros
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.value import Kernel, Op, Value


def unwrapped(kernel: Kernel, launch: Launch) -> Kernel:
    """The kernel with masks for remainders and minima wherever that is proved to be the same."""
    forms = Forms(kernel, launch)
    zeros = Zeros(forms)
    plain: dict[Op, list[Wrap]] = {}
    for site in sites(kernel.body, frozenset((Code.ATOMIC_ADD,))):
        wraps = _wraps(forms, site.op.offset)
        if wraps and all(_needless(forms, wrap, shape, zeros.outside(site.op.stored)) for wrap, shape in wraps):
            plain[site.op] = [wrap for wrap, _ in wraps]
    return _Unwrapper(kernel, plain).copy() if plain else kernel


Path = tuple[Op, ...]
"""Operations that move the lanes of an index to those of the address, the innermost first."""


_PASSES = frozenset((Code.ADD, Code.SUB, Code.MUL, Code.CAST, Code.BROADCAST, Code.EXPAND, Code.TRANS))
_PARTS = frozenset((Code.FLOORDIV, Code.REM))
"""Digits of a number that is clamped, as of the row of a matrix with parted rows."""


@dataclass(frozen=True)
class Wrap:
    """Where an address reads an index by what it is below a size, and something else from there on."""

    op: Op
    """A remainder or a minimum."""
    index: Value
    limit: Value
    """The size, or of a minimum the last index."""

    @property
    def within(self) -> str:
        """How an index that stays as it is compares to the limit."""
        return "lt" if self.op.code is Code.REM else "le"


def _wraps(forms: Forms, offset: Value, path: Path = ()) -> list[tuple[Wrap, Path]]:
    """Wraps of tiles that an address is a sum of products of, and how their axes come to be its own."""
    op = offset.producer
    if op is None or not offset.shape:
        return []
    if op.code in _PARTS:
        inner = [found for found in _wraps(forms, op.operands[0], path) if found[0].op.code is Code.MIN]
        return inner or ([(Wrap(op, *op.operands), path)] if op.code is Code.REM else [])
    if op.code is Code.MIN and not op.attributes.get("unsigned"):
        left, right = op.operands
        index, limit = (right, left) if forms.of(left).invariant is not None else (left, right)
        return [(Wrap(op, index, limit), path)]
    if op.code in _PASSES:
        moves = (op, *path) if op.code in (Code.EXPAND, Code.TRANS) else path
        return [found for operand in op.operands for found in _wraps(forms, operand, moves)]
    return []


def _needless(forms: Forms, wrap: Wrap, path: Path, known: frozenset[Bound] | None) -> bool:
    """Whether what is added is zero where the address does not read the index itself."""
    index, limit = forms.of(wrap.index), forms.of(wrap.limit).invariant
    if limit is None or (wrap.op.code is Code.REM and not index.not_negative):
        return False
    if known is None:
        return True
    form = Form(index.terms)
    for op in path:
        form = relabelled(op, form)
    size = limit if wrap.op.code is Code.REM else limit + ONE
    return Bound(form, size - index.base) in known


class _Unwrapper(Copier):
    """Writes without wraps, under masks."""

    def __init__(self, source: Kernel, plain: dict[Op, list[Wrap]]) -> None:
        super().__init__(source)
        self.plain = plain

    def effect(self, op: Op) -> None:
        """Additions."""
        wraps = self.plain.get(op)
        if wraps is None or self.slicing:
            super().effect(op)
            return
        b = self.b
        offset, below = self.address(op.offset, wraps)
        mask = None if op.mask is None else self[op.mask]
        for one in dict.fromkeys(below):
            mask = one if mask is None else b.logical_and(mask, one)
        b.store(self[op.base], b.whole(offset, op.offset.shape), self[op.stored], mask, Code.ATOMIC_ADD)

    def address(self, offset: Value, wraps: list[Wrap]) -> tuple[Value, list[Value]]:
        """An address without its wraps, and the conditions that each index is what was read by it."""
        op, b = offset.producer, self.b
        if op is None or not offset.shape:
            return self[offset], []
        for wrap in wraps:
            if wrap.op is op:
                index, limit = self.all((wrap.index, wrap.limit))
                return index, [b.compare(wrap.within, index, limit)]
        if op.code not in _PASSES | _PARTS:
            return self[offset], []
        parts, below = [], []
        for operand in op.operands:
            part, conditions = self.address(operand, wraps)
            parts.append(part)
            below += conditions
        if op.code in (Code.EXPAND, Code.TRANS):
            moved = [b.again(op, [condition]) for condition in below]
            below = [one for one in moved if isinstance(one, Value)]
        found = b.again(op, parts)
        assert isinstance(found, Value)
        return found, below
