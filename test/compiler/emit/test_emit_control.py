"""Loops, branches and what they carry: variables are shared only where nobody reads the old value."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from emit_kernels import kernel
from emit_round_trip import run, seeded
from torch import Tensor

from kernel_agent.compiler.emit import triton_source
from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Block, Kernel, Op, Value
from kernel_agent.errors import InternalError

N = 16


def rows_of(b: Builder, pointer: Value, index: Value) -> Value:
    """A tile of 16 elements, the index-th."""
    return b.load(pointer, b.add(b.mul(index, b.const(N)), b.arange(0, N)))


def zeros(b: Builder) -> Value:
    return b.whole(b.const(0.0, "f32"), (N,))


def test_an_accumulator_keeps_its_name_through_nested_loops(tmp_path: Path) -> None:
    made, b, (x, out, n) = kernel("nested", "*f32 X, *f32 Out, i32 n", {})

    def outer(i: Value, carries: list[Value]) -> list[Value]:
        def inner(j: Value, inside: list[Value]) -> list[Value]:
            return [b.add(inside[0], b.mul(rows_of(b, x, j), b.cast(i, "f32")))]

        return list(b.loop((b.const(0), n, b.const(1)), carries, inner, index_name="j", names=["acc"]))

    (acc,) = b.loop((b.const(0), n, b.const(1)), [zeros(b)], outer, index_name="i", names=["acc"])
    b.store(out, b.arange(0, N), acc)
    given = seeded(4, N)
    found = run(made, tmp_path, (1,), {"X": given, "Out": torch.zeros(N), "n": 4})["Out"]
    torch.testing.assert_close(found, given.double().sum(0) * 6)
    text = triton_source(made).text
    assert text.count("acc += ") == 1, text
    assert "acc_1" not in text, text


def test_a_carry_that_is_read_after_its_inner_loop_is_not_overwritten(tmp_path: Path) -> None:
    made, b, (x, out, n) = kernel("kept", "*f32 X, *f32 Out, i32 n", {})

    def outer(i: Value, carries: list[Value]) -> list[Value]:
        (acc,) = carries

        def inner(j: Value, inside: list[Value]) -> list[Value]:
            return [b.add(inside[0], rows_of(b, x, j))]

        (total,) = b.loop((b.const(0), n, b.const(1)), [acc], inner, index_name="j")
        return [b.add(b.mul(total, b.const(0.5, "f32")), acc)]  # the old one is read here

    (acc,) = b.loop((b.const(0), n, b.const(1)), [zeros(b)], outer, index_name="i", names=["acc"])
    b.store(out, b.arange(0, N), acc)
    given, wanted = seeded(3, N), torch.zeros(N, dtype=torch.float64)
    found = run(made, tmp_path, (1,), {"X": given, "Out": torch.zeros(N), "n": 3})["Out"]
    for _ in range(3):
        wanted = (wanted + given.double().sum(0)) * 0.5 + wanted
    torch.testing.assert_close(found, wanted)


def test_an_expression_of_a_carry_is_read_before_the_carry_changes(tmp_path: Path) -> None:
    made, b, (x, out, n) = kernel("late", "*f32 X, *f32 Out, i32 n", {})

    def step(i: Value, carries: list[Value]) -> list[Value]:
        a, h = carries
        doubled = b.mul(a, b.const(2.0, "f32"))  # stands inside the expression of the other carry
        return [b.add(a, rows_of(b, x, i)), b.add(h, doubled)]

    (_, h) = b.loop((b.const(0), n, b.const(1)), [zeros(b), zeros(b)], step, index_name="i", names=["a", "h"])
    b.store(out, b.arange(0, N), h)
    given = seeded(4, N)
    found = run(made, tmp_path, (1,), {"X": given, "Out": torch.zeros(N), "n": 4})["Out"]
    a = h64 = torch.zeros(N, dtype=torch.float64)
    for i in range(4):
        a, h64 = a + given[i].double(), h64 + 2 * a
    torch.testing.assert_close(found, h64)


def test_two_carries_that_change_places_are_assigned_at_once(tmp_path: Path) -> None:
    made, b, (out, n) = kernel("swap", "*f32 Out, i32 n", {})
    (a, _) = b.loop(
        (b.const(0), n, b.const(1)),
        [b.const(1.0, "f32"), b.const(2.0, "f32")],
        lambda i, c: [c[1], b.add(c[0], c[1])],
        index_name="i",
        names=["a", "b"],
    )
    b.store(out, b.const(0), a)
    found = run(made, tmp_path, (1,), {"Out": torch.zeros(1), "n": 5})["Out"]
    assert found.item() == 13.0  # 1 2 3 5 8 13
    assert "a, b = b, b + a" in triton_source(made).text


def test_carries_that_start_as_one_value_are_carried_each(tmp_path: Path) -> None:
    """Triton visits a loop's body once to see what it carries, and takes `a = b` for no change if both start as one."""
    made, b, (x, out, n) = kernel("shifted", "*f32 X, *f32 Out, i32 n", {})
    start = rows_of(b, x, b.const(0))
    (a, _) = b.loop(
        (b.const(0), n, b.const(1)),
        [start, start],
        lambda i, c: [c[1], b.whole(b.cast(i, "f32"), (N,))],
        index_name="i",
        names=["a", "b"],
    )
    b.store(out, b.arange(0, N), b.add(a, start))
    given = seeded(1, N)
    found = run(made, tmp_path, (1,), {"X": given, "Out": torch.zeros(N), "n": 4})["Out"]
    torch.testing.assert_close(found, given[0].double() + 2)


