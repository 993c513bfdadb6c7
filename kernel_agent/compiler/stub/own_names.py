"""`with_own_names`: the text of a stub in which no loop that launches binds a name that something else binds, too.

What is known of a name is known of the one place that binds it. Two loops over chunks, one after the other, both bind
`first` and `part`, and neither sees what the other left there.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from kernel_agent.compiler.free_names import bound_names, free_name, read_names
from kernel_agent.compiler.stub.callees import callees
from kernel_agent.compiler.stub.loops import launches_in
from kernel_agent.compiler.stub.renaming import Renaming, renamed

_SCOPES = (ast.FunctionDef, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.JoinedStr)
"""What may have names of its own, or stands where columns cannot be told."""


def with_own_names(source: str, stub: str) -> str:
    """The text of a file whose stub's launching loops have names of their own for what each trip binds before it reads
    it, and nothing behind the loop reads. Lines stay where they are."""
    tree = ast.parse(source)
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == stub]
    if not found:
        return source
    function, lines = found[-1], source.split("\n")
    taken = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    taken |= {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
    given = {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}
    helpers = callees(tree).keys()
    renamings: list[Renaming] = []
    for place, loop in enumerate(function.body):
        if not (isinstance(loop, ast.For) and isinstance(loop.target, ast.Name) and launches_in(loop, helpers)):
            continue
        before, after = function.body[:place], function.body[place + 1 :]
        elsewhere = given.union(*(bound_names(one) for one in before))
        elsewhere |= {name for one in after if not launches_in(one, helpers) for name in bound_names(one)}
        for name in bound_names(loop):
            if name in elsewhere and _is_of_one_trip(name, loop, after) and not _is_in_a_scope(name, function):
                other = free_name(name, taken)
                nodes = (node for one in (loop.target, *loop.body) for node in _named(name, one))
                renamings += [Renaming(node.lineno, node.col_offset, name, other) for node in nodes]
    renamed(lines, renamings)
    return "\n".join(lines)


def _is_of_one_trip(name: str, loop: ast.For, after: Sequence[ast.stmt]) -> bool:
    """Whether each trip binds a name before it reads it, and what follows does so, too, if it reads it at all."""
    return (name in bound_names(loop.target) or _is_bound_first(name, loop.body)) and _is_bound_first(name, after, True)


def _is_bound_first(name: str, block: Sequence[ast.stmt], unread: bool = False) -> bool:
    """Whether statements bind a name, in any case, before they read it. `unread`: what they are taken for that do
    neither, as loops do that have no trips."""
    for one in block:
        if isinstance(one, ast.For) and not one.orelse:
            if name in read_names(one.iter) | read_names(one.target):
                return False
            if name not in bound_names(one.target) and not _is_bound_first(name, one.body, True):
                return False
            continue
        if name in read_names(one):
            return False
        if isinstance(one, ast.Assign) and any(name in bound_names(target) for target in one.targets):
            return True
        if name in bound_names(one):
            return False
    return unread


def _named(name: str, node: ast.AST) -> Iterator[ast.Name]:
    """Places of a name."""
    return (one for one in ast.walk(node) if isinstance(one, ast.Name) and one.id == name)


def _is_in_a_scope(name: str, function: ast.FunctionDef) -> bool:
    """Whether a function or the like within the stub has a name in it, of its own or of the stub's."""
    scopes = (node for node in ast.walk(function) if isinstance(node, _SCOPES) and node is not function)
    return any(True for scope in scopes for _ in _named(name, scope))
