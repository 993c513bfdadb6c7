"""`Plan`: what a model decides before it writes code, as a record that can be checked and priced."""

from __future__ import annotations

import enum

from pydantic import Field

from kernel_agent.record import Record


class Reduction(str, enum.Enum):
    """How contributions of several programs to one gradient meet."""

    PLAIN_STORE = "plain store"
    PARTIALS = "partials"
    ATOMICS = "atomics"
    LOOP_SWAP = "loop swap"
    SCAN = "scan"


class PairReading(Record):
    """What a retrieved pair has to do with the forward."""

    slug: str
    match: str
    mismatch: str


class Difference(Record):
    """Something in which the forward differs from the anchor."""

    difference: str
    implies: str = Field(description="what that means for the backward")


class GradientPlan(Record):
    """How one gradient is computed."""

    grad: str = Field(description="name of the input whose gradient it is")
    owner: str = Field(description="the axis or tile that one program owns")
    whole: tuple[str, ...] | None = Field(
        default=None, description="dims of which one program takes every index; None in plans that do not say"
    )
    reduction: Reduction
    techniques: tuple[str, ...] = Field(default=(), description="tags of the closed list")
    saved: tuple[str, ...] = Field(default=(), description="entries of `saved` that it reads, extra ones too")
    recomputed: tuple[str, ...] = Field(default=(), description="intermediate values that are computed again")


class ExtraSaved(Record):
    """A tensor that the plan allocates: saved by a forward of its own, or passed from launch to launch."""

    name: str
    dtype: str = Field(description="torch's name without `torch.`")
    shape: tuple[int | str, ...] = Field(
        description="sizes: numbers, or dims of SWEEP with + - * // between them, such as 'B*H'"
    )


class Plan(Record):
    """The answer to the first ask of phase 2."""

    pairs: tuple[PairReading, ...] = Field(description="one per retrieved pair, in their order")
    anchor: str | None = Field(description="slug of the pair to write after; None when none fits")
    differences: tuple[Difference, ...] = ()
    extra: tuple[ExtraSaved, ...] = Field(
        default=(), description="what is saved beyond the given layout; mostly nothing"
    )
    scratch: tuple[ExtraSaved, ...] = Field(
        default=(), description="what one launch of the backward writes and a later one reads, but for partial sums"
    )
    gradients: tuple[GradientPlan, ...] = Field(description="one per gradient, in order")


class GradientPrice(Record):
    """What the cost counter says of one gradient's plan, or of the plan as a whole."""

    grad: str = Field(description="name of the input whose gradient it is; empty for the plan as a whole")
    line: str = Field(
        description="a complete statement that names the gradient: bytes, partials or atomics, and the alternative"
    )
    entry: str = Field(default="", description="label of the SWEEP entry that was priced; the line does not name it")
    planned_bytes: int | None = Field(default=None, description="to and from device memory; None: cannot be priced")
    floor_bytes: int | None = Field(default=None, description="reading what it needs once and writing it once")
    workspace_bytes: int | None = Field(default=None, description="of partial sums")
    atomics: int | None = Field(default=None, description="elements added atomically")
    microseconds: float | None = Field(
        default=None, description="least time of `planned_bytes`; arithmetic is left out"
    )


class Wanted(Record):
    """A gradient to search pairs for, by how it is to be computed."""

    grad: str = Field(description="name of the input whose gradient it is")
    techniques: tuple[str, ...] = Field(
        default=(), description="tags of the closed list, from the plan; empty when nothing was planned"
    )
    red: bool = Field(default=False, description="it came out wrong, so that another pair is wanted than was shown")
