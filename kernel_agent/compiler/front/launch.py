"""`read_launch`: the kernel of a captured launch, with the names that its constexprs give its numbers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.front.asked import asked_numbers
from kernel_agent.compiler.front.library import KEPT, KEPT_STANDARD
from kernel_agent.compiler.front.read import kernel_of
from kernel_agent.compiler.front.witness import lift
from kernel_agent.compiler.ssa.value import Kernel
from kernel_agent.ir.capture.build import Build
from kernel_agent.ir.errors import IRError, LoweringError
from kernel_agent.ir.lower import Path, lower_whole
from kernel_agent.ir.program import Module

_WHOLE = frozenset(
    [f"triton.language.random.{name}" for name in KEPT] + [f"triton.language.standard.{name}" for name in KEPT_STANDARD]
)


class Built(Protocol):
    """A launch, captured or only bound."""

    @property
    def build(self) -> Build:
        """What Triton compiles for it."""
        ...

    @property
    def shared(self) -> tuple[frozenset[str], ...]:
        """See `Launch.shared`."""
        ...


def read_launch(
    launch: Built,
    *,
    distinct: bool = True,
    others: Sequence[Mapping[str, Any]] = (),
    tiles: Mapping[str, Mapping[int, str]] | None = None,
    floats: Collection[str] = (),
) -> Kernel:
    """The kernel of a launch. `others`: what the same kernel's parameters were at other launches that it should hold
    for; numbers for which it is another kernel are `fixed`. `tiles`: for descriptors the axes whose tiles have the
    extent of a constexpr in every launch. `floats`: constexprs that are no whole numbers and that launches may change.

    With `distinct`, tiles may have other sizes than at the launch, so that extents of two names are two numbers:
    `Kernel.constants` holds the constexprs that it was read at. Whole numbers that Triton made constants because they
    were 1 are arguments. Raises CannotDerive.
    """
    build = launch.build
    types, constants = _general(build)
    try:
        lower_whole(build.kernel, types, constants, _WHOLE)
    except LoweringError:  # a kernel may ask for its 1 as a constant
        types, constants = dict(build.types), dict(build.constants)
    names = [parameter.name for parameter in build.kernel.params]
    values = {
        names[path[0]]: value
        for path, value in sorted(constants.items())
        if len(path) == 1 and (type(value) is int or (type(value) is float and names[path[0]] in floats))
    }

    lowered: dict[frozenset[tuple[str, int | float]], Module] = {}

    def lower(changed: Mapping[str, int | float]) -> Module:
        key = frozenset(changed.items())
        if key not in lowered:
            lowered[key] = lowered_at(changed)
        return lowered[key]

    def lowered_at(changed: Mapping[str, int | float]) -> Module:
        chosen = {path: changed.get(names[path[0]], v) if len(path) == 1 else v for path, v in constants.items()}
        blocks = {
            name: {axis: int(changed[constexpr]) for axis, constexpr in axes.items() if constexpr in changed}
            for name, axes in (tiles or {}).items()
        }
        if any(extent & (extent - 1) for axes in blocks.values() for extent in axes.values()):
            raise LoweringError("tiles of descriptors are powers of two", kernel=build.kernel.fn.__name__)
        given = {name: retyped(type_, blocks[name]) if name in blocks else type_ for name, type_ in types.items()}
        return lower_whole(build.kernel, given, chosen, _WHOLE)

    try:
        asked = asked_numbers(build.kernel)
        lifted = lift(lower, values, distinct=distinct, others=[_numbers(one) for one in others], asked=asked)
    except IRError as error:
        raise CannotDerive(error.message, remedy=error.remedy) from error
    known = {names[path[0]]: value for path, value in sorted(constants.items()) if len(path) == 1}
    kernel = kernel_of(
        lifted.module,
        constants={**known, **lifted.values},
        symbols=lifted.symbols,
        shared=launch.shared,
        names=[name for parameter, type_ in types.items() for name in argument_names(parameter, type_)],
    )
    kernel.extents = lifted.extents
    kernel.fixed = lifted.fixed
    kernel.special = dict(lifted.special)
    return kernel


def accepted(launch: Built) -> bool:
    """Whether Triton takes the kernel of a launch as it was launched."""
    build = launch.build
    try:
        lower_whole(build.kernel, build.types, build.constants, _WHOLE)
    except IRError:
        return False
    return True


def _numbers(values: Mapping[str, Any]) -> dict[str, int | float]:
    return {name: value for name, value in values.items() if type(value) in (int, float)}


def argument_names(parameter: str, type_: Any) -> list[str]:
    """What the values of a parameter are called: a tuple's bear its name and their number, constants are none."""
    if isinstance(type_, tuple):
        return [name for number, part in enumerate(type_) for name in argument_names(f"{parameter}_{number}", part)]
    return [] if type_ == "constexpr" else [parameter]


def retyped(type_: str, tiles: Mapping[int, int]) -> str:
    """The type of a descriptor with other tiles: `tensordesc<fp16[64, 32]>`. `tiles`: extents by axis."""
    head, _, inner = type_.rstrip("]>").rpartition("[")
    extents = [str(tiles.get(axis, int(extent))) for axis, extent in enumerate(inner.split(","))]
    return f"{head}[{', '.join(extents)}]>"


def _general(build: Build) -> tuple[dict[str, Any], dict[Path, Any]]:
    """Types and constants without those that Triton made of ones."""
    types, constants = dict(build.types), dict(build.constants)
    for place, parameter in enumerate(build.kernel.params):
        value = constants.get((place,))
        if not parameter.is_constexpr and type(value) is int and types[parameter.name] == "constexpr":
            types[parameter.name] = "i32"
            del constants[place,]
    return types, constants
