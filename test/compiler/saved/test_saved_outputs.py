"""What a forward stored comes back from memory, and only where that is what it stored."""

from __future__ import annotations

import pytest
import saved_forwards as forwards
from saved_checks import loads_in_loops, same_gradients, tensor

from kernel_agent.compiler.saved.outputs import saved_reads, use_saved
from kernel_agent.compiler.saved.prepare import prepared
from kernel_agent.compiler.schedule.calls import Calls
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Kernel, Value


def test_layer_norm_reads_its_statistics_instead_of_summing_again() -> None:
    forward = forwards.layer_norm()
    saved = use_saved(forward.kernel)
    forward.forward_again(saved.kernel)
    backward, plain = forward.backward(saved.kernel), forward.backward(forward.kernel)
    same_gradients(backward, plain)
    # Recomputing needs the two sums of the statistics on top of those of the derivative.
    assert backward.count(Code.SUM) == plain.count(Code.SUM) - 2
    assert saved_reads(backward.kernel, {"y_ptr", "mean_ptr", "rstd_ptr"}) == {"mean_ptr", "rstd_ptr"}


def test_what_is_overwritten_later_is_computed_again_and_the_rest_is_read() -> None:
    # The backward would find another launch's numbers where the mean was; the reciprocal deviation is still there.
    forward = forwards.layer_norm()
    saved = prepared(forward.kernel, frozenset(forward.written), frozenset({"mean_ptr"}))
    assert saved.read == {"rstd_ptr", "y_ptr"}
    backward = forward.backward(saved.kernel)
    assert saved_reads(backward.kernel, {"mean_ptr", "rstd_ptr"}) == {"rstd_ptr"}
    same_gradients(backward, forward.backward(forward.kernel))


def test_a_log_sum_that_is_overwritten_later_is_no_gauge() -> None:
    # Divided by what another launch left there, rows of the softmax would not sum to one.
    forward = forwards.attention()
    (read,) = prepared(forward.kernel, frozenset(forward.written)).read - {"o_ptr"}
    saved = prepared(forward.kernel, frozenset(forward.written), frozenset({read}))
    assert read not in saved.read
    backward = forward.backward(saved.kernel)
    assert read not in saved_reads(backward.kernel, {read})
    same_gradients(backward, forward.backward(forward.kernel))
    assert backward.tapes == 0, "the final maximum is one"


def test_a_looped_layer_norm_loses_both_loops_of_its_statistics() -> None:
    forward = forwards.layer_norm(looped=True)
    saved = use_saved(forward.kernel)
    forward.forward_again(saved.kernel)
    backward, plain = forward.backward(saved.kernel), forward.backward(forward.kernel)
    same_gradients(backward, plain)
    assert (plain.loops, backward.loops) == (5, 3)
    assert backward.tapes == 0
    n = tensor(forward.arguments["x_ptr"]).numel()
    assert plain.loads("x_ptr") == 4 * n
    assert backward.loads("x_ptr") == 2 * n


def test_a_value_that_trips_store_to_their_own_rows_is_read_back() -> None:
    forward = forwards.softmax_rows()
    saved = use_saved(forward.kernel)
    assert saved.read == {"y_ptr"}
    same_gradients(forward.backward(saved.kernel), forward.backward(forward.kernel))


def test_a_row_stored_under_a_mask_is_read_back_under_it() -> None:
    forward = forwards.softmax_row()
    saved = use_saved(forward.kernel)
    assert saved.read == {"y_ptr"}
    same_gradients(forward.backward(saved.kernel), forward.backward(forward.kernel))


def test_a_narrower_output_is_read_where_computing_it_takes_a_loop_of_products() -> None:
    forward = forwards.attention(element="fp16")
    saved = use_saved(forward.kernel)
    assert "o_ptr" in saved.read
    same_gradients(forward.backward(saved.kernel), forward.backward(forward.kernel))


