"""`restepped`: a forward whose products step through rows in tiles as large as other tiles of the same rows.

A quadratic form multiplies rows by a matrix a tile at a time, and then by tiles of the same rows. The gradient of a row
has parts from both, and one owner where both tiles are as large. What products sum over may come in tiles of any size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.plan import BackwardPlan
from kernel_agent.compiler.schedule.calls import Calls
from kernel_agent.compiler.schedule.forms import Launch
from kernel_agent.compiler.schedule.tied import with_one_name
from kernel_agent.compiler.schedule.unstepped import summed_columns
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Kernel


@dataclass(frozen=True)
class Restepped:
    """A forward with one name less."""

    kernel: Kernel
    calls: Calls
    tile: str
    """Constexpr: what products stepped by."""
    name: str
    """Constexpr: what they step by now."""

    def plan(self, found: BackwardPlan) -> BackwardPlan:
        """A plan of that kernel as one of the forward's launch."""
        return replace(found, remarks=(*found.remarks, f"products step by {self.name} rather than {self.tile}"))


def restepped(kernel: Kernel, launch: Launch) -> Restepped | None:
    """The forward with other steps of its products, for the first tile that has another one beside it; None where there
    are none."""
    for tile, name in _candidates(kernel):
        if {tile, name} & kernel.fixed or summed_columns(kernel, launch, tile) is None:
            continue
        try:
            made = with_one_name(kernel, name, tile)
        except CannotDerive:
            continue
        if made is not None:
            return Restepped(made, launch.calls, tile, name)
    return None


def _candidates(kernel: Kernel) -> Iterator[tuple[str, str]]:
    """Names of the extent in which two loads of one tensor differ, in both orders."""
    shapes: dict[str, dict[tuple[int, ...], None]] = {}
    for op in kernel.ops:
        if op.code is Code.LOAD:
            shapes.setdefault(op.base.name, {})[op.result.shape] = None
    for found in shapes.values():
        for one in found:
            for other in found:
                apart = [(a, b) for a, b in zip(one, other, strict=False) if a != b]
                names = [kernel.extents.get(extent, "") for pair in apart for extent in pair]
                if len(one) == len(other) and len(apart) == 1 and all(name in kernel.constants for name in names):
                    yield names[0], names[1]
