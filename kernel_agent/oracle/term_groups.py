"""Which gates of a forward cut the same term, and what to call that term in words of the user's code."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from kernel_agent.ir.edges import RESULT, Edges, Key
from kernel_agent.ir.machine import LEAVES_BLOCK
from kernel_agent.ir.program import Module
from kernel_agent.oracle.value_names import Names

_REGIONS = ("scf.", "cf.", "tt.call")
_REDUCTIONS = frozenset({"tt.reduce", "tt.dot", "tt.scan"})

ValueNode = tuple[int, int]
"""(kernel, id of a value)"""


@dataclass(frozen=True)
class Term:
    """Gates in series: each of them alone cuts the same paths."""

    gates: tuple[Key, ...]
    line: int | None
    """Line of the user's file where the term joins others: the last one that names it."""
    variable: str
    """Name of the value that carries it there; empty where the code has none."""
    reduced: bool
    """Whether a reduction lies on it."""

    @property
    def gate(self) -> Key:
        """The gate to change."""
        return self.gates[0]


def terms_of(edges: Edges, file: str) -> tuple[Term, ...]:
    """The terms of an execution whose gates `edges` holds; `file` is the user's."""
    series = _Series()
    uses = [_uses(module) for module in edges.modules]
    met: dict[tuple[int, int], list[Key]] = defaultdict(list)
    for key in edges.met:
        met[key.launch, key.op].append(key)
    for key, op in edges.met.items():
        series.join(key, key)
        if key.operand <= RESULT:
            series.join(key, (key.launch, op.results[RESULT - key.operand].id))
            continue
        value = op.operands[key.operand].id
        if uses[key.launch].get(value) == 1:
            series.join(key, (key.launch, value))
        beside = [k for k in met[key.launch, key.op] if k.operand >= 0]
        if len(beside) == 1 and len(op.results) == 1 and not op.name.startswith(_REGIONS):
            series.join(key, (key.launch, op.results[0].id))
    names = [Names(module) for module in edges.modules]
    return tuple(_term(edges, names, keys, file) for keys in series.classes())


def _uses(module: Module) -> dict[int, int]:
    """How often each value is read; what leaves a block counts twice, since no gate sees where it goes."""
    count: dict[int, int] = defaultdict(int)
    for op in module.all_ops:
        for value in op.operands:
            count[value.id] += 2 if op.name in LEAVES_BLOCK or op.successors else 1
    return count


class _Series:
    """Disjoint sets of gates and values."""

    def __init__(self) -> None:
        self._above: dict[Key | ValueNode, Key | ValueNode] = {}

    def _root(self, node: Key | ValueNode) -> Key | ValueNode:
        while (above := self._above.setdefault(node, node)) != node:
            node = above
        return node

    def join(self, first: Key | ValueNode, second: Key | ValueNode) -> None:
        """They cut the same paths."""
        first, second = self._root(first), self._root(second)
        self._above[first] = second

    def classes(self) -> list[list[Key]]:
        """Gates that cut the same paths, in the order in which they were met."""
        found: dict[Key | ValueNode, list[Key]] = defaultdict(list)
        for node in self._above:
            if isinstance(node, Key):
                found[self._root(node)].append(node)
        return list(found.values())


def _term(edges: Edges, names_of: list[Names], keys: list[Key], file: str) -> Term:
    """The last gate at which a named value of an earlier line enters names the term, else the last named result."""
    line, variable, entered = None, "", False
    for key in keys:
        op, names = edges.met[key], names_of[key.launch]
        place = names.module.place(op)
        if place is None or place.file != file:
            continue
        if key.operand >= 0:
            operand = op.operands[key.operand]
            enters = bool(names.variable(operand)) and names.line(operand) != place.line
            if enters or line is None:
                line, variable, entered = place.line, names.variable(operand), enters
        elif not entered:
            line, variable = place.line, names.variable(op.results[RESULT - key.operand]) or variable
    reduced = any(edges.met[key].name in _REDUCTIONS for key in keys)
    return Term(tuple(keys), line, variable, reduced)
