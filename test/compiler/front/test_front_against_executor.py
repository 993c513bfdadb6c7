"""Kernels that were read leave in memory what the executor of Triton's IR leaves there."""

import front_kernels as k
import pytest
import torch
import triton
import triton.language as tl
from front_checks import compare
from triton.tools.tensor_descriptor import TensorDescriptor

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.ssa.code import Code


def equal(stub, *args, writes):
    """The comparison of the only launch of a stub."""
    (compared,) = compare(stub, *args)
    assert compared.error <= 1e-12, f"memory differs by {compared.error:.1e}"
    assert compared.changed == writes, "the launch wrote to other buffers than the test means to compare"
    return compared.kernel


def codes(kernel):
    return [op.code for op in kernel.ops]


def loops(kernel):
    return [op for op in kernel.ops if op.code is Code.FOR]


def test_elementwise_arithmetic_with_a_sigmoid_in_one_piece():
    def stub(x, y, out):
        k.axpy[(3,)](x, y, out, 40, 0.3, BLOCK=16)

    kernel = equal(stub, torch.randn(40), torch.randn(40), torch.zeros(40), writes={"out"})
    assert Code.SIGMOID in codes(kernel)


def test_rows_that_are_reduced():
    def stub(x, y):
        k.row_softmax[(4,)](x, y, x.stride(0), 19, BLOCK=32)

    kernel = equal(stub, torch.randn(4, 19), torch.zeros(4, 19), writes={"y"})
    assert Code.REDUCE_MAX in codes(kernel)
    assert Code.SUM in codes(kernel)


@pytest.mark.parametrize("K", [32, 40], ids=["whole", "ragged"])
def test_a_matmul_whose_pointers_advance_carries_its_accumulator_alone(K):
    def stub(a, b, c):
        k.matmul[(2, 2)](a, b, c, 20, 24, K, a.stride(0), a.stride(1), BM=16, BN=16, BK=16)

    kernel = equal(stub, torch.randn(20, K), torch.randn(K, 24), torch.zeros(20, 24), writes={"c"})
    (loop,) = loops(kernel)
    assert [value.name for value in loop.results] == ["acc"], "addresses depend on the trip before"


def test_advances_that_are_a_multiple_of_the_step_need_no_division():
    """A share of the index, not its trip times the step: the addresses stay sums of products for every pass after."""

    def stub(a, b, c):
        k.matmul[(2, 2)](a, b, c, 20, 24, 40, a.stride(0), a.stride(1), BM=16, BN=16, BK=16)

    kernel = equal(stub, torch.randn(20, 40), torch.randn(40, 24), torch.zeros(20, 24), writes={"c"})
    assert all(op.code is not Code.FLOORDIV for op in loops(kernel)[0].blocks[0].ops)


def test_block_pointers_become_offsets_with_masks():
    def stub(a, b, c):
        k.matmul_blocks[(2, 2)](a, b, c, 20, 24, 40, BM=16, BN=16, BK=16)

    kernel = equal(stub, torch.randn(20, 40), torch.randn(40, 24), torch.zeros(20, 24), writes={"c"})
    (loop,) = loops(kernel)
    assert len(loop.results) == 1, "a block pointer is carried"


def test_tensor_descriptors_made_in_the_kernel():
    def stub(x, y):
        k.described[(2,)](x, y, 20, 24, BM=16, BN=16)

    equal(stub, torch.randn(20, 24), torch.zeros(20, 24), writes={"y"})


def test_tensor_descriptors_given_to_the_kernel_are_pointers_with_extents_and_strides():
    def stub(x, y):
        given = [TensorDescriptor(t, list(t.shape), list(t.stride()), [16, 16]) for t in (x, y)]
        k.given_descriptors[(2,)](*given, 24, BM=16, BN=16)

    kernel = equal(stub, torch.randn(20, 24), torch.zeros(20, 24), writes={"y"})
    names = [value.name for value in kernel.arguments]
    assert names[:5] == ["x", "x_shape_0", "x_shape_1", "x_stride_0", "x_stride_1"]


def test_an_online_reduction_with_an_early_return_and_a_branch():
    def stub(x, y):
        k.online_sum[(5,)](x, y, 37, x.stride(0), BLOCK=16)

    kernel = equal(stub, torch.randn(5, 37), torch.zeros(5), writes={"y"})
    assert Code.LEAVE_IF in codes(kernel)
    assert Code.IF in codes(kernel)
    assert loops(kernel)[0].attributes["num_stages"] == 2


def test_a_return_after_a_store_is_a_branch():
    def stub(x, y):
        k.late_return[(3,)](x, y, 40, BLOCK=16)

    kernel = equal(stub, torch.randn(40), torch.zeros(40), writes={"y"})
    assert Code.LEAVE_IF not in codes(kernel)


