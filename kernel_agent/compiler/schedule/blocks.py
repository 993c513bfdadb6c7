"""`in_blocks`: accesses by block pointers and by tensor descriptors, where the forward has these for the same tensor.

Passes see an offset and a mask for every lane, whatever the source says. Before a kernel is printed, loads of such a
tensor, those of its cotangent, and stores of its gradient are found again to be tiles of a matrix, and said as the user
says them. What is not proved to be such a tile stays as it is: each access is right either way.

What descriptors ask of memory the forward's launch gives: they are made only where what a matrix begins at, and what
its rows are apart, are those of one that the forward makes. A cotangent comes from elsewhere, and has none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kernel_agent.compiler.plan import BackwardPlan
from kernel_agent.compiler.schedule.describe import (
    MOST,
    Condition,
    Term,
    conditions_of,
    index_terms,
    lane_of,
    sum_of,
)
from kernel_agent.compiler.schedule.forms import Forms, Launch
from kernel_agent.compiler.schedule.polynomial import Polynomial
from kernel_agent.compiler.ssa.builder import Bounds
from kernel_agent.compiler.ssa.code import BY_DESCRIPTOR, BY_POINTER, MEMORY, Code
from kernel_agent.compiler.ssa.prune import prune
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.uses import written_to
from kernel_agent.compiler.ssa.value import Kernel, Op, Value, broadcast_shape, is_constant, unspread

_BYTES = {"f32": 4, "f16": 2, "bf16": 2}
"""Of the elements that descriptors are made for."""
_UNIT = 16
"""Bytes that a descriptor's rows begin at multiples of, and have at least."""
_HINTS = ("cache_modifier", "eviction_policy")
"""Of a load; descriptors have none."""


@dataclass(frozen=True)
class _Said:
    """How the forward says all accesses to a tensor."""

    form: str
    """BY_POINTER or BY_DESCRIPTOR."""
    name: str
    """The user's variable; empty where there is none."""
    steps: frozenset[str]
    """What its matrices begin at and step by, in elements, in all programs."""


@dataclass(frozen=True)
class _Axis:
    """One axis of a tile."""

    first: tuple[Value, ...]
    """Numbers whose sum is the index of the first lane."""
    stride: Value | None
    """None where it is 1."""
    limit: Value | None = None
    """How many indices there are, where the access asks."""
    spares: Value | None = None
    """The constexpr that says that no lane is beyond them."""


