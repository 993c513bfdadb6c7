"""`hoisted`: statements of a loop of the backward that need to run once, ahead of it.

Numbers that no trip changes, checks of what every trip is given, and cotangents that kernels read as they would lie in
memory of their own: what has been brought into order is in order in the next trip.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Collection, Sequence

from kernel_agent.compiler.stub.lines import Line
from kernel_agent.compiler.stub.needs import Statement, statements_of

_NUMBERS = frozenset({"triton.cdiv", "triton.next_power_of_2", "min", "max", "len"})
"""Functions that make numbers of numbers."""


def hoisted(lines: Sequence[Line], targets: Collection[str]) -> tuple[list[Line], list[Line]]:
    """The lines that may stand ahead of a loop, and those of its trips. `targets`: what its head binds."""
    trip = list(statements_of(lines))
    ahead: list[Statement] = []
    while True:
        bound = Counter(name for one in trip for name in one.binds)
        found = next((one for one in trip if _may_go(one, bound, targets)), None)
        if found is None:
            break
        trip.remove(found)
        ahead.append(found)
    return [line for one in ahead for line in one.lines], [line for one in trip for line in one.lines]


def _may_go(statement: Statement, bound: Counter[str], targets: Collection[str]) -> bool:
    """Whether a statement says the same in each trip. `bound`: how many statements of the trip bind a name."""
    own = frozenset(statement.binds)
    if statement.reads & set(targets) or any(bound[name] > (name in own) for name in statement.reads | own):
        return False
    (node,) = ast.parse("\n".join(row for line in statement.lines for row in line.shown(str, 0))).body
    if own & statement.reads:
        return _is_ordering(node)
    if isinstance(node, ast.If):
        return statement.checks and not own
    return isinstance(node, ast.Assign) and _is_number(node.value)


def _is_number(value: ast.expr) -> bool:
    """Whether an expression computes numbers of numbers, and of the forms of tensors, alone."""
    calls = [node for node in ast.walk(value) if isinstance(node, ast.Call)]
    return all(
        ast.unparse(call.func) in _NUMBERS
        or (isinstance(call.func, ast.Attribute) and call.func.attr in ("element_size", "numel", "stride", "size"))
        for call in calls
    ) and not any(isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice) for node in ast.walk(value))


def _is_ordering(node: ast.stmt) -> bool:
    """`g = g.contiguous()`, or the same under a condition on its strides: done once, it is done."""
    if isinstance(node, ast.If):
        again = node.body[0] if len(node.body) == 1 and not node.orelse else node
        return isinstance(again, ast.Assign) and ".stride()" in ast.unparse(node.test) and _is_copy(again)
    return isinstance(node, ast.Assign) and _is_copy(node)


def _is_copy(node: ast.Assign) -> bool:
    target, value = ast.unparse(node.targets[0]), ast.unparse(node.value)
    return value == f"{target}.contiguous()" or (
        value.startswith("torch.empty_like(") and value.endswith(f").copy_({target})")
    )
