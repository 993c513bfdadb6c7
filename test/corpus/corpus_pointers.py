"""Ways to name memory: pointers that loops carry, block pointers, descriptors of several ranks, views of bytes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from corpus.case import BLOCK_POINTERS, Case, in_dtypes

BF16, HALF = torch.bfloat16, torch.float16


@triton.jit
def _relax(A, B, n, steps, BLOCK: tl.constexpr):
    # the loop carries two pointers that change places
    o = tl.arange(0, BLOCK)
    source = A
    target = B
    for _ in range(steps):
        left = tl.load(source + o - 1, mask=(o > 0) & (o <= n), other=0.0)
        here = tl.load(source + o, mask=o < n, other=0.0)
        right = tl.load(source + o + 1, mask=o + 1 < n, other=0.0)
        tl.store(target + o, 0.5 * here + 0.25 * (left + right) + here * here * 0.125, mask=o < n)
        tl.debug_barrier()
        source, target = target, source


def relax(x: Tensor, steps: int) -> Tensor:
    buffers = (x.clone(), torch.empty_like(x))
    _relax[(1,)](*buffers, x.numel(), steps, BLOCK=64)
    return buffers[steps % 2]


def _relax_reference(x: Tensor, steps: int) -> Tensor:
    for _ in range(steps):
        wide = F.pad(x, (1, 1))
        x = 0.5 * x + 0.25 * (wide[:-2] + wide[2:]) + x * x / 8
    return x


@triton.jit
def _choose(A, B, PICK, OUT, N, BLOCK: tl.constexpr):
    # a whole row from one tensor or another, then lane by lane
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    pick = tl.load(PICK + row) != 0
    if pick:
        at = A + row * N
    else:
        at = B + row * N
    x = tl.load(at + c, mask=c < N, other=0.0)
    mixed = tl.load(tl.where(c % 2 == 0, A + row * N + c, B + row * N + c), mask=c < N, other=0.0)
    tl.store(OUT + row * N + c, x * mixed, mask=c < N)


def choose(a: Tensor, b: Tensor, pick: Tensor) -> Tensor:
    out = torch.empty_like(a)
    _choose[(a.shape[0],)](a, b, pick, out, a.shape[1], BLOCK=16)
    return out


def _choose_reference(a: Tensor, b: Tensor, pick: Tensor) -> Tensor:
    even = torch.arange(a.shape[1]) % 2 == 0
    return torch.where(pick.bool()[:, None], a, b) * torch.where(even, a, b)


@triton.jit
def _strided_blocks(X, Y, M, N, sm, sn, BM: tl.constexpr, BN: tl.constexpr):
    # a transposed block pointer, only one of whose borders is checked, filled with NaN outside
    source = tl.make_block_ptr(X, (N, M), (sn, sm), (0, tl.program_id(0) * BM), (BN, BM), (0, 1))
    total = tl.zeros((BN, BM), tl.float32)
    for _ in range(0, N, BN):
        x = tl.load(source, boundary_check=(0, 1), padding_option="nan")
        total += tl.where(x == x, x * x, 0.0)
        source = tl.advance(source, (BN, 0))
    target = tl.make_block_ptr(Y, (M,), (1,), (tl.program_id(0) * BM,), (BM,), (0,))
    tl.store(target, tl.sum(total, 0), boundary_check=(0,))


def strided_blocks(x: Tensor) -> Tensor:
    y = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    _strided_blocks[(triton.cdiv(x.shape[0], 8),)](x, y, *x.shape, *x.stride(), BM=8, BN=16)
    return y


@triton.jit
def _volume_descriptor(X, Y, BD: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr):
    d, h, w = tl.program_id(0) * BD, tl.program_id(1) * BH, tl.program_id(2) * BW
    x = X.load([d, h, w])
    Y.store([d, h, w], x * x + tl.sum(x, 0, keep_dims=True))


def volume_descriptor(x: Tensor) -> Tensor:
    """Three dimensions, the last tile of each ragged."""
    y = torch.empty_like(x)
    block = [2, 4, 16]
    grid = tuple(triton.cdiv(size, side) for size, side in zip(x.shape, block, strict=True))
    source, target = (TensorDescriptor.from_tensor(t, block) for t in (x, y))
    _volume_descriptor[grid](source, target, BD=2, BH=4, BW=16)
    return y


def _volume_reference(x: Tensor) -> Tensor:
    padded = F.pad(x, (0, 0, 0, 0, 0, x.shape[0] % 2))
    sums = padded.unflatten(0, (-1, 2)).sum(1).repeat_interleave(2, 0)[: x.shape[0]]
    return x * x + sums


@triton.jit
def _reduce_descriptor(X, OUT, M, N, BM: tl.constexpr, BN: tl.constexpr):
    source = tl.make_tensor_descriptor(X, shape=[M, N], strides=[N, 1], block_shape=[BM, BN])
    target = tl.make_tensor_descriptor(OUT, shape=[BM, N], strides=[N, 1], block_shape=[BM, BN])
    x = source.load([tl.program_id(0) * BM, tl.program_id(1) * BN])
    target.atomic_add([0, tl.program_id(1) * BN], x * x)


def reduce_descriptor(x: Tensor) -> Tensor:
    """Tiles are added through a descriptor."""
    triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8, device=x.device))
    out = torch.zeros((4, x.shape[1]), dtype=torch.float32, device=x.device)
    _reduce_descriptor[(triton.cdiv(x.shape[0], 4), triton.cdiv(x.shape[1], 8))](x, out, *x.shape, BM=4, BN=8)
    return out


def _reduce_reference(x: Tensor) -> Tensor:
    return F.pad(x, (0, 0, 0, -x.shape[0] % 4)).unflatten(0, (-1, 4)).square().sum(0)


@triton.jit
def _extremes_of_tiles(X, HIGH, LOW, BM: tl.constexpr, BN: tl.constexpr):
    m, n = tl.program_id(0) * BM, tl.program_id(1) * BN
    x = X.load([m, n])
    HIGH.atomic_max([0, n], x)
    LOW.atomic_min([0, n], x)


def extremes_of_tiles(x: Tensor) -> tuple[Tensor, Tensor]:
    """Programs compete for the elements of one row of tiles."""
    high, low = (torch.full((4, x.shape[1]), sign * 9.0, dtype=x.dtype, device=x.device) for sign in (-1, 1))
    blocks = [TensorDescriptor.from_tensor(t, [4, 8]) for t in (x, high, low)]
    _extremes_of_tiles[(x.shape[0] // 4, x.shape[1] // 8)](*blocks, BM=4, BN=8)
    return high, low


def _extremes_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    tiles = x.unflatten(0, (-1, 4))
    return tiles.max(0).values, tiles.min(0).values


@triton.jit
def _take_rows(X, Y, FROM, TO, K: tl.constexpr, BN: tl.constexpr):
    n = tl.program_id(0) * BN
    k = tl.arange(0, K)
    x = X.gather(tl.load(FROM + k), n)
    Y.scatter(x * x, tl.load(TO + k), n)


def take_rows(x: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """Rows out of range are read as zero and not written."""
    y = torch.zeros_like(x)
    blocks = [TensorDescriptor.from_tensor(t, [1, 8]) for t in (x, y)]
    _take_rows[(triton.cdiv(x.shape[1], 8),)](*blocks, source, target, K=8, BN=8)
    return y


def _take_reference(x: Tensor, source: Tensor, target: Tensor) -> Tensor:
    rows: dict[int, Tensor] = {}
    for read, write in zip(source.tolist(), target.tolist(), strict=True):
        rows[write] = x[read] ** 2 if 0 <= read < x.shape[0] else torch.zeros_like(x[0])
    return torch.stack([rows.get(row, torch.zeros_like(x[0])) for row in range(x.shape[0])])


def _row_numbers() -> tuple[Tensor, ...]:
    source = torch.tensor([3, 0, 3, 11, 9, 5, -1, 4], dtype=torch.int32)
    return torch.randn(10, 20), source, torch.tensor([1, 9, 0, 4, 7, 12, 5, 2], dtype=torch.int32)


@triton.jit
def _bool_mask(X, KEEP, OUT, COUNT, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = tl.load(KEEP + o, mask=o < n, other=0)
    x = tl.load(X + o, mask=(o < n) & keep, other=2.0, eviction_policy="evict_first", cache_modifier=".cg")
    tl.store(OUT + o, x * x, mask=o < n, eviction_policy="evict_last")
    tl.store(COUNT + tl.program_id(0), tl.sum(keep.to(tl.int32), 0))


def bool_mask(x: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(x)
    count = torch.empty(triton.cdiv(x.numel(), 16), dtype=torch.int64, device=x.device)
    _bool_mask[(count.numel(),)](x, keep, out, count, x.numel(), BLOCK=16)
    return out, count.sum()


def _bool_reference(x: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    return torch.where(keep, x, 2.0) ** 2, keep.sum()


@triton.jit
def _signs(X, Y, n, BLOCK: tl.constexpr):
    # copysign and abs on the bits of the number: the integer channel must not lose the value
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + o, mask=o < n, other=0.0)
    y = tl.load(Y + o, mask=o < n, other=0.0)
    larger = tl.where(tl.abs(x) > tl.abs(y), x, y)
    tl.store(X + o, larger, mask=o < n)
    tl.store(Y + o, tl.where(tl.abs(x) > tl.abs(y), y, x) * 3.0, mask=o < n)


def order_by_size(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Both arguments are overwritten."""
    _signs[(triton.cdiv(x.numel(), 16),)](x, y, x.numel(), BLOCK=16)
    return x, y


