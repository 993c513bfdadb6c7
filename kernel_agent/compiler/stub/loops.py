"""`flattened`: the text of a stub in which loops that launch kernels run once, so that one trip can be followed.

What a trip computes hangs on no other trip but by names that the loop hands on, as `h = h_new`, and by memory. Names
are looked at here, in the text; memory where the backward is written (`trips.py`).
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Sequence, Set
from dataclasses import dataclass

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.free_names import bound_names, free_name, free_names
from kernel_agent.compiler.stub.callees import callees, launches
from kernel_agent.compiler.stub.renaming import Renaming, renamed

_ENDS = "Write the trips as programs of one launch, or the values of each trip to rows of a tensor."
_ODD = (ast.Break, ast.Continue, ast.Return, ast.FunctionDef, ast.Lambda, ast.NamedExpr, ast.Yield, ast.ListComp)


HANDED = "roll"
"""Function of torch whose result stands for what a trip was handed: of none that a stub asks anything about."""


@dataclass(frozen=True)
class Carry:
    """A name that a loop hands from trip to trip."""

    name: str
    """In the stub."""
    before: str
    """What it is called as a trip begins, where the loop runs once."""
    behind: str
    """What it is called from where the trip binds it."""


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
    """Names that a trip binds and nothing behind the loop reads, the target among them."""
    carries: tuple[Carry, ...] = ()
    """Names that it hands on."""

    @property
    def within(self) -> frozenset[str]:
        """Names that a trip binds."""
        return self.bound | {one.behind for one in self.carries}

    def has(self, line: int) -> bool:
        """Whether a line is one of the loop."""
        return self.first <= line <= self.last

    @property
    def step(self) -> ast.expr:
        """From one trip to the next."""
        return self.steps.args[2] if len(self.steps.args) == 3 else ast.Constant(1)

    @property
    def least(self) -> int | None:
        """The first trip's number, where it stands in the text and is not below zero."""
        first = self.steps.args[0] if len(self.steps.args) > 1 else ast.Constant(0)
        known = isinstance(first, ast.Constant) and type(first.value) is int and first.value >= 0
        return first.value if known and isinstance(first, ast.Constant) and isinstance(first.value, int) else None

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
    given = [one.arg for one in ast.walk(function.args) if isinstance(one, ast.arg)]
    taken = {*given, *(node.id for node in ast.walk(function) if isinstance(node, ast.Name))}
    renamings: list[Renaming] = []
    for place, node in enumerate(function.body):
        if not launches_in(node, callees(tree).keys()):
            continue
        before, after = function.body[:place], function.body[place + 1 :]
        known = {*given, *(name for one in before for name in bound_names(one))}
        steps = _refused(node, known, after)
        assert isinstance(node, ast.For)
        assert isinstance(node.target, ast.Name)
        carries = []
        for name in _handed_on(node, known):
            carry = Carry(name, free_name(f"{name}_before", taken), free_name(f"{name}_behind", taken))
            carries.append(carry)
            renamings += _renamings(carry, node, after)
        bound = {node.target.id, *(name for one in node.body for name in bound_names(one))} - {
            one.name for one in carries
        }
        bound |= {one.before for one in carries}
        end = node.end_lineno or node.lineno
        loops.append(Loop(node.target.id, steps, node.lineno, end, frozenset(bound), tuple(carries)))
    renamed(lines, renamings)
    heads = {node.lineno: node for node in function.body if isinstance(node, ast.For)}
    for loop in loops:
        _run_once(heads[loop.first], loop, lines)
    return "\n".join(lines), tuple(loops)


def _run_once(node: ast.For, loop: Loop, lines: list[str]) -> None:
    """Put the first trip for a loop."""
    pad, first = " " * node.col_offset, node.body[0]
    head = [f"{pad}{loop.target} = {ast.unparse(loop.steps)}[0]"]
    head += [f'{one.before} = getattr({one.name}, "{HANDED}", lambda _: {one.name})(0)' for one in loop.carries]
    lines[node.lineno - 1 : first.lineno - 1] = ["; ".join(head), *[""] * (first.lineno - 1 - node.lineno)]
    for number in range(first.lineno, loop.last + 1):
        text = lines[number - 1]
        lines[number - 1] = text[min(first.col_offset - node.col_offset, len(text) - len(text.lstrip())) :]


def _handed_on(loop: ast.For, known: Collection[str]) -> list[str]:
    """Names that trips hand on: there before the loop, and bound by a trip that reads them first."""
    return list(dict.fromkeys(name for one in loop.body for name in bound_names(one) if name in known))


