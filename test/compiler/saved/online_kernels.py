"""Forwards whose loops keep the largest so far, and rescale their sums where a larger one comes."""

import triton
import triton.language as tl


@triton.jit
def cross_entropy(x_ptr, label_ptr, loss_ptr, lse_ptr, stride, n, BLOCK: tl.constexpr, STORE_LSE: tl.constexpr):
    row = tl.program_id(0)
    label = tl.load(label_ptr + row)
    m = -float("inf")
    d = 0.0
    for off in range(0, n, BLOCK):
        cols = off + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * stride + cols, mask=cols < n, other=-float("inf"))
        m_new = tl.maximum(m, tl.max(x, axis=0))
        d = d * tl.exp(m - m_new) + tl.sum(tl.exp(x - m_new), axis=0)
        m = m_new
    lse = m + tl.log(d)
    if STORE_LSE:
        tl.store(lse_ptr + row, lse)
    tl.store(loss_ptr + row, lse - tl.load(x_ptr + row * stride + label))


@triton.jit
def softmax_looped(x_ptr, y_ptr, stride, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    m = -float("inf")
    d = 0.0
    for off in range(0, n, BLOCK):
        cols = off + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * stride + cols, mask=cols < n, other=-float("inf"))
        m_new = tl.maximum(m, tl.max(x, axis=0))
        d = d * tl.exp(m - m_new) + tl.sum(tl.exp(x - m_new), axis=0)
        m = m_new
    for off in range(0, n, BLOCK):
        cols = off + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * stride + cols, mask=cols < n, other=-float("inf"))
        tl.store(y_ptr + row * stride + cols, tl.exp(x - m) / d, mask=cols < n)


@triton.jit
def softmax_by_lanes(x_ptr, y_ptr, stride, n, scale, BLOCK: tl.constexpr, KIND: tl.constexpr):
    row = tl.program_id(0)
    m = tl.full((BLOCK,), -float("inf"), tl.float32)
    d = tl.full((BLOCK,), 1.0 if KIND == "one more" else 0.0, tl.float32)
    for off in range(0, n - 1 if KIND == "fewer" else n, BLOCK):
        cols = off + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * stride + cols, mask=cols < n, other=-float("inf")) * scale
        if KIND == "squares":
            x = x * x
        m_new = tl.maximum(m, x)
        shift = tl.where(m_new == -float("inf"), 0.0, m_new)
        d = d * tl.exp(m - shift) + tl.exp(x - shift)
        m = m_new
    largest = tl.max(m, axis=0)
    if KIND == "guarded":
        largest = tl.where(largest == -float("inf"), 0.0, largest)
    total = tl.sum(d * tl.exp(m - largest), axis=0)
    for off in range(0, n, BLOCK):
        cols = off + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * stride + cols, mask=cols < n, other=-float("inf")) * scale
        tl.store(y_ptr + row * stride + cols, tl.exp(x - largest) / total, mask=cols < n)


@triton.jit
def softmin_by_lanes(x_ptr, t_ptr, y_ptr, stride, n, BLOCK: tl.constexpr, KIND: tl.constexpr):
    row = tl.program_id(0)
    t = tl.load(t_ptr)
    least = tl.full((BLOCK,), 1.0e30, tl.float32)
    d = tl.zeros((BLOCK,), tl.float32)
    for off in range(0, n, BLOCK):
        cols = off + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * stride + cols, mask=cols < n, other=float("inf"))
        lower = tl.minimum(least, x)
        d = d * tl.exp((lower - least) / t) + tl.exp((lower - x) / t)
        least = lower
    low = tl.min(least, 0)
    total = tl.sum(d * tl.exp((low - least) / t), 0)
    if KIND == "other unit":
        tl.store(y_ptr + row, low - 2.0 * t * tl.log(total))
    else:
        tl.store(y_ptr + row, low - t * tl.log(total))


