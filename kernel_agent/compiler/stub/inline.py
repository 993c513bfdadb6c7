"""Writes functions of its file that launch kernels into the stub that calls them, so that all launches stand in one
function."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Mapping

from kernel_agent.compiler.free_names import free_name, free_names
from kernel_agent.compiler.stub.callees import callees, launches
from kernel_agent.compiler.substitution import Substitution

_WIDTH = 120
_ROUNDS = 8
"""Calls that are written out at most."""


def without_helpers(source: str, stub: str) -> str:
    """The text of a file whose stub launches its kernels itself, as far as its helpers' bodies can stand in it.

    A helper's body can where it is called in a plain statement or a return, of the stub itself or of a loop at its top,
    and returns in one place, at its end. The lines of the stub may change; the helpers stay where they are.
    """
    for _ in range(_ROUNDS):
        tree = ast.parse(source)
        functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        if stub not in functions:
            return source
        others = {text: node for text, node in callees(tree).items() if node is not functions[stub]}
        changed = _inlined_once(source, functions[stub], _launching(others))
        if changed is None:
            return source
        source = changed
    return source


def _launching(functions: Mapping[str, ast.FunctionDef]) -> dict[str, ast.FunctionDef]:
    """Functions that launch a kernel, or call one that does, by the text that calls them."""
    found: dict[str, ast.FunctionDef] = {}
    while True:
        more = {text: node for text, node in functions.items() if text not in found and launches(node, found)}
        if not more:
            return found
        found |= more


def _inlined_once(source: str, stub: ast.FunctionDef, helpers: Mapping[str, ast.FunctionDef]) -> str | None:
    """The text with the first call of a helper written out; None where there is none that can be."""
    for statement in _statements(stub):
        if not isinstance(statement, (ast.Assign, ast.Expr, ast.Return)) or statement.value is None:
            continue
        calls = [
            node
            for node in ast.walk(statement.value)
            if isinstance(node, ast.Call) and ast.unparse(node.func) in helpers
        ]
        for call in calls:
            helper = helpers[ast.unparse(call.func)]
            written = _written_out(statement, _spelt(call, stub), helper, stub)
            if written is not None:
                lines = source.split("\n")
                pad = " " * statement.col_offset
                shown = [row for part in written for row in rows(part, pad)]
                end = statement.end_lineno or statement.lineno
                return "\n".join([*lines[: statement.lineno - 1], *shown, *lines[end:]])
    return None


def _statements(stub: ast.FunctionDef) -> Iterator[ast.stmt]:
    """The statements of a stub, and of the loops at its top that begin on a line of their own."""
    for one in stub.body:
        yield one
        if isinstance(one, ast.For) and one.body[0].lineno > one.lineno:
            yield from one.body


def rows(statement: ast.stmt, pad: str) -> list[str]:
    """A statement as text; of a long launch, one argument a row."""
    text = ast.unparse(statement)
    call = statement.value if isinstance(statement, ast.Expr) else None
    if len(text) + len(pad) <= _WIDTH or not (isinstance(call, ast.Call) and isinstance(call.func, ast.Subscript)):
        return [pad + row for row in text.split("\n")]
    items = [*map(ast.unparse, call.args), *(ast.unparse(keyword) for keyword in call.keywords)]
    return [f"{pad}{ast.unparse(call.func)}(", *(f"{pad}    {item}," for item in items), f"{pad})"]


def _written_out(
    statement: ast.stmt, call: ast.Call, helper: ast.FunctionDef, stub: ast.FunctionDef
) -> list[ast.stmt] | None:
    """The statements that a statement with a call becomes; None where that is not sure to compute the same."""
    taken, own = _names(stub), _locals(stub)
    body = helper.body[1:] if ast.get_docstring(helper) is not None else helper.body
    returns = [node for node in ast.walk(helper) if isinstance(node, ast.Return)]
    if not body or len(returns) > 1 or (returns and returns[0] is not body[-1]):
        return None
    if any(
        isinstance(node, (ast.Yield, ast.Global, ast.Nonlocal, ast.FunctionDef))
        for one in body
        for node in ast.walk(one)
    ):
        return None
    given = _given(call, helper)
    if given is None:
        return None
    bound = {node.id for one in body for node in ast.walk(one) if isinstance(node, ast.Name) and _stores(node)}
    read = {name for one in body for name in free_names(one)} - bound - given.keys()
    if read & own:
        return None  # names of the module that are other ones in the stub
    renamed: dict[str, ast.expr] = {}
    first: list[ast.stmt] = []
    for name, value in given.items():
        simple = isinstance(value, (ast.Name, ast.Constant))
        if simple and name not in bound:
            renamed[name] = value
        else:
            fresh = free_name(name, taken)
            renamed[name] = ast.Name(fresh, ast.Load())
            first.append(ast.Assign([ast.Name(fresh, ast.Store())], value))
    for name in sorted(bound - given.keys()):
        renamed[name] = ast.Name(free_name(name, taken), ast.Load())
    renaming = _Decided(renamed, renamed)
    rest = [renaming.of(one) for one in body if not isinstance(one, ast.Return)]
    returned = returns[0].value if returns else None
    result = ast.Constant(None) if returned is None else renaming.of(returned)
    last = _Replacing(call, result).visit(copy.deepcopy(statement))
    if isinstance(statement, ast.Expr) and _place(statement.value) == _place(call):
        return [ast.fix_missing_locations(one) for one in (*first, *rest)]
    return [ast.fix_missing_locations(one) for one in (*first, *rest, last)]


def _spelt(call: ast.Call, stub: ast.FunctionDef) -> ast.Call:
    """A call with the elements of starred tuples that the stub binds once, as a display, in their place."""
    bound = [node.id for node in ast.walk(stub) if isinstance(node, ast.Name) and _stores(node)]
    tuples = {
        target.id: node.value
        for node in stub.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
        for target in node.targets
        if isinstance(target, ast.Name) and bound.count(target.id) == 1
    }
    arguments: list[ast.expr] = []
    for one in call.args:
        name = one.value.id if isinstance(one, ast.Starred) and isinstance(one.value, ast.Name) else ""
        known = tuples.get(name)
        if known is None or any(isinstance(part, ast.Starred) for part in known.elts):
            arguments.append(one)
        else:
            arguments += [
                ast.Subscript(ast.Name(name, ast.Load()), ast.Constant(place), ast.Load())
                for place in range(len(known.elts))
            ]
    return ast.copy_location(ast.Call(call.func, arguments, call.keywords), call)


def _given(call: ast.Call, helper: ast.FunctionDef) -> dict[str, ast.expr] | None:
    """The expression of every parameter; None where stars are about."""
    arguments = helper.args
    if arguments.kwarg or any(isinstance(one, ast.Starred) for one in call.args):
        return None
    if any(keyword.arg is None for keyword in call.keywords):
        return None
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = positional[len(positional) - len(arguments.defaults) :]
    found = {argument.arg: value for argument, value in zip(defaults, arguments.defaults, strict=True)}
    found |= {a.arg: value for a, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if value}
    found |= {argument.arg: value for argument, value in zip(positional, call.args, strict=False)}
    rest = call.args[len(positional) :]
    if arguments.vararg is not None:
        found[arguments.vararg.arg] = ast.Tuple(rest, ast.Load())
    elif rest:
        return None
    found |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
    wanted = [argument.arg for argument in (*positional, *arguments.kwonlyargs)]
    wanted += [arguments.vararg.arg] if arguments.vararg is not None else []
    return {name: found[name] for name in wanted} if all(name in found for name in wanted) else None


def _names(function: ast.FunctionDef) -> set[str]:
    return {
        *(node.id for node in ast.walk(function) if isinstance(node, ast.Name)),
        *(node.arg for node in ast.walk(function) if isinstance(node, ast.arg)),
    }


def _locals(function: ast.FunctionDef) -> set[str]:
    return {
        *(node.id for node in ast.walk(function) if isinstance(node, ast.Name) and _stores(node)),
        *(node.arg for node in ast.walk(function) if isinstance(node, ast.arg)),
    }


def _place(node: ast.expr) -> tuple[int | None, ...]:
    """Where an expression stands in the text."""
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset


def _stores(node: ast.Name) -> bool:
    return isinstance(node.ctx, (ast.Store, ast.Del))


class _Decided(Substitution):
    """It, and choices that what a helper is given makes."""

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        """A choice that the call has made: the other side may make no sense with what it gives."""
        self.generic_visit(node)
        if isinstance(node.test, ast.Constant):
            return node.body if node.test.value else node.orelse
        return node


class _Replacing(ast.NodeTransformer):
    """What a helper returns, for its call, which is found by its place."""

    def __init__(self, call: ast.Call, result: ast.expr) -> None:
        self.place = _place(call)
        self.result = result

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """The call itself, or one around it."""
        if _place(node) == self.place:
            return self.result
        return self.generic_visit(node)
