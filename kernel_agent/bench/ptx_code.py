"""What a program of a kernel executes, read off its PTX: instructions inside and outside of each loop."""

from __future__ import annotations

import re

from pydantic import Field

from kernel_agent.record import Record

_LABEL = re.compile(r"^\s*(\$\w+):")
_BRANCH = re.compile(r"\bbra(?:\.uni)?\s+(\$\w+)")
_INSTRUCTION = re.compile(r"^\s*(?:\{\s*)?(?:@!?%\w+\s+)?([a-z][\w.:]*)[\s;]")
_FREE = ("mov.", "ld.param", "cvta", "ret", "bra")
"""What ptxas usually makes nothing of, or what runs once."""
_DEAR = {"div.full": 8, "div.rn": 20, "sqrt.rn": 16, "sqrt.approx": 3, "rcp.rn": 12, "sin.": 4, "cos.": 4, "div.s": 20}
_DEAR |= {"div.u": 20, "rem.": 20, "div.s64": 70, "div.u64": 70, "rem.s64": 70, "rem.u64": 70}
"""Instructions that ptxas writes as several. Assumed, by the length of their sequences on recent GPUs."""


class CodePart(Record):
    """The code outside of all loops, or in one loop and outside of the loops in it."""

    instructions: int = Field(description="of one warp")
    moves: int = Field(description="of them, what goes through the load and store unit: 32 lanes of 4 bytes each")


def code_parts(ptx: str) -> tuple[CodePart, ...]:
    """What stands outside of loops, then each loop by the line of its first instruction.

    A loop is what lies between a label and the last branch back to it.
    """
    lines = ptx.splitlines()
    labels = {match[1]: place for place, line in enumerate(lines) if (match := _LABEL.match(line))}
    ends: dict[int, int] = {}
    for place, line in enumerate(lines):
        for target in _BRANCH.findall(line):
            start = labels.get(target, place + 1)
            if start <= place:
                ends[start] = max(place, ends.get(start, 0))
    loops = sorted(ends.items())
    instructions, moves = [0] * (len(loops) + 1), [0] * (len(loops) + 1)
    for place, line in enumerate(lines):
        match = _INSTRUCTION.match(line)
        if match is None or match[1].startswith(_FREE):
            continue
        innermost = max((k + 1 for k, (start, end) in enumerate(loops) if start <= place <= end), default=0)
        instructions[innermost] += next((cost for name, cost in _DEAR.items() if match[1].startswith(name)), 1)
        moves[innermost] += _moves(match[1])
    return tuple(CodePart(instructions=i, moves=m) for i, m in zip(instructions, moves, strict=True))


def _moves(name: str) -> int:
    """Turns of the load and store unit that an instruction of one warp takes."""
    if name.startswith(("shfl", "redux")):
        return 1
    if not name.startswith(("ld.", "st.", "atom.", "red.", "cp.async", "ldmatrix", "stmatrix")):
        return 0
    width = (
        4
        if ".v4" in name or ".x4" in name or name.startswith("cp.async")
        else 2
        if ".v2" in name or ".x2" in name
        else 1
    )
    return width * (2 if name.endswith(("64", "d")) else 1)
