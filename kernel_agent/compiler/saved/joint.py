"""`Joint`: results of a launch that mean the same when they shift and scale together, as parts of a softmax do.

Where keys are split, every part leaves its maximum m, its mass sum(exp(x - m)) and its sum(exp(x - m) v), and another
launch joins them. With m + D for m, exp(-D) times the mass and exp(-D) times the sum, that launch ends in the same, for
any D of each row: then the first launch may take any number for m, whose derivative is zero, and is differentiated as
if the maximum were given. Two proofs make that right: what the first stores follows one shift (`Ties`, which `examine`
asks), and nothing that a reader stores answers to it (see `joins`). Both are about elements: element i of the shifted
result belongs to the elements from i * width on of a scaled one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kernel_agent.compiler.saved.degree import Degrees, Kind
from kernel_agent.compiler.saved.lanes import conditions
from kernel_agent.compiler.saved.rates import Rate, Rates, same, scaled
from kernel_agent.compiler.schedule.forms import Forms, Launch
from kernel_agent.compiler.schedule.linear import Form
from kernel_agent.compiler.schedule.linear import Kind as Counts
from kernel_agent.compiler.schedule.polynomial import ONE, ZERO, Polynomial
from kernel_agent.compiler.schedule.unmask import conjuncts
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Kernel, Op, Value, bare, constant


@dataclass(frozen=True)
class Scaled:
    """A result that scales."""

    name: str
    """Of the argument."""
    rate: float
    """It becomes exp(rate * D) times what it was when the other shifts by D."""
    width: Polynomial
    """Of its elements there are so many for each of the other's."""


@dataclass(frozen=True)
class Joint:
    """Results of a launch that shift and scale together."""

    pivot: str
    """The argument for what shifts."""
    scaled: tuple[Scaled, ...]

    @property
    def names(self) -> frozenset[str]:
        """Of all the arguments."""
        return frozenset((self.pivot, *(one.name for one in self.scaled)))


@dataclass(frozen=True)
class Tie:
    """How the elements of one access belong to those of another, the pivot's."""

    width: Polynomial
    axes: tuple[int, ...]
    """By axis of the pivot's tile: the axis of the other's that it lies along; -1 for one of extent 1."""

    def moved(self, rates: Rates) -> Rates:
        """Rates of the pivot's lanes as the lanes of the other have them."""
        found = [Rate(r.number, r.factors, r.unit, tuple(self._axis(axis) for axis in r.axes)) for r in rates]
        return tuple(sorted(found, key=lambda rate: rate.kind))

    def _axis(self, axis: int) -> int:
        return axis if axis < 0 else self.axes[axis]


@dataclass(frozen=True)
class Ties:
    """The stores of a kernel to the results of a joint."""

    pivot: Op
    others: Mapping[Op, tuple[float, Tie]]
    """With rates."""

    @classmethod
    def of(cls, kernel: Kernel, joint: Joint | None) -> Ties | None:
        """None where the stores of a kernel do not show the elements of each other."""
        stores = {} if joint is None else only_stores(kernel)
        if joint is None or not joint.names <= stores.keys():
            return None
        forms, pivot = forms_of(kernel), stores[joint.pivot]
        found: dict[Op, tuple[float, Tie]] = {}
        for one in joint.scaled:
            tie = tied(forms, pivot, stores[one.name], one.width)
            if tie is None:
                return None
            found[stores[one.name]] = (one.rate, tie)
        return cls(pivot, found)

    def hold(self, op: Op, degrees: Degrees) -> bool:
        """Whether this is one of the stores, and what it stores follows the shift of the pivot."""
        if op is not self.pivot and op not in self.others:
            return False
        shift = degrees[self.pivot.stored]
        if shift is None or shift.kind not in (Kind.SHIFT, Kind.STAYS):
            return False
        if not all(degrees.stays(value) for value in op.operands if value is not op.stored):
            return False
        if op is self.pivot:
            return True
        rate, tie = self.others[op]
        answer = degrees[op.stored]
        rates = scaled(tie.moved(shift.rates), rate)
        if answer is None or answer.kind not in (Kind.SCALE, Kind.STAYS, Kind.ZERO):
            return False
        return answer.kind is Kind.ZERO or same(answer.rates, rates)