def counted(start: int, stop: Value | int, step: Value | int, b: Builder, out: Value) -> None:
    """Writes the visited indices in order, from the position that a carry counts."""

    def visit(index: Value, carries: list[Value]) -> list[Value]:
        b.store(out, carries[0], b.cast(index, "f32"))
        return [b.add(carries[0], b.const(1))]

    bounds = [value if isinstance(value, Value) else b.const(value) for value in (start, stop, step)]
    b.loop((bounds[0], bounds[1], bounds[2]), [b.const(0)], visit, index_name="i", names=["place"], reverse=True)


@pytest.mark.parametrize(
    ("start", "stop", "step"), [(0, 7, 1), (2, 9, 3), (3, 3, 1), (0, 12, 4), (5, 2, 2), (-4, 5, 3)]
)
def test_reversed_loops_visit_the_last_index_first(tmp_path: Path, start: int, stop: int, step: int) -> None:
    wanted = torch.full((16,), -9.0)
    visited = list(range(start, stop, step))[::-1]
    wanted[: len(visited)] = torch.tensor(visited, dtype=torch.float32)
    for name, arguments, scalars in (
        ("constant_step", "*f32 Out, i32 n", {"n": stop}),
        ("step_given", "*f32 Out, i32 n, i32 s", {"n": stop, "s": step}),
    ):
        made, b, (out, n, *rest) = kernel(name, arguments, {})
        counted(start, n, rest[0] if rest else step, b, out)
        found = run(made, tmp_path, (1,), {"Out": torch.full((16,), -9.0), **scalars})["Out"]
        torch.testing.assert_close(found, wanted.double(), msg=name)