@triton.jit
def _trips(
    acc, mass, m, q, k_ptr, v_ptr, base, rows, low, high, n, scale,
    D: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, GUARD: tl.constexpr,
):  # fmt: skip
    dims = tl.arange(0, D)
    for start in range(low, high, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        inside = cols < n
        k = tl.load(k_ptr + base + cols[:, None] * D + dims[None, :], mask=inside[:, None], other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        s = tl.where(inside[None, :], s, -float("inf"))
        if CAUSAL:
            s = tl.where(rows[:, None] >= cols[None, :], s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1))
        m_safe = m_new
        if GUARD:
            m_safe = tl.where(m_new == -float("inf"), 0.0, m_new)
        p = tl.exp2(s - m_safe[:, None])
        alpha = tl.exp2(m - m_safe)
        v = tl.load(v_ptr + base + cols[:, None] * D + dims[None, :], mask=inside[:, None], other=0.0)
        acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        mass = mass * alpha + tl.sum(p, axis=1)
        m = m_new
    return acc, mass, m


@triton.jit
def attention(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, n, scale,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, GUARD: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    head = tl.program_id(1)
    base = head * n * D
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, D)
    q = tl.load(q_ptr + base + rows[:, None] * D + dims[None, :], mask=rows[:, None] < n, other=0.0)
    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    scale *= 1.44269504
    high = n
    if CAUSAL:
        high = block * BLOCK_M
    acc, mass, m = _trips(acc, mass, m, q, k_ptr, v_ptr, base, rows, 0, high, n, scale, D, BLOCK_N, False, GUARD)
    if CAUSAL:
        low = block * BLOCK_M
        high = tl.minimum(n, low + BLOCK_M)
        acc, mass, m = _trips(acc, mass, m, q, k_ptr, v_ptr, base, rows, low, high, n, scale, D, BLOCK_N, True, GUARD)
    if GUARD:
        mass = tl.where(mass == 0.0, 1.0, mass)
    o = acc / mass[:, None]
    tl.store(o_ptr + base + rows[:, None] * D + dims[None, :], o.to(o_ptr.dtype.element_ty), mask=rows[:, None] < n)
    tl.store(lse_ptr + head * n + rows, m + tl.log2(mass), mask=rows < n)


@triton.jit
def segment_logsumexp(x_ptr, bounds_ptr, y_ptr, BLOCK: tl.constexpr):
    # how many trips a program makes is known in the kernel alone
    segment = tl.program_id(0)
    begin, end = tl.load(bounds_ptr + segment).to(tl.int32), tl.load(bounds_ptr + segment + 1).to(tl.int32)
    top, total = -float("inf"), 0.0
    for start in range(begin, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < end, other=-float("inf"))
        higher = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), 0)
        top = higher
    tl.store(y_ptr + segment, top + tl.log(total))


@triton.jit
def _log_sum_step(m, d, x):
    m_new = tl.maximum(m, tl.max(x, axis=0))
    return m_new, d * tl.exp(m - m_new) + tl.sum(tl.exp(x - m_new), axis=0)


@triton.jit
def log_sum_in_whole_tiles(x_ptr, lse_ptr, stride, n, BLOCK: tl.constexpr, LAST: tl.constexpr):
    row = tl.program_id(0)
    m = -float("inf")
    d = 0.0
    whole = n // BLOCK * BLOCK
    for off in range(0, whole, BLOCK):
        cols = off + tl.arange(0, BLOCK)
        m, d = _log_sum_step(m, d, tl.load(x_ptr + row * stride + cols))
    if whole < n:
        cols = whole + tl.arange(0, BLOCK)
        end = n - 1 if LAST == "an element less" else n
        x = tl.load(x_ptr + row * stride + cols, mask=cols < end, other=-float("inf"))
        if LAST == "another factor":
            x = x * 2
        m, d = _log_sum_step(m, d, x)
    tl.store(lse_ptr + row, m + tl.log(d))


