"""`BackwardPlan`: what a backward of one forward launch does: buffers, launches, and sums of partial results.

Expressions are Python source. They may name what the forward's launch had: its scalar arguments and constexprs by their
parameter names, its tensors by theirs, and `grid0`, `grid1`, `grid2`, the extents of its grid. A fact may also call
`axes_nested((stride, size), ...)`, `bounds_rise(tensor)`, `segment_rows(tensor, segments)` and `longest_segment(tensor,
segments)`, which the stub has to define.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Kernel

NESTED = "axes_nested"
"""Whether elements (stride, size) along several axes never meet: every stride is larger than the reach of all that are
smaller."""


RISING = "bounds_rise"
"""Whether no element of a tensor of bounds is less than the one before."""

ROWS = "segment_rows"
"""Elements between the first bound and the last, of the first so many segments."""

LONGEST = "longest_segment"
"""The most elements that one of the first so many segments has."""

LEFT = "rows_left"
"""Rows that nothing is stored to, as a mask, by how often each row is; raises where one is stored to twice."""


IN_ORDER = "rows_in_order"
"""Numbers of additions in the order of the rows that they go to, and where each row begins among them."""


PICKED = "tiles_in_order"
"""The same of tiles that programs pick; raises where a number is none of a tile."""

LISTED = "places_in_order"
"""The same of places of a list that memory has, and which program has some of these."""
EVERY = 8
"""How many places of a list lie between two whose programs are known."""


class Fill(enum.Enum):
    """What a buffer holds before the first launch."""

    EMPTY = "empty"
    """Anything: every element is stored to."""
    ZEROS = "zeros"
    HELD = "held"
    """What earlier launches left of the same gradient; in float32 if the buffer's element is, else as it lies there."""


@dataclass(frozen=True)
class Axis:
    """Elements one stride after the other."""

    stride: str
    size: str


@dataclass(frozen=True)
class Buffer:
    """Memory that the backward allocates."""

    name: str
    """Of the argument of the kernels, and of the variable in the backward."""
    element: str
    """As in `Value.element`."""
    fill: Fill
    like: str = ""
    """Tensor argument of the forward's launch whose shape and strides it takes; empty: `shape` says."""
    shape: tuple[str, ...] = ()
    """Expressions of its extents, where it is like nothing; rows are contiguous."""
    empty_if: str = ""
    """Expression under which ZEROS may be EMPTY, because every element is stored to then; empty: never. Of a tensor
    whose elements do not lie side by side that is known only where `axes` are its own."""
    axes: tuple[Axis, ...] = ()
    """What is stored to then; empty: not known."""
    lender: str = ""
    """Cotangent that lies in memory as it would, and is it unless the setting `unless` is true; empty: none."""
    unless: str = ""


@dataclass(frozen=True)
class Step:
    """One launch."""

    kernel: Kernel
    grid: tuple[str, ...]
    """One to three expressions."""
    scalars: dict[str, str] = field(default_factory=dict)
    """Expressions of arguments of the kernel that neither the forward's launch had nor a buffer is."""
    num_warps: str = ""
    """Expression; empty: as the forward was launched."""
    num_stages: int | None = None
    """None: as the forward was launched."""
    most: dict[str, int] = field(default_factory=dict)
    """What tiles of the launch start with at most, by constexpr, where the forward's may be too large for it."""


@dataclass(frozen=True)
class Census:
    """A launch before all others that counts how often each row of a gradient will be stored to. More than once, and
    the plan is wrong: what was stored first would be lost."""

    gradient: str
    """Argument of the kernels that store to it."""
    counts: Buffer
    """Of rows."""
    step: Step
    width: str
    """Elements of a row, an expression."""
    whole: str = ""
    """Expression under which stores to a row reach all of its elements, so that only rows without any need zeros;
    empty: not known."""
    facts: tuple[Fact, ...] = ()
    """Under which what is counted are rows."""


@dataclass(frozen=True)
class Counting:
    """A launch before a listing whose programs each write how many additions they make, where memory says that."""

    counts: Buffer
    """Of programs."""
    step: Step
    most: str
    """What other expressions call the most of them: each program has room for as many in the list."""


