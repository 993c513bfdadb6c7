"""`Polynomial`: integers that a launch fixes: strides, sizes, tile extents, and what is computed of these alone.

Coefficients of addresses are such numbers, and so are the bounds of masks. What cannot be decided about them when a
kernel is compiled can be printed as Python and decided when it is launched.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import combinations


@dataclass(frozen=True, eq=False)
class Symbol(str):
    """A number that a launch fixes. Its text says which, and sorts it.

    It is that text: proofs do little else than compare symbols, and Python does that of texts fastest.
    """

    text: str
    """Python expression over names of the launch; a symbol is what it is called."""
    positive: bool = False
    """Known to be at least 1: extents of grids and tiles."""
    printable: bool = True
    """A stub can evaluate the text; false of what a kernel loads from memory."""
    present: int | None = None
    """What it is in the launch that the kernel was lowered for; of constexprs."""

    @property
    def known(self) -> tuple[bool, bool, int | None]:
        """What else than its text there is."""
        return self.positive, self.printable, self.present

    def __new__(cls, text: str, *_: object, **__: object) -> Symbol:
        """What is known of it makes it no other symbol."""
        return super().__new__(cls, text)

    @property
    def factor(self) -> str:
        """The text as a factor of a product."""
        if self.text.isidentifier():
            return self.text
        if not self.printable:
            return f"({self.text})"
        return _factor(self.text)


@lru_cache(maxsize=1 << 12)
def _factor(text: str) -> str:
    """An expression as a factor of a product."""
    tree = ast.parse(text, mode="eval").body
    parenthesised = tree.col_offset > 0
    return text if parenthesised or isinstance(tree, _ATOMS) else f"({text})"


_ATOMS = (ast.Call, ast.Attribute, ast.Subscript)
"""What no operator beside it takes apart."""

Monomial = tuple[Symbol, ...]
"""A product, sorted; () is 1."""

Known = tuple[tuple[bool, bool, int | None], ...]
"""Of several symbols."""


@dataclass(frozen=True)
class Polynomial:
    """A sum of products of symbols with integer coefficients."""

    terms: tuple[tuple[Monomial, int], ...] = ()
    """Sorted, without zeros: equal polynomials are equal records."""

    @classmethod
    def of(cls, terms: Mapping[Monomial, int]) -> Polynomial:
        """From coefficients by monomial."""
        return cls(tuple(sorted((monomial, number) for monomial, number in terms.items() if number)))

    @classmethod
    def integer(cls, number: int) -> Polynomial:
        """A constant."""
        return cls.of({(): number})

    @classmethod
    def symbol(
        cls, text: str, *, positive: bool = False, printable: bool = True, present: int | None = None
    ) -> Polynomial:
        """One symbol."""
        return cls.of({(Symbol(text, positive, printable, present),): 1})

    def __add__(self, other: Polynomial) -> Polynomial:
        if not self.terms or not other.terms:
            return self if self.terms else other
        found = dict(self.terms)
        for monomial, number in other.terms:
            found[monomial] = found.get(monomial, 0) + number
        return Polynomial.of(found)

    def __neg__(self) -> Polynomial:
        return Polynomial(tuple((monomial, -number) for monomial, number in self.terms))

    def __sub__(self, other: Polynomial) -> Polynomial:
        if not other.terms:
            return self
        found = dict(self.terms)
        for monomial, number in other.terms:
            found[monomial] = found.get(monomial, 0) - number
        return Polynomial.of(found)

    def __mul__(self, other: Polynomial) -> Polynomial:
        found: dict[Monomial, int] = {}
        for left, m in self.terms:
            for right, n in other.terms:
                product = tuple(sorted(left + right))
                found[product] = found.get(product, 0) + m * n
        return Polynomial.of(found)

    @property
    def number(self) -> int | None:
        """The integer that it is, or None."""
        if not self.terms:
            return 0
        (monomial, number), *rest = self.terms
        return number if not rest and not monomial else None

    @property
    def symbols(self) -> frozenset[Symbol]:
        """Whatever occurs in it."""
        return frozenset(symbol for monomial, _ in self.terms for symbol in monomial)

    @property
    def printable(self) -> bool:
        """Whether a stub can evaluate it."""
        return all(symbol.printable for symbol in self.symbols)

    def surely(self, least: int) -> bool:
        """Proved to be at least `least`, whatever the symbols are.

        With each positive symbol written as 1 + something not negative, no coefficient but the constant may be
        negative, and no other symbol may occur.
        """
        return self._floor is not None and self._floor >= least

    def likely(self, least: int) -> bool:
        """At least `least` where constexprs are what they are now and all other symbols are 2 or more."""
        return self._likely_floor is not None and self._likely_floor >= least

    @cached_property
    def _floor(self) -> int | None:
        """What it surely is at least."""
        if any(not symbol.positive for monomial, _ in self.terms for symbol in monomial):
            return None
        return _floor_of(self.terms, 1)

    @cached_property
    def _likely_floor(self) -> int | None:
        """What it likely is at least."""
        found: dict[Monomial, int] = {}
        for monomial, number in self.terms:
            for symbol in monomial:
                number *= 1 if symbol.present is None else symbol.present
            rest = tuple(symbol for symbol in monomial if symbol.present is None)
            found[rest] = found.get(rest, 0) + number
        return _floor_of(tuple(found.items()), 2)

    def quotient(self, divisor: Polynomial) -> Polynomial | None:
        """q with q * divisor equal to this; None where there is none."""
        if not divisor.terms:
            return None
        if len(divisor.terms) == 1:
            parts = [_divide(term, divisor.terms[0]) for term in self.terms]
            return None if None in parts else total(part for part in parts if part is not None)
        names = sorted(self.symbols | divisor.symbols)

        def leading(found: Polynomial) -> tuple[Monomial, int]:
            return max(found.terms, key=lambda term: [term[0].count(name) for name in names])

        first = leading(divisor)
        found, left = Polynomial(), self
        while left.terms:  # the leading product of what is left falls in each turn
            part = _divide(leading(left), first)
            if part is None:
                return None
            found, left = found + part, left - part * divisor
        return found

    def text(self) -> str:
        """Python."""
        return self._text

    @cached_property
    def _text(self) -> str:
        rising = sorted(self.terms, key=lambda term: (term[1] < 0, -len(term[0])))
        found = ""
        for monomial, number in rising:
            factors = [symbol.factor if len(monomial) > 1 or abs(number) != 1 else symbol.text for symbol in monomial]
            if abs(number) != 1 or not monomial:
                factors.insert(0, str(abs(number)))
            product = " * ".join(factors)
            if number < 0 and len(monomial) == 1 and abs(number) == 1:
                product = monomial[0].factor
            sign = "-" if number < 0 else "+"
            found = f"{found} {sign} {product}" if found else product if number > 0 else f"-{product}"
        return found or "0"


ONE = Polynomial.integer(1)
ZERO = Polynomial()


def known_of(numbers: Iterable[Polynomial]) -> Known:
    """What is known of the symbols of some numbers, in their order: equal numbers may know different things."""
    return tuple([symbol.known for number in numbers for monomial, _ in number.terms for symbol in monomial])


def total(parts: Iterable[Polynomial]) -> Polynomial:
    """The sum of many."""
    found = ZERO
    for part in parts:
        found = found + part
    return found


def product(parts: Iterable[Polynomial]) -> Polynomial:
    """What factors come to; 1 of none."""
    found = ONE
    for part in parts:
        found = found * part
    return found


def ceiling(amount: Polynomial, step: Polynomial) -> Polynomial:
    """amount / step, rounded up."""
    exact = amount.quotient(step)
    if exact is not None:
        return exact
    if amount.number is not None and step.number is not None:
        return Polynomial.integer(-(-amount.number // step.number))
    text = f"triton.cdiv({amount.text()}, {step.text()})"
    return Polynomial.symbol(text, positive=amount.surely(1), printable=amount.printable and step.printable)


def parsed(expression: str, value: int, positive: frozenset[str], constants: Mapping[str, object]) -> Polynomial:
    """The polynomial of a Python expression over constexpr names.

    What is no sum or product stays one symbol. `value`: what the expression is now, which stands where it names
    nothing; `positive`: names and expressions that are extents of tiles; `constants`: what constexprs are now.
    """
    tree = ast.parse(expression, mode="eval").body
    found = _of_syntax(tree, positive, constants, value)
    return found if found.symbols else Polynomial.integer(value)


def _of_syntax(
    node: ast.expr, positive: frozenset[str], constants: Mapping[str, object], value: int | None
) -> Polynomial:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Polynomial.integer(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_of_syntax(node.operand, positive, constants, None if value is None else -value)
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub, ast.Mult)):
        left, right = (_of_syntax(side, positive, constants, None) for side in (node.left, node.right))
        if isinstance(node.op, ast.Mult):
            return left * right
        return left + right if isinstance(node.op, ast.Add) else left - right
    text = ast.unparse(node)
    known = constants.get(text, value)
    return Polynomial.symbol(text, positive=text in positive, present=known if type(known) is int else None)


def _divide(term: tuple[Monomial, int], divisor: tuple[Monomial, int]) -> Polynomial | None:
    """One product by another, exactly."""
    rest = list(term[0])
    for symbol in divisor[0]:
        if symbol not in rest:
            return None
        rest.remove(symbol)
    if term[1] % divisor[1]:
        return None
    return Polynomial.of({tuple(rest): term[1] // divisor[1]})


def _floor_of(terms: Sequence[tuple[Monomial, int]], start: int) -> int | None:
    """What a sum is at least where no symbol is less than `start`, by the signs of coefficients alone; None where one
    falls.

    Each symbol is written as `start` + something not negative, and the products are multiplied out. Where nothing is
    subtracted none can fall, and one of the longest products keeps its coefficient: most sums are told by these.
    """
    if all(number >= 0 for _, number in terms):
        least: int = sum(number * start ** len(monomial) for monomial, number in terms)
        return least
    longest = max(len(monomial) for monomial, _ in terms)
    if longest and any(number < 0 and len(monomial) == longest for monomial, number in terms):
        return None
    shifted: dict[Monomial, int] = {(): 0}
    for monomial, number in terms:
        for part in _subsets(monomial):
            shifted[part] = shifted.get(part, 0) + number * start ** (len(monomial) - len(part))
    floor = shifted.pop(())
    return floor if all(number >= 0 for number in shifted.values()) else None


def _subsets(monomial: Monomial) -> Iterator[Monomial]:
    """The products that (1 + a)(1 + b)... multiplies out to."""
    for size in range(len(monomial) + 1):
        yield from combinations(monomial, size)
