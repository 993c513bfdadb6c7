"""`Special`: values of a constexpr with which a kernel is another one than for all others: it asks for them."""

from __future__ import annotations

from dataclasses import dataclass

Number = int | float


@dataclass(frozen=True)
class Special:
    """Of one constexpr of one kernel."""

    values: tuple[Number, ...] = ()
    """As of `if ORDER == 2`."""
    up_to: Number | None = None
    """This and all smaller ones, as of `if WINDOW > 0`."""
    down_to: Number | None = None
    """This and all greater ones."""

    def __bool__(self) -> bool:
        return bool(self.values) or self.up_to is not None or self.down_to is not None

    def __contains__(self, value: Number) -> bool:
        return (
            value in self.values
            or (self.up_to is not None and value <= self.up_to)
            or (self.down_to is not None and value >= self.down_to)
        )

    def denied(self, text: str) -> str:
        """Python that holds where a number is none of them. `text`: the number."""
        if self.up_to is not None and self.down_to is not None:
            parts = [f"{self.up_to!r} < {text} < {self.down_to!r}"]
        else:
            parts = [] if self.up_to is None else [f"{text} > {self.up_to!r}"]
            parts += [] if self.down_to is None else [f"{text} < {self.down_to!r}"]
        rest = tuple(value for value in self.values if value not in Special((), self.up_to, self.down_to))
        if rest:
            parts.append(f"{text} not in {rest}" if len(rest) > 1 else f"{text} != {rest[0]!r}")
        return " and ".join(parts)
