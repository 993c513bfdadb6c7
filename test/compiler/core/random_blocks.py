"""Blocks that are filled operation by operation, and random picks among the values in sight."""

import random
from collections.abc import Callable

from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.shapes import result_shape
from kernel_agent.compiler.ssa.value import Block, Kernel, Op, Value, broadcast_shape

SIZE = 16
"""Elements of every tensor: a power of two, so that a conjunction with SIZE - 1 is an address."""


class RandomBlocks:
    """The blocks of a kernel from the outermost to the one that is being filled."""

    def __init__(self, seed: int, kernel: Kernel, seen: list[Value]) -> None:
        """`seen`: arguments that may be operands."""
        self.random = random.Random(seed)
        self.kernel = kernel
        self.blocks = [kernel.body]
        self.seen: list[list[Value]] = [seen]

    def op(self, code: Code, operands, element: str, shape=None, blocks=(), **attributes) -> Value:
        """One operation where we are."""
        shape = result_shape(code, [value.shape for value in operands], attributes, shape or ())
        return self.add(Op(code, operands, [Value(element, shape)], attributes, blocks))[0]

    def add(self, op: Op) -> tuple[Value, ...]:
        self.blocks[-1].ops.append(op)
        for value in op.results:
            value.depth = len(self.blocks) - 1
        self.seen[-1].extend(op.results)
        return op.results

    def const(self, element: str, value=None) -> Value:
        if value is None:
            value = self.random.choice({"i1": (True, False), "f": (0.0, 1.0, -1.0, 0.5), "i": (0, 1, 2, -3, 7)}.get(
                element if element == "i1" else element[0]))  # fmt: skip
        return self.op(Code.CONST, (), element, value=value, symbol=None)

    def inside(self, arguments: list[Value], body: Callable[[], list[Value]]) -> Block:
        """A block made by a function, which returns what it yields."""
        block = Block(arguments)
        self.blocks.append(block)
        self.seen.append(list(arguments))
        for value in arguments:
            value.depth = len(self.blocks) - 1
        block.yields = body()
        self.blocks.pop()
        self.seen.pop()
        return block

    def pick(self, *elements: str, rank: int | None = None, like: Value | None = None) -> Value:
        """Something in sight of one of some elements; a constant where there is nothing."""
        found = [
            value
            for scope in self.seen
            for value in scope
            if value.element in elements
            and (rank is None or len(value.shape) == rank)
            and (like is None or goes_with(value, like))
        ]
        if found:
            return self.random.choice(found[-12:] if self.random.random() < 0.7 else found)
        value = self.const(elements[0])
        return value if not rank else self.op(Code.FULL, (value,), elements[0], (4,) * rank)

    def places(self, value: Value) -> Value:
        """An address in bounds."""
        return self.op(Code.AND, (value, self.const(value.element, SIZE - 1)), value.element)

    def whole(self, value: Value, shape: tuple[int, ...]) -> Value:
        if value.shape == shape:
            return value
        return self.op(Code.FULL if value.shape == () else Code.BROADCAST, (value,), value.element, shape)


def goes_with(value: Value, like: Value) -> bool:
    """Whether two values may be operands of one elementwise operation."""
    try:
        broadcast_shape([value.shape, like.shape])
    except ValueError:
        return False
    return True
