"""`comments_above`: the user's comments, by the lines of the statements they stand above."""

from __future__ import annotations

import ast
import re

_FOR_TOOLS = re.compile(r"#\s*(fmt|noqa|type|pylint|ruff|mypy|pragma|isort)\b", re.IGNORECASE)


def comments_above(source: str) -> dict[int, str]:
    """Line -> comment lines above the statement of that line, without indentation, from the text of a file.

    Every line of a simple statement has its comment, of one with a body the lines of its head. Comments for tools are
    left out. Raises SyntaxError for what is not Python.
    """
    lines = source.split("\n")
    found: dict[int, str] = {}
    for node in ast.walk(ast.parse(source)):
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
            found.update({place: "\n".join(above) for place in range(node.lineno, end + 1)})
    return found
