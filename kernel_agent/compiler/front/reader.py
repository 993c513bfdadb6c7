"""`Reader`: walks the IR of one kernel and builds its `Kernel`; the rules of the operations are in a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.front.items import Item, Pointer
from kernel_agent.compiler.front.names import variables
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.value import Kernel, Value
from kernel_agent.ir.program import Block, Module, Op
from kernel_agent.ir.program import Value as Name
from kernel_agent.ir.types import Kind, Type

Rule = Callable[["Reader", Op, "list[Any]"], "Sequence[Item] | Item | None"]
"""(reader, operation, operands) -> what the results are."""
RULES: dict[str, Rule] = {}
ENDS = frozenset(("scf.yield", "scf.condition", "tt.reduce.return", "tt.scan.return", "tt.map_elementwise.return"))
"""Operations that say what a block yields."""
Symbols = Mapping[tuple[int, int], str]
"""(identity of an operation, place of the operand) -> expression over constexprs that the constant there stands for;
place -1: the extent of a range."""


def reads(*names: str) -> Callable[[Rule], Rule]:
    """Register the rule of operations."""

    def register(rule: Rule) -> Rule:
        for name in names:
            RULES[name] = rule
        return rule

    return register


class Reader:
    """One reading of a module."""

    def __init__(self, module: Module, kernel: Kernel, written: frozenset[str], symbols: Symbols) -> None:
        """`written`: names of the arguments that the kernel both reads and writes."""
        self.module = module
        self.kernel = kernel
        self.symbols = symbols
        self.variables = variables(module)
        self.builder = Builder(kernel, frozenset(value for value in kernel.arguments if value.name in written))
        self.items: dict[int, Item] = {}
        """By the id of the IR's value."""
        self.loaded: set[str] = set()
        self.stored: set[str] = set()
        """Names of arguments that were read and written."""
        self.effects = False
        """Something that cannot be taken back came before."""
        self.lanes = False
        """Inside of what is applied to each element of a tile."""
        self.at_least_zero: set[Value] = set()
        """Loop indices that are never negative."""

    # --- values

    def operands(self, op: Op) -> list[Item]:
        """What an operation works on; constants under the names of the constexprs they come from."""
        return [self.operand(op, place) for place in range(len(op.operands))]

    def operand(self, op: Op, place: int) -> Item:
        """One of them."""
        item = self.items[op.operands[place].id]
        symbol = self.symbols.get((id(op), place))
        if symbol is None or not isinstance(item, Value) or item.producer is None:
            return item
        return self.builder.const(item.producer.attributes["value"], item.element, symbol)

    def set(self, names: Sequence[Name], items: Sequence[Item]) -> None:
        """What values of the IR are from here on."""
        for name, item in zip(names, items, strict=True):
            self.items[name.id] = item

    def whole(self, value: Value, type_: Type) -> Value:
        """A value as the whole tile that the IR has in its place."""
        return self.builder.whole(value, type_.tile)

    def refuse(self, op: Op, what: str, remedy: str) -> CannotDerive:
        """The error for an operation that has no place in a kernel."""
        place = self.module.place(op)
        where = f"{self.module.entry.name}, line {place.line}: " if place else f"{self.module.entry.name}: "
        return CannotDerive(f"{where}{what}", remedy=remedy, line=place.line if place else None)

    # --- operations

    def run(self, block: Block) -> list[Item]:
        """Read a block to its end; what it yields."""
        for op in block.ops:
            if op.name in ENDS:
                return self.operands(op)
            self.read(op)
        return []

    def read(self, op: Op) -> None:
        """Read one operation. Raises CannotDerive."""
        rule = RULES.get(op.name)
        if rule is None:
            raise self.refuse(op, f"{op.name} is not supported", "Write it with operations that are, or by hand.")
        with self.named(op):
            found = rule(self, op, self.operands(op))
        items = [] if found is None else [found] if isinstance(found, Item) else list(found)
        self.set(op.results, items)

    @contextmanager
    def named(self, op: Op) -> Iterator[None]:
        """Results that an operation makes bear its variable's name and its line."""
        builder, place = self.builder, self.module.place(op)
        before = builder.hint, builder.line
        builder.hint = self.variables.get(id(op), "")
        builder.line = place.line if place else None
        try:
            yield
        finally:
            builder.hint, builder.line = before


def element_of(type_: Type) -> str:
    """Element of a value or argument: `f32`, `i64`, `*f16`; positions are i64. Unsigned numbers have no mark."""
    scalar = type_.scalar
    if scalar.kind is Kind.POINTER and scalar.element is not None:
        return "*" + element_of(scalar.element)
    return "i64" if scalar.name == "index" else scalar.name.lstrip("us") if scalar.kind is Kind.INT else scalar.name


def pointer_to(argument: Value, builder: Builder) -> Pointer:
    """The address that an argument holds."""
    return Pointer(argument, builder.const(0, "i32"), argument.pointee)
