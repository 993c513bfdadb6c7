"""`differentiate`: a kernel to its adjoint."""

from __future__ import annotations

from collections.abc import Iterable

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.reverse.activity import Activity
from kernel_agent.compiler.reverse.adjoint import Adjoint
from kernel_agent.compiler.reverse.elements import adjoint_element
from kernel_agent.compiler.reverse.memory import Accesses
from kernel_agent.compiler.reverse.reversal import Reversal
from kernel_agent.compiler.reverse.tapes import tapes
from kernel_agent.compiler.schedule.calls import Calls
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.prune import prune
from kernel_agent.compiler.ssa.rebuild import emptied
from kernel_agent.compiler.ssa.value import FLOATS, Kernel, Value


def differentiate(
    kernel: Kernel,
    *,
    read: frozenset[str],
    written: frozenset[str],
    scalars: frozenset[str] = frozenset(),
    calls: Calls | None = None,
    undoes: bool = False,
) -> Adjoint:
    """The adjoint of a kernel.

    `read`: pointer arguments whose gradient is wanted; `written`: pointer arguments whose cotangent is given;
    `scalars`: float scalar arguments whose gradient is wanted; `calls`: launches that were seen, if the adjoint may
    rely on facts that hold in all of them; `undoes`: carries are found again where a trip can be undone (see `undo`).

    Raises CannotDerive for what has no derivative rule, and for memory that the kernel reads and overwrites.
    """
    taken = {value.name for value in kernel.arguments} | set(kernel.constants)
    outputs = [kernel.argument(name) for name in sorted(written)]
    inputs = [kernel.argument(name) for name in sorted(read | scalars)]
    for value in (*outputs, *inputs):
        if (value.pointee if value.is_pointer else value.element) not in FLOATS:
            raise CannotDerive(
                f"{value.name} holds {value.element.lstrip('*')}, which has no derivatives",
                remedy="name only floating-point arguments",
            )
    cotangents = {value: Value(value.element, (), named(value.name, taken)) for value in outputs}
    gradients = {value: _gradient(value, taken) for value in inputs}
    _refuse_in_place(read & written)
    accesses = Accesses.of(kernel, frozenset(outputs), calls)
    activity = Activity(kernel, frozenset(inputs), accesses.forwarded)
    arguments = [*kernel.arguments, *cotangents.values(), *gradients.values()]
    target = emptied(kernel, name=f"{kernel.name}_backward", arguments=arguments)
    consumed = frozenset(cotangents[value] for value in accesses.consumed)
    builder = Builder(target, frozenset(gradients.values()) | consumed)
    reversal = Reversal(kernel, builder, accesses, activity, cotangents, gradients, undoes=undoes)
    reversal.run()
    found = prune(target)
    _refuse_lost(found, kernel, accesses)
    return Adjoint(
        kernel=found,
        cotangents={value.name: given.name for value, given in cotangents.items()},
        gradients={value.name: wanted.name for value, wanted in gradients.items()},
        tapes=tapes(found),
        recurrences=reversal.recurrences,
        consumed=tuple(sorted(value.name for value in consumed)),
        facts=accesses.facts,
    )


def named(name: str, taken: set[str]) -> str:
    """`dX` for `X` and `X_ptr`, and no name that is taken; it is taken then."""
    wanted = base = f"d{name.removesuffix('_ptr')}"
    count = 1
    while wanted in taken:
        count += 1
        wanted = f"{base}_{count}"
    taken.add(wanted)
    return wanted


def _gradient(value: Value, taken: set[str]) -> Value:
    element = value.pointee if value.is_pointer else value.element
    return Value(f"*{adjoint_element(element)}", (), named(value.name, taken))


def _refuse_in_place(names: Iterable[str]) -> None:
    for name in sorted(names):
        raise CannotDerive(
            f"{name} is overwritten by the kernel that reads it, so its gradient cannot be told from its cotangent",
            remedy="write the result to a tensor of its own",
        )


def _refuse_lost(adjoint: Kernel, forward: Kernel, accesses: Accesses) -> None:
    """What the forward read and then overwrote cannot be read again, unless nothing of the adjoint needs it."""
    lost = {op.base for op in accesses.gone}
    kept = {op.base for op in accesses.saved}
    for op in adjoint.ops:
        if op.code is Code.LOAD and op.base in lost:
            also = " and keeps" if op.base in kept else ""
            raise CannotDerive(
                f"{op.base.name} is read{also} and overwritten by {forward.name}, and the gradient needs what it held",
                remedy="write the result to a tensor of its own",
            )
