"""`Tunable`: one number, or condition, of a backward's text that may be another, and where it stands."""

from __future__ import annotations

import ast
import enum
from dataclasses import dataclass

FACTOR = "*"
"""A factor is inserted in front of something."""


class TunableKind(str, enum.Enum):
    """What a number stands for."""

    WARPS = "num_warps"
    STAGES = "num_stages"
    BLOCK = "constexpr"
    CONFIG = "configuration"
    PROGRAMS = "programs per multiprocessor"
    PIPELINE = "stages of a loop"
    SWITCH = "condition"


LADDERS = {
    TunableKind.WARPS: (1, 2, 4, 8, 16),
    TunableKind.STAGES: (1, 2, 3, 4, 5),
    TunableKind.BLOCK: tuple(1 << power for power in range(14)),
    TunableKind.PROGRAMS: (1, 2, 4, 8),
    TunableKind.PIPELINE: (1, 2, 3, 4),
    TunableKind.SWITCH: (0, 1),
}
"""Values by kind, in order of size."""


@dataclass(frozen=True, order=True)
class Site:
    """A piece of the text, in bytes of its lines; empty where something is to be inserted."""

    line: int
    start: int
    end_line: int
    end: int

    @classmethod
    def of(cls, node: ast.expr | ast.keyword) -> Site:
        """The text of a node."""
        return cls(node.lineno, node.col_offset, node.end_lineno or node.lineno, node.end_col_offset or 0)

    @classmethod
    def behind(cls, node: ast.expr | ast.keyword) -> Site:
        """The place behind a node."""
        site = cls.of(node)
        return cls(site.end_line, site.end, site.end_line, site.end)


@dataclass(frozen=True)
class Tunable:
    """One number that may be another."""

    name: str
    """`num_warps of _ln_bwd`, `BLOCK_M`."""
    kind: TunableKind
    value: int
    """What it is now; -1 for all configurations, and for a condition that is asked."""
    values: tuple[int, ...]
    """What it may be, in order of size."""
    sites: tuple[Site, ...]
    """Where it stands."""
    insert: str = ""
    """Keyword to insert where it does not stand anywhere yet, or FACTOR."""
    texts: tuple[str, ...] = ()
    """For configurations, the text of each; for a loop, its iterable with so many stages."""
    kernels: tuple[str, ...] = ()
    """Whose launches take it; empty where that is not known."""

    def text(self, value: int) -> str:
        """What is written for a value."""
        if self.kind is TunableKind.PIPELINE:
            return self.texts[self.values.index(value)]
        if self.kind is TunableKind.SWITCH:
            return str(bool(value))
        if self.texts:
            return f"[{self.texts[value]}]"
        return self.placed(str(value))

    def placed(self, what: str) -> str:
        """What is written for a number or the name of one."""
        if self.insert == FACTOR:
            return f"{what} * "
        return f", {self.insert}={what}" if self.insert else what

    def beside(self, value: int, step: int) -> int | None:
        """The next value in a direction; None at the end."""
        if value not in self.values:
            return self.values[0] if step > 0 else None
        place = self.values.index(value) + step
        return self.values[place] if 0 <= place < len(self.values) else None

    def said(self, value: int) -> str:
        """`BLOCK_M 64 -> 128`."""
        if self.kind is TunableKind.CONFIG:
            return f"{self.name}: only {self.texts[value]}"
        if self.kind is TunableKind.SWITCH:
            return f"{self.name}: {self.text(value)}"
        return f"{self.name} {self.value} -> {value}"
