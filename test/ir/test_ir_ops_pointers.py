"""Pointers that are chosen, stored as integers, or loaded from memory."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from gradient_check import check_gradients


@triton.jit
def _either(A, B, Y, n: tl.constexpr):
    p = tl.program_id(0)
    source = tl.where(p % 2 == 0, A, B)
    lanes = tl.arange(0, n)
    mixed = tl.where(lanes < 2, A + lanes, B + lanes)
    tl.store(Y + p * n + lanes, tl.load(source + lanes) * tl.load(mixed))


def test_pointers_into_two_buffers_are_chosen_by_program_and_by_lane():
    def stub(a, b):
        y = torch.empty(3, 4, device=a.device)
        _either[(3,)](a, b, y, 4)
        return y

    def reference(a, b):
        mixed = torch.cat([a[:2], b[2:]])
        return torch.stack([a * mixed, b * mixed, a * mixed])

    check_gradients(stub, (torch.randn(4), torch.randn(4)), reference)


@triton.jit
def _block_either(A, B, Y, flag, n: tl.constexpr):
    a = tl.make_block_ptr(A, (4, 4), (4, 1), (0, 0), (n, n), (1, 0))
    b = tl.make_block_ptr(B, (4, 4), (1, 4), (0, 0), (n, n), (1, 0))
    block = a
    if tl.program_id(0) == flag:
        block = b
    block = tl.advance(block, (2, 1))
    y = tl.make_block_ptr(Y + tl.program_id(0) * n * n, (n, n), (n, 1), (0, 0), (n, n), (1, 0))
    tl.store(y, tl.load(block, boundary_check=(0, 1), padding_option="zero"))


@pytest.mark.skipif(not hasattr(tl, "advance"), reason="this Triton has no block pointers")
def test_block_pointers_are_chosen_by_program():
    # the second reads a transposed view: its strides must come along with its base
    def stub(a, b):
        y = torch.empty(2, 4, 4, device=a.device)
        _block_either[(2,)](a, b, y, 1, 4)
        return y

    def reference(a, b):
        return torch.stack([torch.nn.functional.pad(part[2:, 1:], (0, 1, 0, 2)) for part in (a, b.T)])

    check_gradients(stub, (torch.randn(4, 4), torch.randn(4, 4)), reference)


@triton.jit
def _by_integer(A, Y, n: tl.constexpr):
    lanes = tl.arange(0, n)
    address = A.to(tl.int64) + lanes * 4
    tl.store(Y + lanes, tl.load(address.to(tl.pointer_type(tl.float32))) * 2)


def test_pointers_through_integers_count_bytes():
    def stub(a):
        y = torch.empty_like(a)
        _by_integer[(1,)](a, y, a.numel())
        return y

    check_gradients(stub, (torch.randn(8),), lambda a: 2 * a)
