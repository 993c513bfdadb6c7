"""`kernel_of`: the IR of one lowered kernel -> a `Kernel`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kernel_agent.compiler.front import arithmetic, combine, control, library, memory, shapes
from kernel_agent.compiler.front.control import arguments_of, run_function
from kernel_agent.compiler.front.items import Blocked, Item
from kernel_agent.compiler.front.reader import Reader, Symbols, pointer_to
from kernel_agent.compiler.ssa.prune import prune
from kernel_agent.compiler.ssa.value import Kernel, Value
from kernel_agent.ir.program import Function, Module
from kernel_agent.ir.types import Kind

RULES_OF = (arithmetic, combine, control, library, memory, shapes)
"""Modules that fill the table of rules when they are imported."""


def kernel_of(
    module: Module,
    *,
    constants: Mapping[str, object] | None = None,
    name: str = "",
    symbols: Symbols | None = None,
    shared: Sequence[frozenset[str]] = (),
    names: Sequence[str] = (),
) -> Kernel:
    """The kernel of a module. `constants`: the constexprs it was lowered with, in the order of the source; `shared`:
    names of arguments that lie in one storage, so that what is written to one is read from another; `names`: of the
    arguments, where they are not those in the IR.

    Pointers become offsets into arguments, tiles broadcast by themselves, and what loops only advance has its closed
    form. Raises CannotDerive for what has no place in a kernel, with the line and what the user can do.
    """
    written: frozenset[str] = frozenset()
    while True:
        entry = module.entry
        kernel = Kernel(name or entry.name, _named(entry, names), constants=dict(constants or {}))
        reader = _read(module, kernel, written, symbols or {})
        stored = reader.stored.union(*(group for group in shared if group & reader.stored))
        both = frozenset(reader.loaded & stored)
        if both <= written:
            return prune(reader.kernel)
        written = both


def _read(module: Module, kernel: Kernel, written: frozenset[str], symbols: Symbols) -> Reader:
    entry = module.entry
    reader = Reader(module, kernel, written, symbols)
    reader.set(entry.blocks[0].arguments, _given(reader, entry, kernel.arguments))
    run_function(reader, entry)
    return reader


def _named(entry: Function, names: Sequence[str]) -> list[Value]:
    """Arguments; the extents and strides behind a descriptor are named after it."""
    arguments = arguments_of(entry)
    sources = entry.blocks[0].arguments
    given, place = iter(names), 0
    while place < len(sources):
        type_ = sources[place].type
        base = arguments[place].name = next(given, arguments[place].name)
        place += 1
        if type_.kind is Kind.DESCRIPTOR:
            rank = len(type_.shape)
            for which in (f"{base}_{what}_{dim}" for what in ("shape", "stride") for dim in range(rank)):
                arguments[place].name = which
                place += 1
            while place < len(sources) and sources[place].type.name == "i1" and not sources[place].variable:
                arguments[place].name = f"{base}_flag_{place}"
                place += 1
    return arguments


def _given(reader: Reader, entry: Function, arguments: Sequence[Value]) -> list[Item]:
    """What the arguments are at the kernel's start."""
    found: list[Item] = []
    sources = entry.blocks[0].arguments
    for place, (source, argument) in enumerate(zip(sources, arguments, strict=True)):
        if source.type.kind is Kind.DESCRIPTOR:
            rank = len(source.type.shape)
            numbers = arguments[place + 1 : place + 1 + 2 * rank]
            pointer = pointer_to(argument, reader.builder)
            found.append(Blocked(pointer, tuple(numbers[:rank]), tuple(numbers[rank:])))
        else:
            found.append(pointer_to(argument, reader.builder) if argument.is_pointer else argument)
    return found
