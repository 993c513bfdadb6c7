"""What is rarer in forwards means what the executor says too; what has no place in a kernel is refused in words."""

import front_corner_kernels as k
import pytest
import torch
from front_checks import compare

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.ssa.code import Code


def equal(stub, *args):
    (compared,) = compare(stub, *args)
    assert compared.error <= 1e-12, f"memory differs by {compared.error:.1e}"
    assert compared.changed, "nothing was written"
    return compared.kernel


def codes(kernel):
    return [op.code for op in kernel.ops]


def test_pointers_go_on_where_a_loop_left_them():
    def stub(x, y):
        k.two_stages[(1,)](x, y, 12, 3, BLOCK=16)

    kernel = equal(stub, torch.randn(64), torch.zeros(16))
    assert all(len(op.results) == 1 for op in kernel.ops if op.code is Code.FOR), "a pointer is carried"


def test_a_loop_that_does_not_run_leaves_pointers_where_they_were():
    def stub(x, y):
        k.two_stages[(1,)](x, y, 0, 3, BLOCK=16)

    (compared,) = compare(stub, torch.randn(64), torch.ones(16))
    assert compared.error == 0


@pytest.mark.parametrize("which", [0, 1])
def test_pointers_into_one_tensor_may_be_chosen(which):
    def stub(x, y):
        k.chosen_pointer[(1,)](x, y, 5, which, BLOCK=16)

    equal(stub, torch.randn(64), torch.zeros(16))


def test_extremes_of_floats_and_counters_by_atomics():
    def stub(x, best, count, order):
        k.atomics[(2,)](x, best, count, order, 13, BLOCK=16)

    best, count = torch.tensor([-1.0, 0.5, -0.5, 3.0] * 2), torch.zeros(2, dtype=torch.int32)
    equal(stub, torch.randn(16), best, count, torch.zeros(2, dtype=torch.int32))


def test_gathers_interleaved_tiles_and_histograms():
    def stub(x, index, y, h):
        k.moved[(1,)](x, index, y, h, BLOCK=16)

    index = torch.randint(0, 16, (16,), dtype=torch.int32)
    kernel = equal(stub, torch.randn(16), index, torch.zeros(32), torch.zeros(16, dtype=torch.int32))
    assert Code.GATHER in codes(kernel)


def test_mathematical_functions():
    def stub(x, y):
        k.functions[(1,)](x, y, BLOCK=16)

    kernel = equal(stub, torch.randn(16), torch.zeros(16))
    assert {op.attributes["function"] for op in kernel.ops if op.code is Code.CALL} == {
        "libdevice.pow",
        "libdevice.log1p",
        "libdevice.atan2",
        "libdevice.rint",
    }
    assert Code.TANH in codes(kernel)


def test_whole_numbers_signed_and_unsigned():
    def stub(x, y, z):
        k.whole_numbers[(1,)](x, y, z, BLOCK=16)

    x = torch.randint(-100, 100, (16,), dtype=torch.int32)
    equal(stub, x, torch.zeros(16, dtype=torch.int32), torch.zeros(16, dtype=torch.int64))


def test_products_of_bytes_and_halves():
    def stub(x, w, y, z):
        k.small_product[(1,)](x, w, y, z, BLOCK=32)

    x, w = torch.randint(-9, 9, (2, 32, 32), dtype=torch.int8)
    equal(stub, x, w, torch.zeros(32, 32, dtype=torch.int32), torch.zeros(32, 32))


def test_functions_that_triton_does_not_inline():
    def stub(x, y):
        k.calls[(1,)](x, y, 3, BLOCK=16)

    equal(stub, torch.randn(16), torch.zeros(16))


def test_returns_in_nested_branches():
    def stub(x, y):
        k.nested_returns[(5,)](x, y, 3)

    equal(stub, torch.randn(8), torch.zeros(16))


def test_branches_of_an_elementwise_map_are_selections():
    def stub(x, y):
        k.mapped[(1,)](x, y, BLOCK=16)

    kernel = equal(stub, torch.randn(16), torch.zeros(16))
    assert Code.IF not in codes(kernel)


def test_a_search_by_halves():
    def stub(x, y):
        k.searched[(6,)](x, y, 20)

    equal(stub, torch.randn(20).mul(4).sort().values, torch.zeros(6, dtype=torch.int32))


def test_scans_and_reductions_without_a_code_keep_their_combine():
    def stub(x, y, p):
        k.running_extremes[(1,)](x, y, p, BLOCK=16)

    found = codes(equal(stub, torch.randn(16), torch.zeros(16), torch.zeros(1)))
    assert found.count(Code.SCAN) == 1
    assert found.count(Code.LINEAR_SCAN) == 2, "running products are recurrences, both ways"
    assert Code.REDUCE in found


def test_arguments_in_a_tuple():
    def stub(x, y):
        k.tupled[(1,)]((x, 3.5), y, BLOCK=16)

    equal(stub, torch.randn(16), torch.zeros(16))


def test_random_numbers_of_another_number_of_rounds_are_no_call_of_the_usual_ones():
    """A CALL says nothing of rounds: it would be evaluated, and printed, with the usual ten."""

    def stub(y):
        k.fewer_rounds[(1,)](y, 5, BLOCK=16)

    (compared,) = compare(stub, torch.zeros(16))
    assert compared.error < 1e-7  # the generator's scale, in 32 bits, is a decimal in the IR
    calls = [op.attributes["function"] for op in compared.kernel.ops if op.code is Code.CALL]
    assert calls == ["tl.randn"]


def test_rows_gathered_by_a_descriptor():
    def stub(x, y, rows):
        k.gathered_rows[(1,)](x, y, rows, 6, 24)

    rows = torch.tensor([3, 0, 5, 7, 2, 2, 1, 6], dtype=torch.int32)
    equal(stub, torch.randn(6, 24), torch.zeros(8, 16), rows)


def refused(stub, *args):
    with pytest.raises(CannotDerive) as caught:
        compare(stub, *args)
    return str(caught.value)


def test_a_pointer_into_one_of_two_tensors_is_refused_with_its_line():
    def stub(x, y, out):
        k.two_tensors[(1,)](x, y, out, 1)

    message = refused(stub, torch.randn(1), torch.randn(1), torch.zeros(1))
    line = k.two_tensors.starting_line_number + 3
    assert f"two_tensors, line {line}: a pointer may point into one of several arguments" in message
    assert "Load from each" in message


def test_an_address_out_of_memory_is_refused():
    def stub(table, out):
        k.addresses[(1,)](table, out)

    assert "address is computed as a number" in refused(stub, torch.zeros(1, dtype=torch.int64), torch.zeros(1))


def test_a_lock_is_refused():
    def stub(lock, out):
        k.locked[(1,)](lock, out)

    assert "compare and exchange" in refused(stub, torch.zeros(1, dtype=torch.int32), torch.zeros(1))
