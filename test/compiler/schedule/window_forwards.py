"""Forwards of Triton source whose windows overlap, and one whose lanes know of each other."""

import triton
import triton.language as tl


@triton.jit
def squares_1d(X, Y, T, T_OUT, K: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for tap in tl.static_range(K):
        t = o * STRIDE - PAD + tap
        x = tl.load(X + row * T + t, mask=(t >= 0) & (t < T) & (o < T_OUT), other=0.0)
        total += x * x
    tl.store(Y + row * T_OUT + o, total * total, mask=o < T_OUT)


@triton.jit
def totals_of_windows(X, Parts, T, T_OUT, K: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for tap in tl.static_range(K):
        x = tl.load(X + row * T + o + tap, mask=o < T_OUT, other=0.0)
        total += x * x
    tl.store(Parts + row * tl.num_programs(1) + tl.program_id(1), tl.sum(tl.where(o < T_OUT, total * total, 0.0)))


@triton.jit
def squares_2d(X, Y, H, W, HO, WO, K: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    plane = tl.program_id(0)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for tap in tl.static_range(K * K):
        h = o // WO * STRIDE + tap // K
        w = o % WO * STRIDE + tap % K
        x = tl.load(X + plane * H * W + h * W + w, mask=o < HO * WO, other=0.0)
        total += x * x * (tap + 1)
    tl.store(Y + plane * HO * WO + o, total, mask=o < HO * WO)


@triton.jit
def differences(X, Parts, H, W, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr):
    down = tl.cdiv(H, BLOCK_H)
    plane = tl.program_id(0) // down * H * W
    h = (tl.program_id(0) % down * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
    w = (tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W))[None, :]
    at = plane + h * W + w
    x = tl.load(X + at, mask=(h < H) & (w < W), other=0.0)
    right = tl.load(X + at + 1, mask=(h < H) & (w + 1 < W), other=0.0)
    below = tl.load(X + at + W, mask=(h + 1 < H) & (w < W), other=0.0)
    u = tl.where(w + 1 < W, right - x, 0.0)
    v = tl.where(h + 1 < H, below - x, 0.0)
    total = tl.sum(tl.where((h < H) & (w < W), tl.sqrt(u * u + v * v + 0.5), 0.0))
    tl.store(Parts + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), total)


@triton.jit
def convolution(
    X, Weight, Y, T, T_OUT, CI, CO, TAPS: tl.constexpr, STRIDE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    o = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for tap in range(TAPS):
        t = o * STRIDE - 1 + tap
        there = (o < T_OUT) & (t >= 0) & (t < T)
        for start in range(0, CI, BK):
            c = start + tl.arange(0, BK)
            x = tl.load(X + t[:, None] * CI + c[None, :], mask=there[:, None] & (c[None, :] < CI), other=0.0)
            w_at = (tap * CI + c[:, None]) * CO + n[None, :]
            w = tl.load(Weight + w_at, mask=(c[:, None] < CI) & (n[None, :] < CO), other=0.0)
            acc += tl.dot(x, w, input_precision="ieee")
    tl.store(Y + o[:, None] * CO + n[None, :], acc, mask=(o[:, None] < T_OUT) & (n[None, :] < CO))


@triton.jit
def unrolled_convolution(
    X, Weight, Y, T, CI, CO, TAPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    o = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for tap in tl.static_range(TAPS):
        t = o - 1 + tap
        there = (o < T) & (t >= 0) & (t < T)
        for start in range(0, CI, BK):
            c = start + tl.arange(0, BK)
            x = tl.load(X + t[:, None] * CI + c[None, :], mask=there[:, None] & (c[None, :] < CI), other=0.0)
            w_at = (tap * CI + c[:, None]) * CO + n[None, :]
            w = tl.load(Weight + w_at, mask=(c[:, None] < CI) & (n[None, :] < CO), other=0.0)
            acc += tl.dot(x, w, input_precision="ieee")
    tl.store(Y + o[:, None] * CO + n[None, :], acc, mask=(o[:, None] < T) & (n[None, :] < CO))


@triton.jit
def flat_convolution(X, Weight, Y, T, CI, CO, TAPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    o = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    chunks = tl.cdiv(CI, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for step in range(TAPS * chunks):
        tap = step // chunks
        c = step % chunks * BK + tl.arange(0, BK)
        t = o - 1 + tap
        there = (o < T) & (t >= 0) & (t < T)
        x = tl.load(X + t[:, None] * CI + c[None, :], mask=there[:, None] & (c[None, :] < CI), other=0.0)
        w_at = (tap * CI + c[:, None]) * CO + n[None, :]
        w = tl.load(Weight + w_at, mask=(c[:, None] < CI) & (n[None, :] < CO), other=0.0)
        acc += tl.dot(x, w, input_precision="ieee")
    tl.store(Y + o[:, None] * CO + n[None, :], acc, mask=(o[:, None] < T) & (n[None, :] < CO))


@triton.jit
def normed_neighbours(X, Y, T, BLOCK: tl.constexpr):
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = tl.load(X + t, mask=t < T, other=0.0)
    left = tl.load(X + t - 1, mask=(t > 0) & (t < T), other=0.0)
    both = here + 2.0 * left
    tl.store(Y + t, both * tl.sum(both * both), mask=t < T)


@triton.jit
def shuffled(X, Y, H, W, R: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_R: tl.constexpr):
    line = tl.program_id(0)
    w = tl.arange(0, BLOCK_W)[:, None]
    j = tl.arange(0, BLOCK_R)[None, :]
    ok = (w < W) & (j < R)
    channel = line // (H * R)
    h = line // R % H
    i = line % R
    x = tl.load(X + ((channel * R * R + i * R + j) * H + h) * W + w, mask=ok, other=0.0)
    tl.store(Y + line * W * R + w * R + j, x * x, mask=ok)


@triton.jit
def blurred(X, Taps, Y, T, SIDE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    t = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for tap in range(SIDE):
        shift = tap - SIDE // 2
        x = tl.load(X + row * T + t + shift, mask=(t < T) & (t + shift >= 0) & (t + shift < T), other=0.0)
        total += tl.load(Taps + tap) * x
    tl.store(Y + row * T + t, total, mask=t < T)


@triton.jit
def dilated(
    X, Weight, Y, H, W, HO, WO, K: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr, APART: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    plane = tl.program_id(0)
    h = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
    w = (tl.program_id(2) * BLOCK_W + tl.arange(0, BLOCK_W))[None, :]
    total = tl.zeros((BLOCK_H, BLOCK_W), tl.float32)
    for i in range(K):
        for j in range(K):
            y = h * STRIDE - PAD + i * APART
            x = w * STRIDE - PAD + j * APART
            there = (h < HO) & (w < WO) & (y >= 0) & (y < H) & (x >= 0) & (x < W)
            value = tl.load(X + plane * H * W + y * W + x, mask=there, other=0.0)
            total += value * value * tl.load(Weight + i * K + j)
    tl.store(Y + plane * HO * WO + h * WO + w, total, mask=(h < HO) & (w < WO))


@triton.jit
def square_convolution(
    X, Weight, Y, pixels, H, W, CI, CO, SIDE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    h, w = m // W % H, m % W
    acc = tl.zeros((BM, BN), tl.float32)
    for tap in range(SIDE * SIDE):
        down, right = tap // SIDE - 1, tap % SIDE - 1
        there = (h + down >= 0) & (h + down < H) & (w + right >= 0) & (w + right < W) & (m < pixels)
        at = (m + down * W + right) * CI
        for start in range(0, CI, BK):
            c = start + tl.arange(0, BK)
            x = tl.load(X + at[:, None] + c[None, :], mask=there[:, None] & (c[None, :] < CI), other=0.0)
            w_at = (tap * CI + c[:, None]) * CO + n[None, :]
            weight = tl.load(Weight + w_at, mask=(c[:, None] < CI) & (n[None, :] < CO), other=0.0)
            acc += tl.dot(x, weight, input_precision="ieee")
    tl.store(Y + m[:, None] * CO + n[None, :], acc, mask=(m[:, None] < pixels) & (n[None, :] < CO))


@triton.jit
def weighted(X, Taps, Y, T, TAPS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    t = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for tap in tl.static_range(TAPS):
        x = tl.load(X + row * T + t - tap, mask=(t >= tap) & (t < T), other=0.0)
        total += x * tl.load(Taps + row * TAPS + tap)
    tl.store(Y + row * T + t, total * total, mask=t < T)


@triton.jit
def causal(X, Taps, Y, T, TAPS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    t = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for tap in range(TAPS):
        past = t - (TAPS - 1) + tap
        x = tl.load(X + row * T + past, mask=(past >= 0) & (past < T), other=0.0)
        total += tl.load(Taps + tap) * x
    tl.store(Y + row * T + t, total, mask=t < T)


@triton.jit
def half_unrolled(X, Weight, Y, H, W, SIDE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr):
    plane = tl.program_id(0)
    h = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
    w = (tl.program_id(2) * BLOCK_W + tl.arange(0, BLOCK_W))[None, :]
    total = tl.zeros((BLOCK_H, BLOCK_W), tl.float32)
    for i in range(SIDE):
        for j in tl.static_range(SIDE):
            y, x = h + (i - SIDE // 2), w + (j - SIDE // 2)
            there = (y >= 0) & (y < H) & (x >= 0) & (x < W)
            value = tl.load(X + plane * H * W + y * W + x, mask=there, other=0.0)
            total += value * tl.load(Weight + plane * SIDE * SIDE + i * SIDE + j)
    tl.store(Y + plane * H * W + h * W + w, total, mask=(h < H) & (w < W))


@triton.jit
def in_chunks(X, Y, T, W, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    # Programs own chunks of steps and go through them one by one.
    d = tl.arange(0, BLOCK)
    start = tl.program_id(0) * CHUNK
    for t in range(start, tl.minimum(start + CHUNK, T)):
        here = tl.load(X + t * W + d, mask=(d < W) & (t < T), other=0.0)
        before = tl.load(X + (t - 1) * W + d, mask=(d < W) & (t >= 1) & (t - 1 < T), other=0.0)
        tl.store(Y + t * W + d, here * here + here * before, mask=d < W)


@triton.jit
def activated_convolution(
    X, Weight, Y, T, CI, CO, TAPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    o = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for tap in range(TAPS):
        t = o - 1 + tap
        there = (o < T) & (t >= 0) & (t < T)
        for start in range(0, CI, BK):
            c = start + tl.arange(0, BK)
            x = tl.load(X + t[:, None] * CI + c[None, :], mask=there[:, None] & (c[None, :] < CI), other=0.0)
            w_at = (tap * CI + c[:, None]) * CO + n[None, :]
            w = tl.load(Weight + w_at, mask=(c[:, None] < CI) & (n[None, :] < CO), other=0.0)
            acc += tl.dot(x, w, input_precision="ieee")
    tl.store(Y + o[:, None] * CO + n[None, :], acc * acc, mask=(o[:, None] < T) & (n[None, :] < CO))


@triton.jit
def clamped_windows(
    q_ptr, k_ptr, o_ptr, n, w, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, LATER: tl.constexpr
):
    """Sums of squared products of queries with the w keys around each, fewer in front of the first and the last."""
    first = tl.program_id(0) * BM
    head = tl.program_id(1) * n * D
    m = first + tl.arange(0, BM)
    key = tl.minimum(tl.maximum(first - w // 2, 0), n - w) + tl.arange(0, BN)
    d = tl.arange(0, D)
    q = tl.load(q_ptr + head + m[:, None] * D + d[None, :], mask=m[:, None] < n, other=0.0)
    k = tl.load(k_ptr + head + key[:, None] * D + d[None, :], mask=key[:, None] < n, other=0.0)
    begin = tl.minimum(tl.maximum(m - w // 2, 0), n - w)
    near = (key[None, :] >= begin[:, None]) & (key[None, :] < begin[:, None] + w) & (m[:, None] < n)
    s = tl.where(near, tl.dot(q, tl.trans(k)), 0.0)
    if LATER:
        s = tl.cumsum(s, 1)
    tl.store(o_ptr + tl.program_id(1) * n + m, tl.sum(s * s, 1), mask=m < n)


@triton.jit
def _mirrored(i, n):
    i = tl.abs(i)
    return tl.where(i >= n, 2 * (n - 1) - i, i)


@triton.jit
def reflected(X, Y, H, W, PAD, BLOCK: tl.constexpr):
    plane = tl.program_id(0)
    wide = W + 2 * PAD
    size = (H + 2 * PAD) * wide
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    h = _mirrored(o // wide - PAD, H)
    w = _mirrored(o % wide - PAD, W)
    x = tl.load(X + plane * H * W + h * W + w, mask=o < size)
    tl.store(Y + plane * size + o, x * x, mask=o < size)


@triton.jit
def replicated(X, Y, T, PAD, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    t = o - PAD
    t = tl.where(t < 0, 0, tl.where(t < T, t, T - 1))
    x = tl.load(X + row * T + t, mask=o < T + 2 * PAD)
    tl.store(Y + row * (T + 2 * PAD) + o, x * x, mask=o < T + 2 * PAD)


@triton.jit
def patches(
    X, Weight, Scale, Y, H, W, HO, WO, CI, CO, SIDE: tl.constexpr, PAD: tl.constexpr, SCALED: tl.constexpr,
    HIGH: tl.constexpr, WIDE: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    # Lanes are the rows and columns of a patch, programs the images and their rows and columns of patches.
    across = tl.cdiv(WO, WIDE)
    each = tl.cdiv(HO, HIGH) * across
    image = tl.program_id(0) // each
    patch = tl.program_id(0) % each
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    p = tl.arange(0, HIGH * WIDE)
    oh = patch // across * HIGH + p // WIDE
    ow = patch % across * WIDE + p % WIDE
    acc = tl.zeros((BN, HIGH * WIDE), tl.float32)
    for tap in range(SIDE * SIDE):
        h = oh - PAD + tap // SIDE
        w = ow - PAD + tap % SIDE
        there = (h >= 0) & (h < H) & (w >= 0) & (w < W)
        for start in range(0, CI, BK):
            c = start + tl.arange(0, BK)
            weight_at = (tap * CO + n[:, None]) * CI + c[None, :]
            weight = tl.load(Weight + weight_at, mask=(n[:, None] < CO) & (c[None, :] < CI), other=0.0)
            at = (image * CI + c[:, None]) * H * W + h[None, :] * W + w[None, :]
            x = tl.load(X + at, mask=there[None, :] & (c[:, None] < CI), other=0.0)
            acc += tl.dot(weight, x, input_precision="ieee")
    if SCALED:
        acc *= tl.load(Scale + tl.program_id(0))
    y_at = (image * CO + n[:, None]) * HO * WO + oh[None, :] * WO + ow[None, :]
    tl.store(Y + y_at, acc, mask=(n[:, None] < CO) & (oh[None, :] < HO) & (ow[None, :] < WO))


@triton.jit
def grouped(
    X, Weight, Y, pixels, H, W, HO, WO, CI, SIDE: tl.constexpr, PAD: tl.constexpr, K: tl.constexpr,
    CHANNELS: tl.constexpr, N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BJ: tl.constexpr, ENDS: tl.constexpr,
):  # fmt: skip
    # Lanes of a trip are channels of one tap after the other.
    group = tl.program_id(1)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.arange(0, BN)
    top = m // WO % HO - PAD
    left = m % WO - PAD
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, SIDE * SIDE * CHANNELS, BJ):
        j = start + tl.arange(0, BJ)
        tap = j // CHANNELS
        k = j % CHANNELS
        live = ((tap < SIDE * SIDE) | (not ENDS)) & (k < K)
        h = top[:, None] + (tap // SIDE)[None, :]
        w = left[:, None] + (tap % SIDE)[None, :]
        there = (h >= 0) & (h < H) & (w >= 0) & (w < W) & live[None, :] & (m < pixels)[:, None]
        at = (((m // WO // HO)[:, None] * H + h) * W + w) * CI + group * K + k[None, :]
        x = tl.load(X + at, mask=there, other=0.0)
        w_at = ((group * SIDE * SIDE + tap[:, None]) * K + k[:, None]) * N + n[None, :]
        weight = tl.load(Weight + w_at, mask=live[:, None] & (n[None, :] < N), other=0.0)
        acc += tl.dot(x, weight, input_precision="ieee")
    y_at = (m[:, None] * tl.num_programs(1) + group) * N + n[None, :]
    tl.store(Y + y_at, acc, mask=(m[:, None] < pixels) & (n[None, :] < N))


@triton.jit
def by_channel(X, Weight, Y, T, CI, TAPS: tl.constexpr, BLOCK: tl.constexpr):
    plane = tl.program_id(0)
    t = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for tap in tl.static_range(TAPS):
        x = tl.load(X + plane * T + t - tap, mask=(t >= tap) & (t < T), other=0.0)
        total += x * tl.load(Weight + plane % CI * TAPS + tap)
    tl.store(Y + plane * T + t, total, mask=t < T)
