"""Descriptors made on the host with a block that a hook of each configuration sets, as the persistent tutorial does."""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor


def _set_blocks(nargs):
    bm, bn, bk = nargs["BM"], nargs["BN"], nargs["BK"]
    nargs["a_desc"].block_shape = [bm, bk]
    nargs["b_desc"].block_shape = [bk, bn]
    nargs["c_desc"].block_shape = [bm, bn]


def get_configs(pre_hook=None):
    return [
        triton.Config({"BM": bm, "BN": 16, "BK": 16, "GROUP": 2}, num_stages=s, num_warps=w, pre_hook=pre_hook)
        for bm in [16, 32]
        for s in [2, 3]
        for w in [4]
    ]


@triton.jit
def _compute_pid(tile, in_group, rows, GROUP: tl.constexpr):
    group = tile // in_group
    first = group * GROUP
    size = min(rows - first, GROUP)
    return first + (tile % size), (tile % in_group) // size


@triton.autotune(configs=get_configs(pre_hook=_set_blocks), key=["M", "N", "K"])
@triton.jit
def _matmul(
    a_desc, b_desc, c_desc, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(axis=0)
    rows, columns = tl.cdiv(M, BM), tl.cdiv(N, BN)
    tiles = rows * columns
    for tile in tl.range(start, tiles, PROGRAMS, flatten=True):
        i, j = _compute_pid(tile, GROUP * columns, rows, GROUP)
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        for k in range(tl.cdiv(K, BK)):
            acc = tl.dot(a_desc.load([i * BM, k * BK]), b_desc.load([k * BK, j * BN]), acc)
        c_desc.store([i * BM, j * BN], acc)


@triton.jit
def _sum_rows(G, OUT, M, N, BLOCK: tl.constexpr):
    j = tl.program_id(0)
    m = tl.arange(0, BLOCK)
    total = 0.0
    for start in range(0, M, BLOCK):
        total += tl.sum(tl.load(G + (start + m) * N + j, mask=start + m < M, other=0.0))
    tl.store(OUT + j, total)


def _wide(t):
    """Rows of a multiple of 16 bytes."""
    wide = torch.zeros(t.shape[0], triton.cdiv(t.shape[1], 4) * 4, dtype=t.dtype, device=t.device)
    wide[:, : t.shape[1]] = t
    return wide


def matmul(a, b):
    M, K = a.shape
    K, N = b.shape
    a, b = _wide(a), _wide(b)
    c = torch.empty((M, b.shape[1]), device=a.device, dtype=a.dtype)
    dummy_block = [1, 1]
    a_desc = TensorDescriptor(a, [M, K], list(a.stride()), dummy_block)
    b_desc = TensorDescriptor(b, [K, N], list(b.stride()), dummy_block)
    c_desc = TensorDescriptor(c, [M, N], list(c.stride()), dummy_block)
    processors = torch.cuda.get_device_properties("cuda").multi_processor_count

    def grid(meta):
        return (min(processors, triton.cdiv(M, meta["BM"]) * triton.cdiv(N, meta["BN"])),)

    _matmul[grid](a_desc, b_desc, c_desc, M, N, K, PROGRAMS=processors)
    return c[:, :N].contiguous()


def backward(saved, grad_out):
    x, w, b = saved
    g = grad_out.contiguous()
    db = torch.empty_like(b)
    _sum_rows[(g.shape[1],)](g, db, *g.shape, BLOCK=16)
    return matmul(g, w.t()), matmul(x.t(), g), db
