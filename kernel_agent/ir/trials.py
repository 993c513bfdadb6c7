"""What if one operation of a kernel did something else? Executions with one small change each, and where NaN begins.

A `Watch` takes the place of the computation of every operation of a launch. One that only looks lists the places at
which something could be changed; one with an `Edit` changes one of them wherever it is executed.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kernel_agent.ir.launch import LaunchOptions, launch
from kernel_agent.ir.memory import Buffer
from kernel_agent.ir.numbering import Numbering
from kernel_agent.ir.program import Module, Op
from kernel_agent.ir.sanitizer.address import is_variable
from kernel_agent.ir.sanitizer.findings import Findings
from kernel_agent.ir.types import Kind
from kernel_agent.ir.values import Active, Pointer, RuntimeValue


class EditKind(str, enum.Enum):
    """What is changed."""

    FACTOR = "factor"
    """A floating operand is multiplied by a number."""
    OTHER = "other"
    """Masked lanes of a load read zero."""
    LONGER = "longer"
    """A loop takes one more step."""
    INCLUSIVE = "inclusive"
    """A comparison includes its bound, or no longer does."""
    UNMASKED = "unmasked"
    """A selection takes its first value everywhere."""
    MASKED = "masked"
    """What is summed up is zero where a mask of the kernel is false."""
    TIMES = "times"
    """A floating operand is multiplied by another value of the kernel."""
    OVER = "over"
    """A floating operand is divided by another value of the kernel."""
    OWN = "own"
    """Every program loads the element with its own number."""
    FINITE = "finite"
    """What is not finite in a result becomes zero."""


@dataclass(frozen=True)
class Edit:
    """One change at one operation."""

    kernel: int
    """Which lowered kernel of the execution, counted by first launch."""
    op: int
    """Position in `Module.all_ops`."""
    kind: EditKind
    operand: int = 0
    factor: float = 0.0
    mask: int = -1
    """Position of the operation that makes the mask, or the other value."""


@dataclass(frozen=True)
class Place:
    """Somewhere that an edit can be made."""

    edit: Edit
    name: str
    """The operation's name in the IR."""
    line: int | None
    file: str
    variable: str
    """What the source calls the operand or the result; empty where it has no name."""
    other: str = ""
    """What the source calls the other value."""
    column: int | None = None
    """From 0; for an arithmetic operation Triton notes where its right operand begins."""


@dataclass(frozen=True)
class Strange:
    """An operation that makes something that is not finite of what is finite."""

    place: Place
    how: str
    """Such as `divides 0 by 0`."""


_ADDING = frozenset({"arith.addf", "arith.subf"})
_SUMS = {"tt.reduce": (0,), "tt.dot": (0, 1)}
"""Operands that tails must not reach."""
_VALUES = 8
"""Values that are tried as a factor of one operand."""
_MASKS = 3
"""Masks that are tried on one operand."""
_FACTORS = {"arith.addf": (0, 1), "arith.subf": (0, 1), "tt.store": (1,), "tt.atomic_rmw": (1,), **_SUMS}
"""Operands that may lack a factor."""
_STORES = {"tt.store": 1, "tt.atomic_rmw": 1}
_OTHER_END = {2: 3, 3: 2, 4: 5, 5: 4, 6: 7, 7: 6, 8: 9, 9: 8}
"""Predicates of `arith.cmpi` with the bound and without it."""


