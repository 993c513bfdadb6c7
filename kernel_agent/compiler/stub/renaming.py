"""`Renaming`: another name in one place of a text, whose lines stay as they are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Renaming:
    """Another name in one place."""

    line: int
    column: int
    """In bytes."""
    old: str
    new: str


def renamed(lines: list[str], renamings: Iterable[Renaming]) -> None:
    """Put other names into the lines of a text."""
    for one in sorted(renamings, key=lambda one: (one.line, one.column), reverse=True):
        row = lines[one.line - 1].encode()
        old = len(one.old.encode())
        lines[one.line - 1] = (row[: one.column] + one.new.encode() + row[one.column + old :]).decode()
