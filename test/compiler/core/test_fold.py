"""What is simplified, and what must not be."""

import math

import pytest

from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Kernel, Op, Value, constant


@pytest.fixture
def b() -> Builder:
    return Builder(Kernel("k", [Value("*f32", name="X"), Value("i32", name="N"), Value("f32", name="s")]))


@pytest.fixture
def n(b: Builder) -> Value:
    return b.kernel.argument("N")


@pytest.fixture
def s(b: Builder) -> Value:
    return b.kernel.argument("s")


@pytest.fixture
def tile(b: Builder) -> Value:
    return b.load(b.kernel.argument("X"), b.arange(0, 4))


def code(value: Value) -> Code | None:
    return value.producer.code if value.producer else None


def symbol(value: Value) -> str | None:
    return value.producer.attributes["symbol"]


# --- neutral elements


def test_neutral_elements_vanish(b: Builder, n: Value, s: Value, tile: Value) -> None:
    zero, one = b.const(0.0, "f32"), b.const(1.0, "f32")
    assert b.add(tile, zero) is tile
    assert b.add(zero, tile) is tile
    assert b.sub(tile, zero) is tile
    assert b.mul(one, tile) is tile
    assert b.mul(tile, one) is tile
    assert b.div(tile, one) is tile
    assert b.add(n, b.const(0)) is n


def test_the_logarithm_of_one_is_zero_and_a_power_of_zero_one(b: Builder, s: Value) -> None:
    # Where a row's sum is known to be one, `lse + tl.log(1.0)` was printed, and computed by every program.
    for code, number, found in (
        (Code.LOG, 1.0, 0.0),
        (Code.LOG2, 1.0, 0.0),
        (Code.EXP, 0.0, 1.0),
        (Code.EXP2, 0.0, 1.0),
    ):
        assert constant(b.unary(code, b.const(number, "f32"))) == found
        op = b.unary(code, s).producer
        assert op is not None
        assert constant(b.again(op, [b.const(number, "f32")])) == found
    assert constant(b.unary(Code.LOG, b.const(2.0, "f32"))) is None


def test_a_product_with_zero_is_zero_of_the_products_element(b: Builder, tile: Value) -> None:
    # Adjoints are f32 where primals are f16: a zero in the wrong element would not fit its carry.
    half = b.cast(tile, "f16")
    zero = b.mul(tile, b.const(0.0, "f16"))
    assert (constant(zero), zero.element) == (0.0, "f32")
    zero = b.mul(half, b.const(0.0, "f32"))
    assert (constant(zero), zero.element) == (0.0, "f16")
    assert constant(b.div(b.const(0.0, "f32"), tile)) == 0.0


def test_a_constexpr_that_happens_to_be_neutral_stays(b: Builder, n: Value) -> None:
    # The kernel is printed with the constexpr's name: for another value of it the factor counts.
    heads = b.const(1, symbol="HEADS")
    assert code(b.mul(n, heads)) is Code.MUL
    assert code(b.add(n, b.const(0, symbol="SHIFT"))) is Code.ADD
    assert code(b.mul(n, b.const(0, symbol="SHIFT"))) is Code.MUL


def test_a_difference_of_a_float_with_itself_stays_for_it_may_be_nan(b: Builder, n: Value, s: Value) -> None:
    assert code(b.sub(s, s)) is Code.SUB
    assert constant(b.sub(n, n)) == 0
    assert code(b.compare("eq", s, s)) is Code.CMP
    assert constant(b.compare("eq", n, n)) is True
    assert constant(b.compare("lt", n, n)) is False


# --- signs


def test_negations_move_into_sums_and_out_of_products(b: Builder, s: Value, tile: Value) -> None:
    minus = b.neg(tile)
    assert b.neg(minus) is tile
    assert code(b.add(s, minus)) is Code.SUB
    assert code(b.add(minus, s)) is Code.SUB
    assert code(b.sub(s, minus)) is Code.ADD
    assert b.mul(minus, minus) is b.mul(tile, tile)
    assert code(b.mul(s, minus)) is Code.NEG
    assert b.mul(tile, b.const(-1.0, "f32")) is minus
    swapped = b.neg(b.sub(tile, s))
    assert swapped.producer.operands == (s, tile)


def test_integers_keep_their_order_of_subtraction(b: Builder, n: Value) -> None:
    assert code(b.neg(b.sub(n, b.const(3)))) is Code.NEG


