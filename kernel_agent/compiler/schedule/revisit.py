"""`revisited`: tiles that a later loop loads again stay in the caches until then, and leave them at once after it.

A row that takes several trips is read twice where a sum over all of it comes first. The caches hold what all programs
of a processor have read so far, if what nobody reads again makes room for it.
"""

from __future__ import annotations

from collections.abc import Iterator

from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.value import Block, Kernel, Op, Value

KEPT, GONE = "evict_last", "evict_first"


def revisited(kernel: Kernel) -> Kernel:
    """The kernel with eviction policies for loads of loops that run one after the other over the same tiles.

    Tiles that other programs read, too, are left to the caches, and so are operands of products. What the last of the
    loops stores makes room for what others have yet to read again.
    """
    policies: dict[Op, str] = {}
    for block in (kernel.body, *(inner for op in kernel.ops for inner in op.blocks)):
        loops = [op for op in block.ops if op.code is Code.FOR]
        for place, first in enumerate(loops):
            for later in loops[place + 1 :]:
                for load, again in _twice(kernel, first, later):
                    policies[load] = KEPT
                    policies[again] = GONE
    lasts = [
        op for op in kernel.ops if op.code is Code.FOR and any(policies.get(one) == GONE for one in op.blocks[0].ops)
    ]
    stores = (one for loop in lasts for one in loop.blocks[0].ops if one.code is Code.STORE and one.stored.shape)
    policies |= dict.fromkeys(stores, GONE)
    return _Revisited(kernel, policies).copy() if policies else kernel


def _twice(kernel: Kernel, first: Op, later: Op) -> Iterator[tuple[Op, Op]]:
    """Loads of a loop, each with the one of a later loop that loads the same tiles."""
    if first.operands[:3] != later.operands[:3] or any(op.code is Code.DOT for op in kernel.ops):
        return
    written = {op.base for op in kernel.ops if op.code in (Code.STORE, Code.ATOMIC_ADD, Code.ATOMIC)}
    programs = {op.result for op in kernel.ops if op.code is Code.PROGRAM_ID}
    same = {first.blocks[0].arguments[0]: later.blocks[0].arguments[0]}
    for load in _loads(first.blocks[0]):
        if load.base in written or not load.result.shape or not programs <= _made_of(load.offset):
            continue
        for again in _loads(later.blocks[0]):
            if again.base is load.base and _alike(load.offset, again.offset, same):
                yield load, again
                break


def _loads(block: Block) -> list[Op]:
    return [op for op in block.ops if op.code is Code.LOAD]


def _made_of(value: Value) -> set[Value]:
    """All values that one depends on, and itself."""
    found, pending = set[Value](), [value]
    while pending:
        one = pending.pop()
        if one not in found:
            found.add(one)
            pending += one.producer.operands if one.producer is not None else ()
    return found


def _alike(one: Value, other: Value, same: dict[Value, Value]) -> bool:
    """Whether a value of a loop is what another one is in a later loop; `same`: what is known to be, which grows."""
    if one is other or same.get(one) is other:
        return True
    left, right = one.producer, other.producer
    if left is None or right is None or left.code is not right.code or left.attributes != right.attributes:
        return False
    if left.blocks or left.code is Code.LOAD or len(left.operands) != len(right.operands):
        return False
    if not all(_alike(a, b, same) for a, b in zip(left.operands, right.operands, strict=True)):
        return False
    same[one] = other
    return True


class _Revisited(Copier):
    """Copies a kernel, with policies for loads."""

    def __init__(self, source: Kernel, policies: dict[Op, str]) -> None:
        super().__init__(source)
        self.policies = policies

    def load(self, op: Op) -> None:
        """A LOAD."""
        super().load(op)
        made = self[op.result].producer
        if made is not None:
            self._hint(op, made)

    def effect(self, op: Op) -> None:
        """A STORE among others."""
        super().effect(op)
        if not self.slicing:
            self._hint(op, self.b.scopes[-1].block.ops[-1])

    def _hint(self, op: Op, made: Op) -> None:
        if op in self.policies and not made.attributes.get("eviction_policy"):
            made.attributes["eviction_policy"] = self.policies[op]
