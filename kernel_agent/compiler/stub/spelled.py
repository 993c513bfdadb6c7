"""`spelled`: the text of a stub in which everything that launches are given keeps a name of its own.

The backward asks for tensors and numbers by the names that they have as the stub returns. What was bound again since,
or never had a name, is given one.
"""

from __future__ import annotations

import ast
import copy
import itertools
from collections.abc import Iterator, Sequence

from kernel_agent.compiler.free_names import bound_names, free_name, read_names
from kernel_agent.compiler.stub.callees import launches
from kernel_agent.compiler.stub.inline import rows
from kernel_agent.compiler.substitution import Substitution

_MAKERS = frozenset({"empty", "zeros", "ones", "full", "empty_like", "zeros_like", "ones_like", "full_like"})
_PURE = frozenset({"min", "max", "len", "triton.cdiv", "triton.next_power_of_2"})
"""May be called once for each part of a tensor."""
_MOST = 8
"""Tensors of one list that are written out."""


def spelled(source: str, stub: str) -> str:
    """The text of a file whose stub, where that changes nothing, binds

    - tensors that are unpacked from a new one, `a, b = torch.empty(2, n)`, as new ones of their own, or by way of that
      one where its sizes are not written out
    - the elements of a list of new tensors one by one: `[torch.empty(n) for _ in range(3)]`
    - numbers of a launch that are bound again behind it under another name.

    The lines of the stub may change.
    """
    return _spelled(_spelled(source, stub, in_loops=False), stub, in_loops=True)


