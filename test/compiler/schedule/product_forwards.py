"""Products of matrices, and what is stored beside or instead of one, that the schedules are tried on."""

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
