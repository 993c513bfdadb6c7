"""Floats that travel as integers: sorted, flipped, packed, rounded by bit tricks, or made into new numbers."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from gradient_check import check_gradients

from kernel_agent.ir import UnsupportedOp, execute


def _run(kernel, *consts, dtype=None, size=None):
    """A stub that launches a kernel of one program on one input and one output."""

    def stub(x):
        y = torch.empty(size or x.numel(), dtype=dtype or x.dtype, device=x.device)
        kernel[(1,)](x, y, x.numel(), *consts)
        return y

    return stub


@triton.jit
def _sorted(X, Y, n: tl.constexpr, DESCENDING: tl.constexpr):
    c = tl.arange(0, n)
    tl.store(Y + c, tl.sort(tl.load(X + c), descending=DESCENDING))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("descending", [False, True])
def test_sorting_moves_gradients_with_the_values(dtype, descending):
    x = torch.randperm(32).to(dtype) - 11
    check_gradients(_run(_sorted, descending), (x,), lambda x: x.sort(descending=descending).values)


@triton.jit
def _packed_key(X, Y, n: tl.constexpr):
    c = tl.arange(0, n)
    bits = tl.load(X + c).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of the floats
    key = (ordered.to(tl.int64) << 32) | c.to(tl.int64)
    best = tl.max(key, 0)
    value = (best >> 32).to(tl.int32)
    value = (value ^ ((value >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    place = tl.arange(0, 2)
    tl.store(Y + place, tl.where(place == 0, value, best.to(tl.int32).to(tl.float32)))


@pytest.mark.parametrize("shift", [0.0, -20.0])
def test_the_largest_of_packed_keys_is_the_float_with_its_gradient(shift):
    # decoded from the pattern it would be a constant, rounded to float32
    x = torch.randn(16) + shift

    def reference(x):
        return torch.stack([x.max(), x.argmax().to(x.dtype)])

    check_gradients(_run(_packed_key, size=2), (x,), reference)


@triton.jit
def _sign_tricks(X, Y, n: tl.constexpr):
    c = tl.arange(0, n)
    bits = tl.load(X + c).to(tl.uint32, bitcast=True)
    size = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    opposite = (bits ^ 0x80000000).to(tl.float32, bitcast=True)
    tl.store(Y + c, size * size * opposite)


def test_sign_bits_cleared_and_flipped_are_absolute_value_and_negation():
    # taken for an unchanged float, the sign would be wrong
    check_gradients(_run(_sign_tricks), (torch.randn(16),), lambda x: x.abs() ** 2 * -x)


@triton.jit
def _cut_to_bf16(X, Y, n: tl.constexpr):
    c = tl.arange(0, n)
    bits = tl.load(X + c).to(tl.uint32, bitcast=True)
    near = bits + 0x7FFF + ((bits >> 16) & 1)
    tl.store(Y + c, (near & 0xFFFF0000).to(tl.float32, bitcast=True) * 3)


def test_rounding_by_bit_tricks_is_a_cast_and_casts_do_not_round():
    check_gradients(_run(_cut_to_bf16), (torch.randn(16),), lambda x: 3 * x)


@triton.jit
def _power_of_two(X, Y, n: tl.constexpr):
    c = tl.arange(0, n)
    bits = tl.load(X + c).to(tl.uint32, bitcast=True)
    tl.store(Y + c, (bits & 0x7F800000).to(tl.float32, bitcast=True))


def test_the_exponent_alone_is_a_new_number_without_gradient():
    # scales of mx formats are made so; 1.001 is close to its exponent's power of two and must not be taken for it
    x = torch.tensor([1.001, 1.5, 3.99, 1024.0, 0.3, 1e-3, 100.0, 2.0])
    execution = execute(_run(_power_of_two), (x,), leaves=(0,))
    assert torch.equal(execution.result.detach(), torch.exp2(x.double().log2().floor()))
    assert not execution.result.requires_grad or not bool(
        torch.autograd.grad(execution.result.sum(), [execution.leaves[0]])[0].any()
    )


@triton.jit
def _inverse_root(X, Y, n: tl.constexpr):
    c = tl.arange(0, n)
    x = tl.load(X + c)
    guess = (0x5F3759DF - (x.to(tl.int32, bitcast=True) >> 1)).to(tl.float32, bitcast=True)
    tl.store(Y + c, guess)


def test_arithmetic_on_bits_makes_new_numbers():
    x = torch.tensor([0.5, 1.0, 1.01, 4.0])
    wanted = (0x5F3759DF - (x.view(torch.int32) >> 1)).view(torch.float32).double()
    assert torch.equal(execute(_run(_inverse_root), (x,), leaves=(0,)).result.detach(), wanted)


@triton.jit
def _two_in_one(X, Y, n: tl.constexpr):
    c = tl.arange(0, n // 2)
    low = tl.load(X + 2 * c).to(tl.uint16, bitcast=True).to(tl.uint32)
    high = tl.load(X + 2 * c + 1).to(tl.uint16, bitcast=True).to(tl.uint32)
    both = (high << 16) | low
    tl.store(Y + c, (both >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True))


def test_taking_apart_two_floats_packed_into_one_integer_is_refused():
    with pytest.raises(UnsupportedOp, match="two floats packed into one integer"):
        execute(_run(_two_in_one, size=4), (torch.randn(8).bfloat16(),), leaves=(0,))


@triton.jit
def _widened_by_hand(X, Y, n: tl.constexpr):
    c = tl.arange(0, n)
    bits = tl.load(X + c).to(tl.uint16, bitcast=True).to(tl.uint32) << 16
    tl.store(Y + c, bits.to(tl.float32, bitcast=True) * 2)


def test_bfloat16_widened_by_a_shift_keeps_its_gradient():
    check_gradients(_run(_widened_by_hand, dtype=torch.float32), (torch.randn(8).bfloat16(),), lambda x: 2 * x)


@triton.jit
def _other_format(X, Y, n: tl.constexpr):
    c = tl.arange(0, n)
    tl.store(Y + c, tl.load(X + c).to(tl.float16, bitcast=True).to(tl.float32))


def test_one_16_bit_format_read_as_the_other_has_other_values():
    x = torch.randn(8).bfloat16()
    got = execute(_run(_other_format, dtype=torch.float32), (x,)).result
    assert torch.equal(got, x.view(torch.float16).double())


@triton.jit
def _swapped_by_copies(X, Y, n: tl.constexpr):
    c = tl.arange(0, n)
    x = tl.load(X + c)
    left = tl.sum(tl.where(c == 0, x, 0.0), 0) + tl.zeros([n], tl.float32)
    right = tl.sum(tl.where(c == 1, x, 0.0), 0) + tl.zeros([n], tl.float32)
    a, b = left.to(tl.int32, bitcast=True), right.to(tl.int32, bitcast=True)
    swapped = x.to(tl.int32, bitcast=True) ^ tl.where(left > right, a ^ b, tl.zeros([n], tl.int32))
    tl.store(Y + c, swapped.to(tl.float32, bitcast=True))


@pytest.mark.parametrize("values", [[2.0, 1.0], [1.0, 2.0], [1.0, 1.0]])
def test_a_swap_by_exclusive_or_of_copies_keeps_the_gradients(values):
    # the copies were cast one by one: that their bits cancel shows only in their values
    check_gradients(_run(_swapped_by_copies), (torch.tensor(values),), lambda x: x.sort(stable=True).values)


@triton.jit
def _two_at_once(X, Y, n: tl.constexpr):
    c = tl.arange(0, n)
    x = tl.load(X + c)
    bits = x.to(tl.int32, bitcast=True) ^ (x * 3).to(tl.int32, bitcast=True)
    tl.store(Y + c, bits.to(tl.float32, bitcast=True))


def test_an_exclusive_or_of_two_floats_is_no_float_and_refused():
    with pytest.raises(UnsupportedOp, match="two floats packed"):
        execute(_run(_two_at_once), (torch.tensor([2.0, 1.0]),), {}, leaves=(0,))
