"""What is known of one backward at one entry of SWEEP before any GPU has seen it: counts and compiled kernels."""

from __future__ import annotations

from pydantic import Field

from kernel_agent.bench.compiled import CompiledKernel
from kernel_agent.ir.cost.work import Work
from kernel_agent.record import Record


class BlockFacts(Record):
    """A straight piece of a kernel: the body of a loop, a branch, or what stands outside of them."""

    runs: float = Field(description="how often a program runs it, on average")
    most: float = Field(description="how often the program runs it that does so most")
    loads: int = Field(description="operations that read memory; they are taken to overlap within one run")
    reductions: int = Field(description="reductions and scans over a tile; they follow one another")
    in_loop: bool
    order: int = Field(default=0, description="place among the loops of the kernel, from 1; 0 outside of them")
    work: dict[Work, int] = Field(description="operations of one run")


class LaunchFacts(Record):
    """One launch: what it does, counted from its IR at the real sizes."""

    kernel: str
    grid: tuple[int, int, int]
    programs: int
    unique_bytes: float = Field(description="different bytes read, written and updated: cross device memory once")
    reread_bytes: float = Field(description="sector bytes beyond those, of buffers larger than L2 may keep")
    largest_bytes: float = Field(description="unique bytes of the buffer that is read again most")
    sector_bytes: float = Field(description="32-byte sectors of plain loads and stores, once per program and access")
    atomic_bytes: float = Field(default=0.0, description="different bytes updated atomically")
    atomic_sector_bytes: float = 0.0
    atomic_updates: float = Field(default=0.0, description="elements updated, each as often as it is")
    atomic_turns: float = Field(
        default=0.0, description="updates per different element, in the buffer where that is most; they take turns"
    )
    work: dict[Work, float] = Field(description="operations of all programs")
    blocks: tuple[BlockFacts, ...]
    bound_s: float = Field(description="least time by the cost counter")
    bound_by: str = ""
    build: str = Field(description="key into `EntryFacts.compiled`")


class TorchFacts(Record):
    """One call of a torch function between launches."""

    name: str
    read_bytes: int
    written_bytes: int


class EntryFacts(Record):
    """One backward at one entry of SWEEP."""

    label: str
    launches: tuple[LaunchFacts, ...]
    torch: tuple[TorchFacts, ...]
    compiled: dict[str, CompiledKernel]
    notes: tuple[str, ...] = ()
