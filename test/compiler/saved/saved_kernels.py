"""Forwards with something to save, as a user writes them."""

import triton
import triton.language as tl


@triton.jit
def softmax_row(x_ptr, y_ptr, stride, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < n
    x = tl.load(x_ptr + row * stride + cols, mask=mask, other=-float("inf"))
    e = tl.exp(x - tl.max(x, axis=0))
    y = e / tl.sum(e, axis=0)
    tl.store(y_ptr + row * stride + cols, y, mask=mask)


@triton.jit
def softmax_rows(x_ptr, y_ptr, rows, stride, n, BLOCK: tl.constexpr):
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        cols = tl.arange(0, BLOCK)
        mask = cols < n
        x = tl.load(x_ptr + row * stride + cols, mask=mask, other=-float("inf"))
        e = tl.exp(x - tl.max(x, axis=0))
        y = e / tl.sum(e, axis=0)
        tl.store(y_ptr + row * stride + cols, y, mask=mask)


@triton.jit
def row_of(x_ptr, y_ptr, stride, n, BLOCK: tl.constexpr, PADDING: tl.constexpr, KIND: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < n
    x = tl.load(x_ptr + row * stride + cols, mask=mask, other=PADDING)
    largest = tl.max(x, axis=0)
    e = tl.exp(x - largest)
    total = tl.sum(e, axis=0)
    if KIND == "softmax":
        y = e * (1.0 / total)
    elif KIND == "log softmax":
        y = x - largest - tl.log(total)
    elif KIND == "entropy weights":
        y = e / total * (x - largest)
    else:
        y = e
    tl.store(y_ptr + row * stride + cols, y, mask=mask)


@triton.jit
def softmax_in_three_passes(x_ptr, y_ptr, stride, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    largest = -float("inf")
    for off in range(0, n, BLOCK):
        cols = off + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * stride + cols, mask=cols < n, other=-float("inf"))
        largest = tl.maximum(largest, tl.max(x, axis=0))
    total = 0.0
    for off in range(0, n, BLOCK):
        cols = off + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * stride + cols, mask=cols < n, other=-float("inf"))
        total += tl.sum(tl.exp(x - largest), axis=0)
    for off in range(0, n, BLOCK):
        cols = off + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * stride + cols, mask=cols < n, other=-float("inf"))
        tl.store(y_ptr + row * stride + cols, tl.exp(x - largest) / total, mask=cols < n)


@triton.jit
def layer_norm(x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, stride, n, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < n
    x = tl.load(x_ptr + row * stride + cols, mask=mask, other=0.0)
    mean = tl.sum(x, axis=0) / n
    centred = tl.where(mask, x - mean, 0.0)
    rstd = 1 / tl.sqrt(tl.sum(centred * centred, axis=0) / n + eps)
    w = tl.load(w_ptr + cols, mask=mask)
    b = tl.load(b_ptr + cols, mask=mask)
    tl.store(y_ptr + row * stride + cols, (x - mean) * rstd * w + b, mask=mask)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)


@triton.jit
def layer_norm_looped(x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, stride, n, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for off in range(0, n, BLOCK):
        cols = off + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + row * stride + cols, mask=cols < n, other=0.0)
    mean = tl.sum(total, axis=0) / n
    squares = tl.zeros([BLOCK], dtype=tl.float32)
    for off in range(0, n, BLOCK):
        cols = off + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * stride + cols, mask=cols < n, other=0.0)
        x = tl.where(cols < n, x - mean, 0.0)
        squares += x * x
    rstd = 1 / tl.sqrt(tl.sum(squares, axis=0) / n + eps)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    for off in range(0, n, BLOCK):
        cols = off + tl.arange(0, BLOCK)
        mask = cols < n
        w = tl.load(w_ptr + cols, mask=mask)
        b = tl.load(b_ptr + cols, mask=mask)
        x = tl.load(x_ptr + row * stride + cols, mask=mask, other=0.0)
        tl.store(y_ptr + row * stride + cols, (x - mean) * rstd * w + b, mask=mask)


@triton.jit
def moments_by_lanes(x_ptr, y_ptr, stride, n, BLOCK: tl.constexpr, KIND: tl.constexpr):
    row = tl.program_id(0)
    count = tl.zeros((BLOCK,), tl.float32)
    mean = tl.zeros((BLOCK,), tl.float32)
    squares = tl.full((BLOCK,), 1.0 if KIND == "a start" else 0.0, tl.float32)
    for off in range(0, n, BLOCK):
        cols = off + tl.arange(0, BLOCK)
        mask = cols < n
        x = tl.load(x_ptr + row * stride + cols, mask=mask, other=0.0)
        count += tl.where(cols < n - 1 if KIND == "fewer" else mask, 1.0, 0.0)
        gap = tl.where(mask, x - mean, 0.0)
        before = mean
        mean += gap / tl.maximum(count, 1.0)
        squares += gap * (x - (before if KIND == "before" else mean))
    away = mean - tl.sum(mean * count, 0) / n
    tl.store(y_ptr + row, tl.sum(squares + count * away * away, 0) / (n - 1))


@triton.jit
def _one_sample(n, mean, squares, k, its_mean, its_squares):
    total = n + k
    gap = its_mean - mean
    share = gap * k / tl.where(total > 0.0, total, 1.0)
    return total, mean + share, squares + its_squares + gap * share * n


@triton.jit
def _without_the_gap(n, mean, squares, k, its_mean, its_squares):
    total = n + k
    return total, mean + (its_mean - mean) * k / tl.where(total > 0.0, total, 1.0), squares + its_squares