def _spelled(source: str, stub: str, *, in_loops: bool) -> str:
    """The same of statements at the top of a stub, where loops may be written anew as well, or of those in loops."""
    tree = ast.parse(source)
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == stub]
    if not found:
        return source
    function = found[-1]
    taken = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
    taken |= {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
    shown: list[tuple[ast.stmt, Sequence[ast.stmt]]] = []
    loops = [one.body for one in function.body if isinstance(one, ast.For) and one.body[0].lineno > one.lineno]
    for block in loops if in_loops else [function.body]:
        for old, new in zip(block, _bound_once(block, function.args, taken), strict=True):
            written = _written_out(new, taken) or [new]
            if written != [old]:
                shown.append((old, written))
    lines = source.split("\n")
    for old, parts in reversed(shown):
        pad = " " * old.col_offset
        text = [row for one in parts for row in rows(ast.fix_missing_locations(one), pad)]
        lines[old.lineno - 1 : old.end_lineno or old.lineno] = text
    return "\n".join(lines)


def _written_out(statement: ast.stmt, taken: set[str]) -> list[ast.stmt] | None:
    """The statements that one becomes; None where it stays."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return None
    (target,), value = statement.targets, statement.value
    if isinstance(target, ast.Tuple) and _is_made(value):
        if not all(isinstance(one, ast.Name) for one in target.elts):
            return None
        part = _part(value, len(target.elts))
        if part is not None:
            return [ast.Assign([one], copy.deepcopy(part)) for one in target.elts]
        whole = free_name("_and_".join(one.id for one in target.elts if isinstance(one, ast.Name)), taken)
        parts: list[ast.expr] = [
            ast.Subscript(ast.Name(whole, ast.Load()), ast.Constant(place), ast.Load())
            for place in range(len(target.elts))
        ]
        unpacked = ast.Assign([target], ast.Tuple(parts, ast.Load()))
        return [ast.Assign([ast.Name(whole, ast.Store())], value), unpacked]
    if isinstance(target, ast.Name) and isinstance(value, ast.ListComp) and _is_made(value.elt):
        count = _count(value)
        if count is None:
            return None
        names = [free_name(f"{target.id}_{place}", taken) for place in range(count)]
        made: list[ast.stmt] = [ast.Assign([ast.Name(name, ast.Store())], copy.deepcopy(value.elt)) for name in names]
        return [*made, ast.Assign([target], ast.List([ast.Name(name, ast.Load()) for name in names], ast.Load()))]
    return None


def _is_made(value: ast.expr) -> bool:
    """Whether an expression is a new tensor of torch's."""
    return isinstance(value, ast.Call) and ast.unparse(value.func) in {f"torch.{name}" for name in _MAKERS}


def _part(value: ast.expr, count: int) -> ast.Call | None:
    """One of the tensors that a new one, `torch.empty(2, n)`, is unpacked to; None where its text does not tell."""
    if not isinstance(value, ast.Call) or not value.args or ast.unparse(value.func).endswith("_like"):
        return None
    if any(isinstance(node, ast.Call) and ast.unparse(node.func) not in _PURE for node in _within(value)):
        return None
    first, *others = value.args
    packed = first.elts if isinstance(first, (ast.Tuple, ast.List)) else None
    sizes = value.args if packed is None else packed
    if len(sizes) < 2 or not isinstance(sizes[0], ast.Constant) or sizes[0].value != count:
        return None
    given = sizes[1:] if packed is None else [ast.Tuple(packed[1:], ast.Load()), *others]
    return ast.Call(value.func, given, value.keywords)


def _within(value: ast.Call) -> Iterator[ast.AST]:
    """The nodes of what a call is given."""
    for one in (*value.args, *value.keywords):
        yield from ast.walk(one)


def _count(value: ast.ListComp) -> int | None:
    """How many elements a list has whose elements are all made alike: `for _ in range(3)`."""
    (loop, *more), call = value.generators, value.generators[0].iter
    if more or loop.ifs or not isinstance(loop.target, ast.Name) or ast.unparse(call).count("range(") != 1:
        return None
    if any(isinstance(node, ast.Name) and node.id == loop.target.id for node in ast.walk(value.elt)):
        return None
    plain = isinstance(call, ast.Call) and len(call.args) == 1 and isinstance(call.args[0], ast.Constant)
    number = (
        call.args[0].value if plain and isinstance(call, ast.Call) and isinstance(call.args[0], ast.Constant) else 0
    )
    return number if type(number) is int and 0 < number <= _MOST else None


def _bound_once(block: Sequence[ast.stmt], arguments: ast.arguments, taken: set[str]) -> list[ast.stmt]:
    """The statements of a stub, or of a loop in it, with other names for what is bound again behind a launch that reads
    it."""
    body = list(block)
    given = {node.arg for node in ast.walk(arguments) if isinstance(node, ast.arg)}
    for name in dict.fromkeys(name for one in body for name in _plainly_bound(one)):
        places = [place for place, one in enumerate(body) if name in bound_names(one)]
        if name in given or len(places) < 2 or not all(name in _plainly_bound(body[place]) for place in places):
            continue
        if any(_in_a_scope_within(one, name) for one in body):
            continue
        for first, last in itertools.pairwise(places):
            between = body[first + 1 : last]
            if not any(launches(one) and name in read_names(one) for one in between):
                continue
            other = {name: ast.Name(free_name(f"{name}_{places.index(first) + 1}", taken))}
            body[first] = Substitution({}, other).of(body[first])
            for place in range(first + 1, last + 1):
                if name in read_names(body[place]):
                    body[place] = Substitution(other).of(body[place])
    return body


def _plainly_bound(statement: ast.stmt) -> list[str]:
    """Names that an assignment of one target binds, itself or in a tuple."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return []
    (target,) = statement.targets
    targets = target.elts if isinstance(target, ast.Tuple) else [target]
    return [one.id for one in targets if isinstance(one, ast.Name)]


def _in_a_scope_within(statement: ast.stmt, name: str) -> bool:
    """Whether a function of the stub reads a name that it does not bind: where it stands does not tell when."""
    scopes = [n for n in ast.walk(statement) if isinstance(n, (ast.FunctionDef, ast.Lambda))]
    for scope in scopes:
        own = {n.arg for n in ast.walk(scope) if isinstance(n, ast.arg)}
        own |= {n.id for n in ast.walk(scope) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        if name not in own and any(isinstance(n, ast.Name) and n.id == name for n in ast.walk(scope)):
            return True
    return False
