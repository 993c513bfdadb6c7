"""What the source calls the result of an operation: Triton gives every part of `x = a * b + c` the name x."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

from kernel_agent.ir.program import Module, Op, split_callsite

_NAMED = re.compile(r'"([^"]*)"\((.*)\)', re.DOTALL)
_LIBRARY = "/triton/language/"


@dataclass(frozen=True)
class Named:
    """A variable and the place of its statement."""

    variable: str
    place: str


def variables(module: Module) -> dict[int, str]:
    """The variable that an operation's result is assigned to, by the operation's identity; parts of expressions, and
    what library functions compute on the way, have none."""
    found = {id(op): named for op in module.all_ops if (named := _named(module, op.location)) is not None}
    readers: dict[int, list[Op]] = defaultdict(list)
    for op in module.all_ops:
        for value in op.operands:
            readers[value.id].append(op)
    return {
        id(op): found[id(op)].variable
        for op in module.all_ops
        if id(op) in found
        and not any(found.get(id(user)) == found[id(op)] for value in op.results for user in readers[value.id])
    }


def _named(module: Module, location: str) -> Named | None:
    """The innermost variable of the user's along the calls that lead to a location."""
    location = module.locations.get(location.strip(), location).strip()
    if location.startswith("callsite("):
        callee, caller = split_callsite(location[len("callsite(") : -1])
        return _named(module, callee) or _named(module, caller)
    match = _NAMED.fullmatch(location)
    if match is None or not match.group(1).isidentifier():
        return None
    inner = module.locations.get(match.group(2).strip(), match.group(2))
    if _LIBRARY in inner:
        return None
    if inner.startswith("callsite("):
        return _named(module, inner) or Named(match.group(1), inner)
    return Named(match.group(1), inner.rpartition(":")[0])
