"""Forwards of Triton source that the schedules are tried on."""

import triton
import triton.language as tl


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


@triton.jit
def columns_with_columns(x_ptr, o_ptr, n, m, BM: tl.constexpr, B: tl.constexpr):
    """o = x' x of m rows and n columns: a program for every two tiles of B columns."""
    i, j = tl.program_id(0) * B + tl.arange(0, B), tl.program_id(1) * B + tl.arange(0, B)
    total = tl.zeros((B, B), tl.float32)
    for start in range(0, m, BM):
        rows = start + tl.arange(0, BM)
        left = tl.load(x_ptr + rows[None, :] * n + i[:, None], mask=(rows[None, :] < m) & (i[:, None] < n), other=0.0)
        right = tl.load(x_ptr + rows[:, None] * n + j[None, :], mask=(rows[:, None] < m) & (j[None, :] < n), other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
    tl.store(o_ptr + i[:, None] * n + j[None, :], total, mask=(i[:, None] < n) & (j[None, :] < n))
