"""`Replay`: the statements of a trip of the forward that a trip of the backward needs again.

Names that the trip binds, and what its launches left in memory that the next trip overwrote.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.free_names import bound_names
from kernel_agent.compiler.stub.carries import Event, made_by
from kernel_agent.compiler.stub.flow import replaced, storage_of
from kernel_agent.compiler.stub.lines import Line
from kernel_agent.compiler.stub.loops import Loop
from kernel_agent.compiler.stub.names import ASKS
from kernel_agent.compiler.stub.needs import variable_of
from kernel_agent.compiler.stub.trace import LaunchSeen
from kernel_agent.compiler.stub.wording import Launched
from kernel_agent.compiler.stub.writer import Writer

_LIKE = frozenset({"torch.empty_like", "torch.zeros_like", "gradient_room"})
"""Functions that ask their first argument for its form alone."""


class Replay:
    """Of one loop."""

    def __init__(self, writer: Writer, loop: Loop, part: Sequence[tuple[int, Event]], lost: frozenset[int]) -> None:
        """`part`: events of the trip that is followed; `lost`: memory that is there before the loop and has nothing of
        a trip behind it."""
        self.writer = writer
        self.names, self.flow, self.source = writer.names, writer.flow, writer.source
        self.loop = loop
        self.part = part
        made = (one for _, event in part for one in made_by(event) if self.flow.base(one) is None)
        self.passing = lost.union(map(storage_of, made))
        """Memory that has nothing of a trip behind it."""
        self.places: set[int] = set()
        """Of launches that are done again."""
        self.elsewhere: dict[str, str] = {}
        """Tensors that keep what the forward stored: what is written there instead."""
        self._wanted: dict[str, bool] = {}
        """Names, and whether what they hold is read."""

    def statements(self, lines: Sequence[Line]) -> list[Line]:
        """The statements of the trip that lines of its backward need, in order. Raises `CannotDerive`."""
        body = [one for one in self.source.function.body if self.loop.first < one.lineno <= self.loop.last]
        self._want(lines)
        found: dict[int, Line] = {}
        while True:
            more = [place for place, one in enumerate(body) if place not in found and self._is_wanted(one)]
            if not more:
                break
            found[more[-1]] = line = self._again(body[more[-1]])
            self._want([line])
        return [self._moved(found[place]) for place in sorted(found)]

    def wants(self, name: str) -> bool:
        """Whether a name is read in a trip of the backward."""
        return name in self._wanted

    def allocations(self) -> list[Line]:
        """Memory for what the statements of all trips write, made ahead of the loop. Raises `CannotDerive`."""
        lines = [
            Line(f"{other} = torch.empty_like({self.names.tensor(name)})") for name, other in self.elsewhere.items()
        ]
        ahead = [one for one in self.source.function.body if one.lineno < self.loop.first]
        found: list[Line] = []
        for one in reversed(ahead):
            wanted = [name for name in bound_names(one) if name in self._wanted and name in self.names.scratch]
            if not wanted:
                continue
            if not isinstance(one, ast.Assign) or len(one.targets) != 1:
                raise self._refusal(wanted[0], one.lineno)
            line = Line(_assigned(one.targets[0], self.names.expression(one.value, one.lineno, wanted[0])))
            self._want([line])
            found.insert(0, line)
        bound = {name for one in ahead for name in bound_names(one)}
        for name in self._wanted:
            if name in self.names.scratch and name not in bound:
                raise self._refusal(name, self.loop.first)
        return [*lines, *found]

    def _refusal(self, name: str, line: int) -> CannotDerive:
        return CannotDerive(
            f"each trip of the loop (line {self.loop.first}) overwrites `{name}`, which cannot be made again",
            remedy=f"Allocate `{name}` in the stub by a plain assignment.",
            line=line,
        )

    def _want(self, lines: Sequence[Line]) -> None:
        """Note what lines read."""
        text = "\n".join(row for line in lines for row in line.shown(str, 0))
        for name, read in _reads(ast.parse(text)).items():
            self._wanted[name] = self._wanted.get(name, False) or read

    def _is_wanted(self, statement: ast.stmt) -> bool:
        if any(name in self._wanted for name in bound_names(statement)):
            return True
        return any(storage_of(one) in self._memory() for one in self._written(statement))

    def _memory(self) -> set[int]:
        """Memory of which the contents are read that a trip leaves there."""
        held = [self.names.final.get(name) for name, read in self._wanted.items() if read]
        return {storage_of(one) for one in held if isinstance(one, Tensor)} & self.passing

    def _written(self, statement: ast.stmt) -> list[Tensor]:
        """What a statement of the trip writes to."""
        return self.flow.written_at([place for place, _ in self._events(statement)])

    def _events(self, statement: ast.stmt) -> list[tuple[int, Event]]:
        end = statement.end_lineno or statement.lineno
        return [(place, event) for place, event in self.part if statement.lineno <= event.site.outer <= end]

    def _again(self, statement: ast.stmt) -> Line:
        """A statement as the backward has it."""
        value, line = getattr(statement, "value", None), statement.lineno
        launches = [place for place, event in self._events(statement) if isinstance(event, LaunchSeen)]
        if isinstance(statement, ast.Expr) and launches and isinstance(value, ast.Call):
            self.places.update(launches)
            return self._launch(value, launches[0])
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            return Line(_assigned(statement.targets[0], self.names.expression(statement.value, line, "again")))
        if isinstance(statement, ast.AnnAssign) and isinstance(value, ast.expr):
            return Line(f"{ast.unparse(statement.target)} = {self.names.expression(value, line, 'again')}")
        if isinstance(statement, ast.Expr) and isinstance(value, ast.expr):
            return Line(self.names.expression(value, line, "again"))
        raise self._refusal(ast.unparse(statement), line)

    def _launch(self, call: ast.Call, place: int) -> Line:
        """A launch, with memory of its own for what it stores to tensors that outlive the loop."""
        call = copy.deepcopy(call)
        assert isinstance(call.func, ast.Subscript)
        given = call.func.slice
        definition = self.source.definition(given.id) if isinstance(given, ast.Name) else None
        if isinstance(definition, ast.Lambda):
            call.func.slice = definition
        launched = self.writer.launches[place]
        self._keep_apart(launched)
        text = self.names.expression(call, call.end_lineno or call.lineno, "again")
        shown = ast.parse(text, mode="eval").body
        assert isinstance(shown, ast.Call)
        items = [*map(ast.unparse, shown.args), *map(ast.unparse, shown.keywords)]
        written = [ast.unparse(launched.text.arguments[name]) for name in sorted(launched.accesses.written)]
        writes = tuple(dict.fromkeys(map(variable_of, written)))
        assert isinstance(shown.func, ast.Subscript)
        grid = ast.unparse(shown.func.slice)
        return Line(f"{ast.unparse(shown.func.value)}[{grid}](", tuple(items), ")", writes=writes)

    def _keep_apart(self, launched: Launched) -> None:
        """Have a launch store to other memory where the forward's keeps what it stored. Raises `CannotDerive`."""
        for name in sorted(launched.accesses.written):
            root = self.flow.root(launched.seen.tensors[name])
            if storage_of(root) in self.passing:
                continue
            local = self.flow.local(root)
            if local is None:
                raise self._refusal(ast.unparse(launched.text.arguments[name]), launched.seen.site.line)
            self.elsewhere.setdefault(local, self.names.fresh(f"{local}_again"))

    def _moved(self, line: Line) -> Line:
        """A statement with the memory of its own that launches store to."""
        opening, items = line.opening, line.items
        for name, other in self.elsewhere.items():
            target, equals, value = opening.partition(" = ")
            opening = f"{target}{equals}{_renamed(value, name, other)}" if equals else opening
            items = tuple(_renamed(item, name, other) for item in items)
        return replace(line, opening=opening, items=items, writes=tuple(self.elsewhere.get(w, w) for w in line.writes))


def _assigned(target: ast.expr, value: str) -> str:
    """`a, b = x, y`, without parentheses around either."""
    left, tuples = ast.unparse(target), isinstance(ast.parse(value, mode="eval").body, ast.Tuple)
    left = left[1:-1] if isinstance(target, ast.Tuple) and len(target.elts) > 1 and left.startswith("(") else left
    return f"{left} = {value[1:-1] if tuples and value.startswith('(') and not value.endswith(',)') else value}"


def _renamed(text: str, name: str, other: str) -> str:
    """An argument or expression with another name for one."""
    keyword, equals, value = text.partition("=") if re.match(r"\w+=[^=]", text) else ("", "", text)
    return f"{keyword}{equals}{replaced(ast.parse(value, mode='eval').body, name, other)}"


def _reads(tree: ast.AST) -> dict[str, bool]:
    """Names that statements read, and whether more than the form of what they hold."""
    asked = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.attr in ASKS:
            asked.add(id(node.value))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in _LIKE and node.args:
            asked.add(id(node.args[0]))
    found: dict[str, bool] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            found[node.id] = found.get(node.id, False) or id(node) not in asked
    return found
