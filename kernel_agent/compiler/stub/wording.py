"""`Wording`: the expressions of one launch's plan in the names that the backward has."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.plan import BackwardPlan
from kernel_agent.compiler.ssa.value import Kernel
from kernel_agent.compiler.stub.accesses import Accesses
from kernel_agent.compiler.stub.body import Body
from kernel_agent.compiler.stub.names import Names
from kernel_agent.compiler.stub.references import References
from kernel_agent.compiler.stub.source import LaunchText
from kernel_agent.compiler.stub.tiles import Tiles, retiled
from kernel_agent.compiler.stub.trace import LaunchSeen

_LONG = 24
"""Characters from which an expression of a plan gets a name."""
_GRID = ("grid0", "grid1", "grid2")


@dataclass(frozen=True)
class Launched:
    """A launch as the writer sees it."""

    place: int
    seen: LaunchSeen
    kernel: Kernel
    """What it runs."""
    text: LaunchText
    accesses: Accesses
    tiles_of_axes: Mapping[int, str] = field(default_factory=dict)
    """See `tiles.tiles_of_axes`."""
    axes_of_tiles: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """See `tiles.axes_of_tiles`."""
    tiles_of_bounds: Mapping[str, str] = field(default_factory=dict)
    """See `tiles.tiles_of_bounds`."""

    def retiled(self, axis: int, tiles: Tiles) -> ast.expr:
        """An extent of the forward's grid, with variables for tiles; see `tiles.retiled`."""
        arguments = self.text.arguments
        given = {name: arguments[name] for name in tiles}
        bounds = {tile: arguments[name] for name, tile in self.tiles_of_bounds.items() if name in arguments}
        return retiled(self.text.grid[axis], self.tiles_of_axes.get(axis), given, tiles, bounds)


