"""`Signature`: what a tile function is given: the extents and elements of its tiles, and its constants.

Written as `x=[M, 32] fp16, w=[32], eps=fp32, CAUSAL=True`. A number is an extent; a name stands for any, the same
wherever it is written. Elements are fp32 where none is named.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kernel_agent.compiler.emit.dtypes import DTYPES
from kernel_agent.compiler.ssa.value import FLOATS
from kernel_agent.errors import InputError

ELEMENTS = {
    "fp64": "f64", "fp32": "f32", "fp16": "f16", "bf16": "bf16", "fp8e5": "f8E5M2", "fp8e4nv": "f8E4M3FN",
    "int1": "i1", "int8": "i8", "int16": "i16", "int32": "i32", "int64": "i64", "i1": "i1", "i8": "i8", "i16": "i16",
    "i32": "i32", "i64": "i64",
}  # fmt: skip
"""What elements are called in a notation -> in the IR."""
_WRITTEN = {element: name for name, element in ELEMENTS.items()}
_EXAMPLE = "Write them as in shapes='x=[M, 32] fp16, w=[32], eps=fp32, CAUSAL=True'."

Extent = int | str
"""A number, or a name that stands for any."""


@dataclass(frozen=True)
class Tile:
    """A tile, or a scalar."""

    extents: tuple[Extent, ...]
    """Empty for a scalar."""
    element: str = "f32"
    """As in the IR: `f32`, `i64`."""

    @property
    def is_float(self) -> bool:
        """Whether it may have an adjoint."""
        return self.element in FLOATS

    @property
    def type_name(self) -> str:
        """As Triton names it in signatures: `fp16`, `i32`."""
        return _WRITTEN[self.element]

    @property
    def dtype(self) -> str:
        """As Triton's language names it: `tl.float16`."""
        return DTYPES[self.element]

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Its extents where names stand for `sizes`."""
        return tuple(sizes[extent] if isinstance(extent, str) else extent for extent in self.extents)

    def __str__(self) -> str:
        dims = f"[{', '.join(map(str, self.extents))}] " if self.extents else ""
        return f"{dims}{self.type_name}"


@dataclass(frozen=True)
class Constant:
    """The value of a constexpr."""

    value: Any

    def __str__(self) -> str:
        return repr(self.value)


@dataclass(frozen=True)
class Signature:
    """What a tile function is given."""

    parameters: Mapping[str, Tile | Constant]
    """In the order of the function. A constexpr that is the name of an extent is not among them."""

    @property
    def tiles(self) -> dict[str, Tile]:
        """Tiles and scalars."""
        return {name: given for name, given in self.parameters.items() if isinstance(given, Tile)}

    @property
    def constants(self) -> dict[str, Any]:
        """Values of constexprs."""
        return {name: given.value for name, given in self.parameters.items() if isinstance(given, Constant)}

    @property
    def symbols(self) -> tuple[str, ...]:
        """Names of extents, in the order in which they come."""
        named = [extent for tile in self.tiles.values() for extent in tile.extents if isinstance(extent, str)]
        return tuple(dict.fromkeys(named))

    def __str__(self) -> str:
        return ", ".join(f"{name}={given}" for name, given in self.parameters.items())


def signature_of(function: Any, shapes: str | Mapping[str, Any]) -> Signature:
    """The signature of a `triton.JITFunction`. `shapes`: a notation, or a mapping from parameters to parts of one
    (`"[64, 32] fp16"`, `"fp32"`), to extents (`(64, 32)`), or to values of constexprs.

    A constexpr may be left out where it has a default or is the name of an extent. Raises InputError for what is not
    understood, for parameters that are missing and for those that the function has not.
    """
    given = dict(_split(shapes)) if isinstance(shapes, str) else dict(shapes)
    constexprs = {parameter.name for parameter in function.params if parameter.is_constexpr}
    found = {name: _read(name, value, name in constexprs) for name, value in given.items()}
    symbols = Signature(found).symbols
    for name in symbols:
        if isinstance(found.get(name), Tile):
            raise InputError(f"shapes: `{name}` is an extent and a parameter", remedy="Call the extent otherwise.")
    ordered: dict[str, Tile | Constant] = {}
    for parameter in function.params:
        name = parameter.name
        if name in found:
            ordered[name] = found.pop(name)
        elif parameter.is_constexpr and name in symbols:
            continue
        elif parameter.has_default:
            ordered[name] = Constant(parameter.default)
        else:
            raise InputError(f"shapes says nothing of `{name}` of {function.fn.__name__}", remedy=_EXAMPLE)
    for name in found:
        raise InputError(
            f"shapes names `{name}`, which is no parameter of {function.fn.__name__}",
            remedy=f"Its parameters are {', '.join(parameter.name for parameter in function.params)}.",
        )
    return Signature(ordered)


def _split(text: str) -> Iterator[tuple[str, str]]:
    """`name=value` parts, at commas outside of brackets and strings."""
    depth, start, quote = 0, 0, ""
    for place, letter in enumerate(f"{text},"):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in "[(":
            depth += 1
        elif letter in "])":
            depth -= 1
        elif letter == "," and depth == 0:
            part = text[start:place].strip()
            start = place + 1
            name, equals, value = part.partition("=")
            if not equals or not name.strip().isidentifier() or not value.strip():
                if not part:
                    continue
                raise InputError(f"shapes: `{part}` is not of the form name=value", remedy=_EXAMPLE)
            yield name.strip(), value.strip()


def _read(name: str, value: Any, constexpr: bool) -> Tile | Constant:
    if isinstance(value, (Tile, Constant)):
        return value
    if constexpr:
        return Constant(_literal(name, value) if isinstance(value, str) else value)
    if isinstance(value, (tuple, list)):
        return Tile(_extents(name, value))
    if not isinstance(value, str):
        raise InputError(f"shapes: `{name}` is no constexpr, but is given the value {value!r}", remedy=_EXAMPLE)
    text = value.strip()
    inside, bracket, element = text[1:].partition("]") if text.startswith("[") else ("", "", text)
    element = element.strip() or "fp32"
    if element not in ELEMENTS or (text.startswith("[") and not bracket):
        raise InputError(
            f"shapes: `{value}` of `{name}` is no tile and no scalar",
            remedy=f"{_EXAMPLE} Elements are {', '.join(ELEMENTS)}.",
        )
    extents = [int(part) if part.strip().isdigit() else part.strip() for part in inside.split(",") if part.strip()]
    if bracket and not extents:
        raise InputError(f"shapes: the tile `{name}` has no extents", remedy=_EXAMPLE)
    return Tile(_extents(name, extents), ELEMENTS[element])


def _extents(name: str, extents: Sequence[Any]) -> tuple[Extent, ...]:
    for extent in extents:
        if isinstance(extent, str) and extent.isidentifier():
            continue
        if type(extent) is not int or extent < 1 or extent & (extent - 1):
            raise InputError(f"shapes: `{name}` has an extent {extent}", remedy="Extents are powers of two, or names.")
    return tuple(extents)


def _literal(name: str, text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError) as error:
        raise InputError(
            f"shapes: the constexpr `{name}` is given {text}, which is no Python literal", remedy=_EXAMPLE
        ) from error