@triton.jit
def two_log_sums(x_ptr, y_ptr, lse_ptr, stride, n, distance, BLOCK: tl.constexpr, PLANES: tl.constexpr):
    row = tl.program_id(0)
    m = -float("inf")
    d = 0.0
    m_half = -float("inf")
    d_half = 0.0
    for off in range(0, n, BLOCK):
        cols = off + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * stride + cols, mask=cols < n, other=-float("inf"))
        m, d = _log_sum_step(m, d, x)
        m_half, d_half = _log_sum_step(m_half, d_half, 0.5 * x)
    lse = m + tl.log(d)
    lse_half = m_half + tl.log(d_half)
    tl.store(lse_ptr + row, lse)
    tl.store(lse_ptr + row + (tl.num_programs(0) if PLANES else distance), lse_half)
    tl.store(y_ptr + row, lse * lse_half)


@triton.jit
def softmax_of_some_trips(
    x_ptr, v_ptr, on_ptr, z_ptr, y_ptr, lse_ptr, n, lanes, BLOCK: tl.constexpr, KIND: tl.constexpr
):
    lane = tl.arange(0, BLOCK)
    inside = lane < lanes
    top = tl.full([BLOCK], -float("inf"), tl.float32)
    norm = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK], tl.float32)
    for trip in range(n):
        on = tl.load(on_ptr + trip) > 0
        if KIND == "found":
            on = tl.max(top, axis=0) < 2.0
        if on:
            at = (trip * lanes + lane)[:, None] * 4 + tl.arange(0, 4)[None, :]
            x = tl.load(x_ptr + at, mask=inside[:, None], other=-float("inf"))
            higher = tl.maximum(top, tl.max(x, axis=1))
            finite = tl.where(higher == -float("inf"), 0.0, higher)
            p = tl.exp(x - finite[:, None])
            fade = tl.exp(top - finite)
            norm = norm * fade + tl.sum(p, axis=1)
            acc = acc * fade + tl.sum(p * tl.load(v_ptr + at, mask=inside[:, None], other=0.0), axis=1)
            top = higher
    stored = inside
    if KIND == "rows" or KIND == "more rows":
        norm = tl.where(inside, norm, 1.0)
        lse = top + tl.log(norm)
    else:
        empty = norm == 0.0
        norm = tl.where(empty, 1.0, norm)
        lse = tl.where(empty, float("inf"), top + tl.log(norm))
    y = acc / norm
    if KIND == "instead":
        y = tl.where(empty, tl.load(z_ptr + lane, mask=inside, other=0.0), y)
    if KIND == "more rows":
        stored = lane <= lanes
    tl.store(y_ptr + lane, y, mask=stored)
    tl.store(lse_ptr + lane, lse, mask=stored)


@triton.jit
def mixture(x_ptr, p_ptr, y_ptr, lse_ptr, parts, n, PARTS: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr):
    row = tl.program_id(0)
    k = tl.arange(0, PARTS)
    rows = (row * parts + k[:, None]) * n
    m = tl.full((PARTS, BLOCK), -1.0e30, tl.float32)
    d = tl.zeros((PARTS, BLOCK), tl.float32)
    for off in range(0, n, BLOCK):
        cols = off + tl.arange(0, BLOCK)[None, :]
        x = tl.load(x_ptr + rows + cols, mask=(k[:, None] < parts) & (cols < n), other=-float("inf"))
        m_new = tl.maximum(m, x)
        d = d * tl.exp(m - m_new) + tl.exp(x - m_new)
        m = m_new
    largest = tl.max(m, 1)
    total = tl.sum(d * tl.exp(m - largest[:, None]), 1)
    lse = largest + tl.log(tl.where(k < parts, total, 1.0))
    tl.store(lse_ptr + row * parts + k, lse, mask=k < parts)
    if KIND == "padded with zeros":
        prior = tl.load(p_ptr + row * parts + k, mask=k < parts, other=0.0)
    else:
        prior = tl.load(p_ptr + row * parts + k, mask=k < parts, other=-float("inf"))
    offset = (prior - lse)[:, None]
    for off in range(0, n, BLOCK):
        cols = off + tl.arange(0, BLOCK)[None, :]
        joint = tl.load(x_ptr + rows + cols, mask=(k[:, None] < parts) & (cols < n), other=0.0) + offset
        peak = tl.max(joint, 0)[None, :]
        y = peak + tl.log(tl.sum(tl.exp(joint - peak), 0)[None, :])
        tl.store(y_ptr + row * n + cols, y, mask=cols < n)
