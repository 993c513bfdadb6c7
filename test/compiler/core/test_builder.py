"""Where the builder puts operations: shared where they are in sight, out of loops where that is safe."""

from collections.abc import Callable

import pytest
import torch

from kernel_agent.compiler.errors import OutOfBounds
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.evaluate import evaluate
from kernel_agent.compiler.ssa.value import Kernel, Op, Value
from kernel_agent.compiler.ssa.verify import verify


class Case:
    """A builder of a kernel of X, Y, which it writes, and N."""

    def __init__(self) -> None:
        self.x, self.y, self.n = Value("*f32", name="X"), Value("*f32", name="Y"), Value("i32", name="N")
        self.kernel = Kernel("case", [self.x, self.y, self.n])
        self.b = Builder(self.kernel, frozenset({self.y}))

    def over_n(self, body: Callable[[Value], object], *, stop: Value | None = None, certain: bool = False) -> Op:
        """A loop without carries; returns it."""

        def without_carries(index: Value, _: list[Value]) -> list[Value]:
            body(index)
            return []

        b = self.b
        b.loop((b.const(0), self.n if stop is None else stop, b.const(1)), [], without_carries, certain=certain)
        return b.scopes[-1].block.ops[-1]

    def inside(self, loop: Op, code: Code) -> int:
        return sum(op.code is code for op in loop.blocks[0].ops)


def test_equal_values_in_sight_are_one() -> None:
    case = Case()
    b = case.b
    assert b.add(case.n, b.const(1)) is b.add(case.n, b.const(1))
    assert b.load(case.x, case.n) is b.load(case.x, case.n)


def test_constants_of_one_value_but_two_elements_or_two_names_are_two() -> None:
    b = Case().b
    assert b.const(1) is not b.const(1, "i64")
    assert b.const(64, symbol="BLOCK_M") is not b.const(64, symbol="BLOCK_N")
    assert b.const(1, "f32") is not b.const(True, "i1")


def test_zeros_of_both_signs_are_one_constant() -> None:
    b = Case().b
    assert b.const(-0.0, "f32") is b.const(0.0, "f32")


def test_what_does_not_depend_on_the_trip_leaves_the_loop_and_what_does_stays() -> None:
    case = Case()
    b = case.b

    def body(index: Value) -> None:
        b.mul(case.n, b.program_id(0))
        b.add(index, case.n)

    loop = case.over_n(body)
    assert (case.inside(loop, Code.MUL), case.inside(loop, Code.ADD)) == (0, 1)
    verify(case.kernel)


def test_a_value_leaves_only_the_loops_it_does_not_depend_on() -> None:
    case = Case()
    b = case.b
    inner: list[Op] = []
    outer = case.over_n(lambda i: inner.append(case.over_n(lambda j: b.add(b.mul(i, case.n), j))))
    assert case.inside(outer, Code.MUL) == 1
    assert case.inside(inner[0], Code.ADD) == 1


def test_dear_work_does_not_leave_a_branch_and_cheap_work_does() -> None:
    case = Case()
    b = case.b
    tile = b.load(case.x, b.arange(0, 4))

    def side() -> list[Value]:
        return [b.add(b.sum(b.unary(Code.EXP, tile), 0), b.cast(b.mul(case.n, case.n), "f32"))]

    b.branch(b.compare("gt", case.n, b.const(0)), side, lambda: [b.const(0.0, "f32")])
    (branch,) = [op for op in case.kernel.ops if op.code is Code.IF]
    inside = [op.code for op in branch.blocks[0].ops]
    assert Code.EXP in inside
    assert Code.SUM in inside
    assert Code.MUL not in inside
    verify(case.kernel)


def test_what_one_branch_computed_is_not_read_by_the_other() -> None:
    case = Case()
    b = case.b
    tile = b.load(case.x, b.arange(0, 4))
    total = b.branch(
        b.compare("gt", case.n, b.const(0)), lambda: [b.unary(Code.EXP, tile)], lambda: [b.unary(Code.EXP, tile)]
    )
    b.store(case.y, b.arange(0, 4), total[0])
    verify(case.kernel)


# --- loads


def test_a_load_stays_in_a_loop_that_may_make_no_trip() -> None:
    # Outside, program 1 would load element 4 of 4, for a loop that it does not enter.
    case = Case()
    b = case.b
    place = b.mul(b.program_id(0), b.const(4))

    def body(index: Value) -> None:
        b.store(case.y, index, b.load(case.x, place))

    case.over_n(body, stop=b.select(b.compare("lt", place, case.n), b.const(1), b.const(0)))
    tensors = {"X": torch.ones(4), "Y": torch.zeros(4), "N": 4}
    evaluate(case.kernel, (2,), tensors)
    assert tensors["Y"].tolist() == [1.0, 0.0, 0.0, 0.0]


def test_a_load_leaves_a_loop_whose_bounds_make_a_trip() -> None:
    case = Case()
    b = case.b
    loop = case.over_n(lambda _: b.load(case.x, case.n), stop=b.const(4))
    assert case.inside(loop, Code.LOAD) == 0
    never = case.over_n(lambda _: b.load(case.x, b.const(7)), stop=b.const(0))
    assert case.inside(never, Code.LOAD) == 1