def _order_reference(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    first = x.abs() > y.abs()
    return torch.where(first, x, y), 3 * torch.where(first, y, x)


@triton.jit
def _ring(CACHE, NEW, POSITION, OUT, CAPACITY, D: tl.constexpr, BLOCK: tl.constexpr):
    # a ring buffer of keys: written at one place, then summed in order of age
    row = tl.program_id(0)
    d = tl.arange(0, D)
    position = tl.load(POSITION + row)
    base = CACHE + row * CAPACITY * D
    tl.store(base + position % CAPACITY * D + d, tl.load(NEW + row * D + d))
    tl.debug_barrier()
    age = tl.arange(0, BLOCK)
    slot = (position + CAPACITY - age) % CAPACITY
    live = (age < CAPACITY) & (age <= position)
    x = tl.load(base + slot[:, None] * D + d[None, :], mask=live[:, None], other=0.0)
    tl.store(OUT + row * D + d, tl.sum(x * tl.exp2(-age.to(tl.float32))[:, None], 0))


def ring_buffer(cache: Tensor, new: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(new)
    _ring[(new.shape[0],)](cache, new, position, out, cache.shape[1], D=new.shape[1], BLOCK=8)
    return out, cache


def _ring_reference(cache: Tensor, new: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    capacity = cache.shape[1]
    rows = torch.arange(new.shape[0])
    cache = cache.index_put((rows, position.long() % capacity), new)
    out = []
    for row, last in enumerate(position.tolist()):
        terms = [cache[row, (last - age) % capacity] * 0.5**age for age in range(min(capacity, last + 1))]
        out.append(sum(terms))
    return torch.stack(out), cache


CASES = [
    Case("relax_pointer_swap", relax, lambda: (torch.randn(40), 5), _relax_reference),
    *in_dtypes(
        Case(
            "choose_pointers",
            choose,
            lambda: (torch.randn(5, 11), torch.randn(5, 11), torch.tensor([1, 0, 0, 1, 1])),
            _choose_reference,
        ),
        HALF,
    ),
    *in_dtypes(Case("volume_descriptor", volume_descriptor, lambda: (torch.randn(3, 7, 24),), _volume_reference), BF16),
    Case("reduce_descriptor", reduce_descriptor, lambda: (torch.randn(10, 12),), _reduce_reference),
    Case("extremes_through_descriptors", extremes_of_tiles, lambda: (torch.randn(12, 16).half(),), _extremes_reference),
    Case("rows_through_descriptors", take_rows, _row_numbers, _take_reference),
    Case("bool_mask_and_hints", bool_mask, lambda: (torch.randn(40), torch.rand(40) < 0.5), _bool_reference),
    *in_dtypes(
        Case("order_by_size", order_by_size, lambda: (torch.randn(30), torch.randn(30)), _order_reference), BF16
    ),
    Case(
        "ring_buffer",
        ring_buffer,
        lambda: (torch.randn(3, 6, 8), torch.randn(3, 8), torch.tensor([2, 6, 17], dtype=torch.int32)),
        _ring_reference,
    ),
]

if BLOCK_POINTERS:
    CASES.append(
        Case("strided_blocks", strided_blocks, lambda: (torch.randn(13, 40)[:, ::2],), lambda x: (x * x).sum(1))
    )
