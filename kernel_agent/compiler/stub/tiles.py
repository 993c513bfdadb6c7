"""Tiles that a launch of a backward chooses for itself, whatever sizes the forward was launched with.

A constexpr is such a tile where a kernel steps by it (`pid * BLOCK_M + tl.arange(0, BLOCK_M)`, `range(0, K, BLOCK_K)`)
and the forward's launch gives it as a number or a formula. That gets a variable, under which the launch, its grid, the
checks and the buffers that belong to it know it. What counts tiles must follow: a grid whose text does not show the
size keeps it.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Mapping
from types import MappingProxyType

from kernel_agent.compiler.free_names import free_names
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Kernel, Op, Value, constant, unspread
from kernel_agent.compiler.stub.meta import PARAMETER
from kernel_agent.compiler.stub.source import StubSource

_SUMS = frozenset((Code.ADD, Code.CAST, Code.EXPAND, Code.BROADCAST, Code.FULL))

Tiles = Mapping[str, str]
"""Constexpr of a kernel -> variable of the backward."""


def steps_by(kernel: Kernel) -> frozenset[str]:
    """Constexprs that loops step by, or that the number of a program or a trip is multiplied by."""
    found = set()
    for op in kernel.ops:
        if op.code is Code.FOR:
            found.add(_symbol(op.operands[2]))
        elif op.code is Code.MUL:
            for one, other in (op.operands, op.operands[::-1]):
                if not other.shape and constant(other) is None:
                    found.add(_symbol(one))
    return frozenset(found & set(kernel.constants))


def tiles_of_axes(kernel: Kernel) -> dict[int, str]:
    """The constexpr that the number of a program along each axis of the grid is multiplied by, where that is one."""
    found: dict[int, set[str]] = {}
    for op in kernel.ops:
        if op.code is Code.MUL:
            for one, other in (op.operands, op.operands[::-1]):
                axis, symbol = _axis(other), _symbol(one)
                if axis is not None and symbol in kernel.constants:
                    found.setdefault(axis, set()).add(symbol)
    return {axis: next(iter(symbols)) for axis, symbols in found.items() if len(symbols) == 1}


def axes_of_tiles(kernel: Kernel) -> dict[str, frozenset[int]]:
    """The axes of the grid whose programs count a tile, by constexpr. One that counts something else as well, such as
    blocks that an argument tells the number of, is not among them: it has the size that the forward gave it."""
    found: dict[str, set[int] | None] = {name: set() for name in steps_by(kernel)}
    loops = {op.blocks[0].arguments[0]: op for op in kernel.ops if op.code is Code.FOR}
    for op in kernel.ops:
        if op.code is not Code.MUL:
            continue
        for one, other in (op.operands, op.operands[::-1]):
            known = found.get(_symbol(one))
            if known is not None and not other.shape and constant(other) is None:
                counted = _counted(other, loops)
                found[_symbol(one)] = None if counted is None else known | counted
    return {name: frozenset(axes) for name, axes in found.items() if axes is not None}


def _counted(number: Value, loops: Mapping[Value, Op]) -> frozenset[int] | None:
    """Axes of the grid that a number is of; None where it is of more than these and of what is divided by tiles."""
    stack, seen, axes = [number], set[Value](), set[int]()
    while stack:
        value = stack.pop()
        if value in seen or value.is_pointer:
            continue
        seen.add(value)
        op = value.producer
        if op is None:
            if value not in loops:
                return None
            stack += loops[value].operands[:2]
        elif op.code in (Code.PROGRAM_ID, Code.NUM_PROGRAMS):
            axes.add(op.attributes["axis"])
        elif op.blocks or op.code is Code.LOAD:
            return None
        elif op.code is not Code.FLOORDIV or not _symbol(op.operands[1]):
            stack += op.operands
    return frozenset(axes)


def tiles_of_bounds(kernel: Kernel) -> dict[str, str]:
    """Argument -> the constexpr that positions below it are multiples of: `row * BLOCK_M + tl.arange(...) < M`."""
    found: dict[str, set[str]] = {}
    for op in kernel.ops:
        if op.code is Code.CMP and op.attributes["predicate"] == "lt":
            bound = unspread(op.operands[1])
            if bound in kernel.arguments:
                found.setdefault(bound.name, set()).update(_steps(op.operands[0]) & set(kernel.constants))
    return {name: next(iter(symbols)) for name, symbols in found.items() if len(symbols) == 1}


def retiled(
    grid: ast.expr,
    tile: str | None,
    given: Mapping[str, ast.expr],
    tiles: Tiles,
    bounds: Mapping[str, ast.expr] = MappingProxyType({}),
) -> ast.expr:
    """An extent of the forward's grid with variables for its tiles.

    `tile`: the tile of this axis, where it is known; `given`: what the forward's launch gives for each; `bounds`: and
    what it gives for the argument that positions are below.
    """
    shown = _Retiling(tile, given, tiles, bounds).visit(copy.deepcopy(grid))
    assert isinstance(shown, ast.expr)
    return ast.fix_missing_locations(shown)


def mentions(node: ast.expr, name: str, source: StubSource) -> bool:
    """Whether an expression depends on a local of the stub, perhaps by way of others."""
    names, seen = list(free_names(node)), set()
    while names:
        one = names.pop()
        if one == name:
            return True
        definition = source.definition(one)
        if one not in seen and isinstance(definition, ast.expr):
            names += free_names(definition)
        seen.add(one)
    return False


class _Retiling(ast.NodeTransformer):
    def __init__(
        self, tile: str | None, given: Mapping[str, ast.expr], tiles: Tiles, bounds: Mapping[str, ast.expr]
    ) -> None:
        self.tile = tile
        self.bounds = {ast.dump(node): name for name, node in bounds.items()}
        self.given = {name: ast.dump(node) for name, node in given.items()}
        self.tiles = tiles

    def visit(self, node: ast.AST) -> ast.AST:
        """What the grid function asked for, or what is given for the only tile of the axis."""
        asked: str | None = getattr(node, PARAMETER, None)
        if asked is None and self.tile is not None and ast.dump(node) == self.given.get(self.tile):
            asked = self.tile
        if self.tile is None and isinstance(node, ast.Call) and ast.unparse(node.func) == "triton.cdiv":
            count, size = node.args
            name = self.bounds.get(ast.dump(count), "")
            if name in self.tiles and ast.dump(size) == self.given[name]:
                node.args[1] = ast.Name(self.tiles[name], ast.Load())
        own = self.tiles.get(asked or "")
        return self.generic_visit(node) if own is None else ast.Name(own, ast.Load())


def _steps(value: Value) -> set[str]:
    """What numbers that are added up are multiplied by, where the source has a name for it."""
    found, pending = set[str](), [value]
    while pending:
        op = pending.pop().producer
        if op is not None and op.code is Code.MUL:
            found |= {_symbol(one) for one in op.operands}
        elif op is not None and op.code in _SUMS:
            pending += op.operands
    return found


def _symbol(value: Value) -> str:
    """What the source calls a number; empty for anything else."""
    op = value.producer
    return (op.attributes.get("symbol") or "") if op is not None and op.code is Code.CONST else ""


def _axis(value: Value) -> int | None:
    """The axis of the grid whose number a value is, or that number from the end or moved by a constant."""
    op: Op | None = value.producer
    while op is not None and op.code in (Code.CAST, Code.ADD, Code.SUB):
        moved = [operand for operand in op.operands if not _is_distance(operand)]
        op = moved[0].producer if len(moved) == 1 else None
    if op is None or op.code is not Code.PROGRAM_ID:
        return None
    axis: int = op.attributes["axis"]
    return axis


def is_one(node: ast.expr) -> bool:
    """Whether a tile is a single element: what is computed one by one has no tile."""
    return isinstance(node, ast.Constant) and node.value == 1


def _is_distance(value: Value) -> bool:
    """Whether a number is the same for all programs of the grid: a constant, and how many there are."""
    op = value.producer
    if op is not None and op.code in (Code.ADD, Code.SUB):
        return all(map(_is_distance, op.operands))
    return constant(value) is not None or (op is not None and op.code is Code.NUM_PROGRAMS)
