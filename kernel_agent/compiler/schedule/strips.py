"""`stripped`: loops that load their tiles by descriptors load numbers of the tiles' rows so, too.

What a softmax keeps for each row, its log-sum-exp and delta, is a strip of as many numbers as a tile has rows. All
threads that hold a part of a row want its number, so that each copies some, with an address and a predicate for every
one: a quarter of the instructions of a loop over rows of attention. A descriptor copies the strip once.

It gives zeros beyond the last row, where the load may ask for others: a constexpr says that there is no such row, and
that every strip begins at a multiple of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from kernel_agent.compiler.schedule.describe import MOST, Describer, asked_steps, index_terms, is_count, sum_of
from kernel_agent.compiler.schedule.forms import Forms, Launch
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.uses import written_to
from kernel_agent.compiler.ssa.value import Kernel, Op, Value, is_setting, unspread, walk

NAME = "STRIPS"
EVEN = 4
"""Elements of 32 bits in what every strip begins at a multiple of."""


@dataclass(frozen=True)
class Stripped:
    """A kernel that may load strips."""

    kernel: Kernel
    name: str
    """Its constexpr."""
    condition: str
    """When it may be true, beside the kernel's other constexprs."""


@dataclass(frozen=True)
class _Strip:
    """A load of numbers from `first` on of the `size` at `start`."""

    load: Op
    start: tuple[Value, ...]
    """Numbers whose sum it is; so is the next."""
    first: tuple[Value, ...]
    size: Value


def stripped(kernel: Kernel, launch: Launch, whole: str, ours: Collection[str]) -> Stripped | None:
    """The kernel with descriptors for strips in the loops that have some for tiles; None where it loads none.

    `whole`: the constexpr that says that no row is missing. `ours`: buffers of the plan, which begin where they may.
    """
    forms, written = Forms(kernel, launch), written_to(kernel.body)
    strips: dict[Op, _Strip] = {}
    tensors: dict[str, None] = {}
    steps: dict[str, None] = {}
    for loop in kernel.ops:
        if loop.code is not Code.FOR or not any(op.code is Code.LOAD_BLOCK for op in walk(loop.blocks[0])):
            continue
        for op in loop.blocks[0].ops:
            strip = _strip(op, whole) if op.code is Code.LOAD else None
            asked = None if strip is None or op.base in written else asked_steps(forms, strip.start, EVEN)
            if strip is not None and asked is not None:
                strips[op] = strip
                steps |= dict.fromkeys(asked)
                tensors |= dict.fromkeys(() if op.base.name in ours else (op.base.name,))
    if not strips:
        return None
    name = kernel.free_name(NAME)
    conditions = [f"({step}) % {EVEN} == 0" for step in steps] + [f"{one}.data_ptr() % 16 == 0" for one in tensors]
    return Stripped(_Stripper(kernel, strips, name).copy(), name, " and ".join(conditions))


def _strip(load: Op, whole: str) -> _Strip | None:
    """A load of a strip, all of which is there if `whole` is true, as such; None where it is anything else."""
    shape, mask = load.result.shape, load.mask
    if len(shape) != 1 or load.result.element != "f32" or not EVEN <= shape[0] <= MOST or mask is None:
        return None
    either = mask.producer
    if either is None or either.code is not Code.OR or not _is_named(either.operands[1], whole):
        return None
    compared = either.operands[0].producer
    if compared is None or compared.code is not Code.CMP or compared.attributes["predicate"] != "lt":
        return None
    rows = [term.index for term in index_terms(compared.operands[0])]
    terms = index_terms(load.offset)
    if any(term.factors for term in terms) or not set(rows) <= {term.index for term in terms}:
        return None
    lanes = [value for value in rows if value.shape]
    first = tuple(value for value in rows if not value.shape)
    start = tuple(term.index for term in terms if term.index not in rows)
    size = unspread(compared.operands[1])
    if len(lanes) != 1 or not is_count(lanes[0]) or len(terms) != len(rows) + len(start) or size.shape:
        return None
    if any(value.shape for value in start) or any(value.element != "i32" for value in first):
        return None
    return _Strip(load, start, first, size)


def _is_named(value: Value, name: str) -> bool:
    """Whether a value is the constexpr of a name."""
    op = value.producer
    return op is not None and is_setting(value) and op.attributes["symbol"] == name


class _Stripper(Describer):
    """Copies a kernel, with a branch around the strips of each loop."""

    def __init__(self, source: Kernel, strips: dict[Op, _Strip], name: str) -> None:
        super().__init__(source, strips, name)
        self.strips = strips

    def descriptor_of(self, load: Op) -> Value:
        """Of the numbers that a strip is a part of."""
        strip = self.strips[load]
        return self.b.descriptor(load.base, sum_of(self, strip.start), (self[strip.size],), (), load.result.shape)

    def corner(self, load: Op) -> list[Value]:
        """The first of them that it loads."""
        return [sum_of(self, self.strips[load].first)]
