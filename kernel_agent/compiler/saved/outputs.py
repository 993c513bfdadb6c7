"""`use_saved`: what the forward stored is loaded by the backward, where computing it again would take a loop or a sum.

A value whose store is the only one to its tensor, at an address that the backward can compute without much work,
becomes KNOWN: adjoints flow to what it was computed of, but the number is loaded. Statistics of normalisations,
log-sum-exps and results of attention come back this way, and the loops that made them are gone.

That the tensor still holds what this program stored relies on the forward: its programs do not store different values
to one address (it would have no defined result), and nobody writes the tensor between forward and backward, which the
stub has to see to, as autograd does for tensors it saves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kernel_agent.compiler.reverse.checkpoints import LONG, trips_of
from kernel_agent.compiler.reverse.disjoint import Apart
from kernel_agent.compiler.reverse.extents import Extents
from kernel_agent.compiler.saved.athand import at_hand
from kernel_agent.compiler.saved.lanes import Lanes
from kernel_agent.compiler.saved.sides import Sides
from kernel_agent.compiler.saved.slots import Slot, is_start_outside, picked, slots_of
from kernel_agent.compiler.saved.sums import spares_loads
from kernel_agent.compiler.schedule.calls import Calls
from kernel_agent.compiler.schedule.forms import Forms, Launch
from kernel_agent.compiler.schedule.zeros import Zeros
from kernel_agent.compiler.ssa.code import CONTROL, MEMORY, Code
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.uses import Uses, captured, written_to
from kernel_agent.compiler.ssa.value import NARROW, Block, Kernel, Op, Value, constant, walk

HEAVY = CONTROL | {
    Code.SUM, Code.REDUCE_MAX, Code.REDUCE_MIN, Code.ARG_MAX, Code.ARG_MIN, Code.REDUCE, Code.CUMSUM, Code.SCAN,
    Code.LINEAR_SCAN, Code.LINEAR_SCAN_BEFORE, Code.DOT,
}  # fmt: skip
"""What is not computed again where the result can be loaded."""


@dataclass(frozen=True)
class Saved:
    """A forward whose derivative reads what it stored."""

    kernel: Kernel
    """To be differentiated, not to be run: some of its values are loaded from what it stores."""
    read: frozenset[str]
    """Arguments the forward wrote that the backward may read; `saved_reads` says which of them it does in the end."""
    remarks: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()
    """Python over names of the launch: what has to hold for stores of the forward not to meet."""


@dataclass(frozen=True)
class Place:
    """Memory that holds a value after the forward."""

    store: Op
    value: Value
    """What is stored, before it was widened or, where that is allowed, narrowed."""
    lossy: bool
    """Memory has fewer bits than the value."""
    inverse_of: float | None = None
    """What is stored is this number divided by the value: derivatives of 1 / sqrt(v) ask for sqrt(v)."""
    facts: tuple[str, ...] = ()
    """See `Saved`."""
    zero: bool = False
    """Where the store is masked, the value is zero."""


def use_saved(kernel: Kernel, lost: frozenset[str] = frozenset(), calls: Calls | None = None) -> Saved:
    """A kernel with values KNOWN from memory, but for that of the arguments in `lost`. `calls`: launches that were
    seen, on whose numbers facts rely.

    What the forward rounded to a narrower element when it stored it is computed again, unless that takes a loop of
    matrix products, or a tape: the output of attention is taken as it was rounded, as FlashAttention-2 does, and so is
    what the forward itself stored in 16 bits of the start of each trip, where a tape would be twice as wide. That is
    for loops of few trips: over many the errors would add up, and their tapes are cut into segments.
    """
    remarks: list[str] = []
    taken: dict[Value, Place] = {}
    lanes, uses = Lanes(kernel), Uses.of(kernel)
    if at_hand(kernel, calls):
        return Saved(kernel, frozenset(), ("what was stored is computed again, of rows that are loaded anyway",))
    for place in places(kernel, remarks, calls, zeroed=True):
        value = place.value
        spares = not place.lossy and spares_loads(value, uses)
        if value in taken or not (spares or is_heavy(value, taken) or _is_found(value)):
            continue
        base = place.store.base
        if base.name in lost:
            remarks.append(f"{_called(value)} is computed again: {base.name} is overwritten later")
            continue
        rounded = _takes_products(value, taken) or _spares_a_tape(kernel, place, calls)
        if place.lossy and not rounded:
            remarks.append(f"{_called(value)} is computed again: {base.name} holds it in {base.pointee} only")
            continue
        taken[value] = place
        remarks.append(f"{_called(value)} is read from {base.name}")
        divisor = _divisor(lanes, place)
        if divisor is not None:
            taken.setdefault(divisor.value, divisor)
    if not taken:
        return Saved(kernel, frozenset(), tuple(remarks))
    stored = [(value, place.store) for value, place in taken.items()]
    slots = {slot.value: slot for slot in slots_of(kernel, stored, calls) if is_heavy(slot.value, taken)}
    found = _Substitution(kernel, taken, slots).copy()
    facts = [fact for place in taken.values() for fact in place.facts]
    facts = list(dict.fromkeys((*facts, *(fact for slot in slots.values() for fact in slot.facts))))
    return Saved(found, frozenset(place.store.base.name for place in taken.values()), tuple(remarks), tuple(facts))


def saved_reads(kernel: Kernel, written: Iterable[str]) -> frozenset[str]:
    """Arguments among `written`, by name, that a backward loads from."""
    return frozenset(op.base.name for op in kernel.ops if op.code is Code.LOAD) & frozenset(written)


def places(kernel: Kernel, remarks: list[str], calls: Calls | None = None, *, zeroed: bool = False) -> list[Place]:
    """Where the values of a kernel can be loaded from after it has run, in the order they are computed in.

    `calls`: launches whose numbers may tell stores to one tensor apart, which none do without. `zeroed`: also values
    that are used where their store is masked, and zero there, as states of a recurrence beyond the last column.
    """
    lanes, apart, sides = Lanes(kernel), Apart(kernel), Sides(kernel)
    zeros = Zeros(Forms(kernel, Launch.like_forward(3)))
    written = written_to(kernel.body)
    accesses: dict[Value, list[Op]] = {}
    homes: dict[Op, Block] = {}
    nests: list[tuple[Op, Block, tuple[Op, ...]]] = []

    def visit(block: Block, loops: tuple[Op, ...]) -> None:
        for op in block.ops:
            homes[op] = block
            if op.code in MEMORY and not op.attributes.get("saved"):
                accesses.setdefault(op.base, []).append(op)
            if op.code is Code.STORE:
                nests.append((op, block, loops))
            for inner in op.blocks:
                visit(inner, loops if op.code is Code.IF else (*loops, op))

    visit(kernel.body, ())
    found = []
    for store, block, loops in nests:
        value, narrowed = _source(store)
        op = value.producer
        carried = value in block.arguments
        here = carried if op is None else homes.get(op) is block
        if value.element == "i1" or not here or value.shape != store.offset.shape:
            continue
        name = store.base.name
        others = [one for one in accesses[store.base] if one is not store and not sides.apart(store, one)]
        facts: tuple[str, ...] | None = () if _has_its_own(store, others, apart) else None
        if facts is None and calls is not None:
            facts = _own_if(kernel, store, others, calls)
        if facts is None:
            if is_heavy(value, ()):
                remarks.append(
                    f"{_called(value)} is not read back: {name} is accessed at several places of the forward"
                )
            continue
        address = _slice((store.offset, *([] if store.mask is None else [store.mask])))
        if value in address or any(_costly(part, written) for part in address):
            continue
        each = all(loop.code is Code.FOR and loop.blocks[0].arguments[0] in address for loop in loops)
        if not each or (carried and not apart.tells_trips(store, strided=True)):
            if is_heavy(value, ()):
                remarks.append(f"{_called(value)} is not read back: trips of a loop store it to one place of {name}")
            continue
        confined = lanes.confined(value, store.mask)
        zero = (
            zeroed
            and not confined
            and value.is_float
            and store.mask is not None
            and (zeros.confines(value, store.mask) or is_start_outside(kernel, value, store.mask, 0.0, value))
        )
        if not zero and not (confined and (value.is_float or lanes.spared(value, store.mask))):
            if is_heavy(value, ()):
                remarks.append(f"{_called(value)} is not read back: it is used where the store to {name} is masked")
            continue
        found.append(Place(store, value, narrowed, facts=facts, zero=zero))
    order = {op: place for place, op in enumerate(homes)}
    return sorted(found, key=lambda place: order[place.value.producer] if place.value.producer else 0)


def _has_its_own(store: Op, others: Iterable[Op], apart: Apart) -> bool:
    """Whether nothing else that a program does to a tensor meets a store, as in planes of their own."""
    return all(op.code is Code.STORE and apart.proved(store, op) for op in others)


def _own_if(kernel: Kernel, store: Op, others: Iterable[Op], calls: Calls) -> tuple[str, ...] | None:
    """What has to hold for that, as it did in all calls; None where that is not known."""
    apart = Apart(kernel, calls)
    return tuple(apart.facts) if _has_its_own(store, others, apart) else None


def is_heavy(value: Value, cut: Iterable[Value]) -> bool:
    """Whether computing a value takes a loop, a reduction or a product. What is in `cut` comes for free."""
    op = value.producer
    around = () if op is None else (*op.operands, *captured(op.blocks))
    parts = _slice(around, frozenset(cut)) | {value}
    return any(part.producer.code in HEAVY if part.producer else _is_carry(part) for part in parts)


def _is_found(value: Value) -> bool:
    """Whether a value is an index, or the like, that comparisons of numbers decide: memory spares reading these."""
    if value.is_float or value.element == "i1":
        return False
    tests = (part.producer for part in _slice([value]) if part.producer is not None and part.element == "i1")
    return any(test.code is Code.CMP and test.operands[0].is_float for test in tests)


def _takes_products(value: Value, cut: Iterable[Value]) -> bool:
    """Whether computing a value takes a loop of matrix products."""
    found = (part.producer for part in _slice([value], frozenset(cut) - {value}))
    loops = [op for op in found if op is not None and op.code in (Code.FOR, Code.WHILE)]
    return any(inner.code is Code.DOT for loop in loops for block in loop.blocks for inner in walk(block))


def _spares_a_tape(kernel: Kernel, place: Place, calls: Calls | None) -> bool:
    """Whether a value is what each of few trips of a loop begins with, stored in 16 bits."""
    loops = [op for op in kernel.ops if op.code is Code.FOR and place.value in op.blocks[0].arguments[1:]]
    if not loops or calls is None or _bits(place.store.base.pointee) != 16:
        return False
    trips = trips_of(loops[0], Extents({op.blocks[0].arguments[0]: op for op in kernel.ops if op.code is Code.FOR}))
    return bool(trips) and (calls.foreseen(trips) or LONG) < LONG


def load_back(copier: Copier, place: Place, other: float | None = None) -> Value:
    """The number that a place holds, loaded where the copier is, in the element of the value.

    `other`: what lanes get where the store was masked; by default 0 if the value is zero there, else 1 if something
    divides by it, else 0. Nobody reads them then, but they must not make infinities that meet a zero.
    """
    b, store = copier.b, place.store
    mask = None if store.mask is None else copier[store.mask]
    pointee = store.base.pointee
    if other is None:
        other = 1.0 if not place.zero and _divides(Uses.of(copier.source), place.value) else 0.0
    padding = None if mask is None else b.const(other, pointee)
    number = b.load(store.base, copier.whole(store.offset), mask, padding, place.value.name, saved=True)
    number = b.cast(number, place.value.element)
    return number if place.inverse_of is None else b.div(b.const(place.inverse_of, number.element), number)


class _Substitution(Copier):
    """Makes values KNOWN."""

    def __init__(self, source: Kernel, taken: dict[Value, Place], slots: Mapping[Value, Slot]) -> None:
        super().__init__(source)
        self.taken = taken
        self.slots = slots

    def op(self, op: Op) -> None:
        super().op(op)
        self._read(op.results)

    def entered(self, op: Op) -> None:
        """What a trip begins with may have been stored by it, as states of a recurrence are."""
        self._read(op.blocks[0].arguments[1:])

    def _read(self, values: Iterable[Value]) -> None:
        for value in values:
            if value in self.taken:
                self[value] = self.b.known(self[value], load_back(self, self.taken[value]))
            elif value in self.slots:
                slot = self.slots[value]
                self[value] = self.b.known(self[value], picked(self, slot, load_back(self, self.taken[slot.tile])))


def _source(store: Op) -> tuple[Value, bool]:
    """What a store writes before its element was changed, and whether bits were lost then."""
    value = store.stored
    op = value.producer
    if op is not None and op.code is Code.CAST and _keeps_whole(op.operands[0], value):
        return op.operands[0], False
    if op is not None and op.code is Code.CAST and op.operands[0].is_float and value.is_float:
        inner = op.operands[0]
        return inner, _bits(value.element) < _bits(inner.element) or value.element in NARROW
    return value, False


def _divisor(lanes: Lanes, place: Place) -> Place | None:
    """Where what is stored is a constant over a value, that value."""
    op = place.value.producer
    if op is None or op.code is not Code.DIV:
        return None
    number, value = constant(op.operands[0]), op.operands[1]
    if number is None or value.shape != place.value.shape or not lanes.confined(value, place.store.mask):
        return None
    return Place(place.store, value, place.lossy, float(number))


def _bits(element: str) -> int:
    return 8 if element.startswith("f8") else int(element.lstrip("bfi"))


def _keeps_whole(before: Value, after: Value) -> bool:
    """Whether a conversion of integers keeps every value, and one back gives it again."""
    both = [value.element for value in (before, after)]
    return all(element in ("i8", "i16", "i32", "i64") for element in both) and _bits(both[0]) <= _bits(both[1])


def _slice(values: Iterable[Value], cut: frozenset[Value] = frozenset()) -> set[Value]:
    """All that values are computed of, themselves included; a KNOWN needs its number only."""
    found: set[Value] = set()
    stack = list(values)
    while stack:
        value = stack.pop()
        if value in found or value in cut:
            continue
        found.add(value)
        op = value.producer
        if op is not None:
            stack.extend(op.operands[1:] if op.code is Code.KNOWN else (*op.operands, *captured(op.blocks)))
    return found


def _costly(value: Value, written: frozenset[Value]) -> bool:
    """Whether a part of an address is more than index arithmetic on what the forward left alone."""
    op = value.producer
    if op is None:
        return False
    return op.code in HEAVY or (op.code is Code.LOAD and op.base in written and not op.attributes.get("saved"))


def _is_carry(value: Value) -> bool:
    """Whether a value without a producer is an argument of a loop that has derivatives."""
    return value.is_float and value.depth > 0


def _divides(uses: Uses, value: Value) -> bool:
    """Whether zeros of a value would make infinities."""
    for op in uses[value]:
        if op.code in (Code.DIV, Code.REM) and op.operands[1] is value:
            return True
        if op.code in (Code.LOG, Code.LOG2, Code.RSQRT, Code.SQRT):
            return True
        if op.code in (Code.EXPAND, Code.BROADCAST, Code.FULL, Code.CAST, Code.TRANS) and _divides(uses, op.result):
            return True
    return False


def _called(value: Value) -> str:
    return f"`{value.name}`" if value.name else "a stored value"