class Wording:
    """Words for one plan; grows with the variables that the backward binds for it."""

    def __init__(
        self, launched: Launched, plan: BackwardPlan, references: References, names: Names, body: Body
    ) -> None:
        self.launched = launched
        self.plan = plan
        self.references = references
        self.names = names
        self.body = body
        self.variables: dict[str, str] = {}
        """What the plan's cotangents, buffers and totals are called."""
        self._bound: dict[str, str] = {}
        """Long expressions, with their names."""
        self._tiles: tuple[Tiles, ...] = ({},)

    @contextmanager
    def under(self, tiles: Sequence[Tiles]) -> Iterator[None]:
        """Expressions of launches with these tiles."""
        before, self._tiles = self._tiles, tuple(tiles) or ({},)
        try:
            yield
        finally:
            self._tiles = before

    def text(self, expression: str) -> str:
        """An expression of the plan, as the backward writes it. Raises `CannotDerive`."""
        tree = ast.parse(expression, mode="eval").body
        return plain_quotients(ast.unparse(_Filling(self).visit(copy.deepcopy(tree))))

    def condition(self, expression: str) -> str:
        """A condition that must hold for all launches that are spoken of, without parts that hold for any numbers: as
        many blocks as it takes are enough. Raises `CannotDerive`."""
        found: dict[str, None] = {}
        for tiles in self._tiles:
            with self.under([tiles]):
                tree = _Blocks().visit(ast.parse(self.text(expression), mode="eval").body)
            parts = tree.values if isinstance(tree, ast.BoolOp) and isinstance(tree.op, ast.And) else [tree]
            found |= {ast.unparse(part): None for part in parts if not (_always(part) or self._is_size(part))}
        texts = [ast.unparse(_Known(self._bound).visit(ast.parse(text, mode="eval").body)) for text in found]
        if len(texts) > 1:
            texts = [
                f"({text})" if isinstance(ast.parse(text, mode="eval").body, ast.BoolOp) else text for text in texts
            ]
        return " and ".join(texts) or "True"

    def _is_size(self, part: ast.expr) -> bool:
        """Whether a condition only says that a tensor is not empty, or no less than that: nothing is stored to elements
        of one that is."""
        if not isinstance(part, ast.Compare) or not isinstance(part.ops[0], ast.GtE):
            return False
        least, is_size = ast.unparse(part.comparators[0]), self.references.source.is_size
        if least == "0":
            return all(isinstance(factor, ast.Constant) or is_size(factor) for factor in _parts(part.left))
        return least == "1" and is_size(part.left)

    def short(self, expression: str) -> str:
        """The same, or the variable that holds it."""
        text = self.text(expression)
        return self._bound.get(text, text)

    def bind(self, name: str, expression: str) -> None:
        """Give an expression that is long a variable, under which `short` knows it."""
        text = self.text(expression)
        if len(text) > _LONG and text not in self._bound:
            self._bound[text] = self.body.bind(name, text)

    def argument(self, name: str) -> str:
        """A parameter of the forward's launch as the backward writes it. Raises `CannotDerive`."""
        given = self.launched.text
        if name not in given.arguments:
            raise CannotDerive(
                f"a backward kernel of `{self.launched.seen.name}` wants `{name}`, which nothing gives",
                remedy="Please report this forward: the plan is not complete.",
            )
        return self.names.expression(given.arguments[name], given.line, name)

    def form(self, name: str) -> str:
        """A parameter that is only asked for its size or strides: of a clone, what it is a clone of, so that it need
        not be kept for that."""
        clone = self.launched.seen.clones.get(name)
        return self.argument(name if clone is None else clone.of)

    def option(self, name: str) -> str | None:
        """An option of the forward's launch, such as `num_warps`, where that has it."""
        given = self.launched.text
        return self.names.expression(given.options[name], given.line, name) if name in given.options else None

    def gradient(self, name: str) -> str:
        """`dx` for the gradient of the stub's `x`, whatever the kernel calls it; other buffers keep their names."""
        for argument, result in self.plan.gradients.items():
            if result == name:
                return f"d{self.references.hint(self.launched.seen.tensors[argument])}"
        return name

    def name(self, name: str) -> str | None:
        """A name in an expression of the plan, as the backward writes it; None where it is none of the launch's."""
        given = self.launched.text
        if name in _GRID:
            axis = _GRID.index(name)
            return self.names.expression(self._extent(axis), given.line, name) if axis < len(given.grid) else "1"
        if name in self.variables:
            return self.variables[name]
        if name in self._tiles[0]:
            return self._tiles[0][name]
        return self.form(name) if name in given.arguments else None

    def stride(self, node: ast.Call) -> str | None:
        """A stride of a tensor of the launch, as the backward writes it; None of another tensor."""
        given = self.launched.text
        assert isinstance(node.func, ast.Attribute)
        name = ast.unparse(node.func.value)
        if name not in given.arguments or name in self.variables or name in self.launched.seen.clones:
            return None
        asked = ast.Call(ast.Attribute(copy.deepcopy(given.arguments[name]), "stride", ast.Load()), node.args, [])
        return self.names.expression(asked, given.line, name)

    def _extent(self, axis: int) -> ast.expr:
        """An extent of the forward's grid, over the tiles of the launch that is spoken of."""
        return self.launched.retiled(axis, self._tiles[0])


def plain_quotients(text: str) -> str:
    """An expression with `triton.cdiv(a, b)` for `-(-a // b)`, `a` for `a * b // b` and 0 for `a * b % b`."""
    return ast.unparse(_Quotients().visit(ast.parse(text, mode="eval").body))


def divisible(text: str) -> str:
    """`m % n == 0` for `n * triton.cdiv(m, n) <= m`, in all parts of a condition."""
    return ast.unparse(_Divided().visit(ast.parse(text, mode="eval").body))


class _Divided(ast.NodeTransformer):
    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        """A comparison."""
        product, (end,) = node.left, node.comparators
        if not isinstance(node.ops[0], ast.LtE) or not isinstance(product, ast.BinOp):
            return node
        for one, count in ((product.left, product.right), (product.right, product.left)):
            if ast.unparse(count) == f"triton.cdiv({ast.unparse(end)}, {ast.unparse(one)})":
                return ast.parse(f"{ast.unparse(end)} % {ast.unparse(one)} == 0", mode="eval").body
        return node


