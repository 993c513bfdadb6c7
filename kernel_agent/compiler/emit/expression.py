"""`Expression`: Python source of a value, with what is needed to put it into a larger one."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field, replace


class Level(enum.IntEnum):
    """How tightly an expression's outermost operator binds, as in Python's grammar."""

    COMPARISON = 5
    OR = 6
    XOR = 7
    AND = 8
    SHIFT = 9
    SUM = 10
    PRODUCT = 11
    UNARY = 12
    PRIMARY = 14
    """Names, numbers, calls, subscripts and attributes."""


@dataclass(frozen=True)
class Expression:
    """Source of a value."""

    text: str
    level: Level
    element: str
    """What Triton takes it for: `f32`, `i32`, `u32`, ...; `int`, `float`, `bool` of a Python number, which takes the
    type of what it meets."""
    reads: frozenset[str] = frozenset()
    """Names it reads: variables, parameters and constexprs."""
    static: bool = False
    """It may be a Python number when Triton compiles it, which has no methods: an integer argument that is 1, say."""
    call: tuple[str, tuple[str, ...]] | None = None
    """Function and arguments of a call, to break the line between them."""
    needs: frozenset[str] = field(default_factory=frozenset)
    """Helper functions and modules beyond `tl`."""

    @property
    def weak(self) -> bool:
        """Whether it is a Python number."""
        return self.element in ("int", "float", "bool")

    def within(self, level: Level) -> str:
        """Its text where at least `level` is needed."""
        return self.text if self.level >= level else f"({self.text})"

    def typed(self, element: str) -> Expression:
        """The same, known to be of another type."""
        return replace(self, element=element)


def name(text: str, element: str, *, static: bool = False) -> Expression:
    """A variable or parameter."""
    return Expression(text, Level.PRIMARY, element, frozenset((text,)), static)


def made(text: str, level: Level, element: str, parts: Iterable[Expression], *, static: bool = False) -> Expression:
    """An expression that holds others."""
    parts = tuple(parts)
    reads = frozenset().union(*(part.reads for part in parts))
    needs = frozenset().union(*(part.needs for part in parts))
    return Expression(text, level, element, reads, static, needs=needs)


def call(
    function: str, arguments: Iterable[Expression | str], element: str, **keywords: Expression | str
) -> Expression:
    """A call. Text among the arguments reads nothing."""
    given = [*arguments]
    texts = [argument if isinstance(argument, str) else argument.text for argument in given]
    for key, value in keywords.items():
        texts.append(f"{key}={value if isinstance(value, str) else value.text}")
        given.append(value)
    parts = [part for part in given if isinstance(part, Expression)]
    whole = made(f"{function}({', '.join(texts)})", Level.PRIMARY, element, parts)
    return replace(whole, call=(function, tuple(texts)))


SYMBOLS = {
    "+": Level.SUM, "-": Level.SUM, "*": Level.PRODUCT, "/": Level.PRODUCT, "//": Level.PRODUCT, "%": Level.PRODUCT,
    "<<": Level.SHIFT, ">>": Level.SHIFT, "&": Level.AND, "^": Level.XOR, "|": Level.OR,
}  # fmt: skip


def binary(left: Expression, symbol: str, right: Expression, element: str) -> Expression:
    """left symbol right; the right side of equal level keeps its parentheses, since order matters."""
    level = SYMBOLS[symbol]
    symbol, right = without_sign(symbol, right)
    text = f"{left.within(level)} {symbol} {right.within(Level(level + 1))}"
    return made(text, level, element, (left, right), static=left.static and right.static)


def without_sign(symbol: str, right: Expression) -> tuple[str, Expression]:
    """`+` and 1 of `-` and -1: what to write where a number with a sign is added or taken away."""
    if symbol in "+-" and right.text.startswith("-") and right.level is Level.UNARY and right.weak:
        return "-" if symbol == "+" else "+", replace(right, text=right.text[1:], level=Level.PRIMARY)
    return symbol, right


def comparison(left: Expression, symbol: str, right: Expression) -> Expression:
    """left symbol right; Python would chain comparisons, so none stands on a side without parentheses."""
    text = f"{left.within(Level.OR)} {symbol} {right.within(Level.OR)}"
    return made(text, Level.COMPARISON, "i1", (left, right), static=left.static and right.static)


def unary(symbol: str, inner: Expression, element: str) -> Expression:
    """symbol inner."""
    return made(f"{symbol}{inner.within(Level.UNARY)}", Level.UNARY, element, (inner,), static=inner.static)


def subscript(inner: Expression, index: str) -> Expression:
    """inner[index]."""
    return made(f"{inner.within(Level.PRIMARY)}[{index}]", Level.PRIMARY, inner.element, (inner,))
