"""Tensor descriptors that a stub makes and gives to a launch: their tensor, extents and strides, each as an argument.

A kernel with a descriptor is read as one with a pointer and numbers behind it (`front/read.py`). Here the launch gets
the same arguments, with the words that the stub has for them. They are read from the text of the descriptor, and kept
only where they are what the descriptor of the followed call holds, so that no coincidence of sizes is taken for a rule.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from triton.tools.tensor_descriptor import TensorDescriptor

from kernel_agent.compiler.substitution import Substitution

_NAME = "TensorDescriptor"
_MAKER = "from_tensor"
_BLOCK = "block"
"""What the extents of a descriptor's tiles are called behind its name: `x_block_0`."""


@dataclass(frozen=True)
class Described:
    """What a descriptor is made of, in expressions of the stub."""

    base: ast.expr
    """The tensor."""
    shape: tuple[ast.expr, ...]
    strides: tuple[ast.expr, ...]
    blocks: tuple[ast.expr, ...]
    """Extents of the tiles that it loads."""

    def arguments(self, name: str) -> dict[str, ast.expr]:
        """By the names that `taken_apart` gives what it is made of."""
        groups = (("shape", self.shape), ("stride", self.strides), (_BLOCK, self.blocks))
        return {
            name: self.base,
            **{key: one for what, some in groups for key, one in _numbered(name, what, some).items()},
        }


def taken_apart(values: Mapping[str, Any]) -> dict[str, Any]:
    """What a launch is given, descriptors as their tensors, extents, strides and tiles. Those that pad with NaN or
    round are left, since pointers do neither."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, TensorDescriptor) and value.padding == "zero" and not rounds(value):
            found[name] = value.base
            for what, some in (("shape", value.shape), ("stride", value.strides), (_BLOCK, value.block_shape)):
                found |= _numbered(name, what, tuple(map(int, some)))
        else:
            found[name] = value
    return found


def block_names(ranks: Mapping[str, int]) -> list[str]:
    """What the extents of the tiles of descriptors are called. `ranks`: by the descriptor's name."""
    return [f"{name}_{_BLOCK}_{axis}" for name, rank in ranks.items() for axis in range(rank)]


def by_axis(ranks: Mapping[str, int], tied: Mapping[str, str]) -> dict[str, dict[int, str]]:
    """Constexprs that tiles are as long as, by descriptor and axis. `tied`: by the name of the extent."""
    return {
        name: {axis: tied[block] for axis, block in enumerate(block_names({name: rank})) if block in tied}
        for name, rank in ranks.items()
    }


def rounds(value: TensorDescriptor) -> bool:
    """Whether loads by a descriptor round to tf32, which older versions of Triton never do."""
    return bool(getattr(value, "round_f32_to_tf32", False))


def described(node: ast.expr, rank: int, definition: Callable[[str], ast.AST | None]) -> Described | None:
    """What a descriptor's expression makes it of; None where the text does not tell. `definition`: what a local is
    bound to, if that is one thing."""
    call = _written(node, definition)
    if not isinstance(call, ast.Call) or any(isinstance(one, ast.Starred) for one in call.args):
        return None
    given = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
    callee = ast.unparse(call.func)
    if callee.endswith(f"{_NAME}.{_MAKER}"):
        given |= dict(zip(("tensor", "block_shape"), call.args, strict=False))
        base, blocks = given.get("tensor"), _elements(given.get("block_shape"), rank, definition)
        if not isinstance(base, ast.Name) or blocks is None:
            return None
        sizes, steps = (tuple(_asked(base, what, axis) for axis in range(rank)) for what in ("size", "stride"))
        return Described(base, sizes, steps, blocks)
    if callee != _NAME and not callee.endswith(f".{_NAME}"):
        return None
    given |= dict(zip(("base", "shape", "strides", "block_shape"), call.args, strict=False))
    base = given.get("base")
    shape, strides, blocks = (_elements(given.get(w), rank, definition) for w in ("shape", "strides", "block_shape"))
    if not isinstance(base, ast.Name) or shape is None or strides is None or blocks is None:
        return None
    return Described(base, shape, strides, blocks)


