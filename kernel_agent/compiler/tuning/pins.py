"""`pinned`: a backward with the numbers that were chosen, under the conditions of their classes, as people write it.

if N <= 4096:
    num_warps = 8
else:
    num_warps = 16
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kernel_agent.bench.bindings import bindings
from kernel_agent.bench.tunable import Site, Tunable
from kernel_agent.bench.variants import Space
from kernel_agent.compiler.tuning.classes import Class
from kernel_agent.pairs.spec import Candidate

Edit = tuple[Site, str]
"""A piece of the text and what takes its place."""


@dataclass
class _Choice:
    """A statement, and per class the numbers that are chosen in it."""

    node: ast.stmt
    classes: Sequence[Class]
    items: list[list[tuple[Tunable, int]]]

    @property
    def differs(self) -> bool:
        """Whether classes have different numbers."""
        return any(len({value for _, value in some}) > 1 for some in zip(*self.items, strict=True))


def pinned(space: Space, parts: Sequence[Sequence[Class]], note: str = "") -> Candidate:
    """The candidate with the values of the classes of each part. `note`: a comment above the first choice."""
    text = space.candidate.backward
    lines = [line.encode() for line in text.split("\n")]
    statements = list(_statements(ast.parse(text)))
    chosen: dict[int, _Choice] = {}
    for classes in parts:
        for place in sorted({place for one in classes for place in one.values}):
            tunable = space.tunables[place]
            statement = _around(statements, tunable.sites[0])
            choice = chosen.setdefault(statement, _Choice(statements[statement], classes, [[] for _ in classes]))
            for items, one in zip(choice.items, classes, strict=True):
                items.append((tunable, one.values.get(place, tunable.value)))
    ordered = sorted(chosen.values(), key=lambda choice: choice.node.lineno)
    runs: list[list[_Choice]] = []
    for choice in ordered:
        if runs and _follows(choice, runs[-1][-1]):
            runs[-1].append(choice)
        else:
            runs.append([choice])
    taken = set(re.findall(r"\w+", text))
    for run in reversed(runs):
        shown = _shown(lines, run, taken)
        if note and run is runs[0]:
            shown = [b" " * run[0].node.col_offset + b"# " + note.encode(), *shown]
        lines[run[0].node.lineno - 1 : run[-1].node.end_lineno] = shown
    return space.candidate.model_copy(update={"backward": b"\n".join(lines).decode()})


def _follows(choice: _Choice, before: _Choice) -> bool:
    """Whether two assignments stand one below the other and can share their branches."""
    both = (choice, before)
    return (
        choice.classes is before.classes
        and all(isinstance(one.node, ast.Assign) and one.differs for one in both)
        and choice.node.lineno == (before.node.end_lineno or 0) + 1
    )


def names_before(space: Space, places: Sequence[int]) -> list[str]:
    """Expressions of whole numbers that may be asked before the first of some tunables: names that the sizes of tiles
    or constexprs come from first, how wide elements are, then the others; extents of grids last."""
    tree = ast.parse(space.candidate.backward)
    first = min(site.line for place in places for site in space.tunables[place].sites)
    tuned = [site for tunable in space.tunables for site in tunable.sites]
    function = next(
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.lineno <= first <= (node.end_lineno or node.lineno)
    )
    known = [
        target.id
        for statement in function.body
        if isinstance(statement, ast.Assign)
        and (statement.end_lineno or statement.lineno) < first
        and not any(statement.lineno <= site.line <= (statement.end_lineno or 0) for site in tuned)
        for target in ast.walk(statement.targets[0])
        if isinstance(target, ast.Name)
    ]
    kernels = {kernel for place in places for kernel in space.tunables[place].kernels}
    launches = [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Subscript)
        and ast.unparse(node.func.value) in kernels
    ]
    constexprs = {name for call in launches for key in call.keywords for name in _sources(key.value, function, call)}
    extents = {
        name
        for call in launches
        if isinstance(call.func, ast.Subscript)
        for name in _sources(call.func.slice, function, call)
    }

    def rank(name: str) -> int:
        return 0 if name in constexprs else 2 + (name in extents)

    wide = [(1, f"{name}.element_size()") for name in known]
    return [name for _, name in sorted([*((rank(name), name) for name in known), *wide], key=lambda pair: pair[0])]


def _sources(node: ast.expr, function: ast.FunctionDef, call: ast.Call, depth: int = 3) -> set[str]:
    """Names in an expression, and in what gives those their values."""
    known = bindings(function, call)
    found = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    for name in tuple(found) if depth else ():
        for made_of in known.get(name, ()):
            found |= _sources(made_of, function, call, depth - 1)
    return found


def _shown(lines: Sequence[bytes], run: Sequence[_Choice], taken: set[str]) -> list[bytes]:
    """Statements with the choices of the classes, in branches where they differ."""
    choice, node = run[0], run[0].node
    if not choice.differs:
        return _edited(lines, node, choice.items[0])
    if isinstance(node, ast.Assign):
        branches = [
            [line for one in run for line in _edited(lines, one.node, one.items[number])]
            for number in range(len(choice.classes))
        ]
        return _branched(choice.classes, branches, node.col_offset)
    differing = [k for k, some in enumerate(zip(*choice.items, strict=True)) if len({value for _, value in some}) > 1]
    names = {k: _fresh(choice.items[0][k][0], taken) for k in differing}
    pad = " " * node.col_offset
    branches = [
        [f"{pad}{', '.join(names.values())} = {', '.join(str(items[k][1]) for k in differing)}".encode()]
        for items in choice.items
    ]
    return [*_branched(choice.classes, branches, node.col_offset), *_edited(lines, node, choice.items[0], names)]


def _edited(
    lines: Sequence[bytes], node: ast.stmt, items: Sequence[tuple[Tunable, int]], names: Mapping[int, str] | None = None
) -> list[bytes]:
    """The lines of a statement with other numbers. `names`: variables to write instead, by position in `items`."""
    edits: list[Edit] = []
    for k, (tunable, value) in enumerate(items):
        if names is not None and k in names:
            text = tunable.placed(names[k])
        elif value != tunable.value:
            text = tunable.text(value)
        else:
            continue
        edits += [(site, text) for site in tunable.sites]
    found = list(lines[node.lineno - 1 : node.end_lineno])
    for site, text in sorted(edits, key=lambda edit: edit[0], reverse=True):
        first, last = site.line - node.lineno, site.end_line - node.lineno
        found[first : last + 1] = [found[first][: site.start] + text.encode() + found[last][site.end :]]
    return found


def _branched(classes: Sequence[Class], branches: Sequence[list[bytes]], indent: int) -> list[bytes]:
    """`if`, `elif`, `else`; the last class has no condition."""
    pad, found = b" " * indent, []
    for number, (one, branch) in enumerate(zip(classes, branches, strict=True)):
        word = "if" if number == 0 else "elif"
        found.append(pad + (f"{word} {' and '.join(one.conditions)}:" if one.conditions else "else:").encode())
        found += [b"    " + line for line in branch]
    return found


def _fresh(tunable: Tunable, taken: set[str]) -> str:
    """A variable for a number that stood at the launch itself; `num_warps` where the only such word is the keyword."""
    base = tunable.name.split()[0]
    name, count = base, 1
    while name in taken and not (count == 1 and base in ("num_warps", "num_stages")):
        count += 1
        name = f"{base}_{count}"
    taken.add(name)
    return name


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Simple statements."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.Expr, ast.Return)):
            yield node


def _around(statements: Sequence[ast.stmt], site: Site) -> int:
    """The place of the statement that a site stands in."""
    for place, node in enumerate(statements):
        if node.lineno <= site.line and site.end_line <= (node.end_lineno or node.lineno):
            return place
    raise ValueError(f"line {site.line} is in no statement")
