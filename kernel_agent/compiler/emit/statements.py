"""`Statements`: assignments, loads and stores as lines; what `Printer` makes loops and branches of."""

from __future__ import annotations

import abc
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from kernel_agent.compiler.emit import expression as ex
from kernel_agent.compiler.emit.device_functions import Helper, library_helper
from kernel_agent.compiler.emit.dtypes import bits, cast
from kernel_agent.compiler.emit.expression import Expression, Level
from kernel_agent.compiler.emit.layout import WIDTH, bracketed
from kernel_agent.compiler.emit.naming import Names
from kernel_agent.compiler.emit.operations import Operations
from kernel_agent.compiler.emit.places import Places
from kernel_agent.compiler.emit.variables import Variables
from kernel_agent.compiler.ssa.code import CONTROL, Code
from kernel_agent.compiler.ssa.value import Kernel, Op, Value, constant, is_constant
from kernel_agent.errors import InternalError

_IN_PLACE = {Code.ADD: "+", Code.SUB: "-", Code.MUL: "*", Code.DIV: "/"}
COMFORT = 110
"""Statements beyond this get names for parts of them."""


@dataclass(frozen=True)
class Assignment:
    """One variable set by the end of a block."""

    target: str
    value: Expression
    symbol: str = ""
    """`+` of `target += value`."""


