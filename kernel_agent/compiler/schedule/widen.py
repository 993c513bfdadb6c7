"""`widened`: an addition that a mask in memory keeps from some elements of a gradient, as one of zero to those.

What a mask of tokens leaves out, or no window has, has zero for its gradient. Where a program adds to its elements
under such a mask, somebody else has to write the zeros: all of them, before. Adding zero under what the mask says of
indices alone reaches every element, so that stores can follow, and memory that starts empty.

More elements are written then than the forward read: they must be all that the tensor has, and places from 0 on, which
no mask of the forward promises. That is proved, but for the number of elements, which the backward asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kernel_agent.compiler.plan import Fact
from kernel_agent.compiler.schedule.claims import Claim, open_claims
from kernel_agent.compiler.schedule.coverage import Counter, covered_if
from kernel_agent.compiler.schedule.forms import Forms, Launch
from kernel_agent.compiler.schedule.injective import scale
from kernel_agent.compiler.schedule.linear import Form, Kind, quotient_of
from kernel_agent.compiler.schedule.polynomial import ONE, ZERO, Polynomial
from kernel_agent.compiler.schedule.sites import Site, sites, whole_bounds
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.prune import prune
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.value import Kernel, Op, Value, constant, unspread

_MOVES = frozenset((Code.EXPAND, Code.TRANS, Code.BROADCAST, Code.FULL))
Proved = Callable[[Forms, Sequence[Site]], bool]
_WRITES = frozenset((Code.STORE, Code.ATOMIC_ADD, Code.ATOMIC))


@dataclass(frozen=True)
class Widened:
    """A kernel some of whose additions reach more elements."""

    kernel: Kernel
    facts: tuple[Fact, ...] = ()
    """What must hold for that."""


def widened(kernel: Kernel, gradients: Mapping[str, str], launch: Launch, proved: Proved) -> Widened:
    """The kernel with additions to all of a gradient where masks kept them from a part of it.

    `gradients`: by name of the input's argument the name of its gradient's. `proved`: whether some additions are known
    to meet no element twice. None is changed before a launch was seen
    whose tensor has as many elements as are added to.
    """
    facts: list[Fact] = []
    if not launch.calls.names:
        return Widened(kernel)
    for tensor, name in gradients.items():
        made = _wider(kernel, name, launch)
        whole = () if made is None else _whole(made, tensor, name, launch, proved)
        if made is not None and whole:
            kernel = made
            facts += [Fact(text, f"{name} gets zeros where no cotangent reaches it", tensor) for text in whole]
    return Widened(kernel, tuple(facts))


def _wider(kernel: Kernel, name: str, launch: Launch) -> Kernel | None:
    """The kernel with its only addition to a gradient under what its mask says of indices; None where that is all."""
    found = _additions(kernel, name)
    if len(found) != 1 or found[0].op.code is not Code.ATOMIC_ADD or found[0].op.mask is None:
        return None
    forms = Forms(kernel, launch)
    if whole_bounds(forms, found[0].op.mask) is not None:
        return None
    return prune(_Widener(kernel, forms, found[0].op).copy())


def _whole(kernel: Kernel, tensor: str, name: str, launch: Launch, proved: Proved) -> tuple[str, ...]:
    """The expressions under which an addition is to every element of a tensor and to nothing else; none where they are
    not known, or one is false in a launch that was seen."""
    (site,) = _additions(kernel, name)
    return whole_if(Forms(kernel, launch), site, tensor, proved)


def whole_if(forms: Forms, site: Site, tensor: str, proved: Proved) -> tuple[str, ...]:
    """The same of the only addition to a gradient."""
    address, counter = forms.of(site.op.offset), Counter(forms)
    count = counter.count(site)
    if count is None or address.base.terms:
        return ()
    last, told = ZERO, set()
    for part, size in _digits(address, counter.axes):
        stride = scale(address.coefficients, part)
        if stride is None or any(number < 0 for _, number in stride.terms):
            return ()
        last = last + stride * (size - ONE)
        told |= {atom for atom, _ in part.terms}
    within = open_claims([Claim(count, last + ONE)])
    whole = covered_if(forms, [site], tensor)
    if told != set(address.coefficients) or within is None or not whole or not proved(forms, [site]):
        return ()
    facts = (whole, *(claim.text() for claim in within))
    return facts if forms.launch.calls.show(facts) else ()


def _digits(address: Form, axes: Sequence[tuple[Form, Polynomial]]) -> list[tuple[Form, Polynomial]]:
    """Indices and how many values each has, those that an address takes apart as their digits."""
    found = []
    left = list(axes)
    while left:
        part, size = left.pop()
        low = next((one for one in address.coefficients if one.kind is Kind.REMAINDER and one.whole == part), None)
        count = None if low is None or low.divisor is None else size.quotient(low.divisor)
        if low is None or low.divisor is None or count is None:
            found.append((part, size))
        else:
            found.append((Form.of({low: ONE}), low.divisor))
            left.append((Form.of({quotient_of(part, low.divisor): ONE}), count))
    return found


def _additions(kernel: Kernel, name: str) -> list[Site]:
    return [site for site in sites(kernel.body, _WRITES) if site.op.base.name == name]


class _Widener(Copier):
    """Moves what a mask says of memory into the value."""

    def __init__(self, source: Kernel, forms: Forms, added: Op) -> None:
        super().__init__(source)
        self.forms = forms
        self.added = added

    def effect(self, op: Op) -> None:
        """Additions."""
        if self.slicing or op is not self.added or op.mask is None:
            super().effect(op)
            return
        b, value = self.b, self[op.stored]
        if not _is_zero_outside(op.stored, op.mask):
            value = b.select(self[op.mask], value, b.zero(value))
        b.store(self[op.base], self.whole(op.offset), value, self.of_indices(op.mask), op.code)

    def of_indices(self, mask: Value) -> Value | None:
        """What a mask says of indices and of nothing else; None where that is nothing."""
        op = mask.producer
        if op is None:
            return None
        if op.code in (Code.AND, Code.OR):
            left, right = (self.of_indices(operand) for operand in op.operands)
            if op.code is Code.OR:
                return self._common(*op.operands)
            return left if right is None else right if left is None else self.b.logical_and(left, right)
        if op.code in _MOVES:
            inner = self.of_indices(op.operands[0])
            if inner is None:
                return None
            found = self.b.again(op, [inner])
            assert isinstance(found, Value)
            return found
        if op.code is Code.LOAD or (op.code is Code.CMP and op.attributes["predicate"] == "ne"):
            return self._loaded(mask)
        return self[mask] if whole_bounds(self.forms, mask) is not None else None

    def _common(self, one: Value, other: Value) -> Value | None:
        """What holds on either side of an OR."""
        theirs = set(_conjuncts(other))
        kept = [found for part in _conjuncts(one) if part in theirs and (found := self.of_indices(part)) is not None]
        total: Value | None = None
        for part in kept:
            total = part if total is None else self.b.logical_and(total, part)
        return total

    def _loaded(self, mask: Value) -> Value | None:
        """The mask of a load whose other lanes are false, or differ from zero by nothing."""
        op = mask.producer
        assert op is not None
        if op.code is Code.CMP:
            value, zero = op.operands
            if not _is_zero(zero):
                return None
            op = value.producer
            while op is not None and op.code is Code.CAST:
                op = op.operands[0].producer
        if op is None or op.code is not Code.LOAD or op.mask is None or op.other is None:
            return None
        return self.of_indices(op.mask) if _is_zero(op.other) else None


def _conjuncts(mask: Value) -> list[Value]:
    """What all must hold; of alternatives, what is common to them and the alternatives themselves."""
    op = mask.producer
    if op is not None and op.code is Code.AND:
        return [part for operand in op.operands for part in _conjuncts(operand)]
    if op is not None and op.code is Code.OR:
        left, right = (_conjuncts(operand) for operand in op.operands)
        return [mask, *(part for part in left if part in right)]
    return [mask]


def _is_zero_outside(value: Value, mask: Value) -> bool:
    """Whether a sum has nothing but zeros where none of a mask's alternatives holds: choices by these, or what a loop
    sums together with whether any trip's choice was made."""
    ways = {way for part in _conjuncts(mask) for way in _alternatives(part)}
    parts = [value]
    while parts:
        part = parts.pop()
        op = part.producer
        if op is None:
            return False
        if op.code is Code.ADD:
            parts += op.operands
        elif op.code is Code.FOR:
            if not any(way.producer is op and _together(op, part, way) for way in ways):
                return False
        elif op.code is not Code.SELECT or not _is_zero(op.operands[2]) or op.operands[0] not in ways:
            return False
    return True


def _alternatives(mask: Value) -> list[Value]:
    op = mask.producer
    if op is not None and op.code is Code.OR:
        return [mask, *(way for operand in op.operands for way in _alternatives(operand))]
    return [mask]


def _together(loop: Op, total: Value, ever: Value) -> bool:
    """Whether a loop begins with zero and false, and adds only what its own choice lets pass."""
    (block,) = loop.blocks
    at, flag = loop.results.index(total), loop.results.index(ever)
    if not _is_zero(loop.operands[3 + at]) or not _is_zero(loop.operands[3 + flag]):
        return False
    added, held = block.yields[at].producer, block.yields[flag].producer
    if added is None or held is None or added.code is not Code.ADD or held.code is not Code.OR:
        return False
    before, part = added.operands
    seen, mask = held.operands
    chosen = part.producer
    own = before is block.arguments[1 + at] and seen is block.arguments[1 + flag]
    choice = chosen is not None and chosen.code is Code.SELECT and chosen.operands[0] is mask
    return own and choice and chosen is not None and _is_zero(chosen.operands[2])


def _is_zero(value: Value) -> bool:
    """Or false."""
    return constant(unspread(value)) in (0, False)
