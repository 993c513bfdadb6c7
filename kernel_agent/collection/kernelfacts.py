"""`KernelFacts`: what sm_90 makes of a pair's kernel. Reading recorded ones needs neither torch nor triton."""

from __future__ import annotations

from pydantic import Field

from kernel_agent.record import Record


class KernelFacts(Record):
    """One kernel of a pair: the most over its specialisations at the entries of BENCH."""

    part: str = Field(description="`forward` or `backward`")
    kernel: str
    registers: int = Field(description="per thread")
    spills: int = Field(description="bytes per thread that are stored and loaded back, each instruction once")
    shared_bytes: int = Field(description="per program")
    problem: str = Field(default="", description="why sm_90 cannot run it; nothing above counts then")