def test_a_load_leaves_a_loop_that_the_pass_calls_certain_but_no_uncertain_one_around_it() -> None:
    case = Case()
    b = case.b
    inner: list[Op] = []
    outer = case.over_n(lambda _: inner.append(case.over_n(lambda _: b.load(case.x, case.n), certain=True)))
    assert case.inside(inner[0], Code.LOAD) == 0
    assert case.inside(outer, Code.LOAD) == 1


def test_a_load_does_not_leave_a_branch() -> None:
    case = Case()
    b = case.b

    def side() -> list[Value]:
        return [b.load(case.x, b.const(9))]

    b.branch(b.compare("gt", case.n, b.const(9)), side, lambda: [b.const(0.0, "f32")])
    evaluate(case.kernel, (1,), {"X": torch.zeros(4), "Y": torch.zeros(4), "N": 4})
    with pytest.raises(OutOfBounds):
        evaluate(case.kernel, (1,), {"X": torch.zeros(4), "Y": torch.zeros(4), "N": 10})


def test_loads_from_memory_that_is_written_are_never_shared_or_moved() -> None:
    case = Case()
    b = case.b
    first = b.load(case.y, b.const(0))
    b.store(case.y, b.const(0), b.add(first, b.const(1.0, "f32")))
    second = b.load(case.y, b.const(0))
    assert second is not first
    b.store(case.y, b.const(1), second)
    tensors = {"X": torch.zeros(1), "Y": torch.zeros(2), "N": 1}
    evaluate(case.kernel, (1,), tensors)
    assert tensors["Y"].tolist() == [1.0, 1.0]


def test_a_builder_knows_what_is_written_after_loads_from_it_may_have_moved() -> None:
    case = Case()
    b = case.b
    loaded = b.load(case.x, b.const(0))
    b.store(case.y, b.const(0), b.load(case.y, b.const(0)))
    assert b.spoiled == set()
    b.store(case.x, b.const(1), loaded)
    assert b.spoiled == {case.x}


def test_loads_with_other_masks_or_other_values_for_masked_lanes_are_others() -> None:
    case = Case()
    b = case.b
    places = b.arange(0, 4)
    mask = b.compare("lt", places, case.n)
    loads = {
        b.load(case.x, places),
        b.load(case.x, places, mask),
        b.load(case.x, places, mask, b.const(0.0, "f32")),
        b.load(case.x, places, mask, b.const(1.0, "f32")),
    }
    assert len(loads) == 4


def test_an_access_has_offsets_of_its_whole_shape() -> None:
    # A scalar offset with a tile of masks is one element per lane, all of them the same one.
    case = Case()
    b = case.b
    mask = b.compare("lt", b.arange(0, 4), case.n)
    assert b.load(case.x, b.const(2), mask).shape == (4,)
    op = b.store(case.y, b.const(0), b.const(1.0, "f32"), mask, code=Code.ATOMIC_ADD)
    assert op.offset.shape == (4,)
    tensors = {"X": torch.zeros(3), "Y": torch.zeros(1), "N": 3}
    evaluate(case.kernel, (1,), tensors)
    assert tensors["Y"].item() == 3.0


# --- control


def test_a_loop_yields_its_carries_whole() -> None:
    case = Case()
    b = case.b
    tile = b.whole(b.const(0.0, "f32"), (4,))
    (result,) = b.loop((b.const(0), case.n, b.const(1)), [tile], lambda _, c: [b.const(1.0, "f32")], names=["acc"])
    assert (result.shape, result.name) == ((4,), "acc")
    verify(case.kernel)


def test_a_branch_yields_the_larger_of_two_shapes() -> None:
    case = Case()
    b = case.b
    tile = b.load(case.x, b.arange(0, 4))
    (result,) = b.branch(b.compare("gt", case.n, b.const(0)), lambda: [tile], lambda: [b.const(0.0, "f32")])
    assert result.shape == (4,)
    verify(case.kernel)


def test_the_adjoint_of_broadcasting_sums_extents_that_were_one_or_missing() -> None:
    case = Case()
    b = case.b
    rows = b.reshape(b.arange(0, 8), (2, 4))
    tile = b.load(case.x, rows)
    column, row, scalar = b.sum_to(tile, (2, 1)), b.sum_to(tile, (1, 4)), b.sum_to(tile, ())
    assert (column.shape, row.shape, scalar.shape) == ((2, 1), (1, 4), ())
    b.store(case.y, b.expand(b.arange(0, 2), 1), column)
    b.store(case.y, b.add(b.expand(b.arange(0, 4), 0), b.const(2)), row)
    b.store(case.y, b.const(6), scalar)
    x, y = torch.arange(8.0), torch.zeros(7)
    evaluate(case.kernel, (1,), {"X": x, "Y": y, "N": 1})
    grid_x = x.view(2, 4)
    assert y.tolist() == [*grid_x.sum(1).tolist(), *grid_x.sum(0).tolist(), x.sum().item()]
