"""`TileProgram`: a function from tiles to tiles in the compiler's form, and how reverse mode's kernel becomes one.

Reverse mode works on kernels: what a tile function takes is loaded there, and what it gives is stored. Taken back, a
load of an argument is the argument, and what is added to a gradient is returned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kernel_agent.compiler.emit.implicit import implicit
from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.free_names import free_name
from kernel_agent.compiler.reverse import differentiate
from kernel_agent.compiler.reverse.elements import adjoint_element
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.rebuild import Copier, emptied
from kernel_agent.compiler.ssa.value import Kernel, Op, Value
from kernel_agent.compiler.tile.replay import replayed
from kernel_agent.compiler.tile.signature import Signature, Tile
from kernel_agent.errors import InternalError


@dataclass(frozen=True)
class TileProgram:
    """The adjoint of a tile function."""

    kernel: Kernel
    """Arguments: those of the function, as tiles, then the cotangents of its results; its body yields the adjoints."""
    results: dict[str, Tile]
    """Of the function, those of floats: cotangent -> what it is the cotangent of, with the names of extents."""
    adjoints: dict[str, Tile]
    """By the name of the parameter, in the order in which they are returned."""
    replays: bool
    """Whether loops run again for what they carried."""


def adjoint_program(
    forward: Kernel, signature: Signature, results: Mapping[str, Tile], wrt: Sequence[str]
) -> TileProgram:
    """The adjoint of a kernel around a tile function. `results`: what that returns, by name; `wrt`: parameters.

    Raises CannotDerive for what has no derivative rule, and for loops that carry too much to compute it again.
    """
    _refuse_programs(forward)
    floats = {name: _named(forward, name, tile.element) for name, tile in results.items() if tile.is_float}
    pointers = {name: f"{name}_ptr" if signature.tiles[name].extents else name for name in wrt}
    adjoint = differentiate(
        forward,
        read=frozenset(pointers.values()) - frozenset(wrt),
        written=frozenset(f"{name}_ptr" for name in floats),
        scalars=frozenset(pointers.values()) & frozenset(wrt),
    )
    taken = set(signature.parameters) | set(forward.constants)
    cotangents = {name: free_name(f"d_{name}", taken) for name in floats}
    called = {adjoint.cotangents[f"{name}_ptr"]: cotangent for name, cotangent in cotangents.items()}
    kernel = implicit(replayed(adjoint.kernel))
    return TileProgram(
        _Taken(kernel, _taken(forward, kernel, signature, called)).run(
            {adjoint.gradients[pointers[name]]: signature.tiles[name].shape(forward.constants) for name in wrt}
        ),
        {cotangent: floats[name] for name, cotangent in cotangents.items()},
        {name: _adjoint_of(signature.tiles[name]) for name in wrt},
        replays=bool(adjoint.tapes),
    )


def _adjoint_of(tile: Tile) -> Tile:
    return replace(tile, element=adjoint_element(tile.element))


def _named(forward: Kernel, result: str, element: str) -> Tile:
    """What is stored for a result, with the names of its extents."""
    shape = next(op.offset.shape for op in forward.ops if op.code is Code.STORE and op.base.name == f"{result}_ptr")
    return Tile(tuple(forward.extents.get(extent, extent) for extent in shape), element)


def _refuse_programs(forward: Kernel) -> None:
    for op in forward.ops:
        if op.code in (Code.PROGRAM_ID, Code.NUM_PROGRAMS):
            raise CannotDerive(
                f"a tile function asks which program it runs in{op.result.where}",
                remedy="Give it the number as an argument: pid.",
            )
        if op.code is Code.LEAVE_IF:
            raise CannotDerive("a tile function ends the whole program early", remedy="Choose with tl.where.")


def _taken(forward: Kernel, kernel: Kernel, signature: Signature, cotangents: Mapping[str, str]) -> dict[Value, Value]:
    """Arguments of an adjoint kernel -> those of the function. `cotangents`: pointer -> what its tile is called."""
    stored = {f"d{op.base.name.removesuffix('_ptr')}": op.offset.shape for op in forward.ops if op.code is Code.STORE}
    found = {}
    for value in kernel.arguments:
        name = value.name.removesuffix("_ptr")
        if not value.is_pointer:
            found[value] = value
        elif value.name in cotangents:
            found[value] = Value(adjoint_element(value.pointee), stored[value.name], cotangents[value.name])
        elif name in signature.tiles:
            found[value] = Value(value.pointee, signature.tiles[name].shape(forward.constants), name)
    return found


class _Taken(Copier):
    """A kernel in which arguments are tiles, and what it adds to gradients is yielded."""

    def __init__(self, kernel: Kernel, given: dict[Value, Value]) -> None:
        """`given`: arguments of the kernel -> those of the function."""
        super().__init__(kernel, Builder(emptied(kernel, arguments=list(given.values()))))
        self.given = given
        self.found: dict[str, Value] = {}
        """Gradient's pointer -> what was added to it."""

    def run(self, wanted: Mapping[str, tuple[int, ...]]) -> Kernel:
        """The program. `wanted`: pointers of gradients, in the order in which their adjoints are yielded, and the
        extents of those."""
        self.block(self.source.body)
        kernel = self.b.kernel
        for name, shape in wanted.items():
            if name not in self.found:
                self.found[name] = self.b.whole(self.b.const(0.0, self.source.argument(name).pointee), shape)
        kernel.body.yields = [self.found[name] for name in wanted]
        return kernel

    def load(self, op: Op) -> None:
        """A LOAD of an argument is the argument."""
        self[op.result] = self.given[op.base]

    def loop(self, op: Op) -> None:
        """A FOR; an index that the user had no name for has one now, since the way back may read it."""
        index = op.blocks[0].arguments[0]
        index.name = "trip" if index.name == "_" else index.name
        super().loop(op)

    def effect(self, op: Op) -> None:
        """An ATOMIC_ADD to a gradient is what is yielded."""
        if op.code is Code.BARRIER:
            return
        if op.code is not Code.ATOMIC_ADD or op.base.name in self.found or self.b.depth:
            raise InternalError(f"the adjoint of a tile function has an effect: {op!r}")
        value = self.b.cast(self[op.stored], op.base.pointee)
        self.found[op.base.name] = self.b.whole(value, op.offset.shape)
