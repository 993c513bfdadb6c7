"""Which branches around its launches a stub took: a backward of these launches is wrong where it takes others."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from kernel_agent.compiler.errors import CannotDerive


@dataclass(frozen=True)
class Taken:
    """One `if` of a stub that decides about launches."""

    test: ast.expr
    holds: bool
    line: int
    """Last line of the statement: what the test names must be the same behind it."""


def branches_taken(function: ast.FunctionDef, lines: Collection[int]) -> list[Taken]:
    """The decisions of a call that led to its launches, and past others. `lines`: where launches were seen.

    Raises `CannotDerive` where it cannot be told which side was taken.
    """
    return list(_taken(function.body, lines))


def _taken(body: Sequence[ast.stmt], lines: Collection[int]) -> Iterator[Taken]:
    for statement in body:
        if isinstance(statement, ast.If):
            sides = {True: _launches(statement.body), False: _launches(statement.orelse)}
            if not sides[True] and not sides[False]:
                continue
            ran = {side: any(_seen(call, lines) for call in calls) for side, calls in sides.items()}
            if ran[True] == ran[False] and sides[True] and sides[False]:
                raise CannotDerive(
                    f"it cannot be told which side of the `if` in line {statement.lineno} was taken",
                    remedy="Launch in one place, and choose what is passed to the launch.",
                    line=statement.lineno,
                )
            side = ran[True] if ran[True] != ran[False] else not sides[True]
            yield Taken(statement.test, side, statement.end_lineno or statement.lineno)
            yield from _taken(statement.body if side else statement.orelse, lines)
        elif isinstance(statement, (ast.With, ast.Try)):
            yield from _taken(statement.body, lines)


def _launches(body: Sequence[ast.stmt]) -> list[ast.Call]:
    return [
        node
        for statement in body
        for node in ast.walk(statement)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
    ]


def _seen(call: ast.Call, lines: Collection[int]) -> bool:
    return any(call.lineno <= line <= (call.end_lineno or call.lineno) for line in lines)
