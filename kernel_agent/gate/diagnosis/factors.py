"""Names for factors: a wrong constant is repaired faster when it is known to be `sm_scale` and not 0.125."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from kernel_agent.oracle import ForwardTruth
from kernel_agent.pairs.arguments import argument_places
from kernel_agent.pairs.spec import KernelSpec

_CONSTANTS = {"ln 2": math.log(2.0), "log2(e)": 1.0 / math.log(2.0)}
_BLOCKS = tuple(2**k for k in range(3, 14))
"""Sizes that a block may have; a mean over the block is off by N / BLOCK."""


@dataclass(frozen=True)
class Quantity:
    """A number that occurs in a problem."""

    name: str
    value: float


class Factors:
    """The numbers of one case: scalar arguments, dims, and mathematical constants."""

    def __init__(self, spec: KernelSpec, forward: ForwardTruth) -> None:
        self.sizes = tuple(
            Quantity(name, float(value))
            for name, value in forward.point.entry.dims.items()
            if type(value) is int and value > 1
        )
        named = argument_places([fact.name for fact in spec.inputs], forward.args, forward.kwargs)
        scalars = {n: forward.args[p] if isinstance(p, int) else forward.kwargs[p] for n, p in named.items()}
        scalars |= {name: value for name, value in forward.point.entry.dims.items() if type(value) is float}
        self.scalars = tuple(
            Quantity(name, float(value))
            for name, value in scalars.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool) and value not in (0, 1, -1)
        )

    def name(self, factor: float) -> str:
        """`1/N`, `sm_scale`, `N/64`; empty for a number that nothing in the problem explains."""
        if _is(abs(factor), 1.0):
            return ""
        found = [name for name, value in self._known() if _is(value, factor)]
        if found:
            return " or ".join(dict.fromkeys(found[:2]))
        negative = [name for name, value in self._known() if _is(-value, factor)]
        return f"-{negative[0]}" if negative else ""

    def padding(self, lanes: int) -> str:
        """`12 lanes (M = 20 in blocks of 32)`: how a dim comes to so many lanes beyond its end; empty if none does."""
        for size in self.sizes:
            # a block is the power of two that covers the dim, or one of usual size
            for block in sorted({1 << (int(size.value) - 1).bit_length(), *(2**k for k in range(4, 13))}):
                if -size.value % block == lanes:
                    return f"{lanes} lanes ({size.name} = {size.value:g} in blocks of {block})"
        return ""

    def written(self, factor: float) -> str:
        """A factor for a sentence: a small fraction or a number, with its name where it has one."""
        fraction = Fraction(factor).limit_denominator(64)
        plain = str(fraction) if _is(float(fraction), factor) else f"{factor:.9g}"
        name = self.name(factor)
        return f"{plain} = {name}" if name and name != plain else plain

    def _known(self) -> Iterator[tuple[str, float]]:
        for scalar in (*self.scalars, *(Quantity(n, v) for n, v in _CONSTANTS.items())):
            yield scalar.name, scalar.value
            yield f"1/{scalar.name}", 1.0 / scalar.value
            yield f"{scalar.name}^2", scalar.value**2
            yield f"1/{scalar.name}^2", scalar.value**-2
        for size in self.sizes:
            yield size.name, size.value
            yield f"1/{size.name}", 1.0 / size.value
            yield f"sqrt({size.name})", math.sqrt(size.value)
            yield f"1/sqrt({size.name})", 1.0 / math.sqrt(size.value)
            yield f"1/{size.name}^2", size.value**-2
            yield f"({size.name}-1)/{size.name}", (size.value - 1) / size.value
            yield f"{size.name}/({size.name}-1)", size.value / (size.value - 1)
        for scalar in self.scalars:
            for name, value in _CONSTANTS.items():
                yield f"{scalar.name} * {name}", scalar.value * value
        for size in self.sizes:
            for block in _BLOCKS:
                yield f"{size.name}/{block}", size.value / block
                yield f"{block}/{size.name}", block / size.value
            for other in self.sizes:
                if other.value != size.value:
                    yield f"{size.name}/{other.name}", size.value / other.value


def _is(value: float, factor: float) -> bool:
    return math.isclose(value, factor, rel_tol=2e-6)