class Statements(abc.ABC):
    """Lines of a kernel's body. Raises `CannotDerive`."""

    def __init__(
        self,
        kernel: Kernel,
        places: Places,
        parameters: Collection[str],
        comments: Mapping[int, str],
        unsigned: Collection[str],
    ) -> None:
        self.kernel = kernel
        self.places = places
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
        self.long: list[Value] = []
        """Parts of statements that do not fit on a line: with names for these, all is to be printed anew."""
        self.depth = 1

    # --- values

    def at(self, value: Value) -> Expression:
        """What a value is printed as where it is read."""
        variable = self.variables.of.get(value)
        if variable is not None:
            return ex.name(variable.name, value.element, static=variable.name in self.static)
        if value in self.places.inlined and value.producer is not None:
            load = value.producer.code is Code.LOAD
            return self._load(value.producer) if load else self.operations.of(value.producer)
        if value.producer is not None and value not in self.places.block_of:
            return self.operations.of(value.producer)  # in a function beside the kernel: a constant of the kernel's
        if value not in self.kernel.arguments:
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
        # summed in one way, so that Triton finds two loads of a tile to be the same
        text = f"{base.text} + {offset.within(Level.PRODUCT if 'once' in op.attributes else Level.SUM)}"
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
        """`head value`; where it is long, the largest part of it should get a name."""
        self._used(value)
        indent = "    " * self.depth
        whole = f"{indent}{head}{value.text}"
        if len(whole) <= COMFORT:
            self._out([whole])
            return
        part = self._largest_part(roots)
        if part is not None and not (len(whole) <= WIDTH and _is_load(part)):
            self.long.append(part)
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
        """The user's comments above what a statement computes."""
        if not self.comments:
            return
        lines: set[int] = set()
        pending = [*op.results, *op.operands]
        while pending:
            value = pending.pop()
            if value in self.places.inlined and value.producer is not None:
                pending += value.producer.operands
            elif value not in op.results:
                continue
            lines.add(value.source_line or 0)
        for place in sorted(lines):
            text = self.comments.get(place, "")
            if text not in self.said:
                self.said.add(text)
                for line in text.splitlines():
                    self._line(line)

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
        if assignment.value.text == assignment.target and not assignment.symbol:
            return  # a branch has its result's name for it
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
            symbol, part = ex.without_sign(_IN_PLACE[op.code], self.at(other))
            return Assignment(target, part, symbol)
        return None

    def _right_side(self, op: Op) -> Expression:
        """Source of an operation that has a statement of its own."""
        if op.code is Code.LOAD:
            return self._load(op)
        if op.code is Code.DESCRIPTOR:
            return self._descriptor(op)
        if op.code is Code.BLOCK_POINTER:
            return self._block_pointer(op)
        if op.code is Code.LOAD_BLOCK:
            return self._load_block(op)
        if op.code in (Code.SCAN, Code.REDUCE, Code.LINEAR_SCAN, Code.LINEAR_SCAN_BEFORE):
            return self._several(op)
        return self.operations.of(op)

    def _mask(self, op: Op) -> dict[str, Expression]:
        """The mask of an access, if it has one that says anything; atomics take no Python numbers for one."""
        if op.mask is None or constant(op.mask) is True:
            return {}
        mask = self.at(op.mask)
        bare = op.code in (Code.ATOMIC_ADD, Code.ATOMIC) and (mask.weak or mask.static)
        return {"mask": cast(mask, "i1") if bare else mask}

    def _load(self, op: Op) -> Expression:
        options = self._mask(op)
        if op.other is not None and options:
            options["other"] = self.at(op.other)
        for hint in ("cache_modifier", "eviction_policy", "volatile"):
            if op.attributes.get(hint):
                options[hint] = Expression(_hinted(op, hint), Level.PRIMARY, "")
        element = op.result.element
        found = ex.call("tl.load", [self._pointer(op)], element, **options)
        if op.base.name in self.unsigned:
            return cast(found.typed(f"u{bits(element)}"), element)
        return found

    def _descriptor(self, op: Op) -> Expression:
        sizes = [self.at(value) for value in op.operands[1:]]
        rank = len(op.attributes["block"])
        listed = (
            ", ".join(size.text for size in sizes[:rank]),
            ", ".join([*(step.text for step in sizes[rank:]), "1"]),
        )
        extents, strides = (ex.made(f"[{text}]", Level.PRIMARY, "", sizes) for text in listed)
        block = self.operations.dims_of(op.attributes["block"])
        return ex.call("tl.make_tensor_descriptor", [self._pointer(op), extents, strides, block], op.result.element)

    def _block_pointer(self, op: Op) -> Expression:
        numbers = [self.at(value) for value in op.operands[1:]]
        rank = len(op.attributes["block"])
        groups = [numbers[n : n + rank] for n in range(0, len(numbers), rank)]
        listed = [ex.made(_row([part.text for part in group]), Level.PRIMARY, "", group) for group in groups]
        block = self.operations.dims_of(op.attributes["block"])
        shape = replace(block, text=_row(block.text[1:-1].split(", ")))
        turned = rank == 2 and is_constant(op.operands[1 + rank], 1) and not is_constant(op.operands[2 + rank], 1)
        order = "(0, 1)" if turned else _row([str(axis) for axis in reversed(range(rank))])
        return ex.call("tl.make_block_ptr", [self._pointer(op), *listed, shape, order], op.result.element)

    def _load_block(self, op: Op) -> Expression:
        made, *corner = (self.at(value) for value in op.operands)
        if "checked" in op.attributes:
            options = self._bounds(op, corner)
            if options:  # padding without a border that is asked about does not compile
                spared = set(op.attributes["checked"]) <= set(op.attributes["spared"])
                padding = (
                    ex.made(f'"" if {corner[0].text} else "zero"', Level.PRIMARY, "", corner) if spared else '"zero"'
                )
                options["padding_option"] = padding
            for hint in ("cache_modifier", "eviction_policy"):
                if op.attributes.get(hint):
                    options[hint] = quoted(op.attributes[hint])
            return ex.call("tl.load", [made], op.result.element, **options)
        whole = ex.made(f"[{', '.join(part.text for part in corner)}]", Level.PRIMARY, "", corner)
        return replace(ex.call(f"{made.text}.load", [whole], op.result.element), reads=whole.reads | made.reads)

    def _bounds(self, op: Op, spares: Sequence[Expression]) -> dict[str, Expression | str]:
        """Which borders an access through a block pointer asks about."""
        checked = op.attributes["checked"]
        if not checked:
            return {}
        text = _row([str(axis) for axis in checked])
        if not spares:
            return {"boundary_check": text}
        left = [str(axis) for axis in checked if axis not in op.attributes["spared"]]
        whole = f"{_row(left)} if {spares[0].text} else {text}"
        return {"boundary_check": ex.made(whole, Level.PRIMARY, "", spares)}

    def _store(self, op: Op) -> None:
        stored = self.at(op.stored)
        options: dict[str, Expression | str] = {**self._mask(op)}
        function = "tl.store"
        if op.code is Code.ATOMIC_ADD:
            function, options["sem"] = "tl.atomic_add", '"relaxed"'
        elif op.code is Code.ATOMIC:
            function = f"tl.atomic_{op.attributes['operation']}"
        for hint in ("cache_modifier", "eviction_policy") if op.code is Code.STORE else ():
            if op.attributes.get(hint):
                options[hint] = quoted(op.attributes[hint])
        target = f"{self._target(op.result)} = " if op.results and self.places.readers(op.result) else ""
        self._statement(target, ex.call(function, [self._pointer(op), stored], "", **options), op.operands)

    def _store_block(self, op: Op) -> None:
        made, stored, *corner = (self.at(value) for value in op.operands)
        if "checked" in op.attributes:
            self._statement("", ex.call("tl.store", [made, stored], "", **self._bounds(op, corner)), op.operands)
            return
        whole = ex.made(f"[{', '.join(part.text for part in corner)}]", Level.PRIMARY, "", corner)
        call = ex.call(f"{made.text}.store", [whole, stored], "")
        self._statement("", replace(call, reads=call.reads | made.reads), op.operands)

    @abc.abstractmethod
    def _several(self, op: Op) -> Expression:
        """Source of an operation that may have several results, or a function of its own."""


def _is_load(value: Value) -> bool:
    """Whether a value is loaded: a name for it would only take its conversion away."""
    return value.producer is not None and value.producer.code is Code.LOAD


def _row(parts: Sequence[str]) -> str:
    """A tuple."""
    return f"({parts[0]},)" if len(parts) == 1 else f"({', '.join(parts)})"


def _hinted(op: Op, hint: str) -> str:
    """A hint of a LOAD; `once`: a constexpr, and the eviction policy where that is so."""
    usual = quoted(op.attributes[hint])
    if hint != "eviction_policy" or "once" not in op.attributes:
        return usual
    name, policy = op.attributes["once"]
    return usual if quoted(policy) == usual else f"{quoted(policy)} if {name} else {usual}"


def quoted(value: object) -> str:
    """A Python literal, strings as formatters quote them."""
    return f'"{value}"' if isinstance(value, str) else repr(value)