# --- constants


def test_sums_of_integer_constants_wrap(b: Builder) -> None:
    assert constant(b.add(b.const(2**31 - 1), b.const(1))) == -(2**31)
    assert constant(b.mul(b.const(1 << 20), b.const(1 << 12))) == 0
    assert constant(b.neg(b.const(-128, "i8"))) == -128


def test_symbols_become_expressions_with_what_is_done_to_them(b: Builder) -> None:
    block = b.const(64, symbol="BLOCK")
    total = b.sub(b.mul(block, b.const(2)), b.const(1))
    assert (constant(total), symbol(total)) == (127, "((BLOCK * 2) - 1)")
    minus = b.neg(block)
    assert (constant(minus), symbol(minus)) == (-64, "(-BLOCK)")
    wide = b.cast(block, "i64")
    assert (constant(wide), wide.element, symbol(wide)) == (64, "i64", "BLOCK")
    eps = b.cast(b.const(1e-6, "f64", symbol="eps"), "f32")
    assert symbol(eps) == "eps"


def test_a_comparison_of_a_constexpr_stays_and_one_of_numbers_is_known(b: Builder) -> None:
    assert code(b.compare("lt", b.const(64, symbol="BLOCK"), b.const(128))) is Code.CMP
    assert constant(b.compare("lt", b.const(64), b.const(128))) is True
    assert code(b.compare("lt", b.const(-1), b.const(1), unsigned=True)) is Code.CMP


def test_float_constants_are_not_summed_for_the_device_may_round_otherwise(b: Builder) -> None:
    assert code(b.add(b.const(0.1, "f32"), b.const(0.2, "f32"))) is Code.ADD


@pytest.mark.parametrize(
    ("value", "source", "target", "expected"),
    [
        (2.9, "f32", "i32", 2),
        (-2.9, "f32", "i32", -2),
        (True, "i1", "i32", 1),
        (True, "i1", "f32", 1.0),
        (3, "i32", "i1", True),
        (3, "i32", "f32", 3.0),
        (2**24 + 1, "i32", "f32", 2.0**24),
        (2**24 + 1, "i32", "f64", 2.0**24 + 1),
        (1 / 3, "f64", "f32", 0.3333333432674408),
        (300, "i32", "i8", None),
        (3e9, "f32", "i32", None),
        (math.inf, "f32", "i32", None),
        (math.nan, "f32", "i32", None),
        (1e300, "f64", "f32", math.inf),
        (0.5, "f32", "f16", None),
    ],
)
def test_constants_are_converted_as_the_device_does_or_left(
    b: Builder, value, source: str, target: str, expected
) -> None:
    found = b.cast(b.const(value, source), target)
    assert constant(found) == expected
    assert type(constant(found)) is type(expected)
    assert found.element == target


# --- conversions and choices


def test_an_integer_made_wider_and_back_is_itself(b: Builder, n: Value) -> None:
    wide = b.cast(n, "i64")
    assert b.cast(wide, "i32") is n
    assert code(b.cast(b.cast(n, "i8"), "i32")) is Code.CAST
    assert code(b.cast(b.cast(n, "f32"), "i32")) is Code.CAST


def test_a_float_made_wider_and_back_is_itself_but_not_one_made_narrower(b: Builder, tile: Value) -> None:
    half = b.cast(tile, "f16")
    assert b.cast(b.cast(half, "f32"), "f16") is half
    assert b.cast(half, "f32") is not tile
    assert code(b.cast(b.cast(half, "bf16"), "f16")) is Code.CAST


def test_a_choice_within_a_choice_by_the_same_condition_is_one(b: Builder, n: Value, s: Value, tile: Value) -> None:
    condition, another = b.compare("lt", n, b.const(3)), b.compare("gt", n, b.const(5))
    zero = b.const(0.0, "f32")
    once = b.select(condition, tile, zero)
    assert b.select(condition, once, zero) is once
    assert b.select(condition, once, s).producer.operands == (condition, tile, s)
    assert b.select(condition, s, once).producer.operands == (condition, s, zero)
    assert b.select(another, once, s).producer.operands == (another, once, s)


