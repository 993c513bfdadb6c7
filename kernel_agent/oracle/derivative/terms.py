"""Terms of mathematics with a few rules that shorten them. Equal terms are one object."""

from __future__ import annotations

from dataclasses import dataclass

Number = int | float | bool


@dataclass(frozen=True, eq=False)
class Term:
    """One term."""

    op: str
    """`number`, `name`, `+`, `-`, `*`, `/`, `^`, `neg`, `@`, `T`, or the name of a function."""
    args: tuple[Term, ...] = ()
    note: str | Number = ""
    """The number, the name, or what a function says besides its arguments: the dims of a sum."""
    place: int = 0
    """When it was first computed."""
    shape: tuple[int, ...] = ()


class Terms:
    """Makes terms, each once."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], Term] = {}
        self.place = 0
        """Given to terms that are made now."""

    def make(self, op: str, *args: Term, note: str | Number = "", shape: tuple[int, ...] = ()) -> Term:
        """The term of this form."""
        key = (op, tuple(id(arg) for arg in args), type(note).__name__, note)
        if key not in self._known:
            self._known[key] = Term(op, args, note, self.place, shape)
        return self._known[key]

    def number(self, value: Number) -> Term:
        """A number."""
        if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
            value = int(value)
        return self.make("number", note=value)

    def name(self, text: str, shape: tuple[int, ...] = ()) -> Term:
        """A value given from outside."""
        return self.make("name", note=text, shape=shape)

    def add(self, a: Term, b: Term, shape: tuple[int, ...]) -> Term:
        """a + b"""
        if is_number(a, 0):
            return b
        if is_number(b, 0):
            return a
        if b.op == "neg":
            return self.subtract(a, b.args[0], shape)
        if a.op == "neg":
            return self.subtract(b, a.args[0], shape)
        if a is b:
            return self.multiply(self.number(2), a, shape)
        if a.op == "+" and a.args[1] is b:
            return self.add(a.args[0], self.multiply(self.number(2), b, shape), shape)
        number, core = _coefficient(b)
        if core is not None and number < 0:
            return self.subtract(a, self.multiply(self.number(-number), core, shape), shape)
        return self.make("+", a, b, shape=shape)

    def subtract(self, a: Term, b: Term, shape: tuple[int, ...]) -> Term:
        """a - b"""
        if is_number(b, 0):
            return a
        if is_number(a, 0):
            return self.negate(b)
        if b.op == "neg":
            return self.add(a, b.args[0], shape)
        if a.op == "-" and a.args[1] is b:
            return self.subtract(a.args[0], self.multiply(self.number(2), b, shape), shape)
        number, core = _coefficient(b)
        if core is not None and number < 0:
            return self.add(a, self.multiply(self.number(-number), core, shape), shape)
        return self.make("-", a, b, shape=shape)

    def negate(self, a: Term) -> Term:
        """-a"""
        if a.op == "neg":
            return a.args[0]
        value = number_of(a)
        if value is not None:
            return self.number(-value)
        if a.op == "-":
            return self.subtract(a.args[1], a.args[0], a.shape)
        if a.op in ("*", "/") and a.args[0].op == "neg":
            return self.make(a.op, a.args[0].args[0], a.args[1], shape=a.shape)
        return self.make("neg", a, shape=a.shape)

    def multiply(self, a: Term, b: Term, shape: tuple[int, ...]) -> Term:
        """a * b"""
        for one, other in ((a, b), (b, a)):
            if is_number(one, 0):
                return one
            if is_number(one, 1):
                return other
            if is_number(one, -1):
                return self.negate(other)
            if one.op == "neg":
                return self.negate(self.multiply(one.args[0], other, shape))
        if a is b:
            return self.make("^", a, self.number(2), shape=shape)
        gathered = self._gathered(a, b, shape)
        if gathered is not None:
            return gathered
        for one, other in ((a, b), (b, a)):
            if one.op == "/" and is_number(one.args[0], 1):
                return self.divide(other, one.args[1], shape)
        if a.op != "number" and b.op == "number":
            a, b = b, a
        return self.make("*", a, b, shape=shape)

    def _gathered(self, a: Term, b: Term, shape: tuple[int, ...]) -> Term | None:
        """a * b with all numbers in front as one; None where there is at most one already."""
        (first, rest), (second, other) = _coefficient(a), _coefficient(b)
        if rest is not None and other is not None:
            if first == 1 and second == 1:
                return None
            return self.multiply(self.number(first * second), self.multiply(rest, other, shape), shape)
        inner = other if rest is None else rest
        if inner is None:
            return self.number(first * second)
        if inner is (b if rest is None else a):
            return None
        return self.multiply(self.number(first * second), inner, shape)

    def divide(self, a: Term, b: Term, shape: tuple[int, ...]) -> Term:
        """a / b"""
        if is_number(b, 1) or is_number(a, 0):
            return a
        if a.op == "neg":
            return self.negate(self.divide(a.args[0], b, shape))
        number, core = _coefficient(a)
        if core is not None and number != 1:
            return self.multiply(self.number(number), self.divide(core, b, shape), shape)
        return self.make("/", a, b, shape=shape)

    def power(self, a: Term, b: Term, shape: tuple[int, ...]) -> Term:
        """a ^ b"""
        value = number_of(b)
        if value == 1:
            return a
        if value == 0.5:
            return self.make("sqrt", a, shape=shape)
        if value == -0.5:
            return self.make("rsqrt", a, shape=shape)
        if value == -1:
            return self.divide(self.number(1), a, shape)
        return self.make("^", a, b, shape=shape)


def number_of(term: Term) -> Number | None:
    """The number that a term is."""
    return term.note if term.op == "number" and not isinstance(term.note, str) else None


def is_number(term: Term, value: Number) -> bool:
    """Whether a term is this number."""
    found = number_of(term)
    return found is not None and not isinstance(found, bool) and found == value


def _coefficient(term: Term) -> tuple[Number, Term | None]:
    """The number in front of a term, and what is left of it: None of a number."""
    value = number_of(term)
    if value is not None and not isinstance(value, bool):
        return value, None
    if term.op == "*":
        first = number_of(term.args[0])
        if first is not None and not isinstance(first, bool):
            return first, term.args[1]
    return 1, term