def test_an_index_that_is_computed_from_the_trip_takes_no_name_of_another_type(tmp_path: Path) -> None:
    # Triton carries a variable that is set before a loop and in it, and refuses i32 before and i64 within
    made, b, (out, n, s, step) = kernel("wide", "*f32 Out, i32 n, i32 s, i32 step", {})
    b.hint = "i"
    narrow = b.add(n, s)
    b.hint = ""
    b.store(out, b.const(15), b.cast(narrow, "f32"))
    stop, stride = b.cast(n, "i64"), b.cast(s, "i64")

    def visit(index: Value, _: list[Value]) -> list[Value]:
        b.store(out, index, b.cast(b.add(b.cast(index, "i32"), step), "f32"))
        return []

    b.loop((b.const(0, "i64"), stop, stride), [], visit, index_name="i", reverse=True)
    given = {"Out": torch.full((16,), -9.0), "n": 5, "s": 2, "step": 10}
    found = run(made, tmp_path, (1,), given)["Out"]
    assert found.tolist() == [10.0, -9.0, 12.0, -9.0, 14.0, *[-9.0] * 10, 7.0]


def test_a_loop_hint_is_kept() -> None:
    made, b, (out, n) = kernel("hinted", "*f32 Out, i32 n", {})
    b.loop(
        (b.const(0), n, b.const(1)), [], lambda i, c: [b.store(out, i, b.cast(i, "f32"))][:0],
        index_name="i", num_stages=3, flatten=False,
    )  # fmt: skip
    assert "for i in tl.range(0, n, num_stages=3):" in triton_source(made).text


@pytest.mark.parametrize(("flight", "address"), [({"num_stages": 3}, "X + start + cols"), ({}, "X + offs")])
def test_pointers_of_rows_in_flight_take_their_steps_one_by_one(
    flight: dict[str, int], address: str, tmp_path: Path
) -> None:
    # A tile of offsets of 64 bits takes two registers of each lane beside the row: long rows were spilled for them.
    made, b, (x, out, n) = kernel("rows", "*f32 X, *f32 Out, i32 n", {})
    cols = b.arange(0, N, name="cols")

    def visit(row: Value, carries: list[Value]) -> list[Value]:
        b.hint = "start"
        start = b.mul(b.cast(row, "i64"), b.const(N, "i64"))
        b.hint = ""
        at = b.add(start, b.cast(cols, "i64"))
        b.store(out, at, b.mul(b.load(x, at), b.const(2.0, "f32")))
        return carries

    b.loop((b.const(0), n, b.const(1)), [], visit, index_name="row", **flight)
    text = triton_source(made).text
    assert f"tl.load({address})" in text, text
    given = seeded(4, N)
    found = run(made, tmp_path, (1,), {"X": given, "Out": torch.zeros(4, N), "n": 4})["Out"]
    torch.testing.assert_close(found, given.double() * 2)


def branching(one: bool) -> tuple[Kernel, str]:
    made, b, (x, out, n) = kernel("branch", "*f32 X, *f32 Out, i32 n", {})
    tile = rows_of(b, x, b.const(0))
    tile.name = "h"
    (kept,) = b.branch(
        b.compare("gt", n, b.const(2)),
        lambda: [b.mul(tile, b.const(3.0, "f32"))],
        lambda: [tile if one else b.unary(Code.SIGMOID, tile)],
    )
    b.store(out, b.arange(0, N), kept)
    return made, triton_source(made).text


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("one", [True, False])
def test_branches_set_one_variable(tmp_path: Path, one: bool, n: int) -> None:
    made, text = branching(one)
    x = seeded(1, N)
    found = run(made, tmp_path, (1,), {"X": x, "Out": torch.zeros(N), "n": n})["Out"]
    other = x[0].double() if one else x[0].double().sigmoid()
    torch.testing.assert_close(found, x[0].double() * 3 if n > 2 else other)
    assert ("else:" in text) is not one, text
    assert not one or "h *= 3.0" in text, text