@dataclass(eq=False)
class Watch:
    """Computes the operations of one execution, with one edit at most."""

    edit: Edit | None = None
    look: bool = False
    """Whether places, and operations that make NaN, are listed."""
    places: dict[Edit, Place] = field(default_factory=dict)
    strange: dict[tuple[int, int], Strange] = field(default_factory=dict)
    """By kernel and operation, in the order of execution."""
    numbering: Numbering = field(default_factory=Numbering)
    masks: dict[tuple[int, int], tuple[Active, Tensor]] = field(default_factory=dict)
    """The mask that an operation made last, and for which programs."""
    values: dict[tuple[int, int], tuple[Active, Tensor]] = field(default_factory=dict)
    """The same for floats that the source has a name for."""

    def runner(
        self,
        module: Module,
        grid: tuple[int, int, int],
        arguments: Sequence[RuntimeValue],
        buffers: dict[int, Buffer],
        findings: Findings,
        options: LaunchOptions,
    ) -> None:
        """`launch` with this watch."""
        launch(module, grid, arguments, buffers, findings, replace(options, edges=self))

    def compute(
        self, module: Module, op: Op, operands: list[Any], active: Active, run: Callable[..., Any]
    ) -> list[Any]:
        """The results of an operation; `run` is `Machine.compute`."""
        kernel, number = self.numbering.of(module, op)
        edit = self.edit
        if edit is not None and (edit.kernel, edit.op) == (kernel, number):
            return self._edited(edit, op, operands, active, run)
        results = list(run(op, operands, active))
        if self.look or (edit is not None and edit.mask >= 0):
            self._keep(kernel, number, op, results, active)
        if self.look:
            edits = [*_edits(kernel, number, op), *self._masking(kernel, number, op, active)]
            edits += self._scaling(kernel, number, op, active)
            edits += [Edit(kernel, number, EditKind.OWN)] if _may_be_own(op, operands, active) else []
            for found in edits:
                if found not in self.places:
                    self.places[found] = _place_of(module, op, found)
            how = _how(op, operands, results)
            if how and (kernel, number) not in self.strange:
                mended = Edit(kernel, number, EditKind.FINITE)
                self.strange[kernel, number] = Strange(_place_of(module, op, mended), how)
        return results

    def _keep(self, kernel: int, number: int, op: Op, results: list[Any], active: Active) -> None:
        if not results or op.regions:
            return
        type_ = op.results[0].type
        if type_.tile and type_.scalar.name == "i1":
            self.masks[kernel, number] = (active, results[0])
        elif type_.scalar.kind is Kind.FLOAT and _is_float(results[0]) and _named(self.numbering.modules[kernel], op):
            self.values[kernel, number] = (active, results[0])

    def _masking(self, kernel: int, number: int, op: Op, active: Active) -> list[Edit]:
        """Masks of the operand's shape, latest first, that are not true everywhere."""
        found = []
        for operand in _SUMS.get(op.name, ()):
            type_ = op.operands[operand].type
            if type_.scalar.kind is not Kind.FLOAT:
                continue
            ops = self.numbering.modules[kernel].all_ops
            fitting = [
                place
                for (where, place), (owner, mask) in reversed(self.masks.items())
                if where == kernel
                and owner is active
                and ops[place].results[0].type.tile == type_.tile
                and not bool(mask.all())
            ]
            found += [Edit(kernel, number, EditKind.MASKED, operand, mask=place) for place in fitting[:_MASKS]]
        return found

    def _scaling(self, kernel: int, number: int, op: Op, active: Active) -> list[Edit]:
        """Factors that an operand may lack, or have once too often: named values of its shape, latest first."""
        found = []
        ops = self.numbering.modules[kernel].all_ops
        for operand in _FACTORS.get(op.name, ()):
            type_ = op.operands[operand].type
            if type_.scalar.kind is not Kind.FLOAT:
                continue
            fitting = [
                place
                for (where, place), (owner, _) in reversed(self.values.items())
                if where == kernel and owner is active and ops[place].results[0].type.tile in (type_.tile, ())
            ]
            for place in fitting[:_VALUES]:
                kinds = (EditKind.TIMES, EditKind.OVER)
                found += [Edit(kernel, number, kind, operand, mask=place) for kind in kinds]
        return found

    def _edited(self, edit: Edit, op: Op, operands: list[Any], active: Active, run: Callable[..., Any]) -> list[Any]:
        """The results of the operation that the edit is about."""
        changed = list(operands)
        value: Any = operands[edit.operand] if operands else None
        if edit.kind is EditKind.FACTOR:
            changed[edit.operand] = value * edit.factor if edit.factor else torch.zeros_like(value)
        elif edit.kind is EditKind.OTHER:
            changed[2] = torch.zeros_like(value)
        elif edit.kind is EditKind.LONGER:
            changed[1] = operands[1] + operands[2]
        elif edit.kind is EditKind.INCLUSIVE:
            op = replace(op, attributes={**op.attributes, "predicate": _OTHER_END[op.attributes["predicate"]]})
        elif edit.kind is EditKind.UNMASKED:
            changed[0] = torch.ones_like(operands[0])
        elif edit.kind is EditKind.OWN:
            changed[0] = Pointer(operands[0].buffer, active.ids.clone(), operands[0].view)
        elif edit.kind is EditKind.MASKED and (edit.kernel, edit.mask) in self.masks:
            changed[edit.operand] = torch.where(self.masks[edit.kernel, edit.mask][1], value, 0.0)
        elif edit.kind in (EditKind.TIMES, EditKind.OVER) and (edit.kernel, edit.mask) in self.values:
            other = self.values[edit.kernel, edit.mask][1]
            other = other.view(-1, *[1] * (value.dim() - 1)) if other.dim() == 1 else other
            product = value * other if edit.kind is EditKind.TIMES else torch.where(other == 0, 0.0, value / other)
            changed[edit.operand] = product
        results = list(run(op, changed, active))
        if edit.kind is EditKind.FINITE:
            return [torch.where(r.isfinite(), r, 0.0) if _is_float(r) else r for r in results]
        return results


