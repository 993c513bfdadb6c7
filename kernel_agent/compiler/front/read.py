"""`kernel_of`: the IR of one lowered kernel -> a `Kernel`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.front import arithmetic, combine, control, library, memory, shapes
from kernel_agent.compiler.front.control import arguments_of, run_function
from kernel_agent.compiler.front.items import Blocked, Form, Item
from kernel_agent.compiler.front.reader import Reader, Symbols, pointer_to
from kernel_agent.compiler.ssa.code import BY_DESCRIPTOR, MEMORY, Code
from kernel_agent.compiler.ssa.prune import prune
from kernel_agent.compiler.ssa.value import Block, Kernel, Value, walk
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
    names of arguments that lie in one storage; `names`: of the arguments, where they are not those in the IR.

    Pointers become offsets into arguments, tiles broadcast by themselves, and what loops only advance has its closed
    form. Raises CannotDerive for what has no place in a kernel, with the line and what the user can do.
    """
    written: frozenset[str] = frozenset()
    while True:
        entry = module.entry
        kernel = Kernel(name or entry.name, _named(entry, names), constants=dict(constants or {}))
        reader = _read(module, kernel, written, symbols or {})
        both = frozenset(reader.loaded & reader.stored)
        if both <= written:
            _check_shared(reader.kernel.body, set(), shared)
            return prune(reader.kernel)
        written = both


def _check_shared(block: Block, stored: set[str], shared: Sequence[frozenset[str]]) -> None:
    """Raises CannotDerive where a load follows a store through another argument of the same storage: passes take
    memory of two arguments for two memories."""
    for op in block.ops:
        inner = [one for part in op.blocks for one in walk(part)]
        if op.code in (Code.FOR, Code.WHILE):  # the next trip loads again
            stored |= {one.base.name for one in inner if one.code in MEMORY and one.code is not Code.LOAD}
        for part in op.blocks:
            _check_shared(part, stored, shared)
        if op.code not in MEMORY:
            continue
        name = op.base.name
        clash = next((other for group in shared if name in group for other in (group & stored) - {name}), None)
        if clash is not None and (op.code is Code.LOAD or op.results):
            line = op.results[0].source_line
            raise CannotDerive(
                f"line {line}: {name} is read after a store to {clash}, which lies in the same memory",
                remedy="Write to a tensor of its own.",
                line=line,
            )
        if op.code is not Code.LOAD:
            stored.add(name)


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
            numbers = arguments[place + 1 : place + 2 * rank]
            numbers = [*numbers, reader.builder.const(1, arguments[place + 2 * rank].element)]  # Triton takes no other
            pointer = pointer_to(argument, reader.builder)
            form = Form(BY_DESCRIPTOR, argument.name)
            found.append(Blocked(pointer, form, tuple(numbers[:rank]), tuple(numbers[rank:])))
        else:
            found.append(pointer_to(argument, reader.builder) if argument.is_pointer else argument)
    return found