@pytest.mark.parametrize("n", [1, 2])
def test_names_of_a_branch_that_is_no_branch_for_triton_are_not_used_again(tmp_path: Path, n: int) -> None:
    """Where n is 1, Triton takes it for a constant, and the branch's names are those of the kernel."""
    made, b, (x, out, size) = kernel("branch", "*f32 X, *f32 Out, i32 n", {})

    def store() -> list[Value]:
        tile = rows_of(b, x, b.const(0))
        tile.name = "t"
        b.store(out, b.arange(0, N), b.mul(tile, tile))
        return []

    b.branch(b.compare("eq", size, b.const(1)), store, list)

    def step(i: Value, carries: list[Value]) -> list[Value]:
        t = b.mul(i, i)
        t.name = "t"
        b.store(out, b.add(t, b.const(32)), b.cast(b.add(t, i), "f32"))
        return []

    b.loop((b.const(0), b.const(3), b.const(1)), [], step, index_name="i")
    given = seeded(1, N)
    found = run(made, tmp_path, (1,), {"X": given, "Out": torch.zeros(48), "n": n})["Out"]
    torch.testing.assert_close(found[32:37], torch.tensor([0.0, 2, 0, 0, 6], dtype=torch.float64))
    assert (found[0] != 0) == (n == 1)


def test_a_value_read_after_a_branch_is_not_overwritten_in_it(tmp_path: Path) -> None:
    made, b, (x, out, n) = kernel("branch", "*f32 X, *f32 Out, i32 n", {})
    tile = rows_of(b, x, b.const(0))
    (kept,) = b.branch(b.compare("gt", n, b.const(2)), lambda: [b.mul(tile, tile)], lambda: [tile])
    b.store(out, b.arange(0, N), b.sub(kept, tile))
    given = seeded(1, N)
    found = run(made, tmp_path, (1,), {"X": given, "Out": torch.zeros(N), "n": 3})["Out"]
    torch.testing.assert_close(found, (given * given - given)[0].double(), rtol=1e-6, atol=1e-6)


def test_a_value_from_before_a_loop_is_not_overwritten_by_a_branch_in_it(tmp_path: Path) -> None:
    made, b, (x, out, n) = kernel("branch", "*f32 X, *f32 Out, i32 n", {})
    tile = rows_of(b, x, b.const(0))

    def step(i: Value, carries: list[Value]) -> list[Value]:
        (kept,) = b.branch(b.compare("eq", i, b.const(0)), lambda: [b.mul(tile, b.const(2.0, "f32"))], lambda: [tile])
        return [b.add(carries[0], kept)]

    (acc,) = b.loop((b.const(0), n, b.const(1)), [zeros(b)], step, index_name="i")
    b.store(out, b.arange(0, N), acc)
    given = seeded(1, N)
    found = run(made, tmp_path, (1,), {"X": given, "Out": torch.zeros(N), "n": 4})["Out"]
    torch.testing.assert_close(found, given[0].double() * 5)


def halving(*, early: bool) -> Kernel:
    """Counts halvings: while n > 1: n //= 2."""
    made, b, (out, n) = kernel("halving", "*f32 Out, i32 n", {})
    if early:
        b.add_op(Op(Code.LEAVE_IF, [b.compare("le", n, b.const(3))], []))
    test = Block([Value("i32", (), "left"), Value("i32", (), "count")])
    with b.inside(test):
        test.yields = [b.compare("gt", test.arguments[0], b.const(1)), *test.arguments]
    body = Block([Value("i32", (), "left"), Value("i32", (), "count")])
    with b.inside(body):
        left, count = body.arguments
        body.yields = [b.elementwise(Code.FLOORDIV, (left, b.const(2))), b.add(count, b.const(1))]
    results = [Value("i32", (), "left"), Value("i32", (), "count")]
    b.add_op(Op(Code.WHILE, [n, b.const(0)], results, {}, [test, body]))
    b.store(out, b.const(0), b.cast(results[1], "f32"))
    return made


@pytest.mark.parametrize(("n", "count"), [(1, 0), (2, 1), (9, 3), (64, 6)])
def test_while(tmp_path: Path, n: int, count: int) -> None:
    assert run(halving(early=False), tmp_path, (1,), {"Out": torch.zeros(1), "n": n})["Out"].item() == count


