"""`sizes_of`: which numbers a named extent may stand for, so that one adjoint is right for all of them.

A function may look at the shapes of its tiles when it is compiled: `if x.shape[0] > 64`. So it is lowered at sizes from
1 to `LARGEST`: where it makes the same operations, with numbers that follow the same expressions, so does its adjoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.front.expressions import value_of
from kernel_agent.compiler.front.skeleton import RESULTS, Skeleton, skeleton
from kernel_agent.compiler.front.witness import Lifted, lift
from kernel_agent.compiler.tile.wrapper import Wrapped, default_sizes
from kernel_agent.ir.errors import IRError
from kernel_agent.pairs.blame import essence

LARGEST = 4096
"""Extents beyond this are not looked at."""


@dataclass(frozen=True)
class Sizes:
    """Powers of two between two bounds, both included."""

    low: int
    high: int

    def condition(self, name: str) -> str:
        """That an extent is among them, in Triton's language."""
        low = f"{name} >= {self.low} and " if self.low > 1 else ""
        return f"{low}{name} <= {self.high}"

    def __str__(self) -> str:
        return f"{self.low} to {self.high}"


def sizes_of(around: Wrapped) -> dict[str, Sizes]:
    """By named extent of a tile function. Raises CannotDerive where the function is another one at other sizes."""
    values = default_sizes(around.signature)
    if not values:
        return {}
    try:
        found = lift(around.lower, values)
    except IRError as error:
        raise CannotDerive(essence(error.message), remedy=error.remedy) from error
    for name in sorted(found.fixed):
        raise CannotDerive(
            f"what the function does changes with the extent {name}",
            remedy=f"Write a number for {name} in shapes, and derive it once for each.",
        )
    base = skeleton(found.module)
    return {name: _range(around, found, base, name) for name in values}


def _range(around: Wrapped, found: Lifted, base: Skeleton, name: str) -> Sizes:
    low = high = int(found.values[name])
    while low > 1 and _same(around, found, base, {**found.values, name: low // 2}):
        low //= 2
    while high < LARGEST and _same(around, found, base, {**found.values, name: high * 2}):
        high *= 2
    return Sizes(low, high)


def _same(around: Wrapped, found: Lifted, base: Skeleton, values: Mapping[str, int | float]) -> bool:
    """Whether a function makes the same operations at other sizes, with the numbers that its symbols say."""
    try:
        other = skeleton(around.lower(values))
    except IRError:
        return False
    if other.form != base.form or other.numbers.keys() != base.numbers.keys():
        return False
    for (at, place), number in base.numbers.items():
        text = found.symbols.get((id(base.ops[at]), place))
        wanted = number if text is None else value_of(text, values)
        rounding = 1e-7 * abs(wanted) if isinstance(number, float) else 0  # constants are printed in 32 bits
        if place > RESULTS and abs(wanted - other.numbers[at, place]) > rounding:
            return False
    return True
