"""What evaluation of kernels does to memory and in which order: masks, bounds, counts, loops, branches and tapes."""

import pytest
import torch

from kernel_agent.compiler.errors import OutOfBounds
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.evaluate import evaluate
from kernel_agent.compiler.ssa.value import Kernel, Op, Value
from kernel_agent.errors import InternalError

NAN = float("nan")


def floats(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def copy_kernel(mask: bool, other: float | None = None) -> Kernel:
    """Y[pid * 4 + lane] = X[...], lanes from N on left out."""
    x, y, n = Value("*f32", name="X"), Value("*f32", name="Y"), Value("i32", name="N")
    kernel = Kernel("copy", [x, y, n])
    b = Builder(kernel)
    places = b.add(b.mul(b.program_id(0), b.const(4)), b.arange(0, 4))
    inside = b.compare("lt", places, n) if mask else None
    loaded = b.load(x, places, inside, None if other is None else b.const(other, "f32"))
    b.store(y, places, loaded, None if other is not None else inside)
    return kernel


def test_masked_lanes_load_and_store_nothing() -> None:
    x, y = torch.randn(6, dtype=torch.float64), torch.full((8,), NAN, dtype=torch.float64)
    counts = evaluate(copy_kernel(mask=True), (2,), {"X": x, "Y": y, "N": 6})
    assert torch.equal(y[:6], x)
    assert y[6:].isnan().all()
    assert counts.loaded["X"].tolist() == [1] * 6
    assert counts.stored["Y"].tolist() == [1] * 6 + [0] * 2


def test_masked_lanes_get_what_the_load_says_and_else_what_the_caller_says() -> None:
    y = torch.empty(8, dtype=torch.float64)
    evaluate(copy_kernel(mask=True, other=7.0), (2,), {"X": torch.zeros(6, dtype=torch.float64), "Y": y, "N": 6})
    assert y.tolist() == [0.0] * 6 + [7.0] * 2
    kernel = copy_kernel(mask=True)
    store = kernel.body.ops.pop()
    Builder(kernel).store(store.base, store.offset, store.stored)
    for open_lanes in (0.0, 5.0):
        arguments = {"X": torch.ones(6, dtype=torch.float64), "Y": y, "N": 6}
        evaluate(kernel, (2,), arguments, open_lanes=open_lanes)
        assert y[6:].tolist() == [open_lanes] * 2


@pytest.mark.parametrize(("held", "argument"), [(7, "X"), (8, "Y")])
def test_an_access_out_of_bounds_is_reported_with_program_and_argument(held: int, argument: str) -> None:
    x, y = torch.zeros(held, dtype=torch.float64), torch.zeros(7, dtype=torch.float64)
    with pytest.raises(OutOfBounds, match=rf"program \(1, 0, 0\) .* element 7 of {argument}"):
        evaluate(copy_kernel(mask=False), (2,), {"X": x, "Y": y, "N": 8})


def test_an_element_that_two_programs_store_to_is_not_owned() -> None:
    y, n = Value("*f32", name="Y"), Value("i32", name="N")
    kernel = Kernel("overlapping", [y, n])
    b = Builder(kernel)
    b.store(y, b.add(b.mul(b.program_id(0), n), b.arange(0, 4)), b.const(1.0, "f32"))
    apart = evaluate(kernel, (2,), {"Y": torch.zeros(8), "N": 4})
    assert apart.owned("Y")
    assert apart.covered("Y")
    overlapping = evaluate(kernel, (2,), {"Y": torch.zeros(8), "N": 3})
    assert not overlapping.owned("Y")
    assert not overlapping.covered("Y")
    assert overlapping.stored["Y"].tolist() == [1, 1, 1, 2, 1, 1, 1, 0]


def test_atomic_additions_of_one_tile_to_one_element_all_count() -> None:
    y = Value("*f32", name="Y")
    kernel = Kernel("total", [y])
    b = Builder(kernel)
    b.store(y, b.whole(b.const(0), (4,)), b.const(0.5, "f32"), code=Code.ATOMIC_ADD)
    out = torch.zeros(1)
    counts = evaluate(kernel, (3,), {"Y": out})
    assert out.item() == 6.0
    assert counts.added["Y"].item() == 12


def test_offsets_count_elements_of_the_memory_under_a_view() -> None:
    whole = torch.zeros(4, 4, dtype=torch.float64)
    y = Value("*f32", name="Y")
    kernel = Kernel("diagonal", [y])
    b = Builder(kernel)
    b.store(y, b.mul(b.arange(0, 3), b.const(5)), b.const(1.0, "f32"))
    counts = evaluate(kernel, (1,), {"Y": whole[1:, 1:]})
    assert torch.equal(whole, torch.diag(floats(0.0, 1.0, 1.0, 1.0)))
    assert torch.equal(counts.stored["Y"], torch.eye(3, dtype=torch.int64))


# --- control


def test_programs_know_their_place_in_a_grid_of_three_axes() -> None:
    y = Value("*i32", name="Y")
    kernel = Kernel("places", [y])
    b = Builder(kernel)
    place = b.const(0)
    for axis in range(3):
        place = b.add(b.mul(place, b.num_programs(axis)), b.program_id(axis))
    b.store(y, place, place)
    out = torch.full((24,), -1, dtype=torch.int32)
    assert evaluate(kernel, (2, 3, 4), {"Y": out}).owned("Y")
    assert out.tolist() == list(range(24))


def test_a_while_goes_on_as_long_as_its_condition_holds() -> None:
    y, n = Value("*i32", name="Y"), Value("i32", name="N")
    kernel = Kernel("collatz", [y, n])
    b = Builder(kernel)

    def body(passed: list[Value]) -> list[Value]:
        value, count = passed
        even = b.compare("eq", b.logical_and(value, b.const(1)), b.const(0))
        half = b.elementwise(Code.SHR, (value, b.const(1)))
        return [b.select(even, half, b.add(b.mul(value, b.const(3)), b.const(1))), b.add(count, b.const(1))]

    results = b.repeat([n, b.const(0)], lambda inner: [b.compare("ne", inner[0], b.const(1)), *inner], body)
    b.store(y, b.const(0), results[1])
    out = torch.zeros(1, dtype=torch.int32)
    evaluate(kernel, (1,), {"Y": out, "N": 27})
    assert out.item() == 111


def test_a_branch_runs_one_side() -> None:
    y = Value("*f32", name="Y")
    kernel = Kernel("sides", [y])
    b = Builder(kernel)
    first = b.compare("eq", b.program_id(0), b.const(0))

    def stored(number: float):
        def side() -> list[Value]:
            b.store(y, b.program_id(0), b.const(number, "f32"))
            return []

        return side

    b.branch(first, stored(1.0), stored(2.0))
    out = torch.zeros(2)
    evaluate(kernel, (2,), {"Y": out})
    assert out.tolist() == [1.0, 2.0]


def test_a_program_that_leaves_has_no_more_effects() -> None:
    y = Value("*f32", name="Y")
    kernel = Kernel("leaving", [y])
    b = Builder(kernel)
    b.add_op(Op(Code.LEAVE_IF, (b.compare("gt", b.program_id(0), b.const(0)),), ()))
    b.store(y, b.program_id(0), b.const(1.0, "f32"))
    out = torch.zeros(3)
    evaluate(kernel, (3,), {"Y": out})
    assert out.tolist() == [1.0, 0.0, 0.0]


def taped(kernel_name: str, *, stored_in: str) -> Kernel:
    """Y[i] = 10 + X[i], by a tape of one loop that another, running backwards, reads."""
    x, y, n = Value("*f64", name="X"), Value("*f64", name="Y"), Value("i32", name="N")
    kernel = Kernel(kernel_name, [x, y, n])
    b = Builder(kernel, frozenset({x, y}))
    bounds = (b.const(0), n, b.const(1))

    def store(index: Value, _: list[Value]) -> list[Value]:
        b.add_op(Op(Code.TAPE_STORE, (b.load(x, index),), (), {"tape": stored_in}))
        return []

    def load(index: Value, carries: list[Value]) -> list[Value]:
        (found,) = b.add_op(Op(Code.TAPE_LOAD, (), (Value("f64"),), {"tape": "t"})).results
        b.store(y, index, b.add(found, carries[0]))
        return [b.add(carries[0], b.const(10.0, "f64"))]

    b.loop(bounds, [], store)
    b.loop(bounds, [b.const(10.0, "f64")], load, reverse=True)
    return kernel


def test_a_loop_that_runs_backwards_finds_on_the_tape_what_the_same_trip_stored() -> None:
    x, y = floats(1.0, 2.0, 3.0), torch.empty(3, dtype=torch.float64)
    evaluate(taped("k", stored_in="t"), (1,), {"X": x, "Y": y, "N": 3})
    assert y.tolist() == [31.0, 22.0, 13.0]


def test_a_tape_that_nobody_stored_to_is_a_defect() -> None:
    x = torch.zeros(3, dtype=torch.float64)
    with pytest.raises(InternalError, match="nothing was stored to tape t"):
        evaluate(taped("k", stored_in="other"), (1,), {"X": x, "Y": x.clone(), "N": 3})


def test_a_missing_argument_is_named() -> None:
    with pytest.raises(InternalError, match="lacks arguments: N"):
        evaluate(copy_kernel(mask=True), (1,), {"X": torch.zeros(4), "Y": torch.zeros(4)})
