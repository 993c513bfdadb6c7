"""Forward kernels as people write them, small."""

import triton
import triton.language as tl


@triton.jit
def gelu_gate(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    x = tl.load(x_ptr + at, mask=mask)
    y = tl.load(y_ptr + at, mask=mask, other=1.0)
    gate = 0.5 * x * (1 + tl.erf(x * 0.70710678))
    out = gate * tl.sigmoid(y) + tl.maximum(x, y) - tl.abs(x) * tl.sqrt(tl.abs(y) + 0.1)
    tl.store(out_ptr + at, tl.where(x > y, out, tl.log(1 + tl.exp(x))), mask=mask)


@triton.jit
def softmax(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * n + lane, mask=lane < n, other=-float("inf"))
    p = tl.exp(x - tl.max(x, 0))
    tl.store(y_ptr + row * n + lane, p / tl.sum(p, 0), mask=lane < n)


@triton.jit
def layer_norm(x_ptr, w_ptr, b_ptr, y_ptr, n, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + row * n + at, mask=at < n, other=0.0)
    mean = tl.sum(total, 0) / n
    squares = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * n + at, mask=at < n, other=0.0)
        x = tl.where(at < n, x - mean, 0.0)
        squares += x * x
    rstd = 1 / tl.sqrt(tl.sum(squares, 0) / n + eps)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mask = at < n
        w = tl.load(w_ptr + at, mask=mask)
        b = tl.load(b_ptr + at, mask=mask)
        x = tl.load(x_ptr + row * n + at, mask=mask, other=0.0)
        tl.store(y_ptr + row * n + at, (x - mean) * rstd * w + b, mask=mask)


