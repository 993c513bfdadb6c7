"""Stubs that return in several places get one return, and return what they did."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from kernel_agent.compiler.stub.returns import returned_once

ENDING = [
    "if a > 2:\n        return a, b\n    elif a > 1:\n        # twice\n        return (\n"
    "            2 * a,\n        )\n    return -a",
    "if not a: return b\n    c = a + b\n\n    # the rest\n    if c > 3:\n        return c\n    d = c * c\n"
    "    if d > 4:\n        return d\n    else:\n        return b",
    "result = a\n    if a == 1:\n        if b == 1:\n            return 'both'\n        return 'one'\n    result += 1\n"
    "    return result",
    "if a > 2:\n        raise ValueError('large')\n    if a == 2:\n        return 'two'\n    return 'few'",
]
STAYING = [
    "return a",
    "for n in range(a):\n        if n == b:\n            return n\n    return -1",
    "if a:\n        if b:\n            return 1\n        a = 2\n    return a",
    "if a:\n        return 1\n    text = '''\nlong'''\n    return text",
    "if a:\n        return\n    return b",
]


def called(source: str) -> list[Any]:
    scope: dict[str, Any] = {}
    exec(source, scope)
    found: list[Any] = []
    for a in range(4):
        for b in range(3):
            try:
                found.append(scope["stub"](a, b))
            except ValueError as error:
                found.append(str(error))
    return found


@pytest.mark.parametrize("body", ENDING)
def test_what_stands_behind_a_return_becomes_its_other_branch(body: str) -> None:
    # A statement left outside of its branch would run after the others, and give every call the last value.
    source = f"def stub(a, b):\n    {body}\n\n\nx = 1\n"
    changed = returned_once(source, "stub")
    function = ast.parse(changed).body[0]
    assert sum(isinstance(node, ast.Return) for node in ast.walk(function)) == 1
    assert called(changed) == called(source)
    assert changed.count("#") == source.count("#")


@pytest.mark.parametrize("body", STAYING)
def test_returns_that_are_no_branches_of_the_end_stay(body: str) -> None:
    source = f"def stub(a, b):\n    {body}\n"
    assert returned_once(source, "stub") == source
