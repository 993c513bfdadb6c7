"""`verify`: whether a kernel is well formed. Tests call it after every pass: a mistake shows where it was made."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Sequence

from kernel_agent.compiler.ssa.code import CONTROL, ELEMENTWISE, MEMORY, Code
from kernel_agent.compiler.ssa.shapes import result_shape
from kernel_agent.compiler.ssa.uses import captured
from kernel_agent.compiler.ssa.value import Block, Kernel, Op, Value, broadcast_shape
from kernel_agent.errors import InternalError


def verify(kernel: Kernel) -> None:
    """Raises InternalError, naming the operation, where a value is read that is not in sight, or shapes, elements,
    carries, masks or bases are not what `Code` says."""
    names = [value.name for value in kernel.arguments]
    if len(set(names)) < len(names) or "" in names:
        raise InternalError(f"{kernel.name}: arguments need names of their own: {names}")
    _Verifier(kernel).block(kernel.body, set(kernel.arguments), 0)


class _Verifier:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.made: set[Value] = set()
        self.changed = False
        """Memory was, by an operation before."""

    def block(self, block: Block, outside: set[Value], depth: int) -> None:
        """A block and all within; `outside` is what it may read of the blocks around."""
        seen = set(outside)
        self._make(block.arguments, seen, depth, None)
        for op in block.ops:
            for value in op.operands:
                self.expect(value in seen, op, f"{value!r} is not in sight")
                self.expect(not value.is_pointer, op, f"{value!r} is a pointer; offsets are what is computed with")
            self.check(op)
            for inner in op.blocks:
                if op.code in (Code.REDUCE, Code.SCAN):
                    scalar = all(i.code in _SCALAR and not i.result.shape for i in inner.ops)
                    self.expect(scalar and not any(v.shape for v in captured([inner])), op, "a combine is of scalars")
                self.block(inner, seen, depth + 1)
            self._make(op.results, seen, depth, op)
        for value in block.yields:
            if value not in seen:
                raise InternalError(f"{self.kernel.name}: {value!r} is yielded but not in sight")

    def _make(self, values: Sequence[Value], seen: set[Value], depth: int, op: Op | None) -> None:
        for value in values:
            if value in self.made:
                raise InternalError(f"{self.kernel.name}: {value!r} is made twice")
            if value.producer is not op:
                raise InternalError(f"{self.kernel.name}: {value!r} says that {value.producer!r} makes it, not {op!r}")
            if value.depth != depth:
                raise InternalError(f"{self.kernel.name}: {value!r} is made at depth {depth}, but says {value.depth}")
        self.made.update(values)
        seen.update(values)

    def expect(self, holds: bool, op: Op, otherwise: str) -> None:
        """Raise unless something holds."""
        if not holds:
            raise InternalError(f"{self.kernel.name}: {otherwise}\n  in {op!r}")

    def check(self, op: Op) -> None:
        """Shapes and elements of one operation."""
        if op.code in MEMORY:
            self._access(op)
        elif op.code in CONTROL:
            _CONTROLS[op.code](self, op)
        elif op.code in (Code.TAPE_STORE, Code.TAPE_LOAD):
            self.expect(isinstance(op.attributes.get("tape"), str), op, "it needs the name of a tape")
        elif op.code is Code.STORE_BLOCK:
            made = op.operands[0].producer
            described = made is not None and made.code in (Code.DESCRIPTOR, Code.BLOCK_POINTER)
            self.expect(described, op, "it needs a descriptor or a block pointer")
            block = made.attributes["block"] if made is not None else None
            self.expect(op.stored.shape == block, op, f"a tile of {block} belongs there")
        elif op.code is Code.LEAVE_IF:
            self.expect(not self.changed, op, "a program may not leave after it has changed memory")
            self._condition(op, op.operands[0])
        elif op.code is not Code.BARRIER:
            self._computed(op)
            if op.code is Code.CONST:
                self._symbol(op)

    def _computed(self, op: Op) -> None:
        shapes = [value.shape for value in op.operands]
        try:
            expected = {result_shape(op.code, shapes, op.attributes, result.shape) for result in op.results}
        except (ValueError, IndexError, KeyError) as error:
            raise InternalError(f"{self.kernel.name}: operands do not go together: {error}\n  in {op!r}") from error
        for result in op.results:
            self.expect(expected == {result.shape}, op, f"{result!r} should have shape {expected}")
        elements = [value.element for value in op.operands]
        result = op.results[0]
        if op.code is Code.CMP:
            self.expect(result.element == "i1", op, "a comparison gives i1")
            self.expect(op.attributes.get("predicate") in _PREDICATES, op, "it needs a predicate")
            self._alike(op, op.operands)
        elif op.code is Code.SELECT:
            self.expect(elements[0] == "i1", op, "it selects by i1")
            self._alike(op, op.operands[1:])
        elif op.code is Code.DOT:
            self._dot(op)
        elif op.code in (Code.RESHAPE, Code.FULL, Code.BROADCAST):
            self._same_elements(op)
        elif op.code in (Code.AND, Code.OR, Code.XOR, Code.SHL, Code.SHR, Code.MULHI, Code.FLOORDIV):
            self.expect(not any(v.is_float for v in op.operands), op, "it takes integers")
            self._alike(op, (*op.operands, result))
        elif op.code in _FLOATING:
            self.expect(result.is_float and all(v.is_float for v in op.operands), op, "it takes floats")
        elif op.code in _KEEPS_KIND:
            kinds = {value.is_float for value in (*op.operands, result)}
            self.expect(len(kinds) == 1, op, "floats and integers are mixed")
            if not result.is_float:
                self._alike(op, (*op.operands, result))
        elif op.code in (Code.ARG_MAX, Code.ARG_MIN):
            self.expect(not result.is_float, op, "an index is an integer")
        elif op.code is Code.GATHER:
            self.expect(not op.operands[1].is_float, op, "indices are integers")
        elif op.code in (Code.REDUCE, Code.SCAN):
            self.expect(len(op.blocks[0].arguments) == 2 * len(op.operands) == 2 * len(op.results), op, "2n -> n")
            self.expect(len(op.blocks[0].yields) == len(op.results), op, "the block yields one value per result")

    def _symbol(self, op: Op) -> None:
        """What a constant is called is printed in its place, and what folding makes of it is written around it."""
        text, value = op.attributes.get("symbol"), op.attributes["value"]
        if text is None or op.attributes.get("open"):
            return
        tree = ast.parse(text, mode="eval")
        self.expect(isinstance(tree.body, ast.Name) or tree.body.col_offset > 0, op, f"{text} needs parentheses")
        if {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} <= self.kernel.constants.keys():
            found = eval(compile(tree, "<symbol>", "eval"), {"__builtins__": {}}, self.kernel.constants)
            self.expect(math.isclose(found, value, rel_tol=1e-6), op, f"{text} is {found}, not {value}")

    def _same_elements(self, op: Op) -> None:
        (value,), result = op.operands, op.result
        self._alike(op, (value, result))
        if op.code is Code.FULL:
            self.expect(value.shape == (), op, "it fills with a scalar")
        elif op.code is Code.BROADCAST:
            fits = (
                len(value.shape) == len(result.shape) and broadcast_shape([value.shape, result.shape]) == result.shape
            )
            self.expect(fits, op, "it does not broadcast to that shape")
        else:
            self.expect(math.prod(value.shape) == math.prod(result.shape), op, "another number of elements")

    def _dot(self, op: Op) -> None:
        a, b = op.operands
        self._alike(op, (a, b))
        fits = len(a.shape) == len(b.shape) >= 2 and a.shape[-1] == b.shape[-2] and a.shape[:-2] == b.shape[:-2]
        self.expect(fits, op, "these are no factors of a product")

    def _access(self, op: Op) -> None:
        base = op.attributes.get("base")
        known = isinstance(base, Value) and base in self.kernel.arguments
        self.expect(known, op, "its base is not an argument of the kernel")
        self.expect(op.base.is_pointer, op, "its base is no pointer")
        self.expect(op.offset.element in ("i32", "i64"), op, "offsets are i32 or i64")
        count = (1 if op.code is Code.LOAD else 2) + bool(op.attributes["masked"]) + bool(op.attributes.get("padded"))
        self.expect(len(op.operands) == count, op, "its attributes say another number of operands")
        self.expect(
            op.attributes["masked"] or not op.attributes.get("padded"), op, "without a mask nothing is left out"
        )
        if op.mask is not None:
            self.expect(op.mask.element == "i1", op, "a mask is i1")
            self._fits(op, op.mask)
        if op.other is not None:
            self._fits(op, op.other)
            self.expect(op.other.is_float == op.result.is_float, op, "another kind of element for masked lanes")
        if op.code is Code.LOAD:
            self.expect(op.result.shape == op.offset.shape, op, "a load has the shape of its offsets")
            self.expect(op.result.element == op.base.pointee, op, f"{op.base.name} holds {op.base.pointee}")
        else:
            self._fits(op, op.stored)
            self.changed = True

    def _fits(self, op: Op, value: Value) -> None:
        try:
            fits = broadcast_shape([value.shape, op.offset.shape]) == op.offset.shape
        except ValueError:
            fits = False
        self.expect(fits, op, f"{value!r} does not broadcast to the offsets")

    def _alike(self, op: Op, values: Sequence[Value]) -> None:
        self.expect(len({value.element for value in values}) == 1, op, "elements differ")

    def _condition(self, op: Op, value: Value) -> None:
        self.expect(value.element == "i1" and value.shape == (), op, "a condition is a scalar i1")

    def _match(self, op: Op, what: str, left: Sequence[Value], right: Sequence[Value]) -> None:
        forms = [[(value.element, value.shape) for value in side] for side in (left, right)]
        self.expect(forms[0] == forms[1], op, f"{what} do not match: {forms[0]} and {forms[1]}")

    def _for(self, op: Op) -> None:
        bounds, carries = op.operands[:3], op.operands[3:]
        self.expect(len(bounds) == 3 and all(v.shape == () and not v.is_float for v in bounds), op, "bounds: integers")
        self._alike(op, bounds)
        (block,) = op.blocks
        self._match(op, "bounds and index", bounds[:1], block.arguments[:1])
        self._match(op, "carries and arguments", carries, block.arguments[1:])
        self._match(op, "carries and yields", carries, block.yields)
        self._match(op, "carries and results", carries, op.results)

    def _while(self, op: Op) -> None:
        test, body = op.blocks
        self._match(op, "carries and arguments", op.operands, test.arguments)
        self.expect(bool(test.yields), op, "the first block yields a condition")
        self._condition(op, test.yields[0])
        self._match(op, "what goes on and arguments", test.yields[1:], body.arguments)
        self._match(op, "carries and yields", op.operands, body.yields)
        self._match(op, "what goes on and results", test.yields[1:], op.results)

    def _if(self, op: Op) -> None:
        self._condition(op, op.operands[0])
        for block in op.blocks:
            self.expect(not block.arguments, op, "a branch has no arguments")
            self._match(op, "results and yields", op.results, block.yields)


_PREDICATES = frozenset(("eq", "ne", "lt", "le", "gt", "ge"))
_SCALAR = ELEMENTWISE | {Code.CONST}
_FLOATING = frozenset(
    (Code.DIV, Code.EXP, Code.EXP2, Code.LOG, Code.LOG2, Code.SQRT, Code.RSQRT, Code.SIN, Code.COS, Code.TANH, Code.ERF,
     Code.SIGMOID, Code.FLOOR, Code.CEIL)
)  # fmt: skip
_KEEPS_KIND = frozenset(
    (Code.ADD, Code.SUB, Code.MUL, Code.REM, Code.NEG, Code.MAX, Code.MIN, Code.FMA, Code.ABS, Code.EXPAND, Code.TRANS,
     Code.JOIN, Code.SPLIT, Code.FLIP, Code.SUM, Code.REDUCE_MAX, Code.REDUCE_MIN, Code.CUMSUM, Code.LINEAR_SCAN,
     Code.LINEAR_SCAN_BEFORE, Code.KNOWN)
)  # fmt: skip
_CONTROLS: dict[Code, Callable[[_Verifier, Op], None]] = {
    Code.FOR: _Verifier._for,
    Code.WHILE: _Verifier._while,
    Code.IF: _Verifier._if,
}
