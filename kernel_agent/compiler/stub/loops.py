"""`flattened`: the text of a stub in which loops that launch kernels run once, so that one trip can be followed.

What a trip computes hangs on no other trip where the loop hands on neither names nor memory. Names are looked at here,
in the text; memory where the backward is written (`trips.py`).
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.free_names import free_names
from kernel_agent.compiler.stub.callees import callees

_ENDS = "Write the trips as programs of one launch, or the values of each trip to rows of a tensor."
_ODD = (ast.Break, ast.Continue, ast.Return, ast.FunctionDef, ast.Lambda, ast.NamedExpr, ast.Yield, ast.ListComp)


@dataclass(frozen=True)
class Loop:
    """A loop over a range, at the top of a stub, that launches kernels."""

    target: str
    """The name that counts."""
    steps: ast.Call
    """`range(...)`."""
    first: int
    """Line of the head."""
    last: int
    """Last line of the body."""
    bound: frozenset[str]
    """Names that a trip binds, the target among them."""

    def has(self, line: int) -> bool:
        """Whether a line is one of the loop."""
        return self.first <= line <= self.last

    @property
    def step(self) -> ast.expr:
        """From one trip to the next."""
        return self.steps.args[2] if len(self.steps.args) == 3 else ast.Constant(1)

    @property
    def rises_from_zero(self) -> bool:
        """Whether the first trip's number is 0 and no later one is below it, if there is one."""
        given = self.steps.args
        return len(given) == 1 or (isinstance(given[0], ast.Constant) and given[0].value == 0)


def flattened(source: str, stub: str) -> tuple[str, tuple[Loop, ...]]:
    """The text of a file whose stub's launching loops are written as their first trip, line by line where they were,
    and the loops. Raises `CannotDerive` for one whose trips hand names on, or that is not plain enough to tell."""
    tree = ast.parse(source)
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == stub]
    if not found:
        return source, ()
    function, lines = found[-1], source.split("\n")
    loops: list[Loop] = []
    for place, node in enumerate(function.body):
        if not launches_in(node, callees(tree).keys()):
            continue
        given = [one.arg for one in ast.walk(function.args) if isinstance(one, ast.arg)]
        steps = _refused(node, given, function.body[:place], function.body[place + 1 :])
        assert isinstance(node, ast.For)
        assert isinstance(node.target, ast.Name)
        pad, first = " " * node.col_offset, node.body[0]
        head = f"{pad}{node.target.id} = {ast.unparse(steps)}[0]"
        lines[node.lineno - 1 : first.lineno - 1] = [head, *[""] * (first.lineno - 1 - node.lineno)]
        last = node.end_lineno or node.lineno
        for number in range(first.lineno, last + 1):
            text = lines[number - 1]
            lines[number - 1] = text[min(first.col_offset - node.col_offset, len(text) - len(text.lstrip())) :]
        bound = frozenset({node.target.id, *(name for one in node.body for name in _bound(one))})
        loops.append(Loop(node.target.id, steps, node.lineno, last, bound))
    return "\n".join(lines), tuple(loops)


def launches_in(node: ast.stmt, helpers: Collection[str] = ()) -> bool:
    """Whether a statement is a loop that launches, or calls what does."""
    return isinstance(node, (ast.For, ast.While)) and any(
        isinstance(one, ast.Call) and (isinstance(one.func, ast.Subscript) or ast.unparse(one.func) in helpers)
        for one in ast.walk(node)
    )


def _refused(loop: ast.stmt, given: Sequence[str], before: Sequence[ast.stmt], after: Sequence[ast.stmt]) -> ast.Call:
    """The range that a loop runs over. Raises `CannotDerive` where its trips cannot be told to be alone. `given`:
    parameters of the stub."""
    steps = loop.iter if isinstance(loop, ast.For) else None
    if not isinstance(loop, ast.For) or not isinstance(loop.target, ast.Name) or not _is_range(steps):
        raise _refusal(loop, "runs over something other than a range", "Write it as `for i in range(...)`.")
    assert isinstance(steps, ast.Call)
    plain = all(isinstance(one, (ast.Assign, ast.AnnAssign, ast.Expr, ast.Assert)) for one in loop.body)
    if loop.orelse or not plain or any(isinstance(node, _ODD) for one in loop.body for node in ast.walk(one)):
        raise _refusal(loop, "has branches, loops or functions in it", "Write its body as plain statements.")
    if loop.body[0].lineno == loop.lineno or any(_is_long(node) for one in loop.body for node in ast.walk(one)):
        raise _refusal(loop, "cannot be taken apart by lines", "Begin its body on a line of its own.")
    known = {*given, *(name for one in before for name in _bound(one))}
    bound: dict[str, None] = {loop.target.id: None}
    own = {name for one in loop.body for name in _bound(one)}
    for one in loop.body:
        early = [name for name in free_names(one) if name in own and name not in bound]
        again = [name for name in _bound(one) if name in known or name == loop.target.id]
        if early or again:
            name = (early or again)[0]
            raise _refusal(loop, f"hands `{name}` from trip to trip", _ENDS)
        for test in (node.test for node in ast.walk(one) if isinstance(node, ast.IfExp)):
            if any(name in own or name == loop.target.id for name in free_names(test)):
                raise _refusal(loop, f"asks `{ast.unparse(test)}` in each trip", "Launch alike in all trips.")
        bound |= dict.fromkeys(_bound(one))
    late = [name for one in after for name in free_names(one) if name in bound]
    if late:
        raise _refusal(loop, f"leaves `{late[0]}` of its last trip to what follows", _ENDS)
    return steps


def _is_range(node: ast.expr | None) -> bool:
    plain = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range"
    return plain and isinstance(node, ast.Call) and bool(node.args) and not node.keywords


def _refusal(loop: ast.stmt, what: str, remedy: str) -> CannotDerive:
    return CannotDerive(
        f"launches stand in a loop (line {loop.lineno}) that {what}",
        remedy=f"{remedy} Or launch once, with the loop as an axis of the grid.",
        line=loop.lineno,
    )


def _is_long(node: ast.AST) -> bool:
    """Whether it is a string of several lines, whose text an indentation would change."""
    text = isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)))
    return text and getattr(node, "end_lineno", 0) != getattr(node, "lineno", 0)


def _bound(statement: ast.stmt) -> list[str]:
    stored = (ast.Store, ast.Del)
    return list(
        dict.fromkeys(n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, stored))
    )
