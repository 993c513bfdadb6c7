"""Tensor descriptors made in the kernel, whose memory an allocator gives that is set before the launch; persistent."""

import torch
import triton
import triton.language as tl


@triton.constexpr_function
def _least(value, bound):
    return max(value, bound)


@triton.jit
def _tile_of(tile, across):
    return tile // across, tile % across


@triton.jit
def _persistent(
    A, B, C, rows, columns, inner,
    TA: tl.constexpr, TB: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """C = A B; TA, TB: A, B lie transposed in memory."""
    if TA:
        a = tl.make_tensor_descriptor(A, shape=[inner, rows], strides=[rows, 1], block_shape=[BK, BM])
    else:
        a = tl.make_tensor_descriptor(A, shape=[rows, inner], strides=[inner, 1], block_shape=[BM, BK])
    if TB:
        b = tl.make_tensor_descriptor(B, shape=[columns, inner], strides=[inner, 1], block_shape=[BN, BK])
    else:
        b = tl.make_tensor_descriptor(B, shape=[inner, columns], strides=[columns, 1], block_shape=[BK, BN])
    c = tl.make_tensor_descriptor(C, shape=[rows, columns], strides=[columns, 1], block_shape=[BM, BN])
    across = tl.cdiv(columns, BN)
    tiles = tl.cdiv(rows, BM) * across
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        i, j = _tile_of(tile, across)
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        for k in tl.range(0, tl.cdiv(inner, BK), num_stages=_least(2, 1)):
            left = a.load([k * BK, i * BM]).T if TA else a.load([i * BM, k * BK])
            right = b.load([j * BN, k * BK]).T if TB else b.load([k * BK, j * BN])
            acc = tl.dot(left, right, acc)
        c.store([i * BM, j * BN], acc.to(C.dtype.element_ty))


@triton.jit
def _bias(DY, DB, M, N, BM: tl.constexpr, BN: tl.constexpr):
    block = tl.make_block_ptr(
        base=DY, shape=(M, N), strides=(N, 1), offsets=(0, tl.program_id(0) * BN), block_shape=(BM, BN), order=(1, 0)
    )
    total = tl.zeros((BN,), tl.float32)
    for _ in range(0, M, BM):
        total += tl.sum(tl.load(block, boundary_check=(0, 1)), axis=0)
        block = tl.advance(block, (BM, 0))
    j = tl.program_id(0) * BN + tl.arange(0, BN)
    tl.store(DB + j, total, mask=j < N)


def _padded(t):
    """Rows whose bytes are a multiple of 16, as descriptors want them."""
    rows, columns = t.shape
    more = -columns % 4
    if not more:
        return t.contiguous()
    wide = torch.zeros((rows, columns + more), dtype=t.dtype, device=t.device)
    wide[:, :columns].copy_(t)
    return wide


def backward(saved, grad_out):
    x, w, b = saved
    M, K, N = *x.shape, w.shape[1]

    def allocate(size: int, alignment: int, stream: int | None):
        return torch.empty(size, device=x.device, dtype=torch.int8)

    triton.set_allocator(allocate)
    g, xp, wp = _padded(grad_out), _padded(x), _padded(w)
    Np, Kp = g.shape[1], xp.shape[1]
    if wp.shape[0] != Kp:
        full = torch.zeros((Kp, wp.shape[1]), dtype=wp.dtype, device=wp.device)
        full[: wp.shape[0]] = wp
        wp = full
    dx = torch.empty((M, Kp), dtype=x.dtype, device=x.device)
    dw = torch.empty((Kp, Np), dtype=w.dtype, device=w.device)
    db = torch.empty_like(b)
    tiles = {"BM": 16, "BN": 16, "BK": 16}
    _persistent[(4,)](g, wp, dx, M, Kp, Np, TA=False, TB=True, **tiles)
    _persistent[(4,)](xp, g, dw, Kp, Np, M, TA=True, TB=False, **tiles)
    _bias[(triton.cdiv(N, 16),)](grad_out.contiguous(), db, M, N, BM=16, BN=16)
    return dx[:, :K].contiguous(), dw[:K, :N].contiguous(), db