def test_a_narrower_output_is_computed_again_where_a_reduction_does() -> None:
    # The rounded number would be off by more than what summing a row once more costs.
    saved = use_saved(forwards.softmax_row(element="fp16").kernel)
    assert "y_ptr" not in saved.read
    assert any("y_ptr holds it in f16 only" in remark for remark in saved.remarks)


def test_states_that_a_recurrence_stored_are_read_back_instead_of_kept_on_a_tape() -> None:
    # A state of another step, or one that the tape alone has, would give other gradients: the recurrence is not linear.
    forward = forwards.states_of_a_recurrence("rows")
    saved = use_saved(forward.kernel)
    assert "kept_ptr" in saved.read
    backward, plain = forward.backward(saved.kernel), forward.backward(forward.kernel)
    same_gradients(backward, plain)
    assert (plain.tapes, backward.tapes) == (1, 0)
    assert (plain.loops, backward.loops) == (2, 1)


@pytest.mark.parametrize("where", ["one row", "overlapping", "more lanes"])
def test_states_that_are_not_all_in_memory_keep_their_tape(where: str) -> None:
    # Later steps overwrite what lies in one row, or in rows a single element apart; a lane too many was never stored.
    forward = forwards.states_of_a_recurrence(where)
    saved = use_saved(forward.kernel)
    assert "kept_ptr" not in saved.read
    assert forward.backward(saved.kernel).tapes == 1


def test_states_of_few_steps_are_read_in_16_bits_instead_of_kept_on_a_tape_of_32() -> None:
    forward = forwards.states_of_a_recurrence("rows", "*fp16")
    saved = use_saved(forward.kernel, calls=Calls(({"steps": 5},)))
    backward = forward.backward(saved.kernel)
    same_gradients(backward, forward.backward(forward.kernel))
    assert "kept_ptr" in saved.read
    assert backward.tapes == 0


@pytest.mark.parametrize(("element", "steps"), [("*fp16", 64), ("*fp8e5", 5)], ids=["many steps", "eight bits"])
def test_states_that_were_rounded_too_often_or_too_far_are_computed_again(element: str, steps: int) -> None:
    # Errors of many steps add up, and three bits of a state are no state.
    forward = forwards.states_of_a_recurrence("rows", element)
    assert "kept_ptr" not in use_saved(forward.kernel, calls=Calls(({"steps": steps},))).read


def test_states_whose_lanes_beyond_the_stored_ones_are_zero_are_read_back() -> None:
    # Every step asks for all lanes, and those that were not stored are zeros from the first step to the last.
    forward = forwards.states_that_mix(0.0)
    saved = use_saved(forward.kernel)
    backward, plain = forward.backward(saved.kernel), forward.backward(forward.kernel)
    same_gradients(backward, plain)
    assert (plain.tapes, backward.tapes) == (1, 0)


def test_states_with_something_in_lanes_that_were_not_stored_keep_their_tape() -> None:
    forward = forwards.states_that_mix(0.5)
    saved = use_saved(forward.kernel)
    assert "kept_ptr" not in saved.read
    assert forward.backward(saved.kernel).tapes == 1


def _squares(*, store: str) -> Kernel:
    """A row total, stored in several ways, and a value that depends on it, stored plainly."""
    arguments = [Value("*f32", (), name) for name in ("X", "T", "Y")] + [Value("i32", (), "n")]
    kernel = Kernel("squares", arguments)
    x_ptr, t_ptr, y_ptr, n = arguments
    b = Builder(kernel)
    row, lanes = b.program_id(0), b.arange(0, 8)
    offset = b.add(b.mul(row, b.const(8)), lanes)
    x = b.load(x_ptr, offset)
    if store == "masked tile":
        sums = b.pure(Code.CUMSUM, (x,), "f32", (8,), {"axis": 0, "reverse": False})
        b.store(t_ptr, offset, sums, b.compare("lt", lanes, n))
        b.store(y_ptr, offset, b.mul(sums, sums))
        return kernel
    total = b.sum(b.mul(x, x), 0)
    if store == "twice":
        b.store(t_ptr, row, total)
        b.store(t_ptr, row, b.mul(total, b.const(2.0, "f32")))
    elif store == "in a loop":
        zero, one = b.const(0), b.const(1)

        def body(_: Value, carries: list[Value]) -> list[Value]:
            (sum_,) = carries
            sum_ = b.add(sum_, total)
            b.store(t_ptr, row, sum_)
            return [sum_]

        (total,) = b.loop((zero, n, one), [b.const(0.0, "f32")], body)
    b.store(y_ptr, offset, b.mul(x, b.mul(total, total)))
    return kernel


