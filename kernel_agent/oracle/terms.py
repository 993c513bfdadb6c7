"""What a wrong gradient is made of: its residual as terms of the exact adjoint, found in a truth child.

The parent sends residuals (candidate minus truth) of the wrong gradients; what comes back are places in the user's
forward and factors. The candidate is long gone, and no element of the truth leaves the child.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import Field
from torch import Tensor

from kernel_agent.oracle.cotangents import Cotangents
from kernel_agent.oracle.job import run_truth
from kernel_agent.oracle.records import ForwardTruth
from kernel_agent.record import Record
from kernel_agent.sandbox import Limits

if TYPE_CHECKING:
    from kernel_agent.oracle.truth import Truths

LIMITS = Limits(wall_s=30.0, memory_bytes=3 << 30)
SECONDS = 5.0
"""Of processor time, after which the child tries nothing further; what it has found by then counts."""
MAX_ELEMENTS = 1 << 18
"""Elements of all arguments and outputs above which nothing is tried: every hypothesis costs a backward pass."""


class Form(str, enum.Enum):
    """How a residual is related to the adjoint."""

    TERM = "a multiple of the term through one place"
    TERMS = "the same multiple of the terms through several places"
    OUTPUT = "a multiple of what comes from one output"
    STRIDES = "the cotangent read as if it were contiguous"
    BLOCK = "the cotangent's last elements along a dimension do not count"
    DROPPED = "a factor of a local derivative is missing"
    TWICE = "a factor of a local derivative stands twice"
    REPLACED = "another value stands in place of a factor of a local derivative"
    FACTOR = "the term through one place has another factor, element by element"


class Place(Record):
    """Where a term runs through."""

    line: int | None
    variable: str = Field(description="name of the value that carries it; empty where the code has none")


class Explanation(Record):
    """One way to make the whole residual of a gradient, to 1e-6 of its norm."""

    grad: str
    form: Form
    factor: float = Field(default=-1.0, description="residual = factor * term; -1 where the form says it all")
    left_over: float
    places: tuple[Place, ...] = ()
    elsewhere: bool = Field(default=False, description="whether other gradients have what is missing here")
    output: int | None = Field(default=None, description="position of the output that it is about")
    dim: int | None = Field(default=None, description="dimension of the output that a block is cut off")
    size: int | None = Field(default=None, description="length of that block")
    other: str = Field(default="", description="the factor that is missing, twice, or wrong, in words of the forward")
    instead: str = Field(default="", description="what stands in its place")


@dataclass(frozen=True)
class WrongCase:
    """One red case: where it is, its cotangents, and candidate minus truth of every gradient that is wrong there."""

    forward: ForwardTruth
    cotangents: Cotangents
    residuals: Mapping[str, Tensor]
    wrong: tuple[str, ...]
    """All gradients that are wrong there, those that need no explanation included."""


def explain(truths: Truths, cases: Sequence[WrongCase], blocks: Sequence[int]) -> tuple[Explanation, ...]:
    """What explains the residuals of the first case, and those of the others in the same way.

    `blocks` are block sizes that occur in the candidate. Empty where the problem is too large. Raises what every
    question to a truth child does.
    """
    if not cases or cases[0].forward.elements > MAX_ELEMENTS:
        return ()
    tensors: dict[str, Tensor] = {}
    asked: list[dict[str, Any]] = []
    for i, case in enumerate(cases):
        tensors |= {f"{i}.c{j}": c for j, c in enumerate(case.cotangents) if c is not None}
        tensors |= {f"{i}.r.{name}": residual for name, residual in case.residuals.items()}
        asked.append(
            {
                "point": case.forward.point.model_dump(mode="json"),
                "cotangents": [None if c is None else f"{i}.c{j}" for j, c in enumerate(case.cotangents)],
                "residuals": {name: f"{i}.r.{name}" for name in case.residuals},
                "wrong": list(case.wrong),
            }
        )
    payload = {
        "spec": truths.spec.model_dump(mode="json"),
        "cases": asked,
        "blocks": sorted(set(blocks)),
        "seconds": SECONDS,
    }
    messages = run_truth(truths.sandbox, "terms_child:explained", truths.spec.facts, payload, tensors, LIMITS)
    return tuple(Explanation.model_validate(m.record["explanation"]) for m in messages if "explanation" in m.record)
