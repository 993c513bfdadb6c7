"""One expression of a file replaced by another: what every mutant of a source is."""

from __future__ import annotations

import ast
from dataclasses import dataclass


@dataclass(frozen=True)
class Edit:
    """A place in a syntax tree, and the text that is to stand there."""

    node: ast.expr
    new: str

    def replaces(self, source: str) -> str:
        """What stands there now. `ast.get_source_segment` takes a file apart character by character for each."""
        node = self.node
        assert node.end_lineno is not None
        lines = [line.encode() for line in source.splitlines(keepends=True)[node.lineno - 1 : node.end_lineno]]
        lines[-1] = lines[-1][: node.end_col_offset]
        lines[0] = lines[0][node.col_offset :]
        return b"".join(lines).decode()

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
