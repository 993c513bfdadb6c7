"""Forward kernels of many kinds, as users write them."""

import triton
import triton.language as tl


@triton.jit
def axpy(x_ptr, y_ptr, out_ptr, n, alpha, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    x = tl.load(x_ptr + offs, mask=mask)
    y = tl.load(y_ptr + offs, mask=mask, other=1.0)
    tl.store(out_ptr + offs, alpha * x + tl.exp(y) * tl.sigmoid(x) - tl.sqrt(tl.abs(y)), mask=mask)


@triton.jit
def row_softmax(x_ptr, y_ptr, stride, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride + cols, mask=cols < n, other=-float("inf"))
    x = x - tl.max(x, axis=0)
    p = tl.exp(x)
    tl.store(y_ptr + row * stride + cols, p / tl.sum(p, axis=0), mask=cols < n)


@triton.jit
def matmul(a_ptr, b_ptr, c_ptr, M, N, K, sam, sak, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    a_ptrs = a_ptr + rows[:, None] * sam + inner[None, :] * sak
    b_ptrs = b_ptr + inner[:, None] * N + cols[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        a = tl.load(a_ptrs, mask=(rows[:, None] < M) & (inner[None, :] < K - k), other=0.0)
        b = tl.load(b_ptrs, mask=(inner[:, None] < K - k) & (cols[None, :] < N), other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
        a_ptrs += BK * sak
        b_ptrs += BK * N
    tl.store(c_ptr + rows[:, None] * N + cols[None, :], acc, mask=(rows[:, None] < M) & (cols[None, :] < N))


@triton.jit
def matmul_blocks(a_ptr, b_ptr, c_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    a = tl.make_block_ptr(a_ptr, (M, K), (K, 1), (tl.program_id(0) * BM, 0), (BM, BK), (1, 0))
    b = tl.make_block_ptr(b_ptr, (K, N), (N, 1), (0, tl.program_id(1) * BN), (BK, BN), (1, 0))
    acc = tl.zeros((BM, BN), tl.float32)
    for _ in range(tl.cdiv(K, BK)):
        acc += tl.dot(
            tl.load(a, boundary_check=(0, 1), padding_option="zero"),
            tl.load(b, boundary_check=(0, 1), padding_option="zero"),
            input_precision="ieee",
        )
        a = tl.advance(a, (0, BK))
        b = tl.advance(b, (BK, 0))
    c = tl.make_block_ptr(c_ptr, (M, N), (N, 1), (tl.program_id(0) * BM, tl.program_id(1) * BN), (BM, BN), (1, 0))
    tl.store(c, acc, boundary_check=(0, 1))


@triton.jit
def described(x_ptr, y_ptr, M, N, BM: tl.constexpr, BN: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, [M, N], [N, 1], [BM, BN])
    y = tl.make_tensor_descriptor(y_ptr, [M, N], [N, 1], [BM, BN])
    row = tl.program_id(0) * BM
    for col in range(0, N, BN):
        y.store([row, col], tl.sin(x.load([row, col])) * 2)


@triton.jit
def given_descriptors(x, y, N, BM: tl.constexpr, BN: tl.constexpr):
    row = tl.program_id(0) * BM
    for col in range(0, N, BN):
        y.store([row, col], x.load([row, col]) + 1.0)


@triton.jit
def online_sum(x_ptr, y_ptr, n, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    if row * 2 >= tl.num_programs(0) + 100:
        return
    best = -float("inf")
    total = 0.0
    for start in tl.range(0, n, BLOCK, num_stages=2):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * stride + cols, mask=cols < n, other=-float("inf"))
        new = tl.maximum(best, tl.max(x, 0))
        total = total * tl.exp(best - new) + tl.sum(tl.exp(x - new), 0)
        best = new
    if total > 1.5:
        y = best + tl.log(total)
    else:
        y = best * 0.5
    tl.store(y_ptr + row, y)


@triton.jit
def late_return(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n, other=0.0)
    tl.store(y_ptr + offs, x, mask=offs < n)
    if tl.program_id(0) > 0:
        return
    tl.store(y_ptr + offs, x * 3, mask=offs < n)


@triton.jit
def bisection(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """A while loop with a carried pointer."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ptr = x_ptr + offs
    left = n
    total = tl.zeros((BLOCK,), tl.float32)
    while left > 0:
        total += tl.load(ptr)
        ptr += BLOCK
        left -= 1
    tl.store(y_ptr + offs, total)


@triton.jit
def scans(x_ptr, a_ptr, y_ptr, z_ptr, i_ptr, N: tl.constexpr, M: tl.constexpr):
    rows = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    x = tl.load(x_ptr + rows)
    a = tl.load(a_ptr + rows)
    h = linear(a, x)
    tl.store(y_ptr + rows, tl.cumsum(x, 1, reverse=True) + h + tl.flip(x, 1))
    best, where = tl.max(x, 1, return_indices=True)
    tl.store(z_ptr + tl.arange(0, M), best + tl.min(x, 1) + tl.reduce(a, 1, product))
    tl.store(i_ptr + tl.arange(0, M), where + tl.argmin(x, 1))


@triton.jit
def product(a, b):
    return a * b


@triton.jit
def recurrence(a1, x1, a2, x2):
    return a1 * a2, a2 * x1 + x2


@triton.jit
def linear(a, x):
    _, h = tl.associative_scan((a, x), 1, recurrence)
    return h


@triton.jit
def shapes(x_ptr, y_ptr, z_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)
    x = tl.load(x_ptr + offs)
    even, odd = tl.split(tl.reshape(x, (N // 2, 2)))
    turned = tl.join(even * 2, odd - 1)
    tl.store(y_ptr + offs, tl.reshape(tl.trans(turned, (1, 0)), (N,)))
    tl.store(z_ptr + tl.arange(0, 2 * N), tl.cat(x, x + 1, can_reorder=True))


@triton.jit
def scatter_add(x_ptr, index_ptr, out_ptr, flags_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    index = tl.load(index_ptr + offs, mask=mask, other=0)
    flag = tl.load(flags_ptr + offs, mask=mask, other=0)
    x = tl.load(x_ptr + offs, mask=mask, other=0.0)
    tl.atomic_add(out_ptr + index, tl.where(flag, x, -x), mask=mask)


@triton.jit
def counted(x_ptr, y_ptr, n, rows, stride, BLOCK: tl.constexpr):
    """Carried integers with closed forms, in nested loops, and what is left of them afterwards."""
    offs = tl.arange(0, BLOCK)
    seen = 0
    for r in range(2, rows, 3):
        place = 0
        for _ in range(0, n, BLOCK):
            x = tl.load(x_ptr + r * stride + place + offs, mask=place + offs < n, other=0.0)
            tl.store(y_ptr + r * stride + place + offs, x + seen, mask=place + offs < n)
            place += BLOCK
            seen += 1
    tl.store(y_ptr + rows * stride, seen + 0.5)


@triton.jit
def dropout(x_ptr, y_ptr, n, p, seed, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = tl.rand(seed, offs) > p
    x = tl.load(x_ptr + offs, mask=offs < n)
    tl.store(y_ptr + offs, tl.where(keep, x / (1 - p), 0.0), mask=offs < n)
