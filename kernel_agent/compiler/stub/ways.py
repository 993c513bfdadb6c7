"""Ways through a backward: one for each configuration of the stub, under what tells it from the others."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from kernel_agent.compiler.errors import OTHER_CONFIGURATIONS
from kernel_agent.compiler.ssa.special import Special
from kernel_agent.compiler.ssa.value import Kernel
from kernel_agent.compiler.stub.backward import BackwardWriter, Planner, Written
from kernel_agent.compiler.stub.branches import branches_taken
from kernel_agent.compiler.stub.checks import shared_checks
from kernel_agent.compiler.stub.decisions import Decision
from kernel_agent.compiler.stub.lines import Line, double_quoted
from kernel_agent.compiler.stub.names import Names
from kernel_agent.compiler.stub.remains import Eraser
from kernel_agent.compiler.stub.trace import Trace

THERE = " is not None"
"""What asks whether an argument was given."""
_SIMPLE = (ast.Name, ast.Attribute, ast.Call, ast.Compare)
_OPPOSITES: Mapping[type[ast.cmpop], type[ast.cmpop]] = {ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
Tests = Mapping[str, object]
"""What a configuration was compiled for: expression of the backward -> value."""


@dataclass(frozen=True)
class NoneOf:
    """Any value but these."""

    values: Special


@dataclass(frozen=True)
class Way:
    """One configuration of the stub: a call that shows it, and what tells it from the others."""

    trace: Trace
    kernels: Mapping[int, Kernel]
    """Programs of the launches, by their position among the trace's events."""
    planner: Planner
    eraser: Eraser
    conditions: tuple[tuple[int, str, object], ...] = ()
    """What must hold for it: launch, parameter, value."""
    decisions: tuple[Decision, ...] = ()
    """And how conditions of the stub must fall."""
    optional: frozenset[str] = frozenset()
    """Tensors of the call that are None in others of the configuration."""

    def tests(self, writer: BackwardWriter, names: Names, optional: set[tuple[int, str]]) -> dict[str, object]:
        """What is asked of a call, without what is always so. `optional`: parameters that are None in some
        configuration."""
        launches = list(writer.launches.values())
        found: dict[str, object] = {names.expression(one.node, one.line, "way"): one.value for one in self.decisions}
        for place, parameter, value in self.conditions:
            node = launches[place].text.arguments[parameter]
            if isinstance(value, Tensor) and (place, parameter) not in optional:
                continue
            if names.is_of_trips(node):
                writer.refuse_varying(launches[place], parameter)
                continue
            text = names.expression(node, launches[place].text.line, parameter)
            if not writer.source.is_constant(text):
                found[text] = value
        for taken in branches_taken(writer.source.function, {seen.site.line for seen in self.trace.launches}):
            text = names.expression(taken.test, taken.line, "taken")
            if not writer.source.is_constant(text):
                found[text] = taken.holds
        return dict(_asked_of_none(text, value) for text, value in found.items())


def _asked_of_none(text: str, value: object) -> tuple[str, object]:
    """A test; what is None in one configuration and a tensor in another is asked in one way, however the stub asks."""
    node = ast.parse(text, mode="eval").body
    if value is None or isinstance(value, Tensor):
        simple = isinstance(node, (ast.Name, ast.Attribute, ast.Subscript, ast.Call))
        return f"{text if simple else f'({text})'}{THERE}", value is not None
    if isinstance(value, bool) and isinstance(node, ast.Compare) and text.endswith(" is None"):
        return f"{text.removesuffix(' is None')}{THERE}", not value
    return text, value


@dataclass
class _Branch:
    """Statements under conditions."""

    conditions: dict[str, str]
    """Expression -> Python that asks whether it has the value it must have."""
    body: list[Line]
    results: list[str]


def branched(tests: Sequence[Tests], written: Sequence[Written]) -> list[Line]:
    """One way after another, each under what tells it from the others; what all share is asked first. Ways whose
    statements are the same are one; where every call goes one of the ways, what all begin with stands before them."""
    texts = list(dict.fromkeys(text for one in tests for text in one))
    shown = [{text: _test(text, one[text]) for text in texts if text in one} for one in tests]
    common = [text for text in texts if len({one.get(text, "") for one in shown}) == 1]
    refusal = f'raise NotImplementedError("{OTHER_CONFIGURATIONS}")'
    lines: list[Line] = []
    asked = list(dict.fromkeys(shown[0][text] for text in common))
    if asked:
        lines += [Line(f"if not ({' and '.join(asked)}):"), Line(refusal, depth=1)]
    ways = _united(
        [
            _Branch({text: test for text, test in one.items() if text not in common}, way.body, way.results)
            for one, way in zip(shown, written, strict=True)
        ]
    )
    every = _is_exhaustive(ways)
    if len(ways) > 1 and every:
        checks, bodies = shared_checks([way.body for way in ways])
        first = _beginning(bodies)
        lines += [*checks, *bodies[0][:first]]
        ways = [replace(way, body=body[first:]) for way, body in zip(ways, bodies, strict=True)]
    for place, way in enumerate(ways):
        body = [*way.body, Line("return ", tuple(way.results), bare=True)]
        if not way.conditions or (every and place == len(ways) - 1):
            return [*lines, *body]
        lines += [Line(f"if {' and '.join(_telling(way.conditions.values()))}:")]
        lines += [replace(line, depth=line.depth + 1) for line in body]
    return [*lines, Line(refusal)]