def _always(part: ast.expr) -> bool:
    """Whether a condition holds for any numbers: `a == a`, `n * triton.cdiv(m, n) >= m`,
    `triton.next_power_of_2(m) >= m`, or that of the larger of it and another number."""
    if not isinstance(part, ast.Compare):
        return False
    left, (right,) = part.left, part.comparators
    if isinstance(part.ops[0], (ast.Eq, ast.GtE)) and _factors(left) == _factors(right):
        return True
    if not isinstance(part.ops[0], ast.GtE):
        return False
    powers = left.args if isinstance(left, ast.Call) and ast.unparse(left.func) == "max" else [left]
    if any(ast.unparse(power) == f"triton.next_power_of_2({ast.unparse(right)})" for power in powers):
        return True
    if not isinstance(left, ast.BinOp) or not isinstance(left.op, ast.Mult):
        return False
    blocks = (f"triton.cdiv({ast.unparse(right)}, {ast.unparse(block)})" for block in (left.left, left.right))
    return any(ast.unparse(side) == text for side, text in zip((left.right, left.left), blocks, strict=True))


def _factors(value: ast.expr) -> list[str]:
    """What a product is of, sorted."""
    return sorted(map(ast.unparse, _parts(value)))


def _parts(value: ast.expr) -> list[ast.expr]:
    """What a product is of."""
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult):
        return [*_parts(value.left), *_parts(value.right)]
    return [value]


def _product(factors: Sequence[ast.expr]) -> ast.expr:
    """The product of some factors."""
    first, *rest = factors
    return ast.BinOp(_product([first, *rest[:-1]]), ast.Mult(), rest[-1]) if rest else first


class _Blocks(ast.NodeTransformer):
    """`a` for `triton.cdiv(a * b, b)`."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """A call."""
        self.generic_visit(node)
        if ast.unparse(node.func) != "triton.cdiv" or not isinstance(node.args[0], ast.BinOp):
            return node
        product = node.args[0]
        exact = isinstance(product.op, ast.Mult) and ast.unparse(product.right) == ast.unparse(node.args[1])
        return product.left if exact else node


class _Quotients(ast.NodeTransformer):
    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        """A number with a sign."""
        self.generic_visit(node)
        match node:
            case ast.UnaryOp(ast.USub(), ast.BinOp(ast.UnaryOp(ast.USub(), count), ast.FloorDiv(), part)):
                return ast.Call(ast.Attribute(ast.Name("triton", ast.Load()), "cdiv", ast.Load()), [count, part], [])
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        """A quotient or a remainder of a product by one of its factors."""
        self.generic_visit(node)
        if not isinstance(node.op, (ast.FloorDiv, ast.Mod)):
            return node
        factors, divisor = _parts(node.left), ast.unparse(node.right)
        place = next((n for n, factor in enumerate(factors) if ast.unparse(factor) == divisor), None)
        if place is None or len(factors) == 1:
            return node
        left = [*factors[:place], *factors[place + 1 :]]
        return ast.Constant(0) if isinstance(node.op, ast.Mod) else _product(left)


class _Known(ast.NodeTransformer):
    """Variables for the expressions that they hold."""

    def __init__(self, bound: Mapping[str, str]) -> None:
        self.bound = bound

    def visit(self, node: ast.AST) -> ast.AST:
        """Any node."""
        name = self.bound.get(ast.unparse(node)) if isinstance(node, ast.expr) else None
        return self.generic_visit(node) if name is None else ast.Name(name, ast.Load())


class _Filling(ast.NodeTransformer):
    """Puts the backward's expressions for names."""

    def __init__(self, wording: Wording) -> None:
        self.wording = wording

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """`X.stride(0)`, as the launch's arguments spell it: where a kernel was told just that, nothing is asked."""
        stride = isinstance(node.func, ast.Attribute) and node.func.attr == "stride" and node.args
        shown = self.wording.stride(node) if stride else None
        if shown is not None:
            return ast.parse(shown, mode="eval").body
        filled = self.generic_visit(node)
        count = isinstance(filled, ast.Call) and isinstance(filled.func, ast.Attribute) and filled.func.attr == "numel"
        if count and isinstance(filled, ast.Call) and isinstance(filled.func, ast.Attribute):
            of, names = filled.func.value, self.wording.names
            if isinstance(of, ast.Name) and isinstance(names.final.get(of.id), Tensor):
                # by the mark that a launch's `x.numel()` has, so that the two are seen to be one number
                return ast.Name(names.ask(of.id, "numel()"), ast.Load())
        return filled

    def visit_Name(self, node: ast.Name) -> ast.AST:
        """A name."""
        shown = self.wording.name(node.id)
        return node if shown is None else ast.parse(shown, mode="eval").body