def _edits(kernel: int, number: int, op: Op) -> list[Edit]:
    """What can be changed at an operation, whatever its values are."""
    if op.name in _ADDING:
        return [Edit(kernel, number, EditKind.FACTOR, k) for k in (0, 1)]
    if op.name in _STORES and op.operands[1].type.scalar.kind is Kind.FLOAT:
        return [Edit(kernel, number, EditKind.FACTOR, 1)]
    if op.name in ("tt.dot", "math.fma"):
        return [Edit(kernel, number, EditKind.FACTOR, 0)]
    if op.name == "tt.load" and len(op.operands) == 3 and op.results[0].type.scalar.kind is Kind.FLOAT:
        return [Edit(kernel, number, EditKind.OTHER, 2)]
    if op.name == "scf.for":
        return [Edit(kernel, number, EditKind.LONGER, 1)]
    if op.name == "arith.cmpi" and op.attributes["predicate"] in _OTHER_END and op.results[0].type.tile:
        return [Edit(kernel, number, EditKind.INCLUSIVE)]
    if op.name == "arith.select" and op.results[0].type.scalar.kind is Kind.FLOAT and op.results[0].type.tile:
        return [Edit(kernel, number, EditKind.UNMASKED, 1)]
    return []


def _may_be_own(op: Op, operands: list[Any], active: Active) -> bool:
    """Whether all programs load one and the same element of a buffer that has one for each of them."""
    if op.name != "tt.load" or op.results[0].type.tile or op.results[0].type.scalar.kind is not Kind.FLOAT:
        return False
    pointer = operands[0]
    if not isinstance(pointer, Pointer) or pointer.buffer is None or active.size < 2:
        return False
    return pointer.buffer.size == active.size and int(pointer.offset.min()) == int(pointer.offset.max())


def _place_of(module: Module, op: Op, edit: Edit) -> Place:
    frame = module.place(op)
    of_operand = edit.kind in (EditKind.FACTOR, EditKind.MASKED, EditKind.TIMES, EditKind.OVER)
    named = op.operands[edit.operand] if of_operand else next(iter(op.results), None)
    variable = named.variable if named is not None and is_variable(module, named) else ""
    if frame is None:
        return Place(edit, op.name, None, "", variable)
    other = _named(module, module.all_ops[edit.mask]) if edit.mask >= 0 else ""
    return Place(edit, op.name, frame.line, frame.file, variable, other, frame.column)


def _named(module: Module, op: Op) -> str:
    """The variable that an operation's result is, or is a wider copy of."""
    if op.name in ("tt.splat", "tt.broadcast", "tt.expand_dims"):
        value = op.operands[0]
        return value.variable if is_variable(module, value) else ""
    return op.results[0].variable if is_variable(module, op.results[0]) else ""


def _how(op: Op, operands: list[Any], results: list[Any]) -> str:
    """How an operation makes NaN or infinity of finite operands, or NaN of infinite ones; empty where it does not."""
    made = results[0] if results and op.results[0].type.scalar.kind is Kind.FLOAT else None
    if not isinstance(made, Tensor) or not made.is_floating_point() or bool(made.isfinite().all()) or op.regions:
        return ""
    floats = [value for value in operands if _is_float(value)]
    if any(bool(value.isnan().any()) for value in floats):
        return ""
    infinite = any(bool(value.isinf().any()) for value in floats)
    if infinite and not bool(made.isnan().any()):
        return ""
    if op.name == "tt.load":
        return "loads NaN" if bool(made.isnan().any()) else ""
    if op.name == "arith.constant" or not floats:
        return ""
    if op.name == "arith.divf":
        zero = bool((operands[0] == 0).logical_and(operands[1] == 0).any())
        return "divides infinity by infinity" if infinite else "divides 0 by 0" if zero else "divides by 0"
    words = {
        "arith.subf": "subtracts infinity from infinity",
        "arith.addf": "adds infinities of opposite signs" if infinite else "overflows",
        "arith.mulf": "multiplies 0 by infinity" if infinite else "overflows",
        "math.exp": "overflows: its argument is too large",
        "math.exp2": "overflows: its argument is too large",
        "math.log": "takes the logarithm of 0 or of a negative number",
        "math.log2": "takes the logarithm of 0 or of a negative number",
        "math.sqrt": "takes the root of a negative number",
        "math.rsqrt": "takes the root of 0 or of a negative number in a denominator",
        "tt.precise_divf": "divides by 0",
        "math.precise_sqrt": "takes the root of a negative number",
    }
    return words.get(op.name, "makes it of numbers that are finite" if not infinite else "makes it of infinities")


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