@triton.jit
def moments_of_rows(x_ptr, y_ptr, mean_ptr, stride, n, BLOCK: tl.constexpr, GAP: tl.constexpr):
    row = tl.program_id(0)
    count = tl.zeros((BLOCK,), tl.float32)
    mean = tl.zeros((BLOCK,), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    for off in range(0, n, BLOCK):
        cols = off + tl.arange(0, BLOCK)
        mask = cols < n
        x = tl.load(x_ptr + row * stride + cols, mask=mask, other=0.0)
        count += tl.where(mask, 1.0, 0.0)
        gap = tl.where(mask, x - mean, 0.0)
        mean += gap / tl.maximum(count, 1.0)
        squares += gap * tl.where(mask, x - mean, 0.0)
    if GAP:
        count, mean, squares = tl.reduce((count, mean, squares), 0, _one_sample)
    else:
        count, mean, squares = tl.reduce((count, mean, squares), 0, _without_the_gap)
    tl.store(y_ptr + row, squares / (count - 1))
    tl.store(mean_ptr + row, mean)


@triton.jit
def spread_of_a_row(x_ptr, y_ptr, stride, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    highest, lowest = -float("inf"), float("inf")
    for off in range(0, n, BLOCK):
        cols = off + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * stride + cols, mask=cols < n, other=0.0)
        highest = tl.maximum(highest, tl.max(x, axis=0))
        lowest = tl.minimum(lowest, tl.min(x, axis=0))
    tl.store(y_ptr + row, highest - lowest)


@triton.jit
def states_of_a_recurrence(x_ptr, kept_ptr, y_ptr, steps, width, apart, BLOCK: tl.constexpr, WHERE: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    inside = lane < width
    state = tl.zeros([BLOCK], tl.float32)
    for back in range(steps):
        step = steps - 1 - back
        x = tl.load(x_ptr + step * width + lane, mask=inside, other=0.5)
        if WHERE == "rows" or WHERE == "more lanes":
            tl.store(kept_ptr + step * width + lane, state, mask=inside)
        elif WHERE == "overlapping":
            tl.store(kept_ptr + step * apart + lane, state, mask=inside)
        elif WHERE == "one row":
            tl.store(kept_ptr + lane, state, mask=inside)
        state = state * tl.exp(state * x) + x
    tl.store(y_ptr + lane, state, mask=inside if WHERE != "more lanes" else lane <= width)


@triton.jit
def states_that_mix(x_ptr, kept_ptr, y_ptr, steps, width, BLOCK: tl.constexpr, OUTSIDE: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    inside = lane < width
    state = tl.zeros([BLOCK], tl.float32)
    for step in range(steps):
        x = tl.load(x_ptr + step * width + lane, mask=inside, other=OUTSIDE)
        tl.store(kept_ptr + step * width + lane, state, mask=inside)
        state = state * 0.5 + x * (1.0 + tl.sum(state * state, 0))
    tl.store(y_ptr + lane, state, mask=inside)


@triton.jit
def second_order(x_ptr, s_ptr, y_ptr, n, m, BLOCK: tl.constexpr, KIND: tl.constexpr):
    """Each state is made of the two before it, and 3 outside of a band; all states are stored, and the last one."""
    pid = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    steps = n + m - 1
    last = tl.full((BLOCK,), 3.0, tl.float32)
    second = tl.full((BLOCK,), 7.0, tl.float32)
    for step in range(steps):
        j = step - i
        inside = (i < n) & (j >= 0) & (j < m)
        x = tl.load(x_ptr + (pid * n + i) * m + j, mask=inside, other=0.5)
        rest = x if KIND == "what was loaded" else 3.0
        state = tl.where(i < n if KIND == "no band" else inside, x * tl.sin(last) * tl.cos(second), rest)
        row = pid * steps + step
        if KIND == "one row":
            row = pid
        if KIND == "two trips a row":
            row = pid * steps + step // 2
        mask = (i < n) & (step < m) if KIND == "another mask" else i < n
        tl.store(s_ptr + row * n + i, state, mask=mask)
        if KIND == "twice":
            tl.store(s_ptr + row * n + i, state + 1.0, mask=mask)
        second = last
        last = state
    tl.store(y_ptr + pid * BLOCK + i, last + second)


@triton.jit
def log_sums_of_rows(x_ptr, w_ptr, lse_ptr, y_ptr, rows, n, M: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr):
    t, cols = tl.program_id(0) * M + tl.arange(0, M), tl.arange(0, BLOCK)
    there = t < rows
    x = tl.load(x_ptr + t[:, None] * n + cols[None, :], mask=there[:, None] & (cols < n)[None, :], other=0.0)
    w = tl.load(w_ptr + cols, mask=cols < n, other=0.0)
    x = tl.where((cols < n)[None, :], x * w[None, :], float("-inf"))
    if KIND == "base 2":
        x = x * 1.5
        top = tl.max(x, axis=1)
        lse = top / 1.5 + tl.log2(tl.sum(tl.exp2(x - top[:, None]), axis=1)) / 1.5
    elif KIND == "another sum":
        top = tl.max(x, axis=1)
        lse = top + tl.log(tl.sum(tl.exp(x - top[:, None]) * w[None, :] * w[None, :], axis=1))
    else:
        top = tl.max(x, axis=1)
        lse = top + tl.log(tl.sum(tl.exp(x - top[:, None]), axis=1))
    tl.store(lse_ptr + t, lse, mask=t < rows - 1 if KIND == "one less" else there)
    parts = lse * lse if KIND == "squared" else lse
    tl.store(y_ptr + tl.program_id(0), tl.sum(tl.where(there, parts, 0.0), axis=0))
