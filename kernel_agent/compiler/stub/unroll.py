"""Writes out loops of a stub that launch kernels for elements that stand in its text, so that each launch has a place
of its own."""

from __future__ import annotations

import ast
import copy
from collections.abc import Collection, Mapping, Sequence

from kernel_agent.compiler.free_names import bound_names, free_name, read_names
from kernel_agent.compiler.stub.callees import callees, launches
from kernel_agent.compiler.stub.inline import rows
from kernel_agent.compiler.substitution import Substitution

_MOST = 8
"""Trips that are written out."""


def unrolled(source: str, stub: str) -> str:
    """The text of a file whose stub has no loops that launch kernels, as far as their trips are known from the text.

    The last trip keeps the names of what it binds. The lines of the stub may change.
    """
    while True:
        tree = ast.parse(source)
        found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == stub]
        changed = _once(source, found[-1], callees(tree).keys()) if found else None
        if changed is None:
            return source
        source = changed


def _once(source: str, stub: ast.FunctionDef, helpers: Collection[str]) -> str | None:
    """The text with the first such loop written out; None where there is none."""
    for place, loop in enumerate(stub.body):
        if not isinstance(loop, ast.For) or loop.orelse or not any(launches(one, helpers) for one in loop.body):
            continue
        items = _elements(loop.iter)
        if items is None or not 0 < len(items) <= _MOST or not _plain(loop.body):
            continue
        before = {name for one in stub.body[:place] for name in bound_names(one)}
        taken = {node.id for node in ast.walk(stub) if isinstance(node, ast.Name)}
        taken |= {node.arg for node in ast.walk(stub) if isinstance(node, ast.arg)}
        written, names = _trips(loop, items, before, taken)
        rest = stub.body[place + 1 :]
        names = {name: value for name, value in names.items() if any(name in read_names(one) for one in rest)}
        after = _renamed(rest, names) if names else []
        if after is None:
            continue
        lines = source.split("\n")
        pad = " " * loop.col_offset
        shown = [row for one in (*written, *after) for row in rows(ast.fix_missing_locations(one), pad)]
        end = (stub.body[-1] if names else loop).end_lineno or loop.lineno
        return "\n".join([*lines[: loop.lineno - 1], *shown, *lines[end:]])
    return None


def _trips(
    loop: ast.For, items: Sequence[ast.expr], before: set[str], taken: set[str]
) -> tuple[list[ast.stmt], dict[str, ast.expr]]:
    """The statements of all trips, and what names are called after the loop."""
    bound = {name for one in loop.body for name in bound_names(one)}
    names: dict[str, ast.expr] = {}
    written: list[ast.stmt] = []
    for trip, item in enumerate(items):
        last = trip == len(items) - 1
        for target, value in _pairs(loop.target, item):
            value = Substitution(names).of(value)
            simple = isinstance(value, (ast.Name, ast.Constant)) and isinstance(target, ast.Name)
            if simple and isinstance(target, ast.Name) and target.id not in bound | before:
                names[target.id] = value
            else:
                written.append(_renaming(ast.Assign([target], value), names, before, taken, last=last))
        written += [_renaming(one, names, before, taken, last=last) for one in loop.body]
    return written, {
        name: value for name, value in names.items() if not (isinstance(value, ast.Name) and value.id == name)
    }


def _renamed(statements: Sequence[ast.stmt], names: Mapping[str, ast.expr]) -> list[ast.stmt] | None:
    """Statements that read names under other ones, each until it is bound again; None where that is not sure."""
    left, found = dict(names), []
    for one in statements:
        again = left.keys() & set(bound_names(one))
        if again and not isinstance(one, (ast.Assign, ast.AnnAssign)):
            return None
        found.append(Substitution(left).of(one))
        left = {name: value for name, value in left.items() if name not in again}
    return found


def _renaming(
    statement: ast.stmt, names: dict[str, ast.expr], before: set[str], taken: set[str], *, last: bool
) -> ast.stmt:
    """A statement of one trip, in which what it binds gets a name of the trip; `names` has it from then on."""
    stores = bound_names(statement)
    fresh: dict[str, ast.expr] = {
        name: ast.Name(name if last and name not in before else free_name(f"{name}_1", taken)) for name in stores
    }
    renamed = Substitution(names, fresh).of(statement)
    names.update(fresh)
    return renamed


def _pairs(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    """Targets with what each is given, tuples taken apart."""
    both = isinstance(target, (ast.Tuple, ast.List)) and isinstance(value, (ast.Tuple, ast.List))
    if both and isinstance(target, (ast.Tuple, ast.List)) and isinstance(value, (ast.Tuple, ast.List)):
        starred = any(isinstance(one, ast.Starred) for one in (*target.elts, *value.elts))
        if not starred and len(target.elts) == len(value.elts):
            parts = zip(target.elts, value.elts, strict=True)
            return [pair for inner, given in parts for pair in _pairs(inner, given)]
    return [(target, value)]


def _elements(node: ast.expr) -> list[ast.expr] | None:
    """What an iterable gives, one expression per trip; None where the text does not tell."""
    if isinstance(node, (ast.Tuple, ast.List)):
        return None if any(isinstance(one, ast.Starred) for one in node.elts) else list(node.elts)
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return None
    if node.func.id == "range" and not node.keywords:
        numbers = [one.value for one in node.args if isinstance(one, ast.Constant) and type(one.value) is int]
        return [ast.Constant(n) for n in range(*numbers)] if len(numbers) == len(node.args) else None
    if node.func.id == "enumerate" and len(node.args) == 1 and not node.keywords:
        inner = _elements(node.args[0])
        return None if inner is None else [_tuple(ast.Constant(n), one) for n, one in enumerate(inner)]
    if node.func.id == "zip":
        return _zipped(node)
    return None


def _zipped(node: ast.Call) -> list[ast.expr] | None:
    """The elements of a zip of which one argument is written out at least, if the others must be as long."""
    parts = [_elements(one) for one in node.args]
    strict = any(one.arg == "strict" and ast.unparse(one.value) == "True" for one in node.keywords)
    known = [len(part) for part in parts if part is not None]
    if not known or (not strict and (len(known) < len(parts) or len(set(known)) > 1)):
        return None
    given = [
        part or [ast.Subscript(copy.deepcopy(one), ast.Constant(n), ast.Load()) for n in range(known[0])]
        for part, one in zip(parts, node.args, strict=True)
    ]
    return [_tuple(*some) for some in zip(*given, strict=True)] if len(set(map(len, given))) == 1 else None


def _tuple(*parts: ast.expr) -> ast.expr:
    return ast.Tuple(list(parts), ast.Load())


def _plain(body: Sequence[ast.stmt]) -> bool:
    """Whether statements run one after another, with no way out of them and no scope of their own."""
    odd = (ast.Break, ast.Continue, ast.Return, ast.FunctionDef, ast.Lambda, ast.NamedExpr)
    simple = all(isinstance(one, (ast.Assign, ast.AnnAssign, ast.Expr, ast.Assert)) for one in body)
    return simple and not any(isinstance(node, odd) for one in body for node in ast.walk(one))
