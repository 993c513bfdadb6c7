"""`Pace`: how fast a kernel goes through its rows: its warps, loads ahead of their use, programs per processor.

Every number is right; these are good for rows that memory is the limit of. A thread keeps a few elements of each tile,
a processor is full of warps, and while one row is worked on the next ones are on their way to shared memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from kernel_agent.compiler.schedule.forms import Forms
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Kernel

WARPS = "num_warps"
PER_PROCESSOR = "per_sm"
ELEMENTS = 512
"""Of a tile that a warp takes: 16 a thread."""
FEWEST, MOST = 4, 32
"""Warps of a program."""
PROCESSOR = 16
"""Warps that keep a processor busy."""
STAGES = 3
"""Rows in flight."""
SHARED = "192 * 1024"
"""Bytes of shared memory for them."""


@dataclass(frozen=True)
class Pace:
    """Of one kernel."""

    settings: Mapping[str, str]
    """As in a plan."""
    stages: str = ""
    """The constexpr that says how many rows are in flight; empty where the loop over rows holds loops."""


def pace(forms: Forms, axis: int) -> Pace | None:
    """Of a kernel whose programs along an axis become trips; None where it loads no rows, and where it multiplies
    matrices, which have other needs."""
    kernel = forms.kernel
    row = forms.program(axis)
    loads = [op for op in kernel.ops if op.code is Code.LOAD and row in forms.reads(op.offset)]
    largest = max((op.result.shape for op in loads), key=prod, default=())
    if not largest or any(op.code is Code.DOT for op in kernel.ops):
        return None
    extent = _extent(kernel, largest)
    settings = {
        WARPS: f"max({FEWEST}, min({MOST}, {extent} // {ELEMENTS}))",
        PER_PROCESSOR: f"max(1, {PROCESSOR} // {WARPS})",
    }
    if any(op.code in (Code.FOR, Code.WHILE) for op in kernel.ops):
        return Pace(settings)
    stages = kernel.free_name("STAGES")
    sizes = [f"{op.base.name}.element_size()" for op in loads if op.result.shape == largest]
    size = sizes[0] if len(sizes) == 1 else f"({' + '.join(sizes)})"
    settings[stages] = f"max(1, min({STAGES}, 1 + {SHARED} // ({extent} * {size})))"
    return Pace(settings, stages)


def _extent(kernel: Kernel, shape: tuple[int, ...]) -> str:
    """Expression of the lanes of a tile."""
    return " * ".join(kernel.extents.get(extent, str(extent)) for extent in shape if extent != 1) or "1"
