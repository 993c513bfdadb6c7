"""`wrapped`: a kernel that loads the arguments of a tile function, calls it, and stores what it returns.

What reads and runs kernels then reads and runs tile functions too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import triton.language as tl

from kernel_agent.compiler.emit.layout import bracketed
from kernel_agent.compiler.free_names import free_name
from kernel_agent.compiler.front.launch import read_launch
from kernel_agent.compiler.ssa.value import Kernel
from kernel_agent.compiler.tile.modules import defined
from kernel_agent.compiler.tile.signature import ELEMENTS, Extent, Signature, Tile
from kernel_agent.errors import InputError
from kernel_agent.ir.capture.build import Build
from kernel_agent.ir.lower import Path, lower_whole
from kernel_agent.ir.program import Module

SMALLEST = 16
"""Least number that the first named extent stands for: products of matrices take no smaller ones everywhere."""


@dataclass(frozen=True)
class Wrapped:
    """A kernel around a call of a tile function, to run in one program."""

    kernel: Any
    """The `triton.JITFunction`. Parameters: those of the function, tiles as pointers `x_ptr`, then a pointer for every
    result, then named extents."""
    signature: Signature
    """Of the function."""
    sizes: Mapping[str, int]
    """What the named extents are when it is read."""
    results: Mapping[str, Tile] = field(default_factory=dict)
    """What it returns, by names, with numbers for extents."""
    loads_scalars: bool = False
    """Scalars lie in memory too: a launch with tensors alone can be differentiated."""
    shared: tuple[frozenset[str], ...] = ()
    """No two pointers point into one tensor."""

    @property
    def build(self) -> Build:
        """What Triton is to compile."""
        return Build(self.kernel, self.types, self.constants(self.sizes), aligned=())

    @property
    def types(self) -> dict[str, str]:
        """Triton's type of every parameter."""
        found: dict[str, str] = {}
        for parameter in self.kernel.params:
            name = parameter.name
            tile = self.signature.tiles.get(name) or self.signature.tiles.get(name.removesuffix("_ptr"))
            if parameter.is_constexpr:
                found[parameter.name] = "constexpr"
            elif tile is not None:
                loaded = tile.extents or self.loads_scalars
                found[parameter.name] = f"*{stored_as(tile)}" if loaded else tile.type_name
        found.update({f"{name}_ptr": f"*{stored_as(tile)}" for name, tile in self.results.items()})
        return {parameter.name: found[parameter.name] for parameter in self.kernel.params}

    def constants(self, sizes: Mapping[str, int | float]) -> dict[Path, Any]:
        """Constexprs, where named extents are `sizes`."""
        values = {**self.signature.constants, **sizes}
        return {(place,): values[p.name] for place, p in enumerate(self.kernel.params) if p.is_constexpr}

    def lower(self, sizes: Mapping[str, int | float]) -> Module:
        """Its IR, where named extents are `sizes`. Raises LoweringError."""
        return lower_whole(self.kernel, self.types, self.constants(sizes), frozenset())

    def read(self) -> Kernel:
        """As passes read it. Raises CannotDerive."""
        return read_launch(self)


def stored_as(tile: Tile) -> str:
    """Triton's type of the memory that holds a tile: conditions take a byte."""
    return "i8" if tile.element == "i1" else tile.type_name


def default_sizes(signature: Signature) -> dict[str, int]:
    """Numbers for the named extents, all different."""
    return {name: SMALLEST << place for place, name in enumerate(signature.symbols)}


def other_sizes(signature: Signature) -> dict[str, int]:
    """Others, in another order."""
    sizes = default_sizes(signature)
    return dict(zip(sizes, [2 * size for size in reversed(sizes.values())], strict=True))