def test_memory_that_is_written_twice_is_not_trusted() -> None:
    saved = use_saved(_squares(store="twice"))
    assert "T" not in saved.read
    assert any("T is accessed at several places" in remark for remark in saved.remarks)


def test_memory_that_every_trip_overwrites_is_not_trusted() -> None:
    saved = use_saved(_squares(store="in a loop"))
    assert "T" not in saved.read
    assert any("trips of a loop store it to one place of T" in remark for remark in saved.remarks)


def test_a_masked_store_does_not_stand_for_lanes_that_are_used_outside_of_it() -> None:
    saved = use_saved(_squares(store="masked tile"))
    assert "T" not in saved.read
    assert any("used where the store to T is masked" in remark for remark in saved.remarks)


def test_what_is_cheap_is_computed_again() -> None:
    arguments = [Value("*f32", (), name) for name in ("X", "Y")]
    kernel = Kernel("exponentials", arguments)
    b = Builder(kernel)
    offset = b.arange(0, 8)
    b.store(arguments[1], offset, b.unary(Code.EXP, b.load(arguments[0], offset)))
    assert use_saved(kernel).kernel is kernel


def _residual(*, element: str = "f32", read: bool = False, scaled: bool = False) -> Kernel:
    """A sum of two rows, stored and squared. `element`: of what it is stored in; `read`: one summand is stored, too;
    `scaled`: one is multiplied."""
    types = ("*f32", "*f32", f"*{element}", "*f32", "*f32")
    arguments = [Value(kind, (), name) for kind, name in zip(types, ("X", "R", "S", "Y", "Z"), strict=True)]
    x_ptr, r_ptr, s_ptr, y_ptr, z_ptr = arguments
    kernel = Kernel("residual", arguments)
    b = Builder(kernel)
    at = b.add(b.mul(b.program_id(0), b.const(8)), b.arange(0, 8))
    x, r = b.load(x_ptr, at), b.load(r_ptr, at)
    total = b.add(b.mul(x, x) if scaled else x, r)
    b.store(s_ptr, at, b.cast(total, element))
    b.store(y_ptr, at, b.mul(total, total))
    if read:
        b.store(z_ptr, at, b.unary(Code.EXP, r))
    return kernel


def test_a_sum_of_what_nothing_else_reads_is_one_load_where_it_was_stored_whole() -> None:
    # A residual stream is stored as it is: its summands were loaded again, twice as much as the sum.
    saved = use_saved(_residual())
    assert saved.read == {"S"}
    assert saved.remarks == ("a stored value is read from S",)


@pytest.mark.parametrize(
    "kernel",
    [
        pytest.param(_residual(element="bf16"), id="rounded by the store"),
        pytest.param(_residual(read=True), id="a summand is loaded anyhow"),
        pytest.param(_residual(scaled=True), id="the derivative asks for a factor"),
    ],
)
def test_a_sum_is_added_again_where_loading_it_is_not_less_or_not_the_same(kernel: Kernel) -> None:
    assert not use_saved(kernel).read


