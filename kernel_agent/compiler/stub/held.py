"""`onto_held`: launches that add to the gradients which other launches left, instead of to memory of their own.

What several launches give one tensor would be summed by torch otherwise: each part is written, read, written once more
as a row of a stack, read and summed. Here a store becomes a load, an addition and a store of the same element, and
atomic additions start from what is there instead of from zeros. What is known to be zero is stored to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch import Tensor

from kernel_agent.compiler.plan import BackwardPlan, Buffer, Fill
from kernel_agent.compiler.reverse.elements import adjoint_element
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.rebuild import Copier, emptied
from kernel_agent.compiler.ssa.value import NARROW, Kernel, Op, Value, walk
from kernel_agent.compiler.stub.buffers import element_of
from kernel_agent.compiler.stub.cotangents import Cotangents


def widened(
    plan: BackwardPlan, tensors: Mapping[str, Tensor], others: Iterable[tuple[Kernel, Mapping[str, Tensor]]]
) -> BackwardPlan:
    """The plan with float32 for gradients to which this launch or another one adds sums over many elements.

    What several launches sum may cancel, as the derivatives of moments about a pivot do: in 16 bits each sum would have
    been rounded before. `others`: forwards of launches whose turn comes later, and their arguments.
    """
    wide: dict[str, str] = {}
    there = list(others)
    for buffer in plan.buffers:
        tensor, codes = tensors.get(buffer.like), _codes(plan, buffer.name)
        if tensor is None or buffer.element not in NARROW or codes[:1] != [{Code.STORE}]:
            continue
        shared = [(kernel, name) for kernel, given in there for name, one in given.items() if one is tensor]
        sums = {Code.LOAD, Code.STORE} in codes[1:] or any(_has_pivot(kernel, name) for kernel, name in shared)
        if shared and sums:
            wide[buffer.name] = "f32"
    steps = tuple(replace(step, kernel=_adding(step.kernel, wide, adds=False)) for step in plan.steps)
    buffers = tuple(replace(one, element=wide.get(one.name, one.element)) for one in plan.buffers)
    return replace(plan, buffers=buffers, steps=steps) if wide else plan


def _has_pivot(kernel: Kernel, name: str) -> bool:
    """Whether a kernel loads some elements of a tensor for all that a loop loads of it."""
    loops = [op for op in kernel.body.ops if op.code is Code.FOR]
    looped = any(_loads(op, name) for loop in loops for block in loop.blocks for op in walk(block))
    return looped and any(_loads(op, name) for op in kernel.body.ops)


def _loads(op: Op, name: str) -> bool:
    return op.code is Code.LOAD and op.base.name == name


def onto_held(
    plan: BackwardPlan, tensors: Mapping[str, Tensor], types: Mapping[str, str], cotangents: Cotangents
) -> BackwardPlan:
    """The plan with the gradients for which memory is there, of the tensor's layout and read by nothing else.

    Elements are stored to once, and the launches are given what is there as it is: no proof of the plan changes, and
    nothing has to cover the tensor. `tensors`, `types`: arguments of the forward's launch.
    """
    found: dict[str, Buffer] = {}
    pointers: dict[str, str] = {}
    fresh: dict[str, str] = {}
    for buffer in plan.buffers:
        tensor = tensors.get(buffer.like)
        if tensor is None or plan.gradients.get(buffer.like) != buffer.name:
            continue
        there = cotangents.own(tensor)
        twice = any(tensors[other.like] is tensor for other in found.values())
        if there is None or twice or list(plan.gradients.values()).count(buffer.name) != 1:
            continue
        first, *rest = _codes(plan, buffer.name) or [set[Code]()]
        codes = first if all(codes == {Code.LOAD, Code.STORE} for codes in rest) else set()
        if codes == {Code.ATOMIC_ADD} and buffer.element == "f32":
            found[buffer.name] = replace(buffer, fill=Fill.HELD, empty_if="")
        elif codes == {Code.STORE}:
            found[buffer.name] = replace(buffer, element=there.element, fill=Fill.HELD, empty_if="")
            (fresh if there.fresh else pointers)[buffer.name] = there.element or element_of(types[buffer.like])
    steps = tuple(
        replace(step, kernel=_adding(_adding(step.kernel, pointers), fresh, adds=False)) for step in plan.steps
    )
    return replace(plan, buffers=tuple(found.get(one.name, one) for one in plan.buffers), steps=steps)


def _codes(plan: BackwardPlan, name: str) -> list[set[Code]]:
    """What each launch that has a buffer does with it."""
    found = []
    for step in plan.steps:
        codes = {op.code for op in step.kernel.ops if "base" in op.attributes and op.base.name == name}
        found += [codes] if codes else []
    return found


def _adding(kernel: Kernel, elements: Mapping[str, str], *, adds: bool = True) -> Kernel:
    """The kernel with sums for stores to the named arguments, which point to these elements. Where it loads from one,
    it adds to what an earlier launch stored, and so does the kernel that is made. Without `adds` it stores as it did.
    """
    changed = {v: Value(f"*{elements[v.name]}", (), v.name) for v in kernel.arguments if v.name in elements}
    return _Adder(kernel, changed, adds).copy() if changed else kernel


class _Adder(Copier):
    """Stores other elements, and adds to what is there where the source stores, if it `adds`."""

    def __init__(self, source: Kernel, changed: Mapping[Value, Value], adds: bool) -> None:
        empty = emptied(source, arguments=[changed.get(value, value) for value in source.arguments])
        super().__init__(source, Builder(empty))
        self.b.written = frozenset(changed.get(value, value) for value in self.written)
        self.changed = changed
        self.adds = adds
        self.loaded = {op.base for op in source.ops if op.code is Code.LOAD}
        for old, new in changed.items():
            self[old] = new

    def pure(self, op: Op) -> None:
        """What was there, from the element that it has now."""
        before = op.operands[0].producer if op.code is Code.CAST else None
        if before is not None and before.code is Code.LOAD and before.base in self.changed:
            self[op.result] = self.b.cast(self[before.result], op.result.element)
        else:
            super().pure(op)

    def load(self, op: Op) -> None:
        """Of what was there."""
        if op.base not in self.changed:
            super().load(op)
            return
        base, mask = self.changed[op.base], None if op.mask is None else self[op.mask]
        zero = None if mask is None else self.b.const(0.0, base.pointee)
        self[op.result] = self.b.load(base, self.whole(op.offset), mask, zero)

    def effect(self, op: Op) -> None:
        """Stores."""
        if self.slicing or op.code is not Code.STORE or op.base not in self.changed:
            super().effect(op)
            return
        b, base = self.b, self.changed[op.base]
        wide = adjoint_element(base.pointee)
        value = self[op.stored]
        made = value.producer
        if made is not None and made.code is Code.CAST and made.operands[0].element == wide:
            (value,) = made.operands  # rounded once, as part of the sum
        offset, mask = self.whole(op.offset), None if op.mask is None else self[op.mask]
        if op.base in self.loaded or not self.adds:
            b.store(base, offset, b.cast(value, base.pointee), mask)
            return
        before = b.load(base, offset, mask, None if mask is None else b.const(0.0, base.pointee))
        total = b.add(b.cast(before, wide), b.cast(value, wide))
        b.store(base, offset, b.cast(total, base.pointee), mask)