def _numbered(name: str, what: str, values: tuple[Any, ...]) -> dict[str, Any]:
    """As the reader of kernels names them."""
    return {f"{name}_{what}_{axis}": value for axis, value in enumerate(values)}


def _asked(base: ast.expr, what: str, axis: int) -> ast.expr:
    """`x.shape[1]` or `x.stride(1)`."""
    if what == "size":
        return ast.Subscript(ast.Attribute(copy.deepcopy(base), "shape", ast.Load()), ast.Constant(axis), ast.Load())
    return ast.Call(ast.Attribute(copy.deepcopy(base), what, ast.Load()), [ast.Constant(axis)], [])


def _elements(
    node: ast.expr | None, rank: int, definition: Callable[[str], ast.AST | None]
) -> tuple[ast.expr, ...] | None:
    """One expression per axis of a shape or of strides: of a list that is written out, or of `x.shape`."""
    if node is None:
        return None
    written = _written(node, definition)
    if isinstance(written, (ast.List, ast.Tuple)):
        starred = any(isinstance(one, ast.Starred) for one in written.elts)
        return None if starred or len(written.elts) != rank else tuple(written.elts)
    if isinstance(written, ast.Attribute) and written.attr == "shape" and isinstance(written.value, ast.Name):
        return tuple(_asked(written.value, "size", axis) for axis in range(rank))
    method = written.func if isinstance(written, ast.Call) and not written.args else None
    if isinstance(method, ast.Attribute) and method.attr in ("stride", "size") and isinstance(method.value, ast.Name):
        return tuple(_asked(method.value, method.attr, axis) for axis in range(rank))
    return None


def _written(node: ast.AST | None, definition: Callable[[str], ast.AST | None]) -> ast.AST | None:
    """What names and subscripts of lists stand for."""
    if isinstance(node, ast.Name):
        found = definition(node.id)
        return node if found is None else _written(found, definition)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and type(node.slice.value) is int:
        place, whole = node.slice.value, _written(node.value, definition)
        if isinstance(whole, (ast.List, ast.Tuple)):
            return _written(_at(whole.elts, place), definition)
        if isinstance(whole, (ast.ListComp, ast.GeneratorExp)):
            return _element(whole, place, definition)
    return node


def _element(
    node: ast.ListComp | ast.GeneratorExp, place: int, definition: Callable[[str], ast.AST | None]
) -> ast.AST | None:
    """An element of `[f(t) for t in (x, y)]`: f(x). None where there is a condition, or another loop."""
    (loop, *more) = node.generators
    items = _written(loop.iter, definition)
    if more or loop.ifs or not isinstance(items, (ast.List, ast.Tuple)):
        return None
    item = _at(items.elts, place)
    names = _unpacked(loop.target, item) if item is not None else None
    if names is None:
        return None
    return Substitution(names).of(node.elt)


def _unpacked(target: ast.expr, value: ast.expr) -> dict[str, ast.expr] | None:
    """Names with what they are given, tuples taken apart."""
    if isinstance(target, ast.Name):
        return {target.id: value}
    several = isinstance(target, (ast.Tuple, ast.List)) and isinstance(value, (ast.Tuple, ast.List))
    if not several or not isinstance(target, (ast.Tuple, ast.List)) or not isinstance(value, (ast.Tuple, ast.List)):
        return None
    if len(target.elts) != len(value.elts):
        return None
    found: dict[str, ast.expr] = {}
    for one, given in zip(target.elts, value.elts, strict=True):
        inner = _unpacked(one, given)
        if inner is None:
            return None
        found |= inner
    return found


def _at(items: list[ast.expr], place: int) -> ast.expr | None:
    """An element, if the list is that long and has no stars before it."""
    known = -len(items) <= place < len(items) and not any(isinstance(one, ast.Starred) for one in items)
    return items[place] if known else None
