"""A stub that returns in several places as one that returns at its end, where what it saves can be handed over."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kernel_agent.compiler.free_names import free_name
from kernel_agent.compiler.stub.loops import is_long
from kernel_agent.compiler.stub.source import own_nodes


@dataclass
class _Edits:
    """Changes to the lines of a file, counted from 1."""

    deeper: Counter[int] = field(default_factory=Counter)
    """By how many levels lines move to the right."""
    behind: dict[int, str] = field(default_factory=dict)
    """Lines that are put in behind others."""
    named: list[ast.Return] = field(default_factory=list)
    """Statements that name what they returned."""


def returned_once(source: str, stub: str) -> str:
    """The text of a file whose stub returns once: `if a: return x` and what follows become `if`, `else`.

    Returns it as it is where the stub does so already, or where a return stands in a loop, a `with` or a `try`, or in
    a branch that may also go on.
    """
    tree = ast.parse(source)
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == stub]
    returns = [node for node in own_nodes(found[-1]) if isinstance(node, ast.Return)] if found else []
    edits = _Edits()
    if len(returns) < 2 or not _ends(found[-1].body, edits) or len(edits.named) != len(returns):
        return source
    name = free_name("result", {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)})
    lines = [line.encode() for line in source.split("\n")]
    for node in returns:
        line, at = lines[node.lineno - 1], node.col_offset
        lines[node.lineno - 1] = line[:at] + f"{name} =".encode() + line[at + len("return") :]
    shown: list[str] = []
    for number, line in enumerate(lines, start=1):
        shown.append("    " * edits.deeper[number] * bool(line.strip()) + line.decode())
        if number in edits.behind:
            shown.append(edits.behind[number])
        if number == found[-1].end_lineno:
            shown.append(" " * found[-1].body[0].col_offset + f"return {name}")
    return "\n".join(shown)


def _ends(block: Sequence[ast.stmt], edits: _Edits) -> bool:
    """Whether a block ends in a return on all of its ways, and is written so that nothing follows one."""
    for place, node in enumerate(block):
        rest = block[place + 1 :]
        if isinstance(node, ast.Return):
            edits.named.append(node)
            return not rest and node.value is not None
        if isinstance(node, ast.Raise):
            return not rest
        if isinstance(node, ast.If) and any(isinstance(one, ast.Return) for one in ast.walk(node)):
            return _branches_end(node, rest, edits)
    return False


def _branches_end(node: ast.If, rest: Sequence[ast.stmt], edits: _Edits) -> bool:
    """The same of an `if` with what stands behind it, which becomes its last branch."""
    if not _ends(node.body, edits):
        return False
    last = node
    while len(last.orelse) == 1 and isinstance(last.orelse[0], ast.If) and _is_elif(last, last.orelse[0]):
        last = last.orelse[0]
        if not _ends(last.body, edits):
            return False
    if last.orelse or not rest:
        return bool(last.orelse) and not rest and _ends(last.orelse, edits)
    first, end = node.end_lineno or node.lineno, rest[-1].end_lineno or rest[-1].lineno
    if any(is_long(one) for part in rest for one in ast.walk(part)) or rest[0].lineno == first:
        return False
    edits.behind[first] = f"{edits.deeper[node.lineno] * '    '}{node.col_offset * ' '}else:"
    edits.deeper.update(range(first + 1, end + 1))
    return _ends(rest, edits)


def _is_elif(node: ast.If, other: ast.If) -> bool:
    return other.col_offset == node.col_offset
