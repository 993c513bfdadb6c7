"""What the forward does with memory and how its gradients flow, as records that a prompt can show."""

from __future__ import annotations

import enum

from pydantic import Field

from kernel_agent.record import Record


class AccessMode(str, enum.Enum):
    """How a launch touches an argument."""

    LOAD = "load"
    STORE = "store"
    ATOMIC = "atomic"


class AccessFacts(Record):
    """One load, store or atomic of one kernel, as its addresses say."""

    argument: str = Field(description="name of the kernel's parameter, with the stub's name for it where that differs")
    mode: AccessMode
    line: int | None
    axes: str = Field(description="what it walks, such as 'row = program 0; columns 0..N, contiguous'")
    masked: bool


class ReductionFacts(Record):
    """One reduction inside a program."""

    line: int | None
    operation: str = Field(description="sum, max, dot, scan, ...")
    axis: str = Field(description="what is reduced, in the words of the accesses it reads")


class LaunchFacts(Record):
    """One launch of the forward."""

    kernel: str
    grid: str = Field(description="sizes and what they count, such as '(31,): one program per row of x'")
    accesses: tuple[AccessFacts, ...]
    reductions: tuple[ReductionFacts, ...] = ()
    loops: tuple[str, ...] = ()
    times: int = Field(default=1, description="how many launches in a row look like this one")


class DerivativeSource(str, enum.Enum):
    """Where a derivative graph comes from."""

    REFERENCE = "autograd of the reference"
    SURROGATE = "autograd of the surrogate, the gradient that is wanted"
    KERNELS = "adjoint of the kernels"


class Derivative(Record):
    """The derivative as a graph in lines of assignments."""

    source: DerivativeSource
    lines: tuple[str, ...]


class ForwardFacts(Record):
    """All of it for one spec, at one small entry."""

    entry: str = Field(default="", description="the entry it was seen at, such as `M=17 N=100`")
    launches: tuple[LaunchFacts, ...]
    crossing: tuple[str, ...] = Field(
        default=(),
        description="per input that wants a gradient: whether its gradient sums over programs, and over which",
    )
    derivative: Derivative | None = None
    notes: tuple[str, ...] = Field(default=(), description="what could not be told")
    seconds: float = 0.0
