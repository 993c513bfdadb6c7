"""`comments_above`: the user's comments, by the lines of the statements they stand above."""

from __future__ import annotations

import ast
import itertools
import re

_FOR_TOOLS = re.compile(r"#\s*(fmt|noqa|type|pylint|ruff|mypy|pragma|isort)\b", re.IGNORECASE)


def comments_above(source: str) -> dict[int, str]:
    """Line -> comment lines above the statement of that line, without indentation, from the text of a file.

    Every line of a simple statement has its comment, of one with a body the lines of its head. `end = n` computes
    nothing: what is said above it is said of the statement below as well. Comments for tools are left out. Raises
    SyntaxError for what is not Python.
    """
    lines = source.split("\n")
    found: dict[int, str] = {}
    tree = ast.parse(source)
    below = _statements_below(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.stmt) or isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            continue
        above: list[str] = []
        line = node.lineno - 1
        while line > 0 and lines[line - 1].lstrip().startswith("#"):
            line -= 1
            above.insert(0, lines[line].strip())
        above = [text for text in above if not _FOR_TOOLS.match(text)]
        if above:
            body = getattr(node, "body", None)
            end = body[0].lineno - 1 if body else node.end_lineno or node.lineno
            places = [*range(node.lineno, end + 1)]
            plain = isinstance(node, ast.Assign) and isinstance(node.value, (ast.Name, ast.Constant))
            if plain and node in below:
                places += range(below[node].lineno, (below[node].end_lineno or 0) + 1)
            found = {place: "\n".join(above) for place in places} | found
    return found


def _statements_below(tree: ast.AST) -> dict[ast.stmt, ast.stmt]:
    """Statement -> the next one of its block, where no line is between them."""
    bodies = [getattr(node, field, None) for node in ast.walk(tree) for field in ("body", "orelse")]
    return {
        one: other
        for body in bodies
        if isinstance(body, list)
        for one, other in itertools.pairwise(body)
        if other.lineno == (one.end_lineno or 0) + 1
    }