@dataclass(frozen=True)
class _Block:
    """An access to a tile of the matrix, or to some of the numbers, at `start`."""

    access: Op
    start: tuple[Value, ...]
    """Numbers whose sum it is."""
    axes: tuple[_Axis, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Its extents."""
        return _shape(self.access)

    @property
    def matrix(self) -> tuple[object, ...]:
        """Alike for loads of one matrix that come from one of the source."""
        line = self.access.result.source_line if self.access.results else None
        return (line, self.access.base, *(axis.stride for axis in self.axes), *self.start)

    @property
    def bounds(self) -> list[tuple[int, Value | None]]:
        """Axes that the access asks about, with what spares it."""
        return [(n, axis.spares) for n, axis in enumerate(self.axes) if axis.limit is not None]


@dataclass(frozen=True)
class InBlocks:
    """A kernel with the forward's block pointers and descriptors."""

    kernel: Kernel
    descriptors: bool
    """It makes some that take memory."""


def in_blocks(kernel: Kernel, forward: Kernel, plan: BackwardPlan) -> InBlocks:
    """A kernel of a plan with the forward's block pointers and descriptors; the same where none has a place in it."""
    said = _said_of(forward)
    tensors = {name: name for name in said}
    tensors |= {name: tensor for tensor, name in plan.cotangents.items() if tensor in said}
    tensors |= {name: tensor for tensor, name in plan.gradients.items() if tensor in said}
    forms, written = Forms(kernel, _ANYWHERE), written_to(kernel.body)
    stored = {op.base for op in kernel.ops if op.code is Code.STORE and op.base.name in plan.gradients.values()}
    found: dict[Op, _Block] = {}
    for op in kernel.ops if tensors else ():
        free = op.code is Code.LOAD and op.base not in written
        if (free or (op.code is Code.STORE and op.base in stored)) and op.base.name in tensors:
            block = _block_of(op)
            if block is not None:
                found[op] = block
    limits = _Limits(found.values())
    handles: dict[Op, _Handle] = {}
    for op, block in found.items():
        tensor = tensors[op.base.name]
        extents = limits.of(block)
        pointer = said[tensor].form == BY_POINTER
        ours = op.base.name not in plan.cotangents.values()
        if extents is not None and (pointer or (ours and _describes(block, extents, said[tensor], forms))):
            handles[op] = _Handle(block, extents, said[tensor].form, _called(op.base.name, tensor, said[tensor].name))
    described = any(handle.form == BY_DESCRIPTOR for handle in handles.values())
    return InBlocks(prune(_Blocker(kernel, handles).copy()) if handles else kernel, described)


_ANYWHERE = Launch.like_forward(3)


def _said_of(forward: Kernel) -> dict[str, _Said]:
    """By name, the tensors that a kernel accesses by block pointers alone, or by descriptors alone."""
    forms = Forms(forward, _ANYWHERE)
    accesses: dict[str, list[Op]] = {}
    for op in forward.ops:
        if op.code in MEMORY:
            accesses.setdefault(op.base.name, []).append(op)
    found = {}
    for name, ops in accesses.items():
        (form, *others) = {op.attributes.get("form") for op in ops}
        if form is None or others:
            continue
        blocks = [block for op in ops if (block := _block_of(op)) is not None]
        steps = [_steps(block, forms) or frozenset() for block in blocks]
        found[name] = _Said(form, ops[0].attributes["handle"], frozenset().union(*steps))
    return found


def _called(name: str, tensor: str, user: str) -> str:
    """What a handle of a tensor, or of its cotangent or gradient, is called after the user's: `p_dq` after `p_q`."""
    if name == tensor or not user:
        return user
    stem = re.sub(r"^p_|_?(ptrs?|pointer|desc|descriptor)$", "", tensor.lower())
    parts = user.split("_")
    return "_".join("d" + part if part == stem else part for part in parts) if stem in parts else ""


# --- what an access moves


def _shape(access: Op) -> tuple[int, ...]:
    value = access.result if access.code is Code.LOAD else access.stored
    return broadcast_shape([access.offset.shape, value.shape])


def _block_of(access: Op) -> _Block | None:
    """An access to a tile as such; None where it is anything else."""
    value = access.result if access.code is Code.LOAD else access.stored
    rank = len(_shape(access))
    if rank not in (1, 2) or value.element != access.base.pointee or not value.is_float:
        return None
    if access.code is Code.LOAD and access.other is not None and not is_constant(unspread(access.other), 0):
        return None
    asked = [] if access.mask is None else [_asked(one) for one in conditions_of(access.mask, None)]
    terms = index_terms(access.offset)
    lanes = [lane_of(terms, n if rank == 2 else None) for n in range(rank)]
    rest = [term for term in terms if term not in lanes]
    axes: list[_Axis] = []
    for lane in lanes:
        mine = [one for one in asked if one is not None and lane is not None and one.of(lane)]
        if lane is None or len(lane.factors) > 1 or (rank == 1 and not lane.factors and not mine):
            return None
        numbers = [term for term in rest if term.axis == lane.axis and term.factors == lane.factors]
        if rank == 1 and not lane.factors:  # what is asked tells the first index from where the numbers begin
            numbers = [term for term in numbers if term.index in mine[0].numbers]
        first = tuple(term.index for term in numbers)
        limits = [one for one in mine if one.limit is not None]
        alike = all(set(one.numbers) == set(first) and len(one.numbers) == len(first) for one in mine)
        if not alike or len(limits) > 1 or any(number.element != "i32" for number in first):
            return None
        limit, spares = (limits[0].limit, limits[0].spares) if limits else (None, None)
        axes.append(_Axis(first, next(iter(lane.factors), None), limit, spares))
        rest = [term for term in rest if term not in numbers]
        asked = [one for one in asked if one not in mine]
    if asked or any(term.factors or term.index.shape for term in rest):
        return None
    return _Block(access, tuple(term.index for term in rest), tuple(axes))


@dataclass(frozen=True)
class _Asked:
    """Lanes are asked for indices below a limit, or for such that are not negative."""

    lane: Value
    axis: int | None
    numbers: tuple[Value, ...]
    """That are added to the lane."""
    limit: Value | None
    """None: zero, from which on they are."""
    spares: Value | None

    def of(self, lane: Term) -> bool:
        """Whether these lanes are asked."""
        return lane.index is self.lane and lane.axis == self.axis


def _asked(condition: Condition) -> _Asked | None:
    """What a condition asks; None where that is anything else."""
    op = condition.value.producer
    if op is None or op.code is not Code.CMP or op.attributes.get("unsigned"):
        return None
    predicate = op.attributes["predicate"]
    index, bound = op.operands if predicate in ("lt", "ge") else op.operands[::-1]
    bound, terms = unspread(bound), index_terms(index, (), condition.axis)
    lanes = [term for term in terms if term.index.shape]
    lower = predicate in ("ge", "le")
    if predicate not in ("lt", "gt", "ge", "le") or (lower and not is_constant(bound, 0)) or bound.shape:
        return None
    if len(lanes) != 1 or any(term.factors for term in terms):
        return None
    numbers = tuple(term.index for term in terms if term is not lanes[0])
    return _Asked(lanes[0].index, lanes[0].axis, numbers, None if lower else bound, condition.spares)


# --- what there is of a matrix


class _Limits:
    """How many rows and columns matrices have, as far as some access to them asks."""

    def __init__(self, blocks: Iterable[_Block]) -> None:
        self.known: dict[tuple[object, ...], Value] = {}
        for block in blocks:
            for n, axis in enumerate(block.axes):
                if axis.limit is not None:
                    self.known.setdefault((n, *block.matrix), axis.limit)

    def of(self, block: _Block) -> list[Value | None] | None:
        """For each axis the extent, or None for that of the tile, which begins with the first; None where one is not
        known. What a store does not ask is within the matrix only as far as its tile is."""
        found: list[Value | None] = []
        for n, axis in enumerate(block.axes):
            limit = axis.limit
            if limit is None and block.access.code is Code.LOAD:
                limit = self.known.get((n, *block.matrix))
            if limit is None and axis.first:
                return None
            found.append(limit)
        return found


def _describes(block: _Block, extents: Iterable[Value | None], said: _Said, forms: Forms) -> bool:
    """Whether a descriptor can be made for a tile."""
    size, shape, steps = _BYTES.get(block.access.base.pointee), block.shape, _steps(block, forms)
    if size is None or shape[-1] * size < _UNIT or max(shape) > MOST or steps is None or not steps <= said.steps:
        return False
    if block.axes[-1].stride is not None or any(axis.stride is None for axis in block.axes[:-1]):
        return False
    if any(extent is not None and extent.element != "i32" for extent in extents):
        return False
    return not any(block.access.attributes.get(hint) for hint in _HINTS)


def _steps(block: _Block, forms: Forms) -> frozenset[str] | None:
    """What a matrix begins at and steps by, but for multiples of 16; None where that has no name."""
    steps: list[Polynomial | None] = [forms.of(axis.stride).invariant for axis in block.axes if axis.stride is not None]
    for value in block.start:
        form = forms.of(value)
        steps += [*(number for _, number in form.terms), form.base]
    known = [step for step in steps if step is not None and step.printable]
    if len(known) != len(steps):
        return None
    return frozenset(step.text() for step in known if step.number is None or step.number % _UNIT)


# --- writing them


@dataclass(frozen=True)
class _Handle:
    """A block pointer or a descriptor that is to be made."""

    block: _Block
    extents: list[Value | None]
    form: str
    name: str
    """Empty where there is none."""


class _Blocker(Copier):
    """Copies a kernel with handles for some accesses."""

    def __init__(self, source: Kernel, handles: Mapping[Op, _Handle]) -> None:
        super().__init__(source)
        self.handles = handles

    def load(self, op: Op) -> None:
        """A tile."""
        handle = self.handles.get(op)
        if handle is None:
            super().load(op)
            return
        b, made, corner = self.b, *self._made(handle)
        if handle.form == BY_DESCRIPTOR:
            self[op.result] = b.load_block(made, corner, op.result.name)
            return
        hints = {hint: op.attributes[hint] for hint in _HINTS if op.attributes.get(hint)}
        self[op.result] = b.load_pointed(made, self._bounds(handle.block), op.result.name, **hints)

    def effect(self, op: Op) -> None:
        """A store of a tile."""
        handle = None if self.slicing else self.handles.get(op)
        if handle is None:
            super().effect(op)
            return
        made, corner = self._made(handle)
        if handle.form == BY_DESCRIPTOR:
            self.b.store_block(made, self.whole(op.stored), corner)
        else:
            self.b.store_pointed(made, self.whole(op.stored), self._bounds(handle.block))

    def _made(self, handle: _Handle) -> tuple[Value, list[Value]]:
        """The handle, and the numbers of the first row and column that it moves."""
        b, block = self.b, handle.block
        extents = [
            b.extent(size) if limit is None else self[limit]
            for size, limit in zip(block.shape, handle.extents, strict=True)
        ]
        strides = [b.const(1) if axis.stride is None else self[axis.stride] for axis in block.axes]
        start, corner = sum_of(self, block.start), [sum_of(self, axis.first) for axis in block.axes]
        hint, b.hint = b.hint, ""
        try:
            if handle.form == BY_DESCRIPTOR:
                made = b.descriptor(block.access.base, start, extents, strides[:-1], block.shape, handle.name)
            else:
                operands = (start, *extents, *strides, *corner)
                made = b.block_pointer(block.access.base, operands, block.shape, handle.name)
        finally:
            b.hint = hint
        return made, corner

    def _bounds(self, block: _Block) -> Bounds:
        spares = [spares for _, spares in block.bounds if spares is not None]
        return Bounds(
            tuple(n for n, _ in block.bounds),
            tuple(n for n, spares in block.bounds if spares is not None),
            self[spares[0]] if spares else None,
        )
