"""`Program`: the steps of one call as data, without branches, loops and code."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MOST_STEPS = 20_000
"""A call with more steps is refused rather than written down."""


class _Step(BaseModel):
    """Base of steps: frozen, strict about its fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")


class Torch(_Step):
    """A torch function."""

    kind: Literal["torch"] = "torch"
    space: str = Field(max_length=20, description="where its name is looked up: see `forms.SPACES`")
    name: str = Field(max_length=200)
    args: Any
    kwargs: Any
    results: tuple[int | None, ...] = Field(description="number of each leaf of the result that is a tensor")


class Constant(_Step):
    """A tensor that no step made and no argument is: its elements stand here."""

    kind: Literal["constant"] = "constant"
    dtype: str = Field(max_length=20)
    shape: tuple[int, ...] = Field(max_length=32)
    values: tuple[float | int | bool, ...]
    result: int


class Workspace(_Step):
    """A tensor in memory that was there before the call: what an earlier one left in it is not told."""

    kind: Literal["workspace"] = "workspace"
    dtype: str = Field(max_length=20)
    elements: int = Field(ge=0, description="of the memory")
    holds: float | int | bool | None = Field(description="what all of it holds; None: nobody wrote it")
    shape: tuple[int, ...] = Field(max_length=32)
    strides: tuple[int, ...] = Field(max_length=32)
    offset: int
    first: int = Field(description="the first tensor in this memory: itself, or one that another such step made")
    result: int


class Launch(_Step):
    """A kernel launch."""

    kind: Literal["launch"] = "launch"
    kernel: str = Field(max_length=500)
    line: int = Field(description="of its `def`")
    grid: tuple[int, int, int]
    values: Any = Field(description="arguments by parameter")
    options: Any = Field(description="what else of the launch the compiler reads, such as num_warps")


Step = Annotated[Torch | Constant | Workspace | Launch, Field(discriminator="kind")]


class Program(BaseModel):
    """The steps of one call.

    Tensors are numbered: those of the arguments first, in the order of their leaves, then what steps make.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    steps: tuple[Step, ...] = Field(default=(), max_length=MOST_STEPS)
    result: Any = None
    refused: str = Field(default="", max_length=2000, description="why the call could not be written down to its end")

    def constants(self, *, sizes: bool = True) -> frozenset[float | int]:
        """Every number that stands in it, each once: all that the call can have carried from data without a step.

        Without `sizes`, none that only says how large a workspace is and where it lies in its memory.
        """
        found: set[float | int] = set()
        for step in self.steps:
            if isinstance(step, Constant):
                found.update(step.values)
            elif isinstance(step, Torch):
                _collect((step.args, step.kwargs), found)
            elif isinstance(step, Workspace):
                _collect(step.holds, found)
                _collect((step.elements, step.shape, step.strides, step.offset) if sizes else None, found)
            else:
                _collect((step.values, list(step.grid)), found)
        return frozenset(found)


def _collect(form: Any, found: set[float | int]) -> None:
    """Add the numbers of a form; numbers of tensors are none."""
    if isinstance(form, (int, float)):
        found.add(form)
    elif isinstance(form, (list, tuple)):
        for part in form:
            _collect(part, found)
    elif isinstance(form, dict):
        for key, part in form.items():
            if key not in ("tensor", "kernel"):
                _collect(part, found)
