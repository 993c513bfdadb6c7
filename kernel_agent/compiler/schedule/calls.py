"""`Calls`: what launches of a kernel were given, so that no plan relies on what is known to be otherwise.

A fact that fails in a call of the stub's own SWEEP or BENCH would make a backward that refuses work that its forward
does. Such a fact is as good as refuted: what relies on it is done in another way. What a call does not refute is not
proved by that, and what relies on it has the backward check it before it launches anything.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Entry:
    """What a call was made for."""

    sizes: Mapping[str, int]
    """By name."""
    asked: Mapping[str, int]
    """The same before they were made small enough to be looked at."""


@dataclass(frozen=True, eq=False)
class Calls:
    """Launches of one kernel that were seen."""

    names: tuple[Mapping[str, Any], ...] = ()
    """Of each what expressions of a plan may name: arguments, `grid0`, `triton`."""
    typical: bool = True
    """Whether rows that no two programs of these calls share may be taken to be so in others, which raise if not."""
    entries: tuple[Entry, ...] = ()
    """What each was made for, where sizes of real work are among them; else empty."""
    swept: tuple[Entry, ...] = ()
    """What each was made for, of whatever size."""
    single: frozenset[int] = frozenset()
    """Axes of the grid that have one program, whatever the forward's launches had."""

    def refute(self, facts: Iterable[str]) -> bool:
        """Whether one of some facts, Python as in `plan`, fails in a launch that was seen."""
        parts = [part for fact in facts for part in _parts(fact)]
        return any(not _holds(part, names) for part in parts for names in self.names)

    def show(self, facts: Iterable[str]) -> bool:
        """Whether launches were seen, and none of some facts fails in one."""
        return bool(self.names) and not self.refute(facts)

    def most(self, expression: str) -> int | None:
        """The largest that a whole number was in the launches; None where it is known of none."""
        found = [number for names in self.names if (number := _number(expression, names)) is not None]
        return max(found, default=None)

    def at_work(self, expression: str) -> int | None:
        """The largest that a size is at sizes of real work; None where there are none, or none of theirs is that in all
        launches."""
        return self._asked(expression, self.entries)

    def asked(self, expression: str) -> int | None:
        """The largest that a size is at sizes of real work or, where none are known, in SWEEP; None as in `at_work`."""
        return self._asked(expression, self.entries or self.swept)

    def _asked(self, expression: str, entries: Sequence[Entry]) -> int | None:
        pairs = [(_number(expression, names), entry) for names, entry in zip(self.names, entries, strict=False)]
        named = [{name for name, size in entry.sizes.items() if size == number} for number, entry in pairs]
        same = frozenset.intersection(*map(frozenset, named)) if named else frozenset()
        return max((entry.asked[name] for name in same for _, entry in pairs), default=None)

    def foreseen(self, expression: str) -> int | None:
        """The largest that a whole number was in the launches, or is with sizes of real work for those it is made of;
        None where it is known of none."""
        named = {node.id for node in ast.walk(ast.parse(expression, mode="eval")) if isinstance(node, ast.Name)}
        large = {name: size for name in named if (size := self.at_work(name)) is not None}
        found = [_number(expression, {**names, **large}) for names in self.names]
        return max((number for number in (self.most(expression), *found) if number is not None), default=None)

    def total(self, expression: str) -> int | None:
        """The sum of a whole number over the launches; None where it is not known of all, or none was seen."""
        found = [_number(expression, names) for names in self.names]
        known = [number for number in found if number is not None]
        return sum(known) if known and len(known) == len(found) else None


@functools.lru_cache(maxsize=4096)
def _parts(fact: str) -> tuple[str, ...]:
    """What must hold for it, each asked by itself: one that cannot be asked says nothing of the others."""
    tree = ast.parse(fact, mode="eval").body
    if isinstance(tree, ast.BoolOp) and isinstance(tree.op, ast.And):
        return tuple(part for value in tree.values for part in _parts(ast.unparse(value)))
    return (fact,)


def _number(expression: str, names: Mapping[str, Any]) -> int | None:
    """What it is in a launch; None where it cannot be asked, or is a tensor, which is no number of a launch."""
    try:
        found = eval(expression, dict(names))
        return None if isinstance(found, Tensor) else int(found)
    except (NameError, TypeError, AttributeError, ZeroDivisionError):
        return None


def _holds(fact: str, names: Mapping[str, Any]) -> bool:
    """Whether it does, or cannot be asked here: of numbers that the plan will choose, or of a size of nothing."""
    try:
        return bool(eval(fact, dict(names)))
    except (NameError, TypeError, AttributeError, ZeroDivisionError):
        return True