@triton.jit
def rms_norm_rows(x_ptr, w_ptr, y_ptr, rows, n, eps, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    w = tl.load(w_ptr + lane, mask=lane < n, other=0.0)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        x = tl.load(x_ptr + row * n + lane, mask=lane < n, other=0.0)
        rstd = tl.rsqrt(tl.sum(x * x, 0) / n + eps)
        tl.store(y_ptr + row * n + lane, x * rstd * w, mask=lane < n)


@triton.jit
def matmul_relu(a_ptr, b_ptr, c_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    a_at = a_ptr + rows[:, None] * K + inner[None, :]
    b_at = b_ptr + inner[:, None] * N + cols[None, :]
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, K, BK):
        a = tl.load(a_at, mask=(rows[:, None] < M) & (inner[None, :] < K - k), other=0.0)
        b = tl.load(b_at, mask=(inner[:, None] < K - k) & (cols[None, :] < N), other=0.0)
        acc = tl.dot(a, b, acc)
        a_at += BK
        b_at += BK * N
    acc = tl.where(acc > 0, acc, 0.01 * acc)
    tl.store(c_ptr + rows[:, None] * N + cols[None, :], acc, mask=(rows[:, None] < M) & (cols[None, :] < N))


@triton.jit
def attention(
    q_ptr, k_ptr, v_ptr, o_ptr, T, scale, CAUSAL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr
):
    pid = tl.program_id(0)
    rows = pid * BM + tl.arange(0, BM)
    d = tl.arange(0, D)
    q = tl.load(q_ptr + rows[:, None] * D + d[None, :], mask=rows[:, None] < T, other=0.0)
    m = tl.full([BM], -float("inf"), dtype=tl.float32)
    total = tl.zeros([BM], dtype=tl.float32)
    acc = tl.zeros([BM, D], dtype=tl.float32)
    end = T
    if CAUSAL:
        end = tl.minimum((pid + 1) * BM, T)
    for start in range(0, end, BN):
        cols = start + tl.arange(0, BN)
        k = tl.load(k_ptr + cols[:, None] * D + d[None, :], mask=cols[:, None] < T, other=0.0)
        v = tl.load(v_ptr + cols[:, None] * D + d[None, :], mask=cols[:, None] < T, other=0.0)
        s = tl.dot(q, tl.trans(k)) * scale
        keep = cols[None, :] < T
        if CAUSAL:
            keep = keep & (rows[:, None] >= cols[None, :])
        s = tl.where(keep, s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        p = tl.exp(s - m_new[:, None])
        alpha = tl.exp(m - m_new)
        total = total * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None] + tl.dot(p, v)
        m = m_new
    tl.store(o_ptr + rows[:, None] * D + d[None, :], acc / total[:, None], mask=rows[:, None] < T)


@triton.jit
def cross_entropy(x_ptr, label_ptr, loss_ptr, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    label = tl.load(label_ptr + row)
    if label == -100:
        tl.store(loss_ptr + row, 0.0)
        return
    m = -float("inf")
    d = 0.0
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * n + at, mask=at < n, other=-float("inf"))
        new = tl.maximum(m, tl.max(x, 0))
        d = d * tl.exp(m - new) + tl.sum(tl.exp(x - new), 0)
        m = new
    tl.store(loss_ptr + row, m + tl.log(d) - tl.load(x_ptr + row * n + label))


@triton.jit
def rotary(x_ptr, cos_ptr, sin_ptr, y_ptr, half, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    mask = lane < half
    cos = tl.load(cos_ptr + row * half + lane, mask=mask)
    sin = tl.load(sin_ptr + row * half + lane, mask=mask)
    first = tl.load(x_ptr + row * 2 * half + lane, mask=mask)
    second = tl.load(x_ptr + row * 2 * half + half + lane, mask=mask)
    tl.store(y_ptr + row * 2 * half + lane, first * cos - second * sin, mask=mask)
    tl.store(y_ptr + row * 2 * half + half + lane, second * cos + first * sin, mask=mask)


@triton.jit
def recurrence_with_branch(x_ptr, a_ptr, y_ptr, T, N: tl.constexpr):
    lane = tl.arange(0, N)
    a = tl.load(a_ptr + lane)
    h = tl.zeros([N], dtype=tl.float32)
    for t in range(T):
        x = tl.load(x_ptr + t * N + lane)
        if t % 2 == 0:
            h = a * h + x
        else:
            h = h * tl.sin(x)
        tl.store(y_ptr + t * N + lane, h * h)


@triton.jit
def _combine(a, x, b, y):
    return a * b, b * x + y


@triton.jit
def linear_recurrence(a_ptr, x_ptr, h_ptr, T: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, T)[:, None] * N + tl.arange(0, N)[None, :]
    _, h = tl.associative_scan((tl.load(a_ptr + at), tl.load(x_ptr + at)), 0, _combine)
    tl.store(h_ptr + at, h)


@triton.jit
def split_k(x_ptr, w_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    w = tl.load(w_ptr + at, mask=at < n, other=0.0)
    tl.atomic_add(out_ptr, tl.sum(x * w, 0))


@triton.jit
def embedding(index_ptr, w_ptr, y_ptr, D: tl.constexpr):
    row = tl.program_id(0)
    lane = tl.arange(0, D)
    y = tl.load(w_ptr + tl.load(index_ptr + row) * D + lane)
    tl.store(y_ptr + row * D + lane, y * y)


@triton.jit
def picked_maximum(x_ptr, y_ptr, i_ptr, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * n + lane, mask=lane < n, other=-float("inf"))
    value, index = tl.max(x, 0, return_indices=True)
    tl.store(y_ptr + row, value)
    tl.store(i_ptr + row, index)


@triton.jit
def early_return(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    if pid * BLOCK >= n:
        return
    at = pid * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    tl.store(y_ptr + at, x * tl.cos(x), mask=at < n)


@triton.jit
def newton(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=1.0)
    y = x
    step = 0
    while step < 4:
        y = 0.5 * (y + x / y)
        step += 1
    tl.store(y_ptr + at, y, mask=at < n)


@triton.jit
def _multiply(a, b):
    return a * b


@triton.jit
def _log_add(m1, s1, m2, s2):
    m = tl.maximum(m1, m2)
    return m, s1 * tl.exp(m1 - m) + s2 * tl.exp(m2 - m)


@triton.jit
def _welford(mean1, m1, n1, mean2, m2, n2):
    n = n1 + n2
    delta = mean2 - mean1
    return mean1 + delta * n2 / n, m1 + m2 + delta * delta * n1 * n2 / n, n


@triton.jit
def _one_sample(n, m, s, k, p, t):
    gap = p - m
    return n + k, m + gap * (k / (n + k)), s + t + gap * gap * n * k / (n + k)


@triton.jit
def _gap_twice(n, m, s, k, p, t):
    gap = p - m
    return n + k, m + gap * k / (n + k), s + t + 2.0 * gap * gap * n * k / (n + k)


@triton.jit
def _gap_left_out(n, m, s, k, p, t):
    return n + k, (n * m + k * p) / (n + k), s + t


@triton.jit
def _none_is_left_out(n, m, s, k, p, t):
    gap = p - m
    merged = s + t + gap * gap * n * k / (n + k)
    return n + k, m + gap * k / (n + k), tl.where(k > 0.0, tl.where(n > 0.0, merged, t), s)


@triton.jit
def merged_samples(n_ptr, m_ptr, s_ptr, y_ptr, N: tl.constexpr, KIND: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    n, m, s = tl.load(n_ptr + at).to(tl.float32), tl.load(m_ptr + at), tl.load(s_ptr + at)
    if KIND == "one sample":
        count, mean, squares = tl.reduce((n, m, s), 0, _one_sample)
    elif KIND == "means alone":
        count, mean, squares = tl.reduce((n, m, s), 0, _gap_left_out)
    elif KIND == "another sum of squares":
        count, mean, squares = tl.reduce((n, m, s), 0, _gap_twice)
    else:
        count, mean, squares = tl.reduce((n, m, s), 0, _none_is_left_out)
    out = y_ptr + tl.program_id(0) * 3
    tl.store(out, count)
    tl.store(out + 1, mean)
    tl.store(out + 2, squares)


@triton.jit
def product_of_rows(x_ptr, y_ptr, N: tl.constexpr):
    row = tl.program_id(0)
    x = tl.load(x_ptr + row * N + tl.arange(0, N))
    tl.store(y_ptr + row, tl.reduce(x, 0, _multiply))


@triton.jit
def logsumexp_by_pairs(x_ptr, y_ptr, M: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    x = tl.load(x_ptr + at)
    m, s = tl.reduce((x, tl.full([M, N], 1.0, tl.float32)), 1, _log_add)
    tl.store(y_ptr + tl.arange(0, M), m + tl.log(s))


@triton.jit
def variance_by_welford(x_ptr, y_ptr, n, N: tl.constexpr):
    row = tl.program_id(0)
    lane = tl.arange(0, N)
    x = tl.load(x_ptr + row * n + lane, mask=lane < n, other=0.0)
    count = tl.where(lane < n, 1.0, 1e-30)
    mean, m2, _ = tl.reduce((x, tl.zeros([N], tl.float32), count), 0, _welford)
    tl.store(y_ptr + row, m2 / n + mean)


@triton.jit
def running_products(x_ptr, y_ptr, N: tl.constexpr, REVERSE: tl.constexpr):
    row = tl.program_id(0)
    x = tl.load(x_ptr + row * N + tl.arange(0, N))
    tl.store(y_ptr + row * N + tl.arange(0, N), tl.associative_scan(x, 0, _multiply, reverse=REVERSE))


@triton.jit
def _last_positive(a, b):
    return tl.where(b > 0, b * 2 - b, a)


@triton.jit
def filled(x_ptr, y_ptr, M: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(y_ptr + at, tl.associative_scan(tl.load(x_ptr + at), 0, _last_positive))


@triton.jit
def decays_and_states(a_ptr, x_ptr, y_ptr, T: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, T)[:, None] * N + tl.arange(0, N)[None, :]
    decay, h = tl.associative_scan((tl.load(a_ptr + at), tl.load(x_ptr + at)), 0, _combine)
    tl.store(y_ptr + at, decay + h * h)


@triton.jit
def _larger(x, i, y, j):
    keep = x >= y
    return tl.where(keep, x, y), tl.where(keep, i, j)


@triton.jit
def running_maximum(x_ptr, y_ptr, i_ptr, N: tl.constexpr):
    row = tl.program_id(0)
    lane = tl.arange(0, N)
    x, i = tl.associative_scan((tl.load(x_ptr + row * N + lane), lane), 0, _larger)
    tl.store(y_ptr + row * N + lane, x)
    tl.store(i_ptr + row * N + lane, i)


@triton.jit
def _turn(a, b, x, y, c, d, u, v):
    return a * c - b * d, a * d + b * c, c * x - d * y + u, c * y + d * x + v


@triton.jit
def complex_recurrence(a_ptr, x_ptr, y_ptr, N: tl.constexpr):
    lane = tl.arange(0, N)
    a, x = tl.load(a_ptr + lane), tl.load(x_ptr + lane)
    _, _, h, _ = tl.associative_scan((a, a, x, x), 0, _turn)
    tl.store(y_ptr + lane, h)
