"""Numbers that come from constexprs bear their names, found by lowering at other sizes."""

from pathlib import Path

import front_kernels as k
import torch
import triton
import triton.language as tl
from front_checks import compare

from kernel_agent.compiler.front import read_launch
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.text import text


def read(stub, *args, distinct=True):
    kernels = []

    def note(launch):
        kernels.append(read_launch(launch, distinct=distinct))
        return read_launch(launch, distinct=False)

    compare(stub, *args, read=note)
    (kernel,) = kernels
    return kernel


def symbols(kernel, code=Code.CONST):
    return {op.attributes["symbol"] for op in kernel.ops if op.code is code and op.attributes["symbol"]}


def matmul_of(BM, BN, BK):
    def stub(a, b, c):
        k.matmul[(2, 2)](a, b, c, 20, 24, 40, a.stride(0), a.stride(1), BM=BM, BN=BN, BK=BK)

    return stub, torch.randn(20, 40), torch.randn(40, 24), torch.zeros(20, 24)


def test_ranges_and_constants_bear_the_names_of_constexprs():
    kernel = read(*matmul_of(16, 32, 64))
    assert symbols(kernel, Code.ARANGE) == {"BM", "BN", "BK"}
    assert symbols(kernel) == {"BM", "BN", "BK"}
    assert kernel.extents == {16: "BM", 32: "BN", 64: "BK"}
    assert kernel.constants == {"BM": 16, "BN": 32, "BK": 64}


def test_tiles_that_share_a_size_at_the_launch_get_sizes_of_their_own():
    """Else a pass could not tell which of them an extent is, and would print one for the other."""
    kernel = read(*matmul_of(16, 16, 16))
    assert sorted(kernel.extents.values()) == ["BK", "BM", "BN"]
    assert {kernel.constants[name]: name for name in ("BM", "BN", "BK")} == kernel.extents


def test_at_the_sizes_of_the_launch_extents_of_several_names_have_none():
    kernel = read(*matmul_of(16, 16, 32), distinct=False)
    assert kernel.extents == {32: "BK"}
    assert kernel.constants == {"BM": 16, "BN": 16, "BK": 32}
    assert symbols(kernel, Code.ARANGE) == {"BM", "BN", "BK"}, "each range still says whose it is"


