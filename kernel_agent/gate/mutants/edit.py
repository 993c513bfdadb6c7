"""One expression of a file replaced by another: what every mutant of a source is."""

from __future__ import annotations

import ast
from dataclasses import dataclass


@dataclass(frozen=True)
class Edit:
    """A place in a syntax tree, and the text that is to stand there."""

    node: ast.expr
    new: str

    def applied(self, source: str) -> str:
        """The source with the expression replaced, and the number of its lines kept."""
        node, new = self.node, self.new
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        lines = source.splitlines(keepends=True)
        first, last = lines[node.lineno - 1].encode(), lines[node.end_lineno - 1].encode()
        kept = "\n" * (node.end_lineno - node.lineno)
        if kept:  # brackets let the lines that the expression took stand empty
            new = f"({new}{kept})"
        middle = first[: node.col_offset].decode() + new + last[node.end_col_offset :].decode()
        return "".join([*lines[: node.lineno - 1], middle, *lines[node.end_lineno :]])
