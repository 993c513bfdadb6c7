"""Lines no longer than 120 characters, broken where ruff breaks them."""

from __future__ import annotations

from collections.abc import Sequence

WIDTH = 120
_STEP = "    "


def bracketed(head: str, items: Sequence[str], tail: str, depth: int) -> list[str]:
    """`head(items)tail` at a depth of indentation: on one line, else its items on one, else one item a line."""
    indent = _STEP * depth
    whole = f"{indent}{head}({', '.join(items)}){tail}"
    if len(whole) <= WIDTH:
        return [whole]
    inner = indent + _STEP
    together = inner + ", ".join(items)
    if len(together) <= WIDTH:
        return [f"{indent}{head}(", together, f"{indent}){tail}"]
    return [f"{indent}{head}(", *(f"{inner}{item}," for item in items), f"{indent}){tail}"]


def too_long(lines: Sequence[str], limit: int = WIDTH) -> bool:
    """Whether a line is beyond the limit."""
    return any(len(line) > limit for line in lines)
