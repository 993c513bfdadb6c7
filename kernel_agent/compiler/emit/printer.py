"""`Printer`: the lines of one kernel's body."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from kernel_agent.compiler.emit import expression as ex
from kernel_agent.compiler.emit.device_functions import combine_helper
from kernel_agent.compiler.emit.dtypes import cast, is_float, natural
from kernel_agent.compiler.emit.expression import Expression, Level
from kernel_agent.compiler.emit.layout import bracketed
from kernel_agent.compiler.emit.places import Places
from kernel_agent.compiler.emit.statements import Assignment, Statements, quoted
from kernel_agent.compiler.emit.variables import needs_statements
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Block, Kernel, Op, Value, constant
from kernel_agent.errors import InternalError


class Printer(Statements):
    """Prints operations in their order, with the blocks in them."""

    def run(self) -> None:
        """Print the whole body."""
        self._block(self.kernel.body)

    def yielded(self) -> list[Expression]:
        """What the body yields, which a function returns."""
        found = [self.at(value) for value in self.kernel.body.yields]
        for value in found:
            self._used(value)
        return found

    def _block(self, block: Block) -> None:
        for op in block.ops:
            if op in self.places.needed and not (len(op.results) == 1 and op.result in self.places.inlined):
                self._comment(op)
                self._op(op)

    def _op(self, op: Op) -> None:
        code = op.code
        if code in (Code.STORE, Code.ATOMIC_ADD, Code.ATOMIC):
            self._store(op)
        elif code is Code.STORE_BLOCK:
            self._store_block(op)
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
        inner = printed(kernel, parameters, frozenset())
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
        hints = {key: quoted(value) for key, value in op.attributes.items() if key not in ("reverse", "tape")}
        stages = op.attributes.get("num_stages")
        if stages in self.kernel.constants:  # a constexpr
            hints["num_stages"] = stages
            self.reads.add(stages)
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
        target = self.names.trip if head else index
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
        back = ex.binary(ex.binary(trips, "-", one, "i32"), "-", ex.name(self.names.trip, "i32"), "i32")
        at = ex.binary(back, "*", step, "i32")
        at = at if zero else ex.binary(start, "+", at, "i32")
        return [replace(one, text="0"), trips], [f"{index} = {at.text}"]

    def _while(self, op: Op) -> None:
        test, body = op.blocks
        pure = all(inner.result in self.places.inlined for inner in test.ops if inner in self.places.needed)
        if not pure:
            raise needs_statements()
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


def printed(
    kernel: Kernel,
    parameters: Collection[str],
    unsigned: Collection[str],
    comments: Mapping[int, str] | None = None,
) -> Printer:
    """The body of a kernel, with names for all that would make a line too long."""
    forced: set[Value] = set()
    places = Places(kernel)
    while True:
        printer = Printer(kernel, places, parameters, comments or {}, unsigned)
        printer.run()
        if not printer.long:
            return printer
        forced.update(printer.long)
        places = places.forcing(forced)
