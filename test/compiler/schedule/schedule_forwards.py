"""Forwards of Triton source that the schedules are tried on."""

import triton
import triton.language as tl


@triton.jit
def product_grouped(
    a_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, WITHIN: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    num_pid_m = tl.cdiv(M, BM)
    num_pid_n = tl.cdiv(N, BN)
    num_pid_in_group = GROUP * num_pid_n
    group_id = pid // num_pid_in_group
    first_pid_m = group_id * GROUP
    group_size_m = min(num_pid_m - first_pid_m, GROUP)
    if WITHIN:
        pid_m = first_pid_m + ((pid % num_pid_in_group) % group_size_m)
    else:
        pid_m = first_pid_m + (pid % group_size_m)
    pid_n = (pid % num_pid_in_group) // group_size_m
    offs_am = (pid_m * BM + tl.arange(0, BM)) % M
    offs_bn = (pid_n * BN + tl.arange(0, BN)) % N
    offs_k = tl.arange(0, BK)
    a_ptrs = a_ptr + (offs_am[:, None] * stride_am + offs_k[None, :] * stride_ak)
    b_ptrs = b_ptr + (offs_k[:, None] * stride_bk + offs_bn[None, :] * stride_bn)
    accumulator = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(tl.cdiv(K, BK)):
        a = tl.load(a_ptrs, mask=offs_k[None, :] < K - k * BK, other=0.0)
        b = tl.load(b_ptrs, mask=offs_k[:, None] < K - k * BK, other=0.0)
        accumulator = tl.dot(a, b, accumulator, input_precision="ieee")
        a_ptrs += BK * stride_ak
        b_ptrs += BK * stride_bk
    offs_cm = pid_m * BM + tl.arange(0, BM)
    offs_cn = pid_n * BN + tl.arange(0, BN)
    c_ptrs = c_ptr + stride_cm * offs_cm[:, None] + stride_cn * offs_cn[None, :]
    tl.store(c_ptrs, accumulator, mask=(offs_cm[:, None] < M) & (offs_cn[None, :] < N))


@triton.jit
def product_persistent(a_ptr, b_ptr, c_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rows, cols = tl.cdiv(M, BM), tl.cdiv(N, BN)
    for tile in range(tl.program_id(0), rows * cols, tl.num_programs(0)):
        band = tile // (2 * cols)
        height = tl.minimum(rows - band * 2, 2)
        inside = tile - band * 2 * cols
        row = (band * 2 + inside % height) * BM + tl.arange(0, BM)
        col = (inside // height) * BN + tl.arange(0, BN)
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        for start in range(0, K, BK):
            inner = start + tl.arange(0, BK)
            a_mask = (row[:, None] < M) & (inner[None, :] < K)
            b_mask = (inner[:, None] < K) & (col[None, :] < N)
            a = tl.load(a_ptr + row[:, None] * K + inner[None, :], mask=a_mask, other=0.0)
            b = tl.load(b_ptr + inner[:, None] * N + col[None, :], mask=b_mask, other=0.0)
            acc = tl.dot(a, b, acc, input_precision="ieee")
        tl.store(c_ptr + row[:, None] * N + col[None, :], acc, mask=(row[:, None] < M) & (col[None, :] < N))


@triton.jit
def product_in_rows(a_ptr, b_ptr, c_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    pid = tl.program_id(0)
    num_pid_n = tl.cdiv(N, BN)
    rows = (pid // num_pid_n) * BM + tl.arange(0, BM)
    cols = (pid % num_pid_n) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, K, BK):
        inner = start + tl.arange(0, BK)
        a_mask = (rows[:, None] < M) & (inner[None, :] < K)
        b_mask = (inner[:, None] < K) & (cols[None, :] < N)
        a = tl.load(a_ptr + rows[:, None] * K + inner[None, :], mask=a_mask, other=0.0)
        b = tl.load(b_ptr + inner[:, None] * N + cols[None, :], mask=b_mask, other=0.0)
        acc += tl.dot(a, b, input_precision="ieee")
    tl.store(c_ptr + rows[:, None] * N + cols[None, :], acc, mask=(rows[:, None] < M) & (cols[None, :] < N))


@triton.jit
def product_and_bias(a_ptr, b_ptr, bias_ptr, c_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, K, BK):
        inner = start + tl.arange(0, BK)
        a_mask = (rows[:, None] < M) & (inner[None, :] < K)
        b_mask = (inner[:, None] < K) & (cols[None, :] < N)
        a = tl.load(a_ptr + rows[:, None] * K + inner[None, :], mask=a_mask, other=0.0)
        b = tl.load(b_ptr + inner[:, None] * N + cols[None, :], mask=b_mask, other=0.0)
        acc += tl.dot(a, b, input_precision="ieee")
    acc += tl.load(bias_ptr + cols, mask=cols < N, other=0.0)[None, :]
    tl.store(c_ptr + rows[:, None] * N + cols[None, :], acc, mask=(rows[:, None] < M) & (cols[None, :] < N))


@triton.jit
def product_and_tanh(a_ptr, b_ptr, c_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, K, BK):
        inner = start + tl.arange(0, BK)
        a_mask = (rows[:, None] < M) & (inner[None, :] < K)
        b_mask = (inner[:, None] < K) & (cols[None, :] < N)
        a = tl.load(a_ptr + rows[:, None] * K + inner[None, :], mask=a_mask, other=0.0)
        b = tl.load(b_ptr + inner[:, None] * N + cols[None, :], mask=b_mask, other=0.0)
        acc += tl.dot(a, b, input_precision="ieee")
    acc = 1 - 2 / (tl.exp(2 * acc) + 1)
    tl.store(c_ptr + rows[:, None] * N + cols[None, :], acc, mask=(rows[:, None] < M) & (cols[None, :] < N))


@triton.jit
def _causal_trips(
    acc, q, k_ptr, v_ptr, base, rows, low, high, n,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    dims = tl.arange(0, D)
    for start in range(low, high, BN):
        cols = start + tl.arange(0, BN)
        at = base + cols[:, None] * D + dims[None, :]
        if WHOLE:
            k = tl.load(k_ptr + at)
            v = tl.load(v_ptr + at)
        else:
            k = tl.load(k_ptr + at, mask=cols[:, None] < n, other=0.0)
            v = tl.load(v_ptr + at, mask=cols[:, None] < n, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED:
            s = tl.where(rows[:, None] >= cols[None, :], s, 0.0)
        acc += tl.dot(s, v, input_precision="ieee")
    return acc


@triton.jit
def causal_sum(
    q_ptr, k_ptr, v_ptr, o_ptr, n,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Attention without its softmax: trips before the diagonal, then trips on it."""
    block = tl.program_id(0)
    base = tl.program_id(1) * n * D
    rows = block * BM + tl.arange(0, BM)
    dims = tl.arange(0, D)
    at = base + rows[:, None] * D + dims[None, :]
    q = tl.load(q_ptr + at, mask=rows[:, None] < n, other=0.0)
    acc = tl.zeros([BM, D], tl.float32)
    low = block * BM
    high = tl.minimum(n, low + BM)
    acc = _causal_trips(acc, q, k_ptr, v_ptr, base, rows, 0, low, n, D, BM, BN, False, WHOLE)
    acc = _causal_trips(acc, q, k_ptr, v_ptr, base, rows, low, high, n, D, BM, BN, True, WHOLE)
    tl.store(o_ptr + at, acc, mask=rows[:, None] < n)


@triton.jit
def triangle_product(a_ptr, b_ptr, y_ptr, n, D: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, AHEAD: tl.constexpr):
    """tril(A) B: whole tiles in front of the diagonal, and AHEAD further, are loaded without a mask of columns."""
    block = tl.program_id(0)
    z = tl.program_id(1)
    rows = block * BM + tl.arange(0, BM)
    dims = tl.arange(0, D)
    y = tl.zeros([BM, D], tl.float32)
    for start in range(0, block * BM + AHEAD, BK):
        cols = start + tl.arange(0, BK)
        a = tl.load(a_ptr + (z * n + rows[:, None]) * n + cols[None, :], mask=rows[:, None] < n, other=0.0)
        b = tl.load(b_ptr + (z * n + cols[:, None]) * D + dims[None, :])
        y += tl.dot(a, b, input_precision="ieee")
    for start in range(block * BM, tl.minimum((block + 1) * BM, n), BK):
        cols = start + tl.arange(0, BK)
        inside = (rows[:, None] < n) & (cols[None, :] < n)
        a = tl.load(a_ptr + (z * n + rows[:, None]) * n + cols[None, :], mask=inside, other=0.0)
        b = tl.load(b_ptr + (z * n + cols[:, None]) * D + dims[None, :], mask=cols[:, None] < n, other=0.0)
        y += tl.dot(tl.where(rows[:, None] >= cols[None, :], a, 0.0), b, input_precision="ieee")
    tl.store(y_ptr + (z * n + rows[:, None]) * D + dims[None, :], y, mask=rows[:, None] < n)


@triton.jit
def scaled_product(
    x_ptr, s_ptr, w_ptr, y_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BY_TILE: tl.constexpr
):
    """(x s) w: a number of s for each column of x or, BY_TILE, for each element of a tile of rows."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros([BM, BN], tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        inside = (rows[:, None] < M) & (k[None, :] < K)
        x = tl.load(x_ptr + rows[:, None] * K + k[None, :], mask=inside, other=0.0)
        if BY_TILE:
            s = tl.load(s_ptr + tl.arange(0, BM)[:, None] * K + k[None, :], mask=k[None, :] < K, other=0.0)
        else:
            s = tl.load(s_ptr + k, mask=k < K, other=0.0)[None, :]
        w = tl.load(w_ptr + k[:, None] * N + cols[None, :], mask=(k[:, None] < K) & (cols[None, :] < N), other=0.0)
        acc += tl.dot(x * s, w, input_precision="ieee")
    tl.store(y_ptr + rows[:, None] * N + cols[None, :], acc, mask=(rows[:, None] < M) & (cols[None, :] < N))


@triton.jit
def own_rows_first(q_ptr, k_ptr, o_ptr, n, D: tl.constexpr, BM: tl.constexpr, AHEAD: tl.constexpr):
    """o = (sum over keys of squares of scores) * q: those of the program's own rows, then of all tiles before them.

    AHEAD: the first tile is the one behind the program's own.
    """
    block = tl.program_id(0)
    rows, dims = tl.arange(0, BM), tl.arange(0, D)
    base = tl.program_id(1) * n * D
    at = base + (block * BM + rows)[:, None] * D + dims[None, :]
    mask = (block * BM + rows)[:, None] < n
    q = tl.load(q_ptr + at, mask=mask, other=0.0)
    keys = (block + AHEAD) * BM + rows
    k = tl.load(k_ptr + base + keys[:, None] * D + dims[None, :], mask=keys[:, None] < n, other=0.0)
    s = tl.dot(q, tl.trans(k))
    sums = 3.0 * tl.sum(s * s, 1)
    for tile in range(block):
        keys = tile * BM + rows
        k = tl.load(k_ptr + base + keys[:, None] * D + dims[None, :], mask=keys[:, None] < n, other=0.0)
        s = tl.dot(q, tl.trans(k))
        sums += tl.sum(s * s, 1)
    tl.store(o_ptr + at, sums[:, None] * q, mask=mask)


@triton.jit
def attention(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, n, m, scale,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, LAST_FIRST: tl.constexpr,
):  # fmt: skip
    """n rows that see m keys, with the log-sum-exp of each row; causal ones end together."""
    block = tl.program_id(0)
    if LAST_FIRST:
        block = tl.num_programs(0) - 1 - block
    head = tl.program_id(1)
    rows = block * BM + tl.arange(0, BM)
    dims = tl.arange(0, D)
    at = head * n * D + rows[:, None] * D + dims[None, :]
    q = tl.load(q_ptr + at, mask=rows[:, None] < n, other=0.0)
    top = tl.full([BM], float("-inf"), tl.float32)
    mass = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    end = m
    if CAUSAL:
        end = tl.minimum(m, (block + 1) * BM + m - n)
    for start in range(0, end, BN):
        cols = start + tl.arange(0, BN)
        kv_at = head * m * D + cols[:, None] * D + dims[None, :]
        k = tl.load(k_ptr + kv_at, mask=cols[:, None] < m, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * 1.44269504)
        seen = (cols < m)[None, :]
        if CAUSAL:
            seen = seen & (rows[:, None] + m - n >= cols[None, :])
        s = tl.where(seen, s, float("-inf"))
        new = tl.maximum(top, tl.max(s, axis=1))
        p = tl.exp2(s - new[:, None])
        alpha = tl.exp2(top - new)
        mass = mass * alpha + tl.sum(p, axis=1)
        v = tl.load(v_ptr + kv_at, mask=cols[:, None] < m, other=0.0)
        acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        top = new
    tl.store(o_ptr + at, acc / mass[:, None], mask=rows[:, None] < n)
    tl.store(lse_ptr + head * n + rows, top / 1.44269504 + tl.log(mass), mask=rows < n)


@triton.jit
def whole_tiles_and_rest(q_ptr, k_ptr, v_ptr, o_ptr, n, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """exp(q k') v over whole tiles of keys, then over the last one, whose scores are masked."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    dims = tl.arange(0, D)
    at = rows[:, None] * D + dims[None, :]
    q = tl.load(q_ptr + at, mask=rows[:, None] < n, other=0.0)
    acc = tl.zeros([BM, D], tl.float32)
    whole = n // BN * BN
    for start in range(0, whole, BN):
        cols = start + tl.arange(0, BN)
        kv_at = cols[:, None] * D + dims[None, :]
        k = tl.load(k_ptr + kv_at, mask=cols[:, None] < n, other=0.0)
        p = tl.exp(tl.dot(q, tl.trans(k), input_precision="ieee"))
        acc += tl.dot(p, tl.load(v_ptr + kv_at, mask=cols[:, None] < n, other=0.0), input_precision="ieee")
    for start in range(whole, n, BN):
        cols = start + tl.arange(0, BN)
        kv_at = cols[:, None] * D + dims[None, :]
        k = tl.load(k_ptr + kv_at, mask=cols[:, None] < n, other=0.0)
        p = tl.exp(tl.dot(q, tl.trans(k), input_precision="ieee"))
        p = tl.where((cols < n)[None, :], p, 0.0)
        acc += tl.dot(p, tl.load(v_ptr + kv_at, mask=cols[:, None] < n, other=0.0), input_precision="ieee")
    tl.store(o_ptr + at, acc, mask=rows[:, None] < n)


@triton.jit
def two_products(x_ptr, v_ptr, w_ptr, y_ptr, z_ptr, M, K, N, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    column = tl.program_id(0)
    first = tl.cdiv(N, BN)
    if column < first:
        _columns(x_ptr, v_ptr, y_ptr, rows, column, M, K, N, BM, BN, BK)
    else:
        _columns(x_ptr, w_ptr, z_ptr, rows, column - first, M, K, N, BM, BN, BK)


@triton.jit
def _columns(x_ptr, w_ptr, y_ptr, rows, column, M, K, N, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    cols = column * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, K, BK):
        inner = start + tl.arange(0, BK)
        x = tl.load(
            x_ptr + rows[:, None] * K + inner[None, :], mask=(rows[:, None] < M) & (inner[None, :] < K), other=0
        )
        w = tl.load(
            w_ptr + inner[:, None] * N + cols[None, :], mask=(inner[:, None] < K) & (cols[None, :] < N), other=0
        )
        acc += tl.dot(x, w, input_precision="ieee")
    tl.store(y_ptr + rows[:, None] * N + cols[None, :], acc, mask=(rows[:, None] < M) & (cols[None, :] < N))


@triton.jit
def weighted_means(q_ptr, k_ptr, v_ptr, o_ptr, n, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    head = tl.program_id(1)
    rows = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM + tl.arange(0, BM)
    dims = tl.arange(0, D)
    own = (head * n + rows[:, None]) * D + dims[None, :]
    q = tl.load(q_ptr + own, mask=rows[:, None] < n, other=0.0)
    norm = tl.zeros([BM], dtype=tl.float32)
    acc = tl.zeros([BM, D], dtype=tl.float32)
    for start in range(0, n, BN):
        keys = start + tl.arange(0, BN)
        inside = keys[:, None] < n
        there = (head * n + keys[:, None]) * D + dims[None, :]
        k = tl.load(k_ptr + there, mask=inside, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        p = tl.where(keys[None, :] < n, 1.0 / (s * s + 1.0), 0.0)
        norm += tl.sum(p, axis=1)
        acc += tl.dot(p, tl.load(v_ptr + there, mask=inside, other=0.0), input_precision="ieee")
    tl.store(o_ptr + own, acc / norm[:, None], mask=rows[:, None] < n)


@triton.jit
def grouped_sums(q_ptr, k_ptr, o_ptr, n, H, GROUP, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    batch = tl.program_id(1) // H
    head = tl.program_id(1) % H
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    dims = tl.arange(0, D)
    own = ((batch * n + rows[:, None]) * H + head) * D + dims[None, :]
    q = tl.load(q_ptr + own, mask=rows[:, None] < n, other=0.0)
    acc = tl.zeros([BM, D], dtype=tl.float32)
    for start in range(0, tl.minimum((tl.program_id(0) + 1) * BM, n), BN):
        keys = start + tl.arange(0, BN)
        there = ((batch * n + keys[:, None]) * (H // GROUP) + head // GROUP) * D + dims[None, :]
        k = tl.load(k_ptr + there, mask=keys[:, None] < n, other=0.0)
        s = tl.where(rows[:, None] >= keys[None, :], tl.dot(q, tl.trans(k), input_precision="ieee"), 0.0)
        acc += tl.dot(s, k, input_precision="ieee")
    tl.store(o_ptr + own, acc, mask=rows[:, None] < n)


@triton.jit
def sums_up_to(q_ptr, k_ptr, most_ptr, o_ptr, n, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    head = tl.program_id(1)
    most = tl.load(most_ptr + head)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    dims = tl.arange(0, D)
    own = (head * n + rows[:, None]) * D + dims[None, :]
    q = tl.load(q_ptr + own, mask=rows[:, None] < n, other=0.0)
    acc = tl.zeros([BM, D], dtype=tl.float32)
    whole = tl.maximum(most, 0) // BN * BN
    for start in range(0, whole, BN):
        keys = start + tl.arange(0, BN)
        k = tl.load(k_ptr + (head * n + keys[:, None]) * D + dims[None, :], mask=keys[:, None] < most, other=0.0)
        acc += tl.dot(tl.dot(q, tl.trans(k), input_precision="ieee"), k, input_precision="ieee")
    for start in range(whole, most, BN):
        keys = start + tl.arange(0, BN)
        k = tl.load(k_ptr + (head * n + keys[:, None]) * D + dims[None, :], mask=keys[:, None] < most, other=0.0)
        acc += tl.dot(tl.dot(q, tl.trans(k), input_precision="ieee"), k, input_precision="ieee")
    tl.store(o_ptr + own, acc, mask=rows[:, None] < n)


@triton.jit
def clamped_product(a_ptr, b_ptr, c_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, K, BK):
        there = k < K - start
        a = tl.load(a_ptr + tl.minimum(rows, M - 1)[:, None] * K + (start + k)[None, :], mask=there[None, :], other=0.0)
        b = tl.load(b_ptr + (start + k)[:, None] * N + tl.minimum(N - 1, cols)[None, :], mask=there[:, None], other=0.0)
        total += tl.dot(a, b, input_precision="ieee")
    tl.store(c_ptr + rows[:, None] * N + cols[None, :], total, mask=(rows[:, None] < M) & (cols[None, :] < N))


@triton.jit
def clamped_rows(a_ptr, c_ptr, M, N, BM: tl.constexpr, BN: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.arange(0, BN)
    a = tl.load(a_ptr + tl.minimum(rows, M - 1)[:, None] * N + cols[None, :], mask=cols[None, :] < N, other=0.0)
    tl.store(c_ptr + rows[:, None] * N + cols[None, :], a * a, mask=cols[None, :] < N)


@triton.jit
def clamped_parts(a_ptr, c_ptr, M, N, T, stride_b, stride_t, BM: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.arange(0, BN)
    source = tl.minimum(rows, M - 1)
    at = source // T * stride_b + source % T * stride_t
    a = tl.load(a_ptr + at[:, None] + cols[None, :], mask=cols[None, :] < N, other=0.0)
    mask = ((rows[:, None] < M) | (not MASKED)) & (cols[None, :] < N)
    tl.store(c_ptr + rows[:, None] * N + cols[None, :], a * a, mask=mask)


@triton.jit
def sliced_product(a_ptr, b_ptr, c_ptr, M, N, K, EACH, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    first = tl.program_id(2) * EACH
    last = tl.minimum(first + EACH, K)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(first, last, BK):
        k = start + tl.arange(0, BK)
        a = tl.load(a_ptr + rows[:, None] * K + k[None, :], mask=(rows[:, None] < M) & (k[None, :] < last), other=0.0)
        b = tl.load(b_ptr + k[:, None] * N + cols[None, :], mask=(k[:, None] < last) & (cols[None, :] < N), other=0.0)
        total += tl.dot(a, b, input_precision="ieee")
    here = c_ptr + tl.program_id(2) * M * N
    tl.store(here + rows[:, None] * N + cols[None, :], total, mask=(rows[:, None] < M) & (cols[None, :] < N))


@triton.jit
def scaled_slices(x_ptr, w_ptr, y_ptr, M, N, EACH, BM: tl.constexpr, BN: tl.constexpr):
    cols = tl.program_id(0) * BN + tl.arange(0, BN)
    first = tl.program_id(1) * EACH
    last = tl.minimum(first + EACH, M)
    w = tl.load(w_ptr + cols, mask=cols < N, other=0.0)
    for start in range(first, last, BM):
        rows = start + tl.arange(0, BM)
        mask = (rows[:, None] < last) & (cols[None, :] < N)
        x = tl.load(x_ptr + rows[:, None] * N + cols[None, :], mask=mask, other=0.0)
        tl.store(y_ptr + rows[:, None] * N + cols[None, :], x * w[None, :], mask=mask)


@triton.jit
def biased_exponents(x_ptr, w_ptr, bias_ptr, y_ptr, M, N, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    d = tl.arange(0, D)
    x = tl.load(x_ptr + rows[:, None] * D + d[None, :], mask=rows[:, None] < M, other=0.0)
    total = tl.zeros((BM,), dtype=tl.float32)
    for start in range(0, N, BN):
        n = start + tl.arange(0, BN)
        w = tl.load(w_ptr + n[:, None] * D + d[None, :], mask=n[:, None] < N, other=0.0)
        bias = tl.load(bias_ptr + n, mask=n < N, other=0.0)
        score = tl.dot(x, tl.trans(w), input_precision="ieee") + bias[None, :]
        total += tl.sum(tl.where(n[None, :] < N, tl.exp(score), 0.0), 1)
    tl.store(y_ptr + rows, total, mask=rows < M)


@triton.jit
def products_of_sequences(
    a_ptr, b_ptr, bounds_ptr, c_ptr, K, N, BR: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, ALIKE: tl.constexpr
):
    """A product for each sequence, of all its rows. Not `ALIKE`: programs of later columns leave later rows out."""
    tiles = tl.cdiv(K, BK)
    sequence = tl.program_id(0) // tiles
    k = tl.program_id(0) % tiles * BK + tl.arange(0, BK)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    begin = tl.load(bounds_ptr + sequence)
    end = tl.load(bounds_ptr + sequence + 1)
    length = end - begin
    if not ALIKE:
        length -= tl.program_id(0) % tiles + tl.program_id(1)
    acc = tl.zeros([BK, BN], dtype=tl.float32)
    for trip in range((length + BR - 1) // BR):
        rows = begin + trip * BR + tl.arange(0, BR)
        a_mask = (rows[:, None] < end) & (k[None, :] < K)
        b_mask = (rows[:, None] < end) & (n[None, :] < N)
        a = tl.load(a_ptr + rows[:, None] * K + k[None, :], mask=a_mask, other=0.0)
        b = tl.load(b_ptr + rows[:, None] * N + n[None, :], mask=b_mask, other=0.0)
        acc += tl.dot(tl.trans(a), b, input_precision="ieee")
    there = (k[:, None] < K) & (n[None, :] < N)
    tl.store(c_ptr + (sequence * K + k[:, None]) * N + n[None, :], acc, mask=there)


@triton.jit
def rows_with_all_rows(x_ptr, o_ptr, n, m, D: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr, FULL: tl.constexpr):
    """o = 3 x0 + sum over m rows of squares of scores, of the first n rows: tiles of BI with tiles of BJ.

    FULL: programs have whole tiles, and ask no mask.
    """
    i, dims = tl.program_id(0) * BI + tl.arange(0, BI), tl.arange(0, D)
    mask = (i < n) | FULL
    own = tl.load(x_ptr + i[:, None] * D + dims[None, :], mask=mask[:, None], other=0.0)
    sums = 3.0 * tl.sum(own, 1)
    for start in range(0, m, BJ):
        j = start + tl.arange(0, BJ)
        others = tl.load(x_ptr + j[:, None] * D + dims[None, :], mask=j[:, None] < m, other=0.0)
        s = tl.dot(own, tl.trans(others), input_precision="ieee")
        sums += tl.sum(s * s, 1)
    tl.store(o_ptr + i, sums, mask=mask)
