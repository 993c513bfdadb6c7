"""`Printer`: the statements of one kernel's body."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from kernel_agent.compiler.emit import expression as ex
from kernel_agent.compiler.emit.dtypes import bits, cast, is_float, natural
from kernel_agent.compiler.emit.expression import Expression, Level
from kernel_agent.compiler.emit.helpers import Helper, combine_helper, library_helper
from kernel_agent.compiler.emit.layout import WIDTH, bracketed
from kernel_agent.compiler.emit.naming import Names
from kernel_agent.compiler.emit.operations import Operations
from kernel_agent.compiler.emit.places import Places
from kernel_agent.compiler.emit.variables import Variables
from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.ssa.code import CONTROL, Code
from kernel_agent.compiler.ssa.value import Block, Kernel, Op, Value, constant, is_constant
from kernel_agent.errors import InternalError

_IN_PLACE = {Code.ADD: "+", Code.SUB: "-", Code.MUL: "*", Code.DIV: "/"}
COMFORT = 104
"""Statements beyond this get names for parts of them."""


@dataclass(frozen=True)
class Assignment:
    """One variable set by the end of a block."""

    target: str
    value: Expression
    symbol: str = ""
    """`+` of `target += value`."""


class TooLong(Exception):
    """A statement does not fit on a line; `part` should get a name."""

    def __init__(self, part: Value) -> None:
        super().__init__()
        self.part = part


class Printer:
    """Prints a body. Raises `CannotDerive`, and `TooLong` while a part of a statement could have a name."""

    def __init__(
        self,
        kernel: Kernel,
        parameters: Collection[str],
        forced: Collection[Value],
        comments: Mapping[int, str],
        unsigned: Collection[str],
    ) -> None:
        self.kernel = kernel
        self.places = Places(kernel, forced)
        self.variables = Variables(kernel, self.places)
        self.names = Names(kernel, self.places, self.variables, parameters)
        self.operations = Operations(kernel.extents, self.at)
        self.comments = comments
        self.said = {""}
        """Comments that were printed."""
        self.unsigned = frozenset(unsigned)
        self.static: set[str] = set()
        """Variables that may hold Python numbers."""
        self.helpers: dict[str, Helper] = {}
        self.needs: set[str] = set()
        self.reads: set[str] = set()
        self.lines: list[str] = []
        self.depth = 1
        self._block(kernel.body)

    # --- values

    def at(self, value: Value) -> Expression:
        """What a value is printed as where it is read."""
        variable = self.variables.of.get(value)
        if variable is not None:
            return ex.name(variable.name, value.element, static=variable.name in self.static)
        if value in self.places.inlined and value.producer is not None:
            load = value.producer.code is Code.LOAD
            return self._load(value.producer) if load else self.operations.of(value.producer)
        if value.producer is not None or value in self.places.block_of:
            raise InternalError(f"{value!r} is read where nothing defined it")
        found = ex.name(value.name, value.element, static=not value.is_float)
        if value.name in self.unsigned:
            found = cast(found.typed(f"u{bits(value.element)}"), value.element)
        return found

    def _pointer(self, op: Op) -> Expression:
        base = ex.name(op.base.name, op.base.element)
        if is_constant(op.offset, 0):
            return base
        offset = self.at(op.offset)
        text = f"{base.text} + {offset.within(Level.SUM)}"
        return ex.made(text, Level.SUM, base.element, (base, offset))

    # --- statements

    def _out(self, lines: list[str]) -> None:
        self.lines += lines

    def _line(self, text: str) -> None:
        self._out(["    " * self.depth + text])

    def _used(self, value: Expression) -> None:
        self.reads |= value.reads
        for need in value.needs:
            helper = library_helper(need)
            if helper is None:
                self.needs.add(need)
            else:
                self.helpers[helper.name] = helper

    def _statement(self, head: str, value: Expression, roots: tuple[Value, ...]) -> None:
        """`head value`; where it is long, the largest part of it gets a name, and all starts anew."""
        self._used(value)
        indent = "    " * self.depth
        whole = f"{indent}{head}{value.text}"
        if len(whole) <= COMFORT:
            self._out([whole])
            return
        part = self._largest_part(roots)
        if part is not None:
            raise TooLong(part)
        if len(whole) > WIDTH and value.call is not None:
            function, arguments = value.call
            self._out(bracketed(head + function, arguments, "", self.depth))
        else:
            self._out([whole])

    def _largest_part(self, roots: tuple[Value, ...]) -> Value | None:
        """The heaviest part of a statement that could have a name."""
        parts: list[Value] = []
        pending = [value for value in roots if value in self.places.inlined]
        while pending:
            value = pending.pop()
            op = value.producer
            assert op is not None
            if not self.places.free(value) and len(self.at(value).text) > 16:
                parts.append(value)
            pending += [operand for operand in op.operands if operand in self.places.inlined]
        return max(parts, key=lambda value: len(self.at(value).text), default=None)

    def _comment(self, op: Op) -> None:
        for value in op.results:
            text = self.comments.get(value.source_line or 0, "")
            if text not in self.said:
                self.said.add(text)
                for line in text.splitlines():
                    self._line(line)

    def _block(self, block: Block) -> None:
        for op in block.ops:
            if op in self.places.needed and not (len(op.results) == 1 and op.result in self.places.inlined):
                self._comment(op)
                self._op(op)

    def _op(self, op: Op) -> None:
        code = op.code
        if code in (Code.STORE, Code.ATOMIC_ADD, Code.ATOMIC):
            self._store(op)
        elif code is Code.FOR:
            self._for(op)
        elif code is Code.WHILE:
            self._while(op)
        elif code is Code.IF:
            self._if(op)
        elif code is Code.LEAVE_IF:
            self._statement_line("if ", self.at(op.operands[0]), ":")
            self.depth += 1
            self._line("return")
            self.depth -= 1
        elif code is Code.BARRIER:
            self._line("tl.debug_barrier()")
        elif code in (Code.TAPE_STORE, Code.TAPE_LOAD):
            raise InternalError("a tape has no memory yet: it is to be lowered before the kernel is printed")
        else:
            self._assign(op)

    def _statement_line(self, head: str, value: Expression, tail: str) -> None:
        self._used(value)
        self._line(f"{head}{value.text}{tail}")

    # --- assignments

    def _assign(self, op: Op) -> None:
        targets = ", ".join(self._target(value) for value in op.results)
        if len(op.results) == 1:
            assignment = self._carry_on(op.result, self.variables.of[op.result].name)
            self._set(assignment, op.operands)
            return
        value = self._several(op)
        self._statement(f"{targets} = ", value, op.operands)

    def _target(self, value: Value) -> str:
        return self.variables.of[value].name if value in self.variables.of and self.places.readers(value) else "_"

    def _set(self, assignment: Assignment, roots: tuple[Value, ...]) -> None:
        if assignment.value.static and not assignment.symbol:
            self.static.add(assignment.target)
        else:
            self.static.discard(assignment.target)
        self._statement(f"{assignment.target} {assignment.symbol}= ", assignment.value, roots)

    def _carry_on(self, value: Value, target: str) -> Assignment:
        """`target = value`, or `target += ...` where the value goes on from what the target holds."""
        op = value.producer
        if op is None or (value in self.variables.of and self.variables.of[value].name != target):
            return Assignment(target, self.at(value))
        if value in self.variables.of and op.code in CONTROL:
            return Assignment(target, self.at(value))
        if op.code in _IN_PLACE and len(op.operands) == 2:
            found = self._in_place(op, target)
            if found is not None:
                return found
        return Assignment(target, self._right_side(op))

    def _in_place(self, op: Op, target: str) -> Assignment | None:
        for here in (0, 1) if op.code in (Code.ADD, Code.MUL) else (0,):
            held, other = op.operands[here], op.operands[1 - here]
            if held not in self.variables.of or self.variables.of[held].name != target or held.shape != op.result.shape:
                continue
            product = other.producer if other in self.places.inlined else None
            dot = op.code is Code.ADD and product is not None and product.code is Code.DOT
            if dot and product is not None and held.element == other.element == op.result.element:
                return Assignment(target, self.operations.dot(product, self.at(held)))
            whole = self.operations.of(op)
            if whole.level not in (Level.SUM, Level.PRODUCT):
                return None  # Triton would give it another type, so that it is converted
            return Assignment(target, self.at(other), _IN_PLACE[op.code])
        return None

    def _right_side(self, op: Op) -> Expression:
        """Source of an operation that has a statement of its own."""
        if op.code is Code.LOAD:
            return self._load(op)
        if op.code in (Code.SCAN, Code.REDUCE, Code.LINEAR_SCAN, Code.LINEAR_SCAN_BEFORE):
            return self._several(op)
        return self.operations.of(op)

    def _load(self, op: Op) -> Expression:
        options = {}
        if op.mask is not None:
            options["mask"] = self.at(op.mask)
        if op.other is not None:
            options["other"] = self.at(op.other)
        for hint in ("cache_modifier", "eviction_policy", "volatile"):
            if op.attributes.get(hint):
                options[hint] = Expression(_quoted(op.attributes[hint]), Level.PRIMARY, "")
        element = op.result.element
        found = ex.call("tl.load", [self._pointer(op)], element, **options)
        if op.base.name in self.unsigned:
            return cast(found.typed(f"u{bits(element)}"), element)
        return found

    def _store(self, op: Op) -> None:
        stored = self.at(op.stored)
        options: dict[str, Expression | str] = {}
        if op.mask is not None:
            options["mask"] = self.at(op.mask)
        function = "tl.store"
        if op.code is Code.ATOMIC_ADD:
            function, options["sem"] = "tl.atomic_add", '"relaxed"'
        elif op.code is Code.ATOMIC:
            function = f"tl.atomic_{op.attributes['operation']}"
        for hint in ("cache_modifier", "eviction_policy") if op.code is Code.STORE else ():
            if op.attributes.get(hint):
                options[hint] = _quoted(op.attributes[hint])
        target = f"{self._target(op.result)} = " if op.results and self.places.readers(op.result) else ""
        self._statement(target, ex.call(function, [self._pointer(op), stored], "", **options), op.operands)

    # --- scans and reductions with functions of their own

    def _several(self, op: Op) -> Expression:
        element = op.results[0].element
        if op.code is Code.SPLIT:
            return ex.call("tl.split", [self.at(op.operands[0])], element)
        axis = str(op.attributes["axis"])
        whole = [self.operations.whole(value, self._shape(op)) for value in op.operands]
        options = {"reverse": "True"} if op.attributes.get("reverse") else {}
        function = "tl.reduce" if op.code is Code.REDUCE else "tl.associative_scan"
        if op.code in (Code.LINEAR_SCAN, Code.LINEAR_SCAN_BEFORE):
            name = "linear_scan" if op.code is Code.LINEAR_SCAN else "linear_scan_before"
            found = ex.call(name, [*whole, axis, str(bool(op.attributes.get("reverse")))], element)
            return replace(found, needs=found.needs | {name})
        helper = combine_helper(op, f"{self.kernel.name}_combine", self._print_combine, self.helpers)
        self.helpers[helper.name] = helper
        if len(whole) == 1:
            return ex.call(function, [*whole, axis, helper.name], element, **options)
        inputs = ex.made(f"({', '.join(v.text for v in whole)})", Level.PRIMARY, "", whole)
        return ex.call(function, [inputs, axis, helper.name], element, **options)

    def _shape(self, op: Op) -> tuple[int, ...]:
        return max((value.shape for value in op.operands), key=lambda shape: (len(shape), shape))

    def _print_combine(self, kernel: Kernel, parameters: list[str]) -> tuple[list[str], list[str]]:
        """Body of a function on scalars, and what it returns."""
        inner = _printed(kernel, parameters, frozenset())
        self.needs |= inner.needs
        self.helpers.update(inner.helpers)
        return inner.lines, [inner.at(value).text for value in kernel.body.yields]

    # --- control

    def _begin(self, op: Op, initial: tuple[Value, ...]) -> None:
        """Variables before a loop."""
        pending: list[tuple[Assignment, tuple[Value, ...]]] = []
        begun = {self.places.origin(s) for s, r in zip(initial, op.results, strict=True) if self._shared(s, r)}
        for start, result in zip(initial, op.results, strict=True):
            target = self.variables.of[result].name
            if self._shared(start, result):
                continue
            value = self._held(start)
            if start not in self.places.inlined:
                value = _anew(value) if self.places.origin(start) in begun else value
                begun.add(self.places.origin(start))
            pending.append((Assignment(target, value), (start,)))
        self._set_all(pending)
        for result in op.results:
            self.static.discard(self.variables.of[result].name)

    def _shared(self, one: Value, other: Value) -> bool:
        """Whether two values have one variable."""
        return one in self.variables.of and self.variables.of[one] is self.variables.of.get(other)

    def _held(self, value: Value) -> Expression:
        """A value as a variable that Triton must find of one type at all times."""
        found = self.at(value)
        if value.shape or not (found.static or found.weak):
            return found
        if found.weak:
            return found if natural(found.element) == value.element else cast(found, value.element)
        return found if value.element == "i32" else cast(found, value.element)

    def _set_all(self, pending: list[tuple[Assignment, tuple[Value, ...]]]) -> None:
        """Assignments that happen at once, in an order in which none overwrites what another reads."""
        while pending:
            for n, (assignment, roots) in enumerate(pending):
                others = [other.value.reads for m, (other, _) in enumerate(pending) if m != n]
                steps = [other.target for m, (other, _) in enumerate(pending) if m != n and other.symbol]
                if assignment.target not in frozenset().union(*others, steps):
                    self._set(assignment, roots)
                    del pending[n]
                    break
            else:
                self._at_once(pending)
                return

    def _at_once(self, pending: list[tuple[Assignment, tuple[Value, ...]]]) -> None:
        """`a, b = b, a`."""
        values = []
        for assignment, _ in pending:
            value = assignment.value
            if assignment.symbol:
                held = ex.name(assignment.target, value.element)
                value = ex.binary(held, assignment.symbol, value, value.element)
            values.append(value)
            self.static.discard(assignment.target)
        targets = ", ".join(assignment.target for assignment, _ in pending)
        whole = ex.made(", ".join(value.text for value in values), Level.COMPARISON, "", values)
        self._statement(f"{targets} = ", whole, tuple(root for _, roots in pending for root in roots))

    def _finish(self, block: Block, results: tuple[Value, ...]) -> None:
        """What a block yields, in the variables of the results."""
        pending = []
        for value, result in zip(block.yields, results, strict=True):
            variable = self.variables.of[result]
            if self.variables.of.get(value) is variable or not self._wanted(result):
                continue
            assignment = self._carry_on(value, variable.name)
            if not assignment.symbol and not value.shape:
                held = self._held(value)
                if held.text != self.at(value).text:
                    assignment = Assignment(variable.name, held)
            roots = value.producer.operands if value.producer is not None and value in self.places.inlined else ()
            pending.append((assignment, roots))
        self._set_all(pending)

    def _wanted(self, result: Value) -> bool:
        """Whether anyone reads what a block yields; carries of loops are read by the next trip."""
        op = result.producer
        return op is None or op.code is not Code.IF or bool(self.places.readers(result))

    def _body(self, block: Block, results: tuple[Value, ...]) -> None:
        self.depth += 1
        before = len(self.lines)
        self._block(block)
        self._finish(block, results)
        if len(self.lines) == before:
            self._line("pass")
        self.depth -= 1

    def _for(self, op: Op) -> None:
        self._begin(op, op.operands[3:])
        index = self.variables.of[op.blocks[0].arguments[0]].name
        start, stop, step = (self.at(value) for value in op.operands[:3])
        hints = {key: _quoted(value) for key, value in op.attributes.items() if key not in ("reverse", "tape")}
        hints = {key: text for key, text in hints.items() if text not in ("None", "False")}
        head: list[str] = []
        if op.attributes.get("reverse"):
            bounds, head = self._counted_down(op, start, stop, step, index)
        elif step.text == "1":
            bounds = [start, stop]
        else:
            bounds = [start, stop, step]
        for value in bounds:
            self._used(value)
        texts = [*(value.text for value in bounds), *(f"{key}={text}" for key, text in hints.items())]
        target = "step" if head else index
        self._out(bracketed(f"for {target} in {'tl.range' if hints else 'range'}", texts, ":", self.depth))
        self.depth += 1
        for line in head:
            self._line(line)
        self.depth -= 1
        self._body(op.blocks[0], op.results)

    def _counted_down(
        self, op: Op, start: Expression, stop: Expression, step: Expression, index: str
    ) -> tuple[list[Expression], list[str]]:
        """Bounds of the last trip first. A step that is no constant is counted by trips."""
        one = ex.Expression("1", Level.PRIMARY, "int", static=True)
        zero = start.text == "0"
        if step.text == "1":
            return [_less(stop, one), _less(start, one), ex.unary("-", step, "int")], []
        length = stop if zero else ex.binary(stop, "-", start, stop.element)
        trips = ex.call("tl.cdiv", [length, step], "i32")
        if constant(op.operands[2]) is not None:
            last = ex.binary(ex.binary(trips, "-", one, "i32"), "*", step, "i32")
            last = last if zero else ex.binary(start, "+", last, "i32")
            return [last, _less(start, one), ex.unary("-", step, "int")], []
        back = ex.binary(ex.binary(trips, "-", one, "i32"), "-", ex.name("step", "i32"), "i32")
        at = ex.binary(back, "*", step, "i32")
        at = at if zero else ex.binary(start, "+", at, "i32")
        return [replace(one, text="0"), trips], [f"{index} = {at.text}"]

    def _while(self, op: Op) -> None:
        test, body = op.blocks
        pure = all(inner.result in self.places.inlined for inner in test.ops if inner in self.places.needed)
        if not pure or test.yields[1:] != test.arguments:
            raise CannotDerive(
                "a while loop whose condition needs statements of its own cannot be printed",
                remedy="Compute the condition in the loop's body, and let the loop test a variable.",
            )
        self._begin(op, op.operands)
        self._statement_line("while ", self.at(test.yields[0]), ":")
        self._body(body, op.results)

    def _if(self, op: Op) -> None:
        condition = self.at(op.operands[0])
        self._used(condition)
        sides = [self._side(block, op.results) for block in op.blocks]
        then, other = sides
        if not then and other:
            inverse = ex.made(f"not {condition.within(Level.COMPARISON)}", Level.COMPARISON, "i1", (condition,))
            condition, then, other = inverse, other, then
        self._line(f"if {condition.text}:")
        self._out(then or ["    " * (self.depth + 1) + "pass"])
        if other:
            self._line("else:")
            self._out(other)

    def _side(self, block: Block, results: tuple[Value, ...]) -> list[str]:
        """Lines of a branch."""
        kept, self.lines = self.lines, []
        static = set(self.static)
        self.depth += 1
        self._block(block)
        self._finish(block, results)
        self.depth -= 1
        self.static = static
        for result in results:
            self.static.discard(self.variables.of[result].name)
        found, self.lines = self.lines, kept
        return found


def _anew(value: Expression) -> Expression:
    """The same number as another value of the IR.

    Triton finds what a loop carries by visiting its body once, and misses `a = b` where both start as one value.
    """
    if value.element == "i1":
        return ex.binary(value, "|", Expression("False", Level.PRIMARY, "bool"), "i1")
    one = Expression("1.0" if is_float(value.element) else "1", Level.PRIMARY, "float")
    return ex.binary(value, "*", one, value.element)


def _less(value: Expression, one: Expression) -> Expression:
    """value - 1."""
    if value.text == "0":
        return Expression("-1", Level.UNARY, "int", static=True)
    return ex.binary(value, "-", one, value.element)


def _quoted(value: object) -> str:
    """A Python literal, strings as formatters quote them."""
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _printed(
    kernel: Kernel,
    parameters: Collection[str],
    unsigned: Collection[str],
    comments: Mapping[int, str] | None = None,
) -> Printer:
    """The body of a kernel, with names for all that would make a line too long."""
    forced: set[Value] = set()
    while True:
        try:
            return Printer(kernel, parameters, forced, comments or {}, unsigned)
        except TooLong as problem:
            forced.add(problem.part)


printed = _printed
