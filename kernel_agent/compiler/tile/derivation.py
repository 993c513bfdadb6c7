"""`derived`: from a tile function and its signature to the source of its adjoint."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.tile.program import adjoint_program
from kernel_agent.compiler.tile.signature import Signature
from kernel_agent.compiler.tile.sizes import sizes_of
from kernel_agent.compiler.tile.source import AdjointSource, adjoint_source
from kernel_agent.compiler.tile.wrapper import default_sizes, other_sizes, wrapped
from kernel_agent.errors import InputError
from kernel_agent.ir.errors import IRError
from kernel_agent.pairs.blame import essence

_MEMORY = ("tl.load", "tl.store", "tl.atomic_", "tl.make_block_ptr", "tl.make_tensor_descriptor")
Wanted = Sequence[int | str] | int | str | None
"""Parameters by position or name; None: all tiles and scalars of floats."""


def derived(function: Any, signature: Signature, wrt: Wanted, name: str) -> AdjointSource:
    """The adjoint of a `triton.JITFunction`.

    Raises InputError for parameters that have no adjoint, CannotDerive for what has no derivative rule.
    """
    names = chosen(function, signature, wrt)
    try:
        around = wrapped(function, signature, result_names(function))
    except IRError as error:
        raise _refused(function, error) from error
    sizes = sizes_of(around)
    found = []
    for numbers in (default_sizes(signature), other_sizes(signature)) if sizes else ({},):
        at = replace(around, sizes=numbers)
        program = adjoint_program(at.read(), signature, around.results, names)
        found.append(adjoint_source(name, function, signature, program, sizes))
    if found[0] != found[-1]:
        raise CannotDerive(
            f"the adjoint of {function.fn.__name__} is another one where its extents are other numbers",
            remedy="Write numbers for extents in shapes, and derive it once for each.",
        )
    return found[0]


def _refused(function: Any, error: IRError) -> CannotDerive:
    """Why Triton does not compile a function on tiles. One that loads was meant for pointers."""
    called = {ast.unparse(node.func) for node in ast.walk(function.parse()) if isinstance(node, ast.Call)}
    memory = sorted(name for name in called if name.startswith(_MEMORY))
    if memory:
        return CannotDerive(
            f"`{function.fn.__name__}` calls {', '.join(f'`{name}`' for name in memory)}, and a tile function has no "
            "pointers",
            remedy="Load and store in the kernel that calls it; kernel-agent derive takes kernels with their launch.",
        )
    shapes = " Or correct `shapes`, which says what it is given."
    return CannotDerive(essence(error.message), remedy=error.remedy + shapes)


def chosen(function: Any, signature: Signature, wrt: Wanted) -> tuple[str, ...]:
    """Names of the parameters that adjoints are wanted of, in the order asked for. Raises InputError."""
    floats = [name for name, tile in signature.tiles.items() if tile.is_float]
    asked = floats if wrt is None else named(function, wrt)
    for name in asked:
        if name not in floats:
            raise InputError(
                f"wrt: `{name}` of {function.fn.__name__} has no adjoint",
                remedy=f"Choose from {', '.join(floats) or 'none: no parameter is a float'}.",
            )
    if not asked:
        raise InputError(f"no parameter of {function.fn.__name__} is a float", remedy="Name a float in shapes.")
    return tuple(asked)


def named(function: Any, wrt: Sequence[int | str] | int | str) -> list[str]:
    """Positions and names of parameters as names. Raises InputError for what is none, and for one named twice."""
    own = [parameter.name for parameter in function.params]
    listed = [wrt] if isinstance(wrt, (int, str)) else list(wrt)
    found = [own[item] if isinstance(item, int) and -len(own) <= item < len(own) else str(item) for item in listed]
    if not found or len(set(found)) < len(found) or not set(found) <= set(own):
        raise InputError(
            f"wrt names {', '.join(f'`{name}`' for name in found) or 'no parameter'} of `{function.fn.__name__}`",
            remedy=f"Name some of {', '.join(own)}, each once.",
        )
    return found


def result_names(function: Any) -> list[str]:
    """What a function calls its results; none where it returns what is no variable, or at several places."""
    values = _returned(function)
    named = [value.id for value in values if isinstance(value, ast.Name)]
    return named if len(named) == len(values) else []


def result_count(function: Any) -> int:
    """How many tiles a function returns, as far as its text says so; 0 where it does not."""
    values = _returned(function)
    return len(values) if len(values) > 1 or not any(isinstance(value, ast.Starred) for value in values) else 0


def _returned(function: Any) -> list[ast.expr]:
    """The parts of the one value that a function returns; none where it returns at several places."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function.fn)))
    returned = [node.value for node in ast.walk(tree) if isinstance(node, ast.Return) and node.value is not None]
    if len(returned) != 1:
        return []
    return list(returned[0].elts) if isinstance(returned[0], ast.Tuple) else [returned[0]]
