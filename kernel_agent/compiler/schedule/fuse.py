"""`fused`: loops over the same trips that do not need each other's results, as one: what both load is loaded once."""

from __future__ import annotations

from kernel_agent.compiler.ssa.code import MEMORY, Code
from kernel_agent.compiler.ssa.order import only_adds
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.uses import captured, tapes_of
from kernel_agent.compiler.ssa.value import Block, Kernel, Op, Value, walk


def fused(kernel: Kernel, *, products: bool = False) -> Kernel:
    """A kernel in which of two loops over the same trips the second depends on the first, or on what is between.

    Two loops of products stay two, unless `products` says otherwise: together their tiles would not fit in registers.
    """
    while True:
        pair = _pair(kernel, products)
        if pair is None:
            return kernel
        kernel = _Fused(kernel, *pair).copy()


def _pair(kernel: Kernel, products: bool) -> tuple[Op, Op] | None:
    for block in (kernel.body, *(block for op in kernel.ops for block in op.blocks)):
        for place, loop in enumerate(block.ops):
            if loop.code is not Code.FOR:
                continue
            for later in block.ops[place + 1 :]:
                if later.code is Code.FOR and same_trips(loop, later) and _free(block, place, later, products):
                    return loop, later
    return None


def same_trips(one: Op, other: Op) -> bool:
    """Whether two FORs have the same bounds, run forwards, and none remembers trips by tapes."""
    if one.operands[:3] != other.operands[:3] or one.attributes["reverse"] or other.attributes["reverse"]:
        return False
    return not any(
        next(tapes_of(loop.blocks[0], code), None) is not None
        for loop in (one, other)
        for code in (Code.TAPE_STORE, Code.TAPE_LOAD)
    )


def _free(block: Block, place: int, later: Op, products: bool) -> bool:
    """Whether a loop can run where the operation at `place` does: it needs no loop since, and only adds to memory."""
    if not _may_move(later) or not _may_move(block.ops[place]):
        return False
    if not products and all(any(op.code is Code.DOT for op in _all(loop)) for loop in (later, block.ops[place])):
        return False
    between = block.ops[place : block.ops.index(later)]
    stores = {op.base for one in between for op in _all(one) if op.code in (Code.STORE, Code.ATOMIC, Code.ATOMIC_ADD)}
    if any(op.code in (Code.LEAVE_IF, Code.BARRIER, Code.TAPE_STORE) for one in between for op in _all(one)):
        return False
    if any(op.code is Code.LOAD and op.base in stores for op in _all(later)):
        return False
    adds = {op.base for op in _all(later) if op.code is Code.ATOMIC_ADD}
    others = (op for one in between for op in _all(one) if op.code in MEMORY and op.code is not Code.ATOMIC_ADD)
    if any(op.base in adds for op in others):
        return False
    blocked = {result for op in between if op.blocks for result in op.results}
    memory = {op.result for op in between if op.code is Code.LOAD and op.base in stores}
    needed = [*later.operands, *captured(later.blocks)]
    seen: set[Value] = set()
    while needed:
        value = needed.pop()
        if value in seen:
            continue
        seen.add(value)
        if value in blocked or value in memory:
            return False
        if value.producer is not None and value.producer in between:
            needed.extend((*value.producer.operands, *captured(value.producer.blocks)))
    return True


def _may_move(loop: Op) -> bool:
    """Whether a loop only adds to memory, and neither waits nor remembers trips."""
    bad = (Code.BARRIER, Code.TAPE_STORE, Code.TAPE_LOAD, Code.WHILE)
    return all(map(only_adds, loop.blocks)) and not any(op.code in bad for op in _all(loop))


def _all(op: Op) -> list[Op]:
    return [op, *(inner for block in op.blocks for inner in walk(block))]


class _Fused(Copier):
    """Copies two loops as one, where the first stands."""

    def __init__(self, source: Kernel, first: Op, second: Op) -> None:
        super().__init__(source)
        self.first = first
        self.second = second

    def op(self, op: Op) -> None:
        if op is not self.second:
            super().op(op)

    def loop(self, op: Op) -> None:
        if op is not self.first:
            super().loop(op)
            return
        both = (self.first, self.second)
        b = self.b
        start, stop, step = self.all(op.operands[:3])
        self.all(value for value in captured(self.second.blocks) if not value.is_pointer)
        carries = [self.whole(value) for loop in both for value in loop.operands[3:]]

        def body(index: Value, inner: list[Value]) -> list[Value]:
            found: list[Value] = []
            for loop in both:
                (block,) = loop.blocks
                count = len(loop.results)
                mine, inner = inner[:count], inner[count:]
                self.enter(block.arguments, (index, *mine))
                found.extend(self.block(block))
            return found

        names = [value.name for loop in both for value in loop.blocks[0].arguments[1:]]
        index_name = op.blocks[0].arguments[0].name
        results = b.loop((start, stop, step), carries, body, index_name=index_name, names=names, **self.attributes(op))
        old = [value for loop in both for value in loop.results]
        for value, new in zip(old, results, strict=True):
            self[value] = new