@pytest.mark.parametrize(("n", "count"), [(3, -1), (4, 2)])
def test_a_program_leaves_where_it_should(tmp_path: Path, n: int, count: int) -> None:
    found = run(halving(early=True), tmp_path, (1,), {"Out": torch.full((1,), -1.0), "n": n})["Out"]
    assert found.item() == count


def wide(step: int) -> tuple[Kernel, dict[str, Tensor | int]]:
    """64-bit offsets that a loop carries and that start from an argument."""
    made, b, (x, out, stride, n) = kernel("wide", "*f32 X, *f32 Out, i64 stride, i32 n", {})

    def visit(i: Value, carries: list[Value]) -> list[Value]:
        at, total = carries
        return [b.add(at, stride), b.add(total, b.load(x, at))]

    (_, total) = b.loop((b.const(0), n, b.const(1)), [stride, b.const(0.0, "f32")], visit, names=["at", "total"])
    b.store(out, b.cast(b.program_id(0), "i64"), total)
    return made, {"X": seeded(32), "Out": torch.zeros(1), "stride": step, "n": 5}


@pytest.mark.parametrize("step", [1, 3])
def test_arguments_that_are_one_may_start_a_carry(tmp_path: Path, step: int) -> None:
    made, given = wide(step)
    found = run(made, tmp_path, (1,), given)["Out"]
    torch.testing.assert_close(found[0], given["X"][step : 5 * step + 1 : step].double().sum())  # type: ignore[index]


def test_arguments_that_are_one_may_be_converted(tmp_path: Path) -> None:
    made, b, (x, out, n) = kernel("mean", "*f32 X, *f32 Out, i32 n", {})
    total = b.sum(rows_of(b, x, b.const(0)), 0)
    mean = b.div(total, b.cast(n, "f32"))
    wide_offset = b.add(b.cast(n, "i64"), b.const(-1, "i64"))
    b.store(out, wide_offset, b.add(mean, b.unary(Code.EXP, b.cast(n, "f32"))))
    given = seeded(1, N)
    found = run(made, tmp_path, (1,), {"X": given, "Out": torch.zeros(1), "n": 1})["Out"]
    torch.testing.assert_close(found[0], given.double().sum() + torch.tensor(1.0, dtype=torch.float64).exp())
    assert "/ n" in triton_source(made).text


def test_gradients_are_added_without_an_order_between_programs(tmp_path: Path) -> None:
    made, b, (x, dx) = kernel("scatter", "*f32 X, *f32 dX", {})
    b.store(dx, b.arange(0, N), rows_of(b, x, b.program_id(0)), code=Code.ATOMIC_ADD)
    given = seeded(4, N)
    found = run(made, tmp_path, (4,), {"X": given, "dX": torch.zeros(N)})["dX"]
    torch.testing.assert_close(found, given.double().sum(0))
    assert 'sem="relaxed"' in triton_source(made).text


def test_a_condition_with_statements_of_its_own_is_refused() -> None:
    made, b, (out, n) = kernel("refused", "*f32 Out, i32 n", {})
    test = Block([Value("i32", (), "left")])
    with b.inside(test):
        big = b.load(out, test.arguments[0])
        test.yields = [b.compare("gt", b.mul(big, big), b.const(1.0, "f32")), *test.arguments]
    body = Block([Value("i32", (), "left")])
    with b.inside(body):
        body.yields = [b.sub(body.arguments[0], b.const(1))]
    b.add_op(Op(Code.WHILE, [n], [Value("i32")], {}, [test, body]))
    with pytest.raises(CannotDerive, match="while loop"):
        triton_source(made)


def test_a_tape_without_memory_is_a_defect_of_a_pass() -> None:
    made, b, (out,) = kernel("taped", "*f32 Out", {})
    b.add_op(Op(Code.TAPE_STORE, [b.const(1.0, "f32")], [], {"tape": "t"}))
    with pytest.raises(InternalError, match="tape"):
        triton_source(made)
    assert out.is_pointer