def test_what_a_load_leaves_out_need_not_be_left_out_again(b: Builder, n: Value) -> None:
    places = b.arange(0, 4)
    mask, another = b.compare("lt", places, n), b.compare("gt", places, n)
    zero, one = b.const(0.0, "f32"), b.const(1.0, "f32")
    loaded = b.load(b.kernel.argument("X"), places, mask, zero)
    assert b.select(mask, loaded, zero) is loaded
    assert code(b.select(mask, loaded, one)) is Code.SELECT
    assert code(b.select(another, loaded, zero)) is Code.SELECT
    assert code(b.select(mask, zero, loaded)) is Code.SELECT
    open_ended = b.load(b.kernel.argument("X"), places, mask)
    assert code(b.select(mask, open_ended, zero)) is Code.SELECT


def test_a_choice_that_is_none_is_its_value(b: Builder, n: Value, s: Value, tile: Value) -> None:
    condition = b.compare("lt", n, b.const(3))
    assert b.select(condition, tile, tile) is tile
    assert b.select(b.const(True, "i1"), tile, s) is tile
    assert b.select(b.const(False, "i1"), tile, s) is s


def test_conditions_that_hold_always_or_never_decide_a_conjunction(b: Builder, n: Value) -> None:
    condition = b.compare("lt", n, b.const(3))
    yes, no = b.const(True, "i1"), b.const(False, "i1")
    assert b.logical_and(condition, yes) is condition
    assert b.logical_and(yes, condition) is condition
    assert b.logical_and(condition, no) is no
    assert b.logical_and(condition, condition) is condition


# --- shapes


def test_two_permutations_are_one_and_none_is_none(b: Builder) -> None:
    x = b.reshape(b.arange(0, 24), (2, 3, 4))
    there = b.trans(x, (1, 2, 0))
    assert b.trans(there, (2, 0, 1)) is x
    twice = b.trans(there, (1, 2, 0))
    assert (twice.producer.operands, twice.shape) == ((x,), (4, 2, 3))
    assert twice.producer.attributes["order"] == (2, 0, 1)


def test_sums_over_an_extent_of_one_do_not_add(b: Builder, tile: Value) -> None:
    assert b.sum(b.expand(tile, 1), 1) is tile
    row = b.reshape(tile, (1, 4))
    assert code(b.sum(row, 0)) is Code.RESHAPE
    assert code(b.sum(b.expand(tile, 1), 0)) is Code.SUM


def test_the_sum_of_a_tile_of_zeros_is_zero_and_of_ones_its_size_stays_a_sum(b: Builder) -> None:
    assert constant(b.sum(b.whole(b.const(0.0, "f32"), (4,)), 0)) == 0.0
    assert code(b.sum(b.whole(b.const(1.0, "f32"), (4,)), 0)) is Code.SUM


def test_an_operation_again_on_smaller_operands_gets_back_the_extents_that_count(b: Builder, tile: Value) -> None:
    total = b.sum(tile, 0).producer
    one = b.const(1.0, "f32")
    again = b.again(total, [one])
    assert isinstance(again, Value)
    assert again.producer.operands[0].shape == (4,)
    running = b.pure(Code.CUMSUM, (tile,), "f32", (4,), {"axis": 0, "reverse": False}).producer
    assert b.again(running, [one]).shape == (4,)


def test_an_operation_again_on_larger_operands_grows(b: Builder, tile: Value) -> None:
    rows = b.load(b.kernel.argument("X"), b.reshape(b.arange(0, 8), (2, 4)))
    assert b.again(b.unary(Code.EXP, tile).producer, [rows]).shape == (2, 4)
    flipped = b.pure(Code.FLIP, (tile,), "f32", (4,), {"axis": 0}).producer
    assert b.again(flipped, [rows]).shape == (2, 4)


def test_an_operation_with_two_results_again_has_two(b: Builder, tile: Value) -> None:
    pairs = b.reshape(tile, (2, 2))
    split = b.add_op(Op(Code.SPLIT, (pairs,), [Value("f32", (2,)), Value("f32", (2,))]))
    found = b.again(split, [pairs])
    assert isinstance(found, tuple)
    assert [value.shape for value in found] == [(2,), (2,)]


def test_dividing_by_a_reciprocal_is_to_multiply(b: Builder, s: Value, tile: Value) -> None:
    # A norm's saved 1 / root gives 1 / rstd for the root again: each division costs a kernel more than the product.
    product = b.div(tile, b.div(b.const(1.0, "f32"), s))
    assert code(product) is Code.MUL
    assert product.producer is not None
    assert set(product.producer.operands) == {tile, s}
    assert code(b.div(tile, b.div(b.const(2.0, "f32"), s))) is Code.DIV
