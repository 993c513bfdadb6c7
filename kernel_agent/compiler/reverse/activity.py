"""Which values of a forward depend on what a gradient is wanted of, by operations that have derivatives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.reverse.rules.registry import CONSTANT
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Block, Kernel, Op, Value


class Activity:
    """Values with a derivative, found by a fixed point over loops."""

    def __init__(self, kernel: Kernel, sources: frozenset[Value], forwarded: Mapping[Op, Op]) -> None:
        """`sources`: arguments whose gradient is wanted; `forwarded`: loads of what a store before them wrote."""
        self.varied: set[Value] = {value for value in sources if not value.is_pointer}
        self._sources = sources
        self._forwarded = forwarded
        self._bits: set[Value] = set()
        """Integers made of the bits of a varied float, or of such integers."""
        size = -1
        while size != len(self.varied) + len(self._bits):
            size = len(self.varied) + len(self._bits)
            self._block(kernel.body)

    def __contains__(self, value: Value) -> bool:
        return value in self.varied

    def _block(self, block: Block) -> None:
        for op in block.ops:
            if op.code is Code.FOR:
                self._loop(op)
            elif op.code is Code.WHILE:
                self._while(op)
            elif op.code is Code.IF:
                for inner in op.blocks:
                    self._block(inner)
                    self._flow(inner.yields, op.results)
            else:
                self._op(op)

    def _loop(self, op: Op) -> None:
        (block,) = op.blocks
        carries = block.arguments[1:]
        self._flow(op.operands[3:], carries)
        self._block(block)
        self._flow(block.yields, carries)
        self._flow(carries, op.results)

    def _while(self, op: Op) -> None:
        test, go_on = op.blocks
        self._flow(op.operands, test.arguments)
        self._block(test)
        self._flow(test.yields[1:], go_on.arguments)
        self._flow(test.yields[1:], op.results)
        self._block(go_on)
        self._flow(go_on.yields, test.arguments)

    def _flow(self, given: Sequence[Value], taken: Sequence[Value]) -> None:
        for one, other in zip(given, taken, strict=True):
            if one in self.varied:
                self.varied.add(other)
            if one in self._bits:
                self._bits.add(other)

    def _op(self, op: Op) -> None:
        if op.code is Code.LOAD:
            store = self._forwarded.get(op)
            if store is not None:
                self._flow([store.stored], op.results)
            elif op.base in self._sources and op.result.is_float:
                self.varied.add(op.result)
            if op.other is not None:
                self._flow([op.other], op.results)
            return
        operands = op.operands[:1] if op.code is Code.KNOWN else op.operands
        if any(value in self._bits for value in operands) and op.code is not Code.CMP:
            if op.code is Code.BITCAST and op.result.is_float:
                raise CannotDerive(
                    f"a float is made of bits{op.result.where} that come from an input: that has no derivative rule",
                    remedy="mark the input as one without gradient, or compute the value by arithmetic; `tl.sort` and "
                    "`tl.topk` swap bits: find places by them on a tensor without gradient, and load the values there",
                )
            self._bits.update(result for result in op.results if not result.is_float)
        if any(value in self.varied for value in operands):
            if op.code is Code.BITCAST:
                self._bits.update(op.results)
            elif op.code not in CONSTANT:
                self.varied.update(result for result in op.results if result.is_float)
