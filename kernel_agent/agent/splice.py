"""`splice`: one candidate out of two, each of which computes other gradients.

Both backwards are kept whole under new names, with the kernels they launch; a new `backward` asks each for its own
gradients. What both sections define alike stands there once; what they define differently is renamed in the second.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

from kernel_agent.pairs.spec import Candidate, content_hash
from kernel_agent.pairs.statements import Statement, statements
from kernel_agent.pairs.syntax import accepts, parse

ENTRY = "backward"
_KEYWORD = {ast.FunctionDef: len("def"), ast.AsyncFunctionDef: len("async def"), ast.ClassDef: len("class")}


@dataclass(frozen=True)
class Piece:
    """A candidate and what is taken from it."""

    candidate: Candidate
    grads: frozenset[str]


def splice(first: Piece, second: Piece, *, grads: tuple[str, ...], cotangents: tuple[str, ...]) -> Candidate | None:
    """The gradients of two candidates in one; `grads` in order, `cotangents` are the parameters after `saved`.

    None when they cannot be joined: their forwards differ, so that they read another `saved`, or a name that must be
    changed is bound in several scopes.
    Raises `InputError` when a section is no valid Python.
    """
    if not _same_forward(first.candidate, second.candidate):
        return None
    kept = statements(first.candidate.backward)
    added = statements(second.candidate.backward)
    taken = {name for item in kept for name in item.binds}
    fresh = [item for item in added if item not in _shared(kept, added)]
    clashing = sorted({name for item in fresh for name in item.binds} & taken - {ENTRY})
    every = taken | {name for item in added for name in item.binds | item.uses}
    names = {ENTRY: _unused(f"{ENTRY}_2", every)}
    for name in clashing:
        names[name] = _unused(f"{name}_2", every | set(names.values()))
    entry = _unused(f"{ENTRY}_1", every)
    left = _renamed(_text(kept), {ENTRY: entry})
    right = _renamed(_text(fresh), names)
    if left is None or right is None:
        return None
    parts = (
        _Part(entry, first.grads, _takes_needs(kept)),
        _Part(names[ENTRY], second.grads, _takes_needs(added)),
    )
    wrapper = _wrapper(grads, cotangents, parts)
    return Candidate(backward=f"{left}\n\n\n{right}\n\n\n{wrapper}", forward=first.candidate.forward)


def _same_forward(first: Candidate, second: Candidate) -> bool:
    if first.forward is None or second.forward is None:
        return first.forward is second.forward
    return content_hash(first.forward) == content_hash(second.forward)


def _shared(kept: list[Statement], added: list[Statement]) -> list[Statement]:
    """Statements of the second that the first has word for word, and that mean the same there."""
    texts = {item.text.strip() for item in kept}
    shared = [item for item in added if item.text.strip() in texts and ENTRY not in item.binds]
    while True:
        own = {name for item in added if item not in shared for name in item.binds}
        meaning = [item for item in shared if not item.uses & own]
        if len(meaning) == len(shared):
            return shared
        shared = meaning


def _text(items: list[Statement]) -> str:
    return "\n\n\n".join(item.text.strip("\n") for item in items)


def _unused(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    return name


def _takes_needs(items: list[Statement]) -> bool:
    nodes = [node for item in items for node in item.nodes]
    entry = next((node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == ENTRY), None)
    return entry is not None and accepts(entry, "needs")


@dataclass(frozen=True)
class _Place:
    """Where a name stands: line from 1, bytes from the line's beginning."""

    line: int
    column: int
    name: str


def _renamed(source: str, names: dict[str, str]) -> str | None:
    """`source` with module-level names changed; None when one of them is bound in another scope or by an import."""
    tree = parse(source)
    places: list[_Place] = []
    top = set(map(id, tree.body))
    lines = source.encode().split(b"\n")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name in names:
            if id(node) not in top:
                return None
            column = lines[node.lineno - 1].index(node.name.encode(), node.col_offset + _KEYWORD[type(node)])
            places.append(_Place(node.lineno, column, node.name))
        elif isinstance(node, ast.Name) and node.id in names:
            places.append(_Place(node.lineno, node.col_offset, node.id))
        elif _cannot_change(node, names):
            return None
    if any(_binds_inside(node, names) for node in tree.body):
        return None
    for place in sorted(places, key=lambda p: (p.line, p.column), reverse=True):
        line = lines[place.line - 1]
        after = place.column + len(place.name.encode())
        lines[place.line - 1] = line[: place.column] + names[place.name].encode() + line[after:]
    return b"\n".join(lines).decode()


def _cannot_change(node: ast.AST, names: dict[str, str]) -> bool:
    """Whether one of the names stands for something else here, or at a place that is not known."""
    if isinstance(node, ast.JoinedStr):
        # Before Python 3.12, places inside an f-string are not those of the file.
        return any(isinstance(inner, ast.Name) and inner.id in names for inner in ast.walk(node))
    if isinstance(node, ast.alias):
        return (node.asname or node.name) in names
    return isinstance(node, ast.arg) and node.arg in names


def _binds_inside(node: ast.stmt, names: dict[str, str]) -> bool:
    """Whether a definition assigns one of the names within itself, where it would be another variable."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return False
    return any(
        isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store | ast.Del) and inner.id in names
        for inner in ast.walk(node)
    )


@dataclass(frozen=True)
class _Part:
    """One of the two functions that the joined `backward` calls."""

    function: str
    grads: frozenset[str]
    takes_needs: bool


def _wrapper(grads: tuple[str, ...], cotangents: tuple[str, ...], parts: tuple[_Part, _Part]) -> str:
    """The joined `backward`."""
    given = ", ".join(("saved", *cotangents))
    nothing = ", ".join(["None"] * len(grads))
    lines = [
        f"def {ENTRY}({given}, needs=None):",
        f"    needs = ({', '.join(['True'] * len(grads))}) if needs is None else needs",
    ]
    for number, part in enumerate(parts, 1):
        own = ", ".join(f"needs[{place}]" if name in part.grads else "False" for place, name in enumerate(grads))
        call = f"{part.function}({given}{f', needs=needs_{number}' if part.takes_needs else ''})"
        lines += [
            f"    needs_{number} = ({own})",
            f"    grads_{number} = {call} if any(needs_{number}) else ({nothing})",
        ]
    source = {name: number for number, part in enumerate(parts, 1) for name in part.grads}
    returned = ", ".join(f"grads_{source[name]}[{place}]" for place, name in enumerate(grads))
    return "\n".join([*lines, f"    return {returned}"]) + "\n"
