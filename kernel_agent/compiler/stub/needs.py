"""What of a backward serves which gradients: statements that only gradients need which nobody asks for are skipped."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from kernel_agent.compiler.free_names import assigned_names
from kernel_agent.compiler.stub.lines import Line


@dataclass(frozen=True)
class Sparing:
    """A backward that leaves gradients out."""

    body: list[Line]
    results: list[str]


@dataclass(frozen=True)
class Statement:
    """One statement with what stands in it."""

    lines: tuple[Line, ...]
    binds: frozenset[str]
    """Variables that it gives a value, or whose contents it changes."""
    reads: frozenset[str]
    launches: bool
    checks: bool
    effects: bool
    """It does more than to name a value."""
    inner: tuple[Statement, ...] = ()
    """Of a loop: the statements of a trip."""


def sparing(body: Sequence[Line], results: Sequence[str], flags: Sequence[str]) -> Sparing | None:
    """The statements, with those that some gradients alone need under `if`; None where every launch serves all.

    `flags`: per result, the variable that tells whether it is needed.
    """
    everything = frozenset(range(len(results)))
    served = _Served(everything)
    for place, text in enumerate(results):
        served.add(_read(ast.parse(text, mode="eval")), frozenset({place}))
    found = served.by(statements_of(body), flags)
    if not served.apart:
        return None
    shown = []
    for place, text in enumerate(results):
        partial = any(served.names[name] != everything for name in _read(ast.parse(text, mode="eval")))
        shown.append(only_if(flags[place], text) if partial else text)
    return Sparing(_under_flags(found, everything, flags), shown)


class _Served:
    """Which gradients variables serve, found from the last statement to the first."""

    def __init__(self, everything: frozenset[int]) -> None:
        self.everything = everything
        self.names: dict[str, frozenset[int]] = {}
        self.apart = False
        """Whether some gradient does without a statement that launches."""

    def add(self, names: Collection[str], wanted: frozenset[int]) -> None:
        """Have variables serve some more."""
        self.names.update({name: self.names.get(name, frozenset()) | wanted for name in names})

    def by(self, statements: Sequence[Statement], flags: Sequence[str]) -> list[tuple[Statement, frozenset[int]]]:
        """Statements, with the gradients that each serves; those of loops under their own conditions."""
        found: list[tuple[Statement, frozenset[int]]] = []
        for statement in reversed(statements):
            if statement.inner:
                found.insert(0, self._loop(statement, flags))
                continue
            wanted = frozenset().union(*(self.names.get(name, frozenset()) for name in statement.binds))
            wanted = self.everything if statement.checks or not wanted else wanted
            self.add(statement.reads, wanted)
            self.apart |= statement.launches and wanted != self.everything
            found.insert(0, (statement, wanted))
        return found

    def _loop(self, loop: Statement, flags: Sequence[str]) -> tuple[Statement, frozenset[int]]:
        """A loop. What a trip reads may be what an earlier one wrote: its statements are asked until all have told."""
        known: dict[str, frozenset[int]] | None = None
        inner: list[tuple[Statement, frozenset[int]]] = []
        apart = self.apart
        while known != self.names:
            known, self.apart = dict(self.names), apart
            inner = self.by(loop.inner, flags)
        wanted = frozenset().union(*(one for _, one in inner))
        self.add(_read(ast.parse(f"{loop.lines[0].opening}\n    pass")), wanted)
        lines = [line.deeper() for line in _under_flags(inner, wanted, flags)]
        return replace(loop, lines=(loop.lines[0], *lines)), wanted


def _under_flags(
    found: Sequence[tuple[Statement, frozenset[int]]], whole: frozenset[int], flags: Sequence[str]
) -> list[Line]:
    """Statements, those under conditions that serve less than the `whole` does."""
    lines: list[Line] = []
    for wanted, group in _grouped(found):
        under = wanted != whole
        if under:
            lines.append(Line(f"if {' or '.join(flags[place] for place in sorted(wanted))}:"))
        lines += [line.deeper() if under else line for statement in group for line in statement.lines]
    return lines


def only_if(condition: str, text: str) -> str:
    """A result where a condition holds, else None; conditions that it has already stand behind that one."""
    node = ast.parse(text, mode="eval").body
    if isinstance(node, ast.IfExp) and ast.unparse(node.orelse) == "None":
        return f"{ast.unparse(node.body)} if {condition} and {ast.unparse(node.test)} else None"
    return f"{text} if {condition} else None"


def _grouped(
    found: Sequence[tuple[Statement, frozenset[int]]],
) -> Iterator[tuple[frozenset[int], list[Statement]]]:
    """Runs of statements that serve the same gradients. One without effects waits for the next of its run, if none
    between them has to do with it."""
    waiting: dict[frozenset[int], list[Statement]] = {}
    run: tuple[frozenset[int], list[Statement]] | None = None
    for statement, wanted in found:
        met = [
            one
            for one, others in waiting.items()
            if (statement.effects and one == wanted)
            or (one != wanted and any(_meet(statement, other) for other in others))
        ]
        for one in met:
            if run is not None and run[0] == one:
                run[1].extend(waiting.pop(one))
            else:
                if run is not None:
                    yield run
                run = one, waiting.pop(one)
        if not statement.effects:
            waiting.setdefault(wanted, []).append(statement)
        elif run is not None and run[0] == wanted:
            run[1].append(statement)
        else:
            if run is not None:
                yield run
            run = wanted, [statement]
    if run is not None:
        yield run[0], [*run[1], *waiting.pop(run[0], [])]
    yield from waiting.items()


def _meet(one: Statement, other: Statement) -> bool:
    """Whether two statements may not change places."""
    return bool(one.binds & (other.binds | other.reads) or one.reads & other.binds)


def variable_of(text: str) -> str:
    """The variable that an expression starts with: `dx` of `dx[1:]`; empty where it starts with none."""
    return _base(ast.parse(text, mode="eval").body)


def statements_of(body: Sequence[Line]) -> list[Statement]:
    """Lines as statements."""
    groups: list[list[Line]] = []
    for line in body:
        if line.depth == 0:
            groups.append([])
        groups[-1].append(line)
    return [_statement(tuple(group)) for group in groups]


def _statement(lines: tuple[Line, ...]) -> Statement:
    rows = [row for line in lines for row in line.shown(str, 0)]
    (node,) = ast.parse("\n".join(rows)).body
    launches = any(line.writes for line in lines)
    binds = {name for line in lines for name in line.writes}
    binds |= assigned_names(node)
    for one in ast.walk(node):
        if isinstance(one, ast.Assign):
            binds |= {_base(target) for target in one.targets if isinstance(target, (ast.Subscript, ast.Attribute))}
        elif isinstance(one, ast.Expr) and not launches:
            binds.add(_base(one.value))
    checks = any(isinstance(one, ast.Raise) for one in ast.walk(node))
    effects = not isinstance(node, ast.Assign) or any(
        not isinstance(one, (ast.Name, ast.Tuple)) for one in node.targets
    )
    found = Statement(lines, frozenset(binds), _read(node), launches, checks, effects)
    if not isinstance(node, ast.For):
        return found
    inner = [replace(line, depth=line.depth - 1) for line in lines[1:]]
    trip = tuple(_writing_through(statements_of(inner)))
    return replace(found, binds=found.binds.union(*(one.binds for one in trip)), inner=trip)


def _writing_through(statements: Sequence[Statement]) -> Iterator[Statement]:
    """Statements of which those that write to a part of a tensor, `dpart = dx[1:]`, write to the tensor."""
    whole: dict[str, str] = {}
    for one in statements:
        rows = [row for line in one.lines for row in line.shown(str, 0)]
        (node,) = ast.parse("\n".join(rows)).body
        if not one.effects and isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            whole[node.targets[0].id] = _base(node.value)
            yield one
            continue
        binds = set(one.binds)
        for name in one.binds:
            while (name := whole.get(name, "")) and name not in binds:
                binds.add(name)
        yield replace(one, binds=frozenset(binds))


def _base(node: ast.expr) -> str:
    """See `variable_of`."""
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Call):
            node = node.func
        elif isinstance(node, (ast.Attribute, ast.Subscript)):
            node = node.value
        else:
            return ""
    return node.id


def _read(node: ast.AST) -> frozenset[str]:
    return frozenset(
        one.id for one in ast.walk(node) if isinstance(one, ast.Name) and not isinstance(one.ctx, ast.Store)
    )
