"""`adjoint_source`: the adjoint of a tile function in Triton's language, with what it assumes asserted."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import triton.language as tl

from kernel_agent.compiler.emit.dtypes import DTYPES, dtype
from kernel_agent.compiler.emit.layout import WIDTH, bracketed
from kernel_agent.compiler.emit.printer import printed
from kernel_agent.compiler.emit.source import LIBDEVICE
from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.reverse.elements import adjoint_element
from kernel_agent.compiler.tile.program import TileProgram
from kernel_agent.compiler.tile.signature import Constant, Extent, Signature, Tile
from kernel_agent.compiler.tile.sizes import Sizes


@dataclass(frozen=True)
class AdjointSource:
    """An adjoint as text."""

    name: str
    text: str
    """The function with its decorator, behind the functions it calls; ends with a line break."""
    imports: tuple[str, ...] = ()
    """Lines beside `import triton` and `import triton.language as tl`."""

    @property
    def module_text(self) -> str:
        """A module with this function alone."""
        return "\n".join(("import triton", "import triton.language as tl", *self.imports, "", "", self.text))


def adjoint_source(
    name: str, function: Any, signature: Signature, program: TileProgram, sizes: Mapping[str, Sizes]
) -> AdjointSource:
    """Print the adjoint of a `triton.JITFunction`.

    `name`: of the new function; `sizes`: what the named extents may be. Raises CannotDerive.
    """
    own = [parameter.name for parameter in function.params]
    kernel = replace(program.kernel, name=name)
    body = printed(kernel, [*own, *program.results, *signature.symbols, name], frozenset())
    returned = body.yielded()
    head = [*(_declared(parameter, signature) for parameter in own), *program.results]
    lines = ["@triton.jit", *bracketed(f"def {name}", head, ":", 0)]
    lines += _docstring(function.fn.__name__, signature, program)
    lines += _assertions(own, signature, sizes)
    lines += [line for cotangent, tile in program.results.items() for line in _cotangent(cotangent, tile)]
    lines += body.lines
    lines += _returned([value.text for value in returned])
    helpers = [helper.text for helper in body.helpers.values()]
    imports = (LIBDEVICE,) if "libdevice" in body.needs else ()
    return AdjointSource(name, "\n\n".join([*helpers, "\n".join(lines) + "\n"]), imports)


def _declared(parameter: str, signature: Signature) -> str:
    return parameter if isinstance(signature.parameters.get(parameter), Tile) else f"{parameter}: tl.constexpr"


def _docstring(function: str, signature: Signature, program: TileProgram) -> list[str]:
    given = ", ".join(f"{name} {tile}" for name, tile in signature.tiles.items())
    pulled = _listed([f"{name} {_shape(tile)}" for name, tile in program.results.items()])
    given += f"; {pulled}: cotangent{'s' if len(program.results) > 1 else ''} of what `{function}` returns."
    back = ", ".join(f"{_shape(tile)} {tile.type_name}".strip() for tile in program.adjoints.values())
    rows = [given, f"Returns {back}."]
    if program.replays:
        rows.append("Every trip of the way back runs the loop again from its start, for what it carried there.")
    found = [f'    """Adjoints of `{function}` by {_listed(list(program.adjoints))}.', ""]
    for row in rows:
        found += [f"    {line}" for line in textwrap.wrap(row, WIDTH - 4)]
    return [*found, '    """']


def _shape(tile: Tile) -> str:
    return f"[{', '.join(map(str, tile.extents))}]" if tile.extents else "scalar"


def _listed(parts: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))


def _assertions(own: Sequence[str], signature: Signature, sizes: Mapping[str, Sizes]) -> list[str]:
    """That arguments are what the adjoint was derived for, and names for extents."""
    lines: list[str] = []
    known = set(own)
    for name, tile in signature.tiles.items():
        if not tile.extents:
            continue
        new: dict[Extent, str] = {}  # names that this tile gives -> where they are
        checked = [f"len({name}.shape) == {len(tile.extents)}"]
        for axis, extent in enumerate(tile.extents):
            place = f"{name}.shape[{axis}]"
            if isinstance(extent, str) and extent not in known and extent not in new:
                new[extent] = place
            else:
                checked.append(f"{place} == {new.get(extent, extent)}")
        condition = " and ".join([*checked, f"{name}.dtype == {tile.dtype}"])
        lines += _asserted(condition, f"{name} must be {tile}")
        lines += [f"    {extent}: tl.constexpr = {place}" for extent, place in new.items()]
        known.update(str(extent) for extent in new)
    for symbol, size in sizes.items():
        lines += _asserted(size.condition(symbol), f"{symbol} must be {size}, which this was derived for")
    for name, given in signature.parameters.items():
        if isinstance(given, Constant):
            lines += _asserted(f"{name} {_is(name, given.value)}", f"{name} must be {given}")
    return lines


def _is(name: str, value: Any) -> str:
    """That a constexpr has a value."""
    if value is None:
        return "is None"
    if isinstance(value, tl.dtype) and f"tl.{value}" in DTYPES.values():
        return f"== tl.{value}"
    if isinstance(value, float) and math.isinf(value):
        return f'== float("{value}")'
    if not isinstance(value, (bool, int, float, str)) or value != value:
        raise CannotDerive(
            f"the constexpr {name} is {value!r:.60}, which cannot be asserted",
            remedy="Write a function of your own that calls this one with it, and differentiate that.",
        )
    return f"== {json.dumps(value) if isinstance(value, str) else repr(value)}"


def _asserted(condition: str, message: str) -> list[str]:
    said = message.replace('"', "'")
    return bracketed("tl.static_assert", [condition, f'"{said}"'], "", 1)


def _cotangent(name: str, tile: Tile) -> list[str]:
    """What is said of a cotangent before it is used: sums of narrow floats are made in float32, whoever gives them."""
    wide = dtype(adjoint_element(tile.element))
    if not tile.extents:
        return [f"    {name} = tl.cast({name}, {wide})"]  # it may be a Python number
    parts = [f"len({name}.shape) == {len(tile.extents)}"]
    parts += [f"{name}.shape[{axis}] == {extent}" for axis, extent in enumerate(tile.extents)]
    lines = _asserted(" and ".join(parts), f"{name} must be {_shape(tile)}")
    return [*lines, f"    {name} = {name}.to({wide})"]


def _returned(values: Sequence[str]) -> list[str]:
    line = f"    return {', '.join(values)}"
    return [line] if len(line) <= WIDTH else bracketed("return ", values, "", 1)