def tied(forms: Forms, pivot: Op, other: Op, width: Polynomial | None = None) -> Tie | None:
    """How the elements of an access belong to those of the pivot; None where that is not proved. `width`: of a row,
    where it is known.

    It is where the one's address is the other's times the width, and what is left is at least 0 and less than that.
    """
    address = forms.of(other.offset)
    places = [axis for axis, extent in enumerate(other.offset.shape) if extent > 1]
    wide = [axis for axis, extent in enumerate(pivot.offset.shape) if extent > 1]
    for chosen in itertools.permutations(places, len(wide)):
        axes = [-1] * len(pivot.offset.shape)
        for axis, place in zip(wide, chosen, strict=True):
            axes[axis] = place
        if any(pivot.offset.shape[axis] != other.offset.shape[axes[axis]] for axis in wide):
            continue
        row = forms.of(pivot.offset).moved(lambda axis, axes=axes: axes[axis])  # type: ignore[misc]
        for size, within in _parts(forms, other):
            if (width is None or width == size) and address - row.times(size) == within and within.not_negative:
                return Tie(size, tuple(axes))
    return None


def _parts(forms: Forms, op: Op) -> Iterator[tuple[Polynomial, Form]]:
    """Numbers, and forms of what the lanes of an access are less than: 1 and 0, what its mask says, its own axes."""
    yield ONE, Form()
    labels = tuple(range(len(op.offset.shape)))
    for part, at in [] if op.mask is None else conjuncts(op.mask, labels):
        test = part.producer
        if test is None or test.code is not Code.CMP or test.attributes["predicate"] != "lt":
            continue
        size = forms.of(test.operands[1]).invariant
        if size is not None and not test.attributes.get("unsigned") and not test.operands[0].is_float:
            yield size, forms.of(test.operands[0]).moved(lambda axis, at=at: _label(at, axis))  # type: ignore[misc]
    for atom, _ in forms.of(op.offset).terms:
        if atom.kind is Counts.LANE and atom.extent is not None:
            yield atom.extent, Form.of({atom: ONE}, ZERO)


def _label(at: Sequence[object], axis: int) -> int:
    label = at[axis]
    return label if isinstance(label, int) else -1


def read_with(forms: Forms, pivot: Op, other: Op) -> Tie | None:
    """How a load belongs to the pivot's, if both take constants in the same lanes, or this one zero in more."""
    tie = tied(forms, pivot, other)
    if tie is None:
        return None
    names = tuple(axis if axis >= 0 else ("one", place) for place, axis in enumerate(tie.axes))
    there, here = conditions(pivot.mask, names), conditions(other.mask, tuple(range(len(other.offset.shape))))
    if there == here:
        return tie
    zero = other.other is not None and constant(bare(other.other)) == 0
    return tie if there < here and zero else None


def only_stores(kernel: Kernel) -> dict[str, Op]:
    """By argument, stores of floats in the kernel's own block that nothing else goes to the memory of."""
    found: dict[str, list[Op]] = {}
    for op in kernel.ops:
        base = op.attributes.get("base")
        for value in (*op.operands, *([base] if isinstance(base, Value) else [])):
            if value.is_pointer:
                found.setdefault(value.name, []).append(op)
    top = frozenset(kernel.body.ops)
    single = {name: ops[0] for name, ops in found.items() if len(ops) == 1}
    return {name: op for name, op in single.items() if op.code is Code.STORE and op in top and op.stored.is_float}


def forms_of(kernel: Kernel) -> Forms:
    """Of a forward, whatever its grid is."""
    return Forms(kernel, Launch.like_forward(3))
