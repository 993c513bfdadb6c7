"""Memory under autograd: overwrites, atomics, locks, scans, sorted values, block pointers, addresses."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from corpus.case import BLOCK_POINTERS
from gradient_check import check_gradients
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernel_agent.ir import as_image, execute


@triton.jit
def _square_in_place(X, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(X + offsets, mask=mask)
    tl.store(X + offsets, x * x, mask=mask)
    again = tl.load(X + offsets, mask=mask)
    tl.store(X + offsets, again * 3.0 + x, mask=mask)


def square_in_place(x: Tensor) -> Tensor:
    y = x * 2.0
    _square_in_place[(triton.cdiv(y.numel(), 16),)](y, y.numel(), BLOCK=16)
    return y + x


def test_in_place_overwrites_are_undone_in_exact_reverse_order():
    check_gradients(square_in_place, (torch.randn(50),), lambda x: 3 * (2 * x) ** 2 + 2 * x + x)


@triton.jit
def _same_statistic(X, Y, S, N, BLOCK: tl.constexpr):
    row, part = tl.program_id(0), tl.program_id(1)
    c = tl.arange(0, BLOCK)
    x = tl.load(X + row * N + c, mask=c < N, other=0.0)
    total = tl.sum(x * x, 0)
    tl.store(S + row, total)
    tl.store(Y + row * N + c, x * total, mask=(c < N) & (c % 2 == part))


def same_statistic(x: Tensor) -> tuple[Tensor, Tensor]:
    y, s = torch.empty_like(x), torch.empty(x.shape[0], device=x.device)
    _same_statistic[(x.shape[0], 2)](x, y, s, x.shape[1], BLOCK=16)
    return y, s


def test_a_value_that_two_programs_store_alike_gets_its_gradient_once():
    # both column programs store the same row statistic; counting both would double its gradient
    check_gradients(same_statistic, (torch.randn(3, 10),), lambda x: (x * (x * x).sum(-1)[:, None], (x * x).sum(-1)))


@triton.jit
def _column_sum(X, Y, M, N, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    x = tl.load(X + tl.program_id(0) * N + c, mask=c < N)
    tl.atomic_add(Y + c, x * x, mask=c < N)


def column_sum(x: Tensor) -> Tensor:
    y = torch.zeros(x.shape[1], device=x.device)
    _column_sum[(x.shape[0],)](x, y, *x.shape, BLOCK=16)
    return y


def test_atomic_add():
    check_gradients(column_sum, (torch.randn(9, 13),), lambda x: (x * x).sum(0))


@triton.jit
def _extremes(X, HIGH, LOW, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + offsets, mask=offsets < n, other=0.0)
    tl.atomic_max(HIGH + offsets % 4, x, mask=offsets < n)
    tl.atomic_min(LOW + offsets % 4, x, mask=offsets < n)


def extremes(x: Tensor) -> tuple[Tensor, Tensor]:
    high = torch.full((4,), float("-inf"), device=x.device)
    low = torch.full((4,), float("inf"), device=x.device)
    _extremes[(triton.cdiv(x.numel(), 8),)](x, high, low, x.numel(), BLOCK=8)
    return high, low


@pytest.mark.parametrize("shift", [-5.0, 0.0, 5.0])
def test_atomic_extremes_of_floats_of_either_sign(shift):
    # Triton updates floats through integers, signed for positive and unsigned for negative values
    check_gradients(extremes, (torch.randn(40) + shift,), lambda x: (x.view(-1, 4).amax(0), x.view(-1, 4).amin(0)))


@triton.jit
def _locked_sum(X, SUM, LOCK, COUNT, N: tl.constexpr):
    c = tl.arange(0, N)
    x = tl.load(X + tl.program_id(0) * N + c)
    while tl.atomic_cas(LOCK, 0, 1) == 1:
        pass
    if tl.load(COUNT) > 0:
        x += tl.load(SUM + c) * 0.5
    tl.atomic_xchg(COUNT, 1)
    tl.store(SUM + c, x)
    tl.debug_barrier()
    tl.atomic_xchg(LOCK, 0)


def locked_sum(x: Tensor) -> Tensor:
    total = torch.empty(x.shape[1], device=x.device)
    state = torch.zeros(2, dtype=torch.int32, device=x.device)
    _locked_sum[(x.shape[0],)](x, total, state, state[1:], N=x.shape[1])
    return total


def test_spin_lock_runs_program_by_program():
    def reference(x: Tensor) -> Tensor:
        total = x[0]
        for row in x[1:]:
            total = row + 0.5 * total
        return total

    check_gradients(locked_sum, (torch.randn(6, 8),), reference)


@triton.jit
def _last_one_sums(X, PARTIAL, COUNT, Y, P: tl.constexpr, N: tl.constexpr):
    program = tl.program_id(0)
    tl.store(PARTIAL + program, tl.sum(tl.load(X + program * N + tl.arange(0, N)), 0))
    if tl.atomic_add(COUNT, 1) == P - 1:
        tl.store(Y, tl.sum(tl.load(PARTIAL + tl.arange(0, P)), 0))


def last_one_sums(x: Tensor) -> Tensor:
    partial = torch.empty(x.shape[0], device=x.device)
    count, y = torch.zeros(1, dtype=torch.int32, device=x.device), torch.empty(1, device=x.device)
    _last_one_sums[(x.shape[0],)](x, partial, count, y, P=x.shape[0], N=x.shape[1])
    return y


def test_the_program_that_arrives_last_sees_the_others_results():
    check_gradients(last_one_sums, (torch.randn(4, 8),), lambda x: x.sum()[None])


@triton.jit
def _decay(left_decay, left, right_decay, right):
    return left_decay * right_decay, left * right_decay + right


@triton.jit
def _scans(X, A, Y, N: tl.constexpr):
    c = tl.arange(0, N)
    x, a = tl.load(X + c), tl.load(A + c)
    tl.store(Y + c, tl.cumsum(x, 0, reverse=True))
    tl.store(Y + N + c, tl.cumprod(a, 0))
    _, state = tl.associative_scan((a, x), 0, _decay)
    tl.store(Y + 2 * N + c, state)
    product, total = tl.reduce((a, x), 0, _decay)
    tl.store(Y + 3 * N, product + total)


def scans(x: Tensor, a: Tensor) -> Tensor:
    y = torch.empty(3 * x.numel() + 1, device=x.device)
    _scans[(1,)](x, a, y, N=x.numel())
    return y


def test_scans_and_reductions_with_combines_of_their_own():
    def reference(x: Tensor, a: Tensor) -> Tensor:
        states, state = [], x.new_zeros(())
        for value, decay in zip(x, a, strict=True):
            state = state * decay + value
            states.append(state)
        last = (a.prod() + state)[None]
        return torch.cat([x.flip(0).cumsum(0).flip(0), a.cumprod(0), torch.stack(states), last])

    check_gradients(scans, (torch.randn(16), torch.rand(16) + 0.5), reference)


@triton.jit
def _sharper(a, b):
    if a * a > b * b:
        chosen = a * 2.0
    else:
        chosen = b
    return chosen


@triton.jit
def _branching_reduce(X, Y, N: tl.constexpr):
    row = tl.program_id(0)
    tl.store(Y + row, tl.reduce(tl.load(X + row * N + tl.arange(0, N)), 0, _sharper))


def branching_reduce(x: Tensor) -> Tensor:
    y = torch.empty(x.shape[0], device=x.device)
    _branching_reduce[(x.shape[0],)](x, y, N=x.shape[1])
    return y


def test_a_combine_function_with_a_branch_chooses_element_by_element():
    # two elements per row: with more, the combine is not associative and order would matter
    def reference(x: Tensor) -> Tensor:
        return torch.where(x[:, 0] ** 2 > x[:, 1] ** 2, 2 * x[:, 0], x[:, 1])

    check_gradients(branching_reduce, (torch.randn(6, 2),), reference)


@triton.jit
def _sorted(X, Y, Z, N: tl.constexpr):
    row, c = tl.program_id(0), tl.arange(0, N)
    x = tl.load(X + row * N + c)
    tl.store(Y + row * N + c, tl.sort(x, descending=True))
    tl.store(Z + row * N + c, tl.flip(x, 0))


def sorted_and_flipped(x: Tensor) -> tuple[Tensor, Tensor]:
    y, z = torch.empty_like(x), torch.empty_like(x)
    _sorted[(x.shape[0],)](x, y, z, N=x.shape[1])
    return y, z


def test_sort_and_flip_keep_values_and_gradients_through_integer_code():
    # through float32 bit patterns values would be off by 1e-8 and gradients lost
    x = torch.randn(3, 16, dtype=torch.float64)
    check_gradients(
        sorted_and_flipped, (as_image(x, torch.float32),), lambda x: (x.sort(descending=True).values, x.flip(-1))
    )


@triton.jit
def _blocks(X, Y, M, N, BM: tl.constexpr, BN: tl.constexpr):
    source = tl.make_block_ptr(X, (M, N), (N, 1), (0, 0), (BM, BN), (1, 0))
    target = tl.make_block_ptr(Y, (N, M), (M, 1), (0, 0), (BN, BM), (1, 0))
    source = tl.advance(source, (tl.program_id(0) * BM, 0))
    target = tl.advance(target, (0, tl.program_id(0) * BM))
    for _ in range(0, N, BN):
        x = tl.load(source, boundary_check=(0, 1), padding_option="zero")
        tl.store(target, tl.trans(tl.exp(x)), boundary_check=(0, 1))
        source, target = tl.advance(source, (0, BN)), tl.advance(target, (BN, 0))


def blocks(x: Tensor) -> Tensor:
    y = torch.empty(x.shape[::-1], device=x.device)
    _blocks[(triton.cdiv(x.shape[0], 16),)](x, y, *x.shape, BM=16, BN=8)
    return y


@pytest.mark.skipif(not BLOCK_POINTERS, reason="this Triton has no block pointers")
def test_block_pointers_with_ragged_borders():
    check_gradients(blocks, (torch.randn(37, 21),), lambda x: x.exp().t())


@triton.jit
def _descriptors(source, Y, M, N, BM: tl.constexpr, BN: tl.constexpr):
    i, j = tl.program_id(0) * BM, tl.program_id(1) * BN
    target = tl.make_tensor_descriptor(Y, [M, N], [N, 1], [BM, BN])
    tile = source.load([i, j])
    target.store([i, j], tile * tile)


def descriptors(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    source = TensorDescriptor.from_tensor(x, [16, 16])
    _descriptors[(triton.cdiv(x.shape[0], 16), triton.cdiv(x.shape[1], 16))](source, y, *x.shape, BM=16, BN=16)
    return y


def test_tensor_descriptors_made_by_host_and_kernel():
    check_gradients(descriptors, (torch.randn(33, 40),), lambda x: x * x)


@triton.jit
def _by_address(ADDRESSES, OUT, SIZES, BLOCK: tl.constexpr):
    group = tl.program_id(0)
    source = tl.load(ADDRESSES + group).to(tl.pointer_type(tl.float32))
    target = tl.load(OUT + group).to(tl.pointer_type(tl.float32))
    c = tl.arange(0, BLOCK)
    mask = c < tl.load(SIZES + group)
    tl.store(target + c, tl.load(source + c, mask=mask) * (group + 2.0), mask=mask)


def by_address(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    outs = [torch.empty_like(a), torch.empty_like(b)]
    addresses = torch.tensor([a.data_ptr(), b.data_ptr()], device=a.device)
    out = torch.tensor([t.data_ptr() for t in outs], device=a.device)
    sizes = torch.tensor([a.numel(), b.numel()], dtype=torch.int32, device=a.device)
    _by_address[(2,)](addresses, out, sizes, BLOCK=32)
    return tuple(outs)


def test_pointers_loaded_from_memory_as_in_a_grouped_gemm():
    check_gradients(by_address, (torch.randn(10), torch.randn(20)), lambda a, b: (2 * a, 3 * b))


@triton.jit
def _counts_by_address(ADDRESSES, OLD):
    i = tl.arange(0, 2)
    counters = tl.load(ADDRESSES + i).to(tl.pointer_type(tl.int32))
    tl.store(OLD + i, tl.atomic_add(counters, 1))


def test_an_atomic_on_several_buffers_finds_the_old_value_of_each():
    def stub(a: Tensor, b: Tensor) -> Tensor:
        addresses = torch.tensor([a.data_ptr(), b.data_ptr()], device=a.device)
        old = torch.empty(2, dtype=torch.int32, device=a.device)
        _counts_by_address[(1,)](addresses, old)
        return old

    counters = (torch.tensor([3], dtype=torch.int32), torch.tensor([5], dtype=torch.int32))
    assert execute(stub, counters).result.tolist() == [3, 5]


def test_running_a_backward_needs_no_gradients_and_takes_saved_images():
    # saved images of one execution go into the next, with an expanded cotangent that must keep its zero strides
    def backward(saved: tuple[Tensor, ...], grad: Tensor) -> Tensor:
        assert grad.stride() == (0,)
        return column_sum(saved[0]) * grad

    x = torch.randn(4, 8)
    forward = execute(lambda x: (x * 2,), (x,))
    run = execute(backward, (forward.result, torch.ones(1).expand(8)))
    torch.testing.assert_close(run.result, (4 * x.double() ** 2).sum(0))
    assert not run.result.requires_grad
