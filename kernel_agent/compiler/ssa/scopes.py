"""`Scope`: a block under construction, what is known in it, and how far out of it an operation may move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kernel_agent.compiler.ssa.code import ELEMENTWISE, Code
from kernel_agent.compiler.ssa.value import Block, Value

Key = tuple[Any, ...]
"""What makes two operations without effect equal."""

CHEAP = ELEMENTWISE | {Code.CONST, Code.PROGRAM_ID, Code.NUM_PROGRAMS, Code.ARANGE, Code.EXPAND, Code.BROADCAST}
"""What may run although the branch it comes from does not."""


@dataclass(eq=False)
class Scope:
    """A block under construction."""

    block: Block
    guarded: bool = False
    """It is a branch, which may not run: dear work and loads stay in it."""
    certain: bool = True
    """It runs at least once, or it does no harm to load what it loads: else loads stay in it, since their addresses may
    lie outside of what they point to where it does not run."""
    known: dict[Key, Value] = field(default_factory=dict)


def known(scopes: Sequence[Scope], key: Key) -> Value | None:
    """The value of an equal operation in sight."""
    for scope in scopes:
        found = scope.known.get(key)
        if found is not None:
            return found
    return None


def outermost(scopes: Sequence[Scope], code: Code, operands: Sequence[Value], shape: tuple[int, ...]) -> int:
    """Depth of the outermost block where all operands are known; dear work does not leave a branch."""
    least = max((value.depth for value in operands), default=0)
    if code in CHEAP and (not shape or all(not v.is_float for v in operands)):
        return least
    loads = code in (Code.LOAD, Code.LOAD_BLOCK)
    for place in range(len(scopes) - 1, least, -1):
        if not scopes[place].certain if loads else scopes[place].guarded:
            return place
    return least