@dataclass(frozen=True)
class Listing:
    """A launch before all others that writes down which row of a gradient each addition goes to, from 1 on; 0 is none.
    Torch sorts that: the owner of a row goes through the additions that name it."""

    gradient: str
    """Argument of the kernel that stores to it."""
    rows: Buffer
    step: Step
    count: str
    """Rows of the gradient, an expression."""
    order: str
    """Argument with the numbers of additions in the order of their rows."""
    begins: str
    """Argument that says where in that order each row begins, and where the last one ends."""
    counting: Counting | None = None
    """None: the launch says how many additions there are. Else rows are tiles that programs pick, and -1 may be any."""


@dataclass(frozen=True)
class Inverse:
    """A list that memory has of which row of a gradient each addition goes to. Torch sorts it: the owner of a row goes
    through the places that name it."""

    gradient: str
    """Argument of the kernel that stores to it."""
    rows: str
    """Tensor argument of the forward's launch: the list."""
    bounds: str
    """Another one: where each program's places begin, and where those of the last one end."""
    programs: str
    """How many programs there are, an expression."""
    count: str
    """Rows of the gradient, an expression."""
    order: str
    """Argument with the places, from the first program's first on, in the order of their rows."""
    begins: str
    """Argument that says where in that order each row begins, and where the last one ends."""
    known: str
    """Argument that says which program has every 8th place."""


@dataclass(frozen=True)
class Total:
    """Partial results that torch sums over their first axis after the launches."""

    partials: str
    """Buffer of shape (n, ...)."""
    name: str
    """What the sum is called."""
    wide: bool = False
    """The partial results are not small beside what is summed: where plans are compared, no better than additions."""


@dataclass(frozen=True)
class Fact:
    """What must hold at a launch for a plan to be right; where it does not, the plain plan still is."""

    expression: str
    """Python, as above."""
    reason: str
    """What depends on it: "each element of dX is stored by one program"."""
    tensor: str = ""
    """Argument it is about, if one: a tensor of the forward's launch, or a cotangent."""
    of_forward: bool = False
    """It is about tiles that the forward has, whatever the backward chooses."""


@dataclass(frozen=True)
class BackwardPlan:
    """The backward of one launch."""

    schedule: str
    """What the plan is called where plans are compared: `plain`, `owned`, ..."""
    cotangents: dict[str, str]
    """Tensor argument the forward wrote -> kernel argument that holds its cotangent; the cotangent has the strides of
    the tensor that was written."""
    buffers: tuple[Buffer, ...]
    steps: tuple[Step, ...]
    gradients: dict[str, str]
    """Tensor argument the forward read -> buffer, total or cotangent that holds its gradient, in whatever dtype. What
    several have in common lies in memory as the gradient of each would, but for those `by_index`."""
    by_index: frozenset[str] = frozenset()
    """Tensor arguments whose gradient is a cotangent, of elements one behind the other, under the same indices."""
    totals: tuple[Total, ...] = ()
    censuses: tuple[Census, ...] = ()
    listings: tuple[Listing, ...] = ()
    inverses: tuple[Inverse, ...] = ()
    consumed: tuple[str, ...] = ()
    """Kernel arguments with cotangents that a launch overwrites: it is given copies, of the same strides."""
    saved: tuple[str, ...] = ()
    """Tensor arguments the forward wrote whose contents the backward reads, beside what the forward read."""
    settings: dict[str, str] = field(default_factory=dict)
    """Expressions of numbers that any value is right for and speed depends on, by the names that other expressions of
    the plan, and constexprs of its kernels, have for them. Later ones may name earlier ones."""
    facts: tuple[Fact, ...] = ()
    """What the stub has to check before the launches."""
    remarks: tuple[str, ...] = ()
    """Why something was left as it is: "dW stays atomic because ..."."""

    @property
    def sums(self) -> dict[str, str]:
        """What the sum of each buffer of partial results is called."""
        return {total.partials: total.name for total in self.totals}

    def results(self, kernel: Kernel) -> list[str]:
        """What a kernel writes to: buffers, and for one of partial results the name of their sum."""
        return [self.sums.get(name, name) for name in written_by(kernel)]


def written_by(kernel: Kernel) -> list[str]:
    """The pointer arguments that a kernel writes to."""
    codes = (Code.STORE, Code.STORE_BLOCK, Code.ATOMIC_ADD, Code.ATOMIC)
    return list(dict.fromkeys(op.base.name for op in kernel.ops if op.code in codes))