def test_a_while_loop_with_a_pointer():
    def stub(x, y):
        k.bisection[(2,)](x, y, 3, BLOCK=16)

    kernel = equal(stub, torch.randn(80), torch.zeros(32), writes={"y"})
    assert Code.WHILE in codes(kernel)


def test_scans_flips_and_reductions_of_several_kinds():
    def stub(x, a, y, z, i):
        k.scans[(1,)](x, a, y, z, i, N=16, M=4)

    x, a = torch.randn(4, 16), torch.rand(4, 16)
    outputs = torch.zeros(4, 16), torch.zeros(4), torch.zeros(4, dtype=torch.int32)
    found = codes(equal(stub, x, a, *outputs, writes={"y", "z", "i"}))
    for code in (Code.CUMSUM, Code.LINEAR_SCAN, Code.FLIP, Code.ARG_MAX, Code.ARG_MIN, Code.REDUCE_MIN, Code.REDUCE):
        assert code in found, code
    assert Code.SCAN not in found


def test_tiles_that_are_split_joined_turned_and_put_together():
    def stub(x, y, z):
        k.shapes[(1,)](x, y, z, N=16)

    equal(stub, torch.randn(16), torch.zeros(16), torch.zeros(32), writes={"y", "z"})


def test_atomic_additions_and_loads_of_conditions():
    def stub(x, index, out, flags):
        k.scatter_add[(3,)](x, index, out, flags, 40, BLOCK=16)

    index, flags = torch.randint(0, 7, (40,)), torch.rand(40) > 0.5
    kernel = equal(stub, torch.randn(40), index, torch.zeros(7), flags, writes={"out"})
    assert Code.ATOMIC_ADD in codes(kernel)
    assert kernel.argument("flags_ptr").element == "*i1"


def test_counters_of_nested_loops_have_closed_forms():
    def stub(x, y):
        k.counted[(1,)](x, y, 37, 6, 40, BLOCK=16)

    kernel = equal(stub, torch.randn(6 * 40 + 1), torch.zeros(6 * 40 + 1), writes={"y"})
    assert all(not loop.results for loop in loops(kernel))


def test_random_numbers_stay_calls():
    def stub(x, y):
        k.dropout[(3,)](x, y, 40, 0.4, 7, BLOCK=16)

    kernel = equal(stub, torch.randn(40), torch.zeros(40), writes={"y"})
    calls = [op.attributes["function"] for op in kernel.ops if op.code is Code.CALL]
    assert calls == ["tl.rand"]
    assert Code.MULHI not in codes(kernel), "the generator was inlined"


@triton.jit
def in_place(x_ptr, n, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    for i in range(n):
        tl.store(x_ptr + offs, tl.load(x_ptr + offs) * 2 + i)
        tl.store(x_ptr + offs, tl.load(x_ptr + offs) + 1)


def test_memory_that_is_written_is_read_again():
    """A second load that were the first one's value would not see what was stored between."""

    def stub(x):
        in_place[(1,)](x, 3, BLOCK=16)

    equal(stub, torch.randn(16), writes={"x"})


@triton.jit
def running(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    for i in range(n):
        tl.store(y_ptr + offs, tl.load(x_ptr + offs) * 2 + i)
        tl.store(y_ptr + offs, tl.load(x_ptr + offs) + 1)


def test_a_load_after_a_store_through_another_argument_of_the_same_memory_is_refused():
    """Every pass takes two arguments for two memories, and would load the first value again."""

    def stub(x):
        running[(1,)](x, x, 3, BLOCK=16)

    with pytest.raises(CannotDerive, match="x_ptr is read after a store to y_ptr"):
        compare(stub, torch.randn(16))


def test_memory_may_be_shared_by_what_is_read_first_and_written_then():
    def stub(x, y):
        k.axpy[(3,)](x, y, x, 40, 0.3, BLOCK=16)

    equal(stub, torch.randn(40), torch.randn(40), writes={"x"})


@triton.jit
def comparisons(x_ptr, y_ptr, out_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs)
    y = tl.load(y_ptr + offs)
    odd = offs % 3 == 1
    bits = (x < y).to(tl.int32) + 2 * (x <= y) + 4 * (x == y) + 8 * (x != y) + 16 * (x > y) + 32 * (x >= y)
    bits += 64 * (not_less(x, y)) + 128 * (odd ^ (x > 0)) - odd.to(tl.int8)
    tl.store(out_ptr + offs, bits)


@triton.jit
def not_less(x, y):
    return (x < y) == 0


def test_comparisons_with_nan():
    def stub(x, y, out):
        comparisons[(1,)](x, y, out, BLOCK=16)

    x = torch.randn(16)
    y = x.clone()
    y[::2] += 1
    x[3:8:2] = float("nan")
    equal(stub, x, y, torch.zeros(16, dtype=torch.int32), writes={"out"})
