"""Gathers whose indices can be turned around need no comparison of all places with all indices, others do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from reverse_checks import Forward, compare
from torch import Tensor

from kernel_agent.compiler.reverse import Adjoint
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Value

M, N = 4, 8
LAST = N - 1
Index = Callable[[Builder, Value, Value], Value]
"""Of a lane along the axis of the gather, and the row beside it."""


def both(b: Builder, code: Code, a: Value, c: Value | int) -> Value:
    return b.elementwise(code, (a, b.const(c) if isinstance(c, int) else c), "i32")


def gathered(index: Index, axis: int, *, unless: int | None = None, squared: bool = False) -> Adjoint:
    """The adjoint of Y = gather(X, index), which is asserted to be right. `unless`: a lane where Y is 0 instead;
    `squared`: Y is squared, so that no cotangent is the same twice."""
    k = Forward(X="*f32", Y="*f32")
    b, extents = k.b, [M, M]
    extents[axis] = N
    shape = (extents[0], extents[1])
    lanes = [b.expand(b.arange(0, shape[place]), 1 - place) for place in (0, 1)]
    offset = b.add(b.mul(lanes[0], b.const(shape[1])), lanes[1])
    x = b.load(k.X, offset)
    picked = index(b, lanes[axis], lanes[1 - axis])
    y = b.pure(Code.GATHER, (x, b.whole(picked, shape)), "f32", shape, {"axis": axis})
    y = b.mul(y, y) if squared else y
    if unless is not None:
        y = b.select(b.compare("gt" if unless == 0 else "lt", lanes[axis], b.const(unless)), y, b.const(0.0, "f32"))
    b.store(k.Y, offset, y)
    numbers = torch.arange(N, dtype=torch.int32)
    rows = torch.arange(M, dtype=torch.int32)[:, None]
    at = places(index, numbers, rows).expand(M, N).long()
    at = at if axis == 1 else at.T

    def reference(x: Tensor) -> Tensor:
        y = x.gather(axis, at)
        y = y * y if squared else y
        if unless is not None:
            y = torch.where(torch.arange(N) == unless, 0.0, y)  # along axis 1
        return y

    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return compare(k.kernel, {"X": x}, {"Y": shape}, reference)


def places(index: Index, lane: Tensor, row: Tensor) -> Tensor:
    """What an index is, computed by torch: the builder's operations on tensors."""

    class Torch:
        def const(self, value: int) -> Tensor:
            return torch.tensor(value, dtype=torch.int32)

        def add(self, a: Tensor, c: Tensor) -> Tensor:
            return a + c

        def sub(self, a: Tensor, c: Tensor) -> Tensor:
            return a - c

        def mul(self, a: Tensor, c: Tensor) -> Tensor:
            return a * c

        def elementwise(self, code: Code, operands: tuple[Tensor, Tensor], element: str) -> Tensor:
            assert element == "i32"
            name = {Code.XOR: "bitwise_xor", Code.AND: "bitwise_and", Code.MAX: "maximum", Code.MIN: "minimum"}[code]
            found: Tensor = getattr(torch, name)(*operands)
            return found

    return index(Torch(), lane, row)  # type: ignore[arg-type]


def compares(adjoint: Adjoint) -> bool:
    """Whether a backward compares all places with all indices: in a tile of another axis."""
    return any(len(result.shape) > 2 for op in adjoint.kernel.ops for result in op.results)


TURNED: dict[str, Index] = {
    "xor": lambda b, lane, row: both(b, Code.XOR, lane, 5),
    "xor by the row": lambda b, lane, row: both(b, Code.XOR, row, lane),
    "around": lambda b, lane, row: both(b, Code.AND, b.add(lane, b.const(3)), LAST),
    "around, back by the row": lambda b, lane, row: both(b, Code.AND, b.sub(lane, row), LAST),
    "around, on by the row": lambda b, lane, row: both(b, Code.AND, b.const(LAST), b.add(row, lane)),
    "around, reversed": lambda b, lane, row: both(b, Code.AND, b.sub(row, lane), LAST),
    "reversed": lambda b, lane, row: b.sub(b.const(LAST), lane),
    "the one before": lambda b, lane, row: both(b, Code.MAX, b.sub(lane, b.const(1)), 0),
    "the one behind": lambda b, lane, row: both(b, Code.MIN, b.add(lane, b.const(1)), LAST),
}


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", TURNED)
def test_a_gather_that_can_be_turned_around_is_a_gather_again(name: str, axis: int) -> None:
    # `compare` sees a wrong reader, as of a rotation turned the same way, and an end that loses its second one.
    assert not compares(gathered(TURNED[name], axis, squared=True))


COMPARED: dict[str, Index] = {
    "an element read twice": lambda b, lane, row: both(b, Code.AND, b.mul(lane, b.const(2)), LAST),
    "around another extent": lambda b, lane, row: both(b, Code.AND, b.add(lane, b.const(1)), N // 2 - 1),
    "two before": lambda b, lane, row: both(b, Code.MAX, b.sub(lane, b.const(2)), 0),
    "the one before, but not the first": lambda b, lane, row: both(b, Code.MAX, b.sub(lane, b.const(1)), 2),
    "the one behind, but not the last": lambda b, lane, row: both(b, Code.MIN, b.add(lane, b.const(1)), N - 3),
    "xor with itself": lambda b, lane, row: both(b, Code.XOR, lane, both(b, Code.AND, lane, 6)),
    "of the row": lambda b, lane, row: both(b, Code.MAX, b.sub(row, b.const(1)), 0),
}


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", COMPARED)
def test_a_gather_that_looks_alike_but_reads_some_places_twice_is_compared(name: str, axis: int) -> None:
    # Each is one number, or one operand, away from an index above: turned around like that one it is wrong.
    assert compares(gathered(COMPARED[name], axis, squared=True))


@pytest.mark.parametrize(("name", "end"), [("the one before", 0), ("the one behind", LAST)])
def test_an_end_that_is_masked_gets_nothing_for_being_read_twice(name: str, end: int) -> None:
    masked, whole = gathered(TURNED[name], 1, unless=end), gathered(TURNED[name], 1)
    selects = [sum(op.code is Code.SELECT for op in adjoint.kernel.ops) for adjoint in (masked, whole)]
    assert selects[0] == selects[1], "one for the mask instead of one for the end"


def test_another_masked_lane_leaves_the_end_its_two_readers() -> None:
    # `lane < N - 1` hides the last lane's cotangent, not the first's: taken for the first's, dX[0] lacks a part.
    assert not compares(gathered(TURNED["the one before"], 1, unless=LAST))
