"""`Materializer`: integers that are known as polynomials and forms, as values of a kernel again."""

from __future__ import annotations

from collections.abc import Sequence

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.schedule.forms import Forms
from kernel_agent.compiler.schedule.linear import Atom, Form, Kind
from kernel_agent.compiler.schedule.polynomial import Polynomial, Symbol
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.value import Kernel, Value


class Materializer:
    """Writes integers where a copier copies. Raises CannotDerive for those that cannot be written."""

    def __init__(self, forms: Forms, copier: Copier) -> None:
        """`forms`: of what is copied."""
        self.forms = forms
        self.copier = copier
        self.told: dict[Value, Polynomial] = {}
        """Arguments that the copy has got: what a launch computes and a kernel does not."""

    def number(self, polynomial: Polynomial, element: str) -> Value:
        """A scalar that the launch fixes."""
        b = self.copier.b
        total = b.const(0, element)
        for monomial, count in polynomial.terms:
            product = b.const(abs(count), element)
            for symbol in monomial:
                product = b.mul(product, b.cast(self._symbol(symbol), element))
            total = b.add(total, product) if count > 0 else b.sub(total, product)
        return total

    def _symbol(self, symbol: Symbol) -> Value:
        source: Kernel = self.copier.source
        b = self.copier.b
        for value in source.arguments:
            if value.name == symbol.text and not value.is_pointer:
                return self.copier[value]
        if symbol.present is not None:
            return b.const(symbol.present, symbol=symbol.factor)
        wanted = Polynomial.of({(symbol,): 1})
        for value, known in self.told.items():
            if known == wanted:
                return value
        if not symbol.printable:
            raise CannotDerive(f"`{symbol.text}` cannot be computed at a launch")
        told = Value("i32", (), b.kernel.free_name(f"extent_{len(self.told)}"))
        b.kernel.arguments.append(told)
        self.told[told] = wanted
        return told

    def form(self, form: Form, shape: Sequence[int], element: str) -> Value:
        """A form whose lanes are those of a tile."""
        b = self.copier.b
        total = self.number(form.base, element)
        for atom, number in form.terms:
            one = b.cast(self.atom(atom, shape), element)
            total = b.add(total, b.mul(one, self.number(number, element)))
        return total

    def atom(self, atom: Atom, shape: Sequence[int]) -> Value:
        """An index."""
        b = self.copier.b
        if atom.kind is Kind.PROGRAM:
            return b.program_id(atom.number)
        if atom.kind is Kind.LANE:
            size = shape[atom.number]
            symbol = atom.extent.text() if atom.extent is not None and atom.extent.symbols else None
            return on_axis(self.copier, b.arange(0, size, symbol), len(shape), atom.number)
        if atom.kind is Kind.TRIP:
            loop = self.forms.loops[atom.number]
            start, _, step = loop.operands[:3]
            gone = b.sub(self.copier[loop.blocks[0].arguments[0]], self.copier[start])
            by = self.forms.of(step).invariant
            return gone if by is not None and by.number == 1 else b.elementwise(
                Code.FLOORDIV, (gone, self.copier[step])
            )  # fmt: skip
        if atom.whole is not None and atom.divisor is not None:
            whole = self.form(atom.whole, shape, "i32")
            code = Code.FLOORDIV if atom.kind is Kind.QUOTIENT else Code.REM
            return b.elementwise(code, (whole, self.number(atom.divisor, "i32")))
        raise CannotDerive("an index that is read from memory cannot be computed anew")


def on_axis(copier: Copier, tile: Value, rank: int, axis: int) -> Value:
    """A tile of one axis as one of `rank` axes."""
    for place in range(rank):
        if place != axis and tile.shape:
            tile = copier.b.expand(tile, place)
    return tile