def wrapped(function: Any, signature: Signature, names: Sequence[str] = (), *, loads_scalars: bool = False) -> Wrapped:
    """The kernel around a tile function. `names`: of its results, as far as they are known; `loads_scalars`: see there.

    Raises LoweringError where Triton refuses the function, InputError where what it returns are not tiles.
    """
    noted: list[Tile] = []
    look = _looking(noted)
    looking = _kernel(function, signature, {}, look, loads_scalars)
    sizes = default_sizes(signature)
    Wrapped(looking, signature, sizes, loads_scalars=loads_scalars).lower(sizes)
    if not noted or any(tile.element not in _KNOWN for tile in noted):
        raise InputError(
            f"`{function.fn.__name__}` returns {', '.join(map(_told, noted)) or 'nothing'}",
            remedy="A tile function returns tiles and scalars of numbers, one or several.",
        )
    taken = {parameter.name for parameter in function.params} | set(signature.symbols)
    called = [free_name(name, taken) for name in names] if len(names) == len(noted) else []
    called = called or [free_name(f"out_{n}" if len(noted) > 1 else "out", taken) for n in range(len(noted))]
    results = dict(zip(called, noted, strict=True))
    kernel = _kernel(function, signature, results, look, loads_scalars)
    return Wrapped(kernel, signature, sizes, results, loads_scalars)


_KNOWN = frozenset(ELEMENTS.values())


def _told(tile: Tile) -> str:
    if tile.element == "constexpr_type[None]":
        return "nothing"
    return str(tile) if tile.element in _KNOWN else f"a value of type {tile.element}"


def _looking(noted: list[Tile]) -> Callable[..., Any]:
    """For kernels: what a function returns, as one tuple; when it is compiled, `noted` holds what they are."""

    def look(value: Any, _semantic: Any = None) -> Any:
        values = flat(value)
        noted[:] = [_tile_of(one) for one in values]
        return tuple(value for value in values if isinstance(value, tl.tensor))

    return tl.core.builtin(look)  # type: ignore[no-any-return]


def _tile_of(value: Any) -> Tile:
    if not isinstance(value, tl.tensor):
        return Tile((), str(getattr(value, "type", type(value).__name__)))
    name = str(value.type.scalar)
    shape = value.type.get_block_shapes() if value.type.is_block() else ()
    return Tile(tuple(int(extent) for extent in shape), ELEMENTS.get(name.removeprefix("u"), name))


def flat(value: Any) -> list[Any]:
    """What a value of Triton's language holds, tuples within tuples taken apart."""
    if isinstance(value, (tl.tuple, tuple)):
        return [inner for part in value for inner in flat(part)]
    return [value]


def _kernel(
    function: Any, signature: Signature, results: Mapping[str, Tile], look: Callable[..., Any], loads_scalars: bool
) -> Any:
    kernel = function.fn.__name__  # which errors name
    own = [parameter.name for parameter in function.params]
    pointers = [f"{result}_ptr" for result in results]
    symbols = [f"{symbol}: tl.constexpr" for symbol in signature.symbols if symbol not in own]
    loaded = {name: tile for name, tile in signature.tiles.items() if tile.extents or loads_scalars}
    constexprs = [name for name in own if name not in signature.tiles]
    declared = {**{name: f"{name}_ptr" for name in loaded}, **{name: f"{name}: tl.constexpr" for name in constexprs}}
    head = [*(declared.get(name, name) for name in own), *pointers, *symbols]
    lines = ["@triton.jit", *bracketed(f"def {kernel}", head, ":", 0)]
    for name, tile in loaded.items():
        load = f"tl.load({name}_ptr + {_offsets(tile.extents)})"
        lines.append(f"    {name} = {load}" + (" != 0" if tile.element == "i1" else ""))
    targets = "".join(f"{result}, " for result in results)
    lines.append(f"    {f'({targets}) = ' if results else ''}tile_results(tile_function({', '.join(own)}))")
    for pointer, (result, tile) in zip(pointers, results.items(), strict=True):
        extents = [f"{result}.shape[{axis}]" for axis in range(len(tile.extents))]  # whatever is named in them
        lines.append(f"    tl.store({pointer} + {_offsets(extents)}, {result})")
    names = {"tile_function": function, "tile_results": look}
    return defined("\n".join(lines) + "\n", names, f"kernel around {function.fn.__name__}")[kernel]


def _offsets(extents: Sequence[Extent]) -> str:
    """Of the elements of a contiguous tile."""
    rank, text = len(extents), ""
    for axis, extent in enumerate(extents):
        index = ", ".join(":" if other == axis else "None" for other in range(rank))
        lane = f"tl.arange(0, {extent})" + (f"[{index}]" if rank > 1 else "")
        text = f"({text}) * {extent} + {lane}" if text else lane
    return f"({text})" if text else "0"