@triton.jit
def formed(x_ptr, y_ptr, n, ROWS: tl.constexpr, COLS: tl.constexpr, SPLIT: tl.constexpr):
    lanes = tl.program_id(0) * (ROWS * COLS) + tl.arange(0, ROWS * COLS)
    x = tl.load(x_ptr + lanes, mask=lanes < n - (COLS - 1), other=0.0)
    half = tl.arange(0, COLS // 2)
    total = tl.sum(tl.reshape(x, (ROWS, COLS)), 0) / ROWS
    even, odd = tl.split(tl.reshape(total, (COLS // 2, 2)))
    tl.store(y_ptr + half, even + odd * (1.0 / SPLIT))


def test_expressions_over_constexprs_are_found():
    def stub(x, y):
        formed[(1,)](x, y, 64, ROWS=4, COLS=16, SPLIT=3)

    kernel = read(stub, torch.randn(64), torch.zeros(8))
    assert symbols(kernel, Code.ARANGE) == {"(ROWS * COLS)", "(COLS // 2)"}
    assert {"(COLS - 1)", "ROWS", "(1.0 / SPLIT)"} <= symbols(kernel)


@triton.jit
def configured(x_ptr, y_ptr, n, WIDTH: tl.constexpr, STEPS: tl.constexpr, DOUBLE: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n, other=0.0)
    for _ in tl.static_range(STEPS):
        x += tl.sin(x)
    if DOUBLE:
        x = x * 2
    tl.store(y_ptr + offs * WIDTH, x, mask=offs < n)


def test_constexprs_that_change_the_operations_belong_to_the_configuration():
    def stub(x, y):
        configured[(1,)](x, y, 16, WIDTH=3, STEPS=2, DOUBLE=True, BLOCK=16)

    kernel = read(stub, torch.randn(16), torch.zeros(48))
    assert kernel.constants["STEPS"] == 2
    assert kernel.constants["DOUBLE"] is True
    assert symbols(kernel) == {"WIDTH"}


def test_literals_that_equal_a_tile_stay_numbers():
    """2 is no SPLIT // 2 although it is one at this launch."""

    @triton.jit
    def literal(x_ptr, y_ptr, SPLIT: tl.constexpr):
        offs = tl.arange(0, 16)
        tl.store(y_ptr + offs, tl.load(x_ptr + offs) * 16 + SPLIT)

    def stub(x, y):
        literal[(1,)](x, y, SPLIT=16)

    kernel = read(stub, torch.randn(16), torch.zeros(16))
    assert symbols(kernel) == {"SPLIT"}
    assert kernel.extents == {}


@triton.jit
def strided(x_ptr, y_ptr, n, STEP: tl.constexpr):
    ptr = x_ptr + tl.arange(0, 16)
    for i in range(0, n, STEP):
        tl.store(y_ptr + i, tl.sum(tl.load(ptr), 0))
        ptr += 32


def test_an_advance_by_a_literal_is_no_multiple_of_a_step_that_may_change():
    """32 is twice the step at this launch alone: elsewhere 2 * i would be another address."""

    def stub(x, y):
        strided[(1,)](x, y, 48, STEP=16)

    kernel = read(stub, torch.randn(200), torch.zeros(48))
    (loop,) = [op for op in kernel.ops if op.code is Code.FOR]
    assert Code.FLOORDIV in [op.code for op in loop.blocks[0].ops]


def test_one_as_an_argument_is_an_argument():
    """Triton makes it a constant; a backward for this stride alone would be wrong for others."""
    stub, *args = matmul_of(16, 16, 16)
    assert "sak" in [value.name for value in read(stub, *args).arguments]


def test_results_bear_the_variables_of_the_source():
    def stub(x, y):
        k.row_softmax[(4,)](x, y, x.stride(0), 19, BLOCK=32)

    kernel = read(stub, torch.randn(4, 19), torch.zeros(4, 19))
    named = {op.results[0].name: op.code for op in kernel.ops if op.results and op.results[0].name}
    assert named["p"] is Code.EXP
    assert named["row"] is Code.PROGRAM_ID
    assert named["x"] is Code.SUB, "the variable is the last that the statement computes"
    assert "input" not in text(kernel), "variables of Triton's library are no names"
    (exp,) = [op for op in kernel.ops if op.code is Code.EXP]
    assert "tl.exp" in Path(k.__file__).read_text().split("\n")[exp.result.source_line - 1]


@triton.jit
def windowed(x_ptr, y_ptr, n, SIDE: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(-(SIDE // 2), SIDE // 2 + 1):
        total += tl.load(x_ptr + offs + j, mask=(offs + j >= 0) & (offs + j < n), other=0.0)
    tl.store(y_ptr + offs, total, mask=offs < n)


def test_a_constexpr_that_only_some_changes_of_leave_alone_is_fixed():
    """2 // 2 is 3 // 2, so that the kernel for 3 looked as if it were that for every side."""

    def stub(x, y):
        windowed[(1,)](x, y, 16, SIDE=3, BLOCK=16)

    kernel = read(stub, torch.randn(16), torch.zeros(16))
    assert "SIDE" in kernel.fixed
    assert "BLOCK" not in kernel.fixed


@triton.jit
def summed(x_ptr, y_ptr, LEN: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, LEN, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + at, mask=at < LEN, other=0.0)
    tl.store(y_ptr + tl.program_id(0), tl.sum(total, 0))


def summed_at(length, others):
    launches = []

    def note(launch):
        launches.append(launch)
        return read_launch(launch, distinct=False)

    compare(lambda x, y: summed[(1,)](x, y, LEN=length, BLOCK=16), torch.randn(40), torch.zeros(1), read=note)
    return read_launch(launches[0], others=others)


def test_a_loop_that_makes_one_trip_at_the_launch_is_a_loop_where_others_make_several():
    """Triton writes a single trip out: what was derived of it gave longer rows the gradient of their first tile."""
    kernel = summed_at(12, [{"LEN": 40, "BLOCK": 16}])
    assert [op.code for op in kernel.ops].count(Code.FOR) == 1
    assert kernel.fixed == frozenset()


def test_sizes_for_which_a_kernel_is_another_one_are_fixed():
    kernel = summed_at(40, [{"LEN": 40, "BLOCK": 64}])
    assert kernel.fixed == frozenset(), "a single trip is a case of several"

    def other(x, y):
        windowed[(1,)](x, y, 16, SIDE=4, BLOCK=16)

    launches = []
    compare(other, torch.randn(16), torch.zeros(16), read=lambda one: launches.append(one) or read_launch(one))
    assert "SIDE" in read_launch(launches[0], others=[{"SIDE": 5}]).fixed


@triton.jit
def five_tiles(
    x_ptr, y_ptr, n, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, D: tl.constexpr, E: tl.constexpr
):  # fmt: skip
    a, b, c = tl.arange(0, A), tl.arange(0, B), tl.arange(0, C)
    d, e = tl.arange(0, D), tl.arange(0, E)
    x = tl.load(x_ptr + a[:, None] * n + b[None, :])
    y = tl.load(x_ptr + b[:, None] * n + c[None, :])
    z = tl.load(x_ptr + c[:, None] * n + d[None, :])
    w = tl.load(x_ptr + d[:, None] * n + e[None, :])
    product = tl.dot(tl.dot(tl.dot(x, y), z), w)
    tl.store(y_ptr + a[:, None] * n + e[None, :], product)


@triton.jit
def headed(x_ptr, y_ptr, HEADS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    heads, lanes = tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    at = heads[:, None] * WIDTH + lanes[None, :]
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=(heads < HEADS)[:, None]), mask=(heads < HEADS)[:, None])


def test_a_launch_with_tiles_of_one_lane_fixes_no_size_of_the_others():
    """Triton folds one head away: the kernel of several heads was then held to be for as many as it was read at."""
    launches = []

    def several(x, y):
        headed[(1,)](x, y, HEADS=3, BLOCK=4, WIDTH=16)

    compare(several, torch.randn(48), torch.zeros(48), read=lambda one: launches.append(one) or read_launch(one))
    assert read_launch(launches[0], others=[{"HEADS": 1, "BLOCK": 1, "WIDTH": 32}]).fixed == frozenset()


@triton.jit
def powered(x_ptr, y_ptr, TAPS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    rows, lanes = tl.arange(0, BLOCK // 4), tl.arange(0, WIDTH)
    at = rows[:, None] * WIDTH + lanes[None, :]
    x = tl.load(x_ptr + at)
    for _ in tl.static_range(TAPS):
        x *= tl.load(x_ptr + at)
    tl.store(y_ptr + at, x)


def test_a_tile_of_one_lane_does_not_fix_the_others_beside_a_count_that_is_written_out():
    """Of a convolution with other taps, at one token, all sizes were held to tell it apart, channels among them."""
    launches = []

    def several(x, y):
        powered[(1,)](x, y, TAPS=2, BLOCK=16, WIDTH=16)

    compare(several, torch.randn(64), torch.zeros(64), read=lambda one: launches.append(one) or read_launch(one))
    assert read_launch(launches[0], others=[{"TAPS": 3, "BLOCK": 4, "WIDTH": 32}]).fixed == {"TAPS"}


def test_five_tiles_of_one_size_get_five_sizes():
    """With three changed at most, two extents stayed one number and were printed as such."""

    def stub(x, y):
        five_tiles[(1,)](x, y, 16, A=16, B=16, C=16, D=16, E=16)

    kernel = read(stub, torch.randn(16, 16), torch.zeros(16, 16))
    assert sorted(kernel.extents.values()) == ["A", "B", "C", "D", "E"]


@triton.jit
def halves(x_ptr, y_ptr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    pairs = tl.arange(0, BLOCK)
    at = tl.program_id(0) * DIM + 2 * pairs
    x = tl.load(x_ptr + at, mask=pairs < DIM // 2, other=0.0)
    tl.store(y_ptr + at, x, mask=pairs < tl.cdiv(DIM, 2))


def halves_of(dim):
    def stub(x, y):
        halves[(1,)](x, y, DIM=dim, BLOCK=16)

    return read(stub, torch.randn(40), torch.zeros(40))


def test_half_of_an_even_number_is_no_literal():
    """24 // 2 is 25 // 2: with 25 alone, heads of 32 columns got the gradient of 24, and nothing said so."""
    assert {"DIM", "(DIM // 2)", "((DIM + 1) // 2)"} <= symbols(halves_of(24))


def test_a_half_rounded_up_is_none_rounded_down():
    """Of powers of two, which were doubled alone, both are one number, and 17 columns would lose their last."""
    assert {"DIM", "(DIM // 2)", "((DIM + 1) // 2)"} <= symbols(halves_of(16))
