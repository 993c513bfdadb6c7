"""`Pace`: how fast a kernel goes through its rows: its warps, loads ahead of their use, programs per processor.

Every number is right; these were good on an H200, where memory is the limit of rows. While one row is worked on the
next ones are on their way to shared memory, so that some 64 KiB are under way for each processor. A row that fills the
registers of a processor is loaded as it is needed, and again behind its sums (see `reload`): what is ahead of its use
would have no room.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from kernel_agent.compiler.schedule.forms import Forms
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Kernel

WARPS, PER_PROCESSOR, BYTES = "num_warps", "per_sm", "row_bytes"
FEWEST, MOST = 4, 32
"""Warps of a program."""
LANES = 1024
"""Elements of a tile that a warp takes, where nothing is loaded ahead."""
BY_BYTES = ((32, 4), (64, 8), (128, 16))
"""KiB of a row, and warps of a program where it has less; Triton takes powers of two alone."""
WIDEST = 8
"""Warps of a program where it has more than that: each has more registers."""
FETCHED = 64
"""KiB of a row from which on rows that stay in registers beside two sums are better loaded each time."""
LONGEST = 8192
"""Elements of a tile that fits the registers of a processor with all that is computed of it."""
STAGES = 3
"""Rows in flight, the one that is worked on included."""
SHARED = "192 * 1024"
"""Bytes of shared memory for them."""
AHEAD = "32 * 1024"
"""Bytes of rows that are to arrive next, for the programs of a processor together."""
PROGRAMS = 16
"""Programs per processor: as many as have four warps."""


@dataclass(frozen=True)
class Pace:
    """Of one kernel."""

    settings: Mapping[str, str]
    """As in a plan."""
    stages: str = ""
    """The constexpr that says how many rows are in flight; empty where the loop over rows holds loops."""
    is_long: str = ""
    """Whether a row fills the registers of a processor; empty as `stages` is."""
    extent: str = ""
    """Lanes of a row."""

    def crowded(self, shared: Sequence[str], fetch: str) -> dict[str, str]:
        """What differs where sums and rows of `shared` tensors stay in registers from row to row: long rows have few
        warps with many registers each. `fetch`: the constexpr for each row to load the shared ones."""
        ahead = self._ahead(shared)
        return {
            WARPS: f"{FEWEST} if {BYTES} < {BY_BYTES[0][0]} * 1024 else {WIDEST}",
            self.stages: _in_flight(ahead, self.extent),
            fetch: f"{BYTES} >= {FETCHED} * 1024",
        }

    def streamed(self, shared: Sequence[str], fetch: str, reload: str) -> dict[str, str]:
        """All settings, and `reload`, where the registers hold a row of each of few tensors: long rows of 16 bits fly
        ahead as short ones do, with those of `shared` tensors among them, past as many warps as there can be."""
        ahead = self._ahead(shared)
        return {
            BYTES: self.settings[BYTES],
            fetch: f"{self.is_long} and {STAGES - 1} * {ahead} <= {SHARED}",
            WARPS: f"{MOST} if {fetch} else {self.settings[WARPS]}",
            PER_PROCESSOR: self.settings[PER_PROCESSOR],
            self.stages: _in_flight(BYTES, self.extent, fetch),
            reload: f"{self.is_long} and not {fetch}",
        }

    def _ahead(self, shared: Sequence[str]) -> str:
        """Bytes of a row with those of `shared` tensors."""
        width = " + ".join(f"{tensor}.element_size()" for tensor in shared)
        return f"({BYTES} + {self.extent} * {width if len(shared) == 1 else f'({width})'})"


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
    if any(op.code in (Code.FOR, Code.WHILE) for op in kernel.ops):
        warps = f"max({FEWEST}, min({MOST}, {extent} // {LANES}))"
        return Pace({WARPS: warps, PER_PROCESSOR: f"max(1, {PROGRAMS} // {WARPS})"})
    stages, is_long = kernel.free_name("STAGES"), f"{extent} > {LONGEST}"
    sizes = [f"{op.base.name}.element_size()" for op in loads if op.result.shape == largest]
    width = sizes[0] if len(sizes) == 1 else f"({' + '.join(sizes)})"
    settings = {
        BYTES: f"{extent} * {width}",
        WARPS: "".join(f"{warps} if {BYTES} < {size} * 1024 else " for size, warps in BY_BYTES) + str(WIDEST),
        PER_PROCESSOR: f"max(1, min({PROGRAMS}, {AHEAD} // {BYTES}))",
        stages: _in_flight(BYTES, extent),
    }
    return Pace(settings, stages, is_long, extent)


def _in_flight(ahead: str, extent: str, fetch: str = "") -> str:
    """Expression of the rows in flight, where each that is to come takes so many bytes. `fetch`: what says that long
    rows fly, too."""
    fits = " or ".join(filter(None, (f"{extent} <= {LONGEST}", fetch)))
    return f"max(1, min({STAGES}, 1 + {SHARED} // {ahead})) if {fits} else 1"


def _extent(kernel: Kernel, shape: tuple[int, ...]) -> str:
    """Expression of the lanes of a tile."""
    return " * ".join(kernel.extents.get(extent, str(extent)) for extent in shape if extent != 1) or "1"
