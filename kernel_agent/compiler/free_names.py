"""`free_name`: names for what the compiler adds beside names that the user or another pass has chosen."""

from __future__ import annotations


def free_name(name: str, taken: set[str]) -> str:
    """The name, or one with a number behind it where it is taken; it is taken then."""
    found, count = name, 1
    while found in taken:
        count += 1
        found = f"{name}_{count}"
    taken.add(found)
    return found