def _sides(*, looped: bool) -> Kernel:
    """A sum of exponentials of each row that FLAGS does not leave out; zero of others.

    `looped`: in two trips, of which one keeps the row, and the other zeroes that one's place.
    """
    arguments = [Value("*f32", (), "X"), Value("*i32", (), "FLAGS"), Value("*f32", (), "T"), Value("*f32", (), "Y")]
    kernel = Kernel("sides", arguments)
    x_ptr, flags, t_ptr, y_ptr = arguments
    b = Builder(kernel)
    row = b.program_id(0)
    offset, first = b.add(b.mul(row, b.const(8)), b.arange(0, 8)), b.mul(row, b.const(2))

    def trip(number: Value, _: list[Value]) -> list[Value]:
        def kept() -> list[Value]:
            total = b.sum(b.unary(Code.EXP, b.load(x_ptr, offset)), 0)
            b.store(t_ptr, b.add(first, number), total)
            b.store(y_ptr, b.add(first, number), b.mul(total, total))
            return []

        def left_out() -> list[Value]:
            b.store(t_ptr, b.add(first, b.sub(b.const(1), number) if looped else number), b.const(0.0, "f32"))
            return []

        b.branch(b.compare("eq", b.load(flags, row), number), left_out, kept)
        return []

    if looped:
        b.loop((b.const(0), b.const(2), b.const(1)), [], trip)
    else:
        trip(b.const(0), [])
    return kernel


def test_what_one_side_of_a_condition_stores_is_read_back_though_the_other_stores_there_too() -> None:
    # A program takes one of them: a loss whose ignored rows return early was computed again for its log-sum-exp.
    assert use_saved(_sides(looped=False)).read == {"T"}


def test_what_sides_of_a_condition_store_in_several_trips_is_computed_again() -> None:
    # The first trip keeps what the second zeroes, and zero would be read for its sum.
    assert "T" not in use_saved(_sides(looped=True)).read


def test_the_loops_that_stay_load_nothing_for_the_statistics() -> None:
    forward = forwards.layer_norm(looped=True)
    plain, saved = forward.backward(forward.kernel), forward.backward(use_saved(forward.kernel).kernel)
    assert loads_in_loops(saved.kernel) < loads_in_loops(plain.kernel)


def _lengths(row: int, *, of: str = "squares", rows_too: bool = False) -> Kernel:
    """One over the length of each row, and with `rows_too` the rows divided by it; of squares, or of other products."""
    arguments = [Value("*f32", (), name) for name in ("X", "Z", "R", "Y")]
    kernel = Kernel("lengths", arguments, extents={row: "BLOCK"}, constants={"BLOCK": row})
    x_ptr, z_ptr, r_ptr, y_ptr = arguments
    b = Builder(kernel)
    rows, lanes = b.arange(0, 4), b.arange(0, row, "BLOCK")
    offset = b.add(b.mul(b.expand(rows, 1), b.const(row, "i32", "BLOCK")), b.expand(lanes, 0))
    x = b.load(x_ptr, offset)
    other = x if of == "squares" else b.load(z_ptr, offset)
    inverse = b.unary(Code.RSQRT, b.sum(b.mul(x, other), 1))
    b.store(r_ptr, rows, inverse)
    if rows_too:
        b.store(y_ptr, offset, b.mul(x, b.expand(inverse, 1)))
    return kernel


def test_lengths_of_short_rows_that_a_launch_stores_alone_are_summed_again() -> None:
    # Their derivative loads every element: to read a number for each row, beside 64 elements, is to read more.
    kernel = _lengths(64)
    saved = use_saved(kernel, calls=Calls(({"BLOCK": 64},)))
    assert saved.kernel is kernel
    assert not saved.read
    assert any("loaded anyway" in remark for remark in saved.remarks)


@pytest.mark.parametrize(
    ("kernel", "block"),
    [
        pytest.param(_lengths(256), 256, id="long rows"),
        pytest.param(_lengths(64), 4096, id="rows that are long in a call"),
        pytest.param(_lengths(64, of="products"), 64, id="sums of other products"),
        pytest.param(_lengths(64, rows_too=True), 64, id="a launch that stores the rows, too"),
    ],
)
def test_other_statistics_are_read(kernel: Kernel, block: int) -> None:
    # Long rows would wait for their sum, and a norm's own launch has its number at hand that its user stored for it.
    assert "R" in use_saved(kernel, calls=Calls(({"BLOCK": block},))).read