def _united(ways: Sequence[_Branch]) -> list[_Branch]:
    """Ways that do the same, and that one condition tells apart, without it."""
    found: list[_Branch] = []
    for way in ways:
        twin = next((one for one in found if (one.body, one.results) == (way.body, way.results)), None)
        apart = _apart(twin, way) if twin is not None else []
        if twin is not None and len(apart) == 1:
            del twin.conditions[apart[0]]
        else:
            found.append(way)
    return found if len(found) == len(ways) else _united(found)


def _apart(one: _Branch, other: _Branch) -> list[str]:
    """Expressions that two ways want opposite values of; several where they differ otherwise."""
    texts = [
        text
        for text in {**one.conditions, **other.conditions}
        if one.conditions.get(text) != other.conditions.get(text)
    ]
    if all(_opposite(one.conditions.get(text, ""), other.conditions.get(text, "")) for text in texts):
        return texts
    return [*texts, *texts]


def _is_exhaustive(ways: Sequence[_Branch]) -> bool:
    """Whether every call goes one of some ways: the last asks nothing, or each way an expression can turn out is
    there."""
    if not ways[-1].conditions:
        return True
    texts = list(ways[0].conditions)
    if any(list(way.conditions) != texts for way in ways) or len(ways) != 2 ** len(texts):
        return False
    asked = [list(dict.fromkeys(way.conditions[text] for way in ways)) for text in texts]
    if not all(len(tests) == 2 and _opposite(*tests) for tests in asked):
        return False
    return len({tuple(way.conditions.values()) for way in ways}) == len(ways)


def _beginning(bodies: Sequence[Sequence[Line]]) -> int:
    """Of how many lines the statements are that all bodies begin with."""
    found = 0
    for place, same in enumerate(zip(*bodies, strict=False)):
        if any(line != same[0] for line in same):
            break
        if all(len(body) == place + 1 or not body[place + 1].depth for body in bodies):
            found = place + 1
    return found


def _telling(tests: Iterable[str]) -> list[str]:
    """Tests without those that another one answers: what is equal to one text differs from all others."""
    asked = {test: ast.parse(test, mode="eval").body for test in tests}
    known = {compared[0]: compared[1] for node in asked.values() if (compared := _compared(node, ast.Eq))}
    found = []
    for test, node in asked.items():
        other = _compared(node, ast.NotEq)
        if other is None or known.get(other[0], other[1]) == other[1]:
            found.append(test)
    return found


def _compared(node: ast.expr, operator: type[ast.cmpop]) -> tuple[str, str] | None:
    """An expression, and the text that it is compared with; None for other tests."""
    if not isinstance(node, ast.Compare) or len(node.ops) != 1 or not isinstance(node.ops[0], operator):
        return None
    (other,) = node.comparators
    if not isinstance(other, ast.Constant) or not isinstance(other.value, str):
        return None
    return ast.unparse(node.left), other.value


def _opposite(one: str, other: str) -> bool:
    """Whether one of two tests holds wherever the other does not."""
    first, second = sorted((one, other), key=len)
    if "!=" in one + other:
        return one.replace(" != ", " == ") == other.replace(" != ", " == ") and one != other
    return " and " not in second and second in (f"not {first}", first.replace(" is None", " is not None"))


def _test(text: str, value: object) -> str:
    """Python that asks whether an expression has a value."""
    if value is False and text.endswith(THERE):
        return f"{text.removesuffix(THERE)} is None"
    if isinstance(value, bool):
        node = ast.parse(text, mode="eval").body
        if not value and isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _OPPOSITES:
            text, value = ast.unparse(ast.Compare(node.left, [_OPPOSITES[type(node.ops[0])]()], node.comparators)), True
        text = double_quoted(text if isinstance(node, _SIMPLE) else f"({text})")
        return text if value else f"not {text}"
    if isinstance(value, NoneOf):
        return value.values.denied(text)
    if isinstance(value, (int, float, str)):
        return double_quoted(f"{text} == {value!r}")
    return double_quoted(f"str({text}) == {str(value)!r}")