def _renamings(carry: Carry, loop: ast.For, after: Sequence[ast.stmt]) -> Iterator[Renaming]:
    """What a name that is handed on is called in each place of a trip and behind the loop."""
    bound = False
    for one in (*loop.body, *after):
        stores = carry.name in bound_names(one)
        for node in ast.walk(one):
            if isinstance(node, ast.Name) and node.id == carry.name:
                late = bound or (stores and isinstance(node.ctx, ast.Store))
                yield Renaming(node.lineno, node.col_offset, node.id, carry.behind if late else carry.before)
        bound = bound or stores


def launches_in(node: ast.stmt, helpers: Collection[str] = ()) -> bool:
    """Whether a statement is a loop that launches, or calls what does."""
    return isinstance(node, (ast.For, ast.While)) and launches(node, helpers)


def _refused(loop: ast.stmt, known: Set[str], after: Sequence[ast.stmt]) -> ast.Call:
    """The range that a loop runs over. Raises `CannotDerive` where its trips cannot be told to be alone. `known`: names
    that are there before it."""
    steps = loop.iter if isinstance(loop, ast.For) else None
    if not isinstance(loop, ast.For) or not isinstance(loop.target, ast.Name) or not _is_range(steps):
        raise _refusal(loop, "runs over something other than a range", "Write it as `for i in range(...)`.")
    assert isinstance(steps, ast.Call)
    plain = all(isinstance(one, (ast.Assign, ast.AnnAssign, ast.Expr, ast.Assert)) for one in loop.body)
    if loop.orelse or not plain or any(isinstance(node, _ODD) for one in loop.body for node in ast.walk(one)):
        raise _refusal(loop, "has branches, loops or functions in it", "Write its body as plain statements.")
    if loop.body[0].lineno == loop.lineno or any(is_long(node) for one in loop.body for node in ast.walk(one)):
        raise _refusal(loop, "cannot be taken apart by lines", "Begin its body on a line of its own.")
    bound: dict[str, None] = {loop.target.id: None}
    own = {name for one in loop.body for name in bound_names(one)}
    for one in loop.body:
        early = [name for name in free_names(one) if name in own - known and name not in bound]
        if (
            early
            or loop.target.id in bound_names(one)
            or (loop.target.id in known and loop.target.id in free_names(one))
        ):
            raise _refusal(loop, f"hands `{(early or [loop.target.id])[0]}` from trip to trip", _ENDS)
        for test in (node.test for node in ast.walk(one) if isinstance(node, ast.IfExp)):
            if any(name in own or name == loop.target.id for name in free_names(test)):
                raise _refusal(loop, f"asks `{ast.unparse(test)}` in each trip", "Launch alike in all trips.")
        bound |= dict.fromkeys(bound_names(one))
    for name in own & known:
        _refuse_hand_over(name, loop, after)
    late = [name for one in after for name in free_names(one) if name in bound and name not in known]
    if late:
        raise _refusal(loop, f"leaves `{late[0]}` of its last trip to what follows", _ENDS)
    return steps


def _refuse_hand_over(name: str, loop: ast.For, after: Sequence[ast.stmt]) -> None:
    """Raise `CannotDerive` for a name that a loop does not hand on by one plain assignment."""
    binding = [one for one in loop.body if name in bound_names(one)]
    plain = len(binding) == 1 and isinstance(binding[0], ast.Assign) and len(binding[0].targets) == 1
    target = binding[0].targets[0] if plain and isinstance(binding[0], ast.Assign) else None
    if not isinstance(target, ast.Name) or any(name in bound_names(one) for one in after):
        raise _refusal(loop, f"binds `{name}` more than once", f"Hand `{name}` on by one plain assignment.")
    if any(isinstance(node, ast.JoinedStr) for one in (*loop.body, *after) for node in ast.walk(one)):
        raise _refusal(loop, f"hands `{name}` on beside a formatted string", "Format it elsewhere.")
    first = next(one for one in loop.body if name in (*bound_names(one), *free_names(one)))
    if first is binding[0] and name not in free_names(first):
        raise _refusal(loop, f"binds `{name}`, which is there before", f"Give `{name}` of the trips a name of its own.")


def _is_range(node: ast.expr | None) -> bool:
    plain = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range"
    return plain and isinstance(node, ast.Call) and bool(node.args) and not node.keywords


def _refusal(loop: ast.stmt, what: str, remedy: str) -> CannotDerive:
    return CannotDerive(
        f"launches stand in a loop (line {loop.lineno}) that {what}",
        remedy=f"{remedy} Or launch once, with the loop as an axis of the grid.",
        line=loop.lineno,
    )


def is_long(node: ast.AST) -> bool:
    """Whether it is a string of several lines, whose text an indentation would change."""
    text = isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)))
    return text and getattr(node, "end_lineno", 0) != getattr(node, "lineno", 0)
