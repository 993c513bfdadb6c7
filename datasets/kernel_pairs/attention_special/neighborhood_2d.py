"""Neighbourhood attention on an image: a square tile of queries walks the rows of keys that any of its windows touches.

Each query sees W x W keys, centred on it or, near a border, shifted inwards. A tile of queries flattens to the rows of
one product; the keys of a step are a strip, a few image rows high and as wide as the tile with its halo. Seen from a
key the window is centred as well, but near a border it is open to all queries that were shifted: along each axis the
inverse window of the keys from `first` to `last` begins at 0 if first < W and ends at the border if last >= size - W.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "neighborhood_2d",
    "family": "attention_special",
    "op": "neighborhood_attention_2d",
    "schema": 1,
    "techniques": ("halo", "saved-lse", "loop-swap", "owner-grid", "recompute", "strided-cotangent"),
    "saves": ("o: fp32 or bf16 (B, Y, X, H, D)", "lse: fp32 (B, H, Y, X)"),
    "grads": ("q", "k", "v"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _pixels(Image, y, x, YS, XS, s_y, s_x, s_d, D: tl.constexpr, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    inside = (y[:, None] < YS) & (x[:, None] < XS) & (d[None, :] < D)
    at = y[:, None].to(tl.int64) * s_y + x[:, None].to(tl.int64) * s_x + d[None, :] * s_d
    return tl.load(Image + at, mask=inside, other=0.0)


@triton.jit
def _window_begin(i, size, W):
    return tl.minimum(tl.maximum(i - W // 2, 0), size - W)


@triton.jit
def _in_window(key_y, key_x, query_y, query_x, YS, XS, W):
    y = key_y - _window_begin(query_y, YS, W)
    x = key_x - _window_begin(query_x, XS, W)
    return (y >= 0) & (y < W) & (x >= 0) & (x < W)


@triton.jit
def _window_fwd(
    Q, K, V, Out, LSE, YS, XS, H, W, scale_log2, D: tl.constexpr, BLOCK_D: tl.constexpr,
    SIDE: tl.constexpr, STRIP_Y: tl.constexpr, STRIP_X: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(XS, SIDE)
    first_y = tl.program_id(0) // across * SIDE
    first_x = tl.program_id(0) % across * SIDE
    batch = (tl.program_id(1) // H).to(tl.int64)
    base = (batch * YS * XS * H + tl.program_id(1) % H) * D
    i = tl.arange(0, SIDE * SIDE)
    j = tl.arange(0, STRIP_Y * STRIP_X)
    my, mx = first_y + i // SIDE, first_x + i % SIDE
    nx = _window_begin(first_x, XS, W) + j % STRIP_X
    q = _pixels(Q + base, my, mx, YS, XS, XS * H * D, H * D, 1, D, BLOCK_D)
    top = tl.full((SIDE * SIDE,), float("-inf"), tl.float32)
    norm = tl.zeros((SIDE * SIDE,), tl.float32)
    acc = tl.zeros((SIDE * SIDE, BLOCK_D), tl.float32)
    end = _window_begin(tl.minimum(first_y + SIDE, YS) - 1, YS, W) + W
    for start in range(_window_begin(first_y, YS, W), end, STRIP_Y):
        ny = start + j // STRIP_X
        k = _pixels(K + base, ny, nx, YS, XS, XS * H * D, H * D, 1, D, BLOCK_D)
        v = _pixels(V + base, ny, nx, YS, XS, XS * H * D, H * D, 1, D, BLOCK_D)
        near = _in_window(ny[None, :], nx[None, :], my[:, None], mx[:, None], YS, XS, W)
        s = tl.where(near, tl.dot(q, tl.trans(k)) * scale_log2, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        # The first strips may lie above the window of a row.
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp2(s - finite[:, None])
        fade = tl.exp2(top - finite)
        norm = norm * fade + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None])
        top = higher
    d = tl.arange(0, BLOCK_D)
    in_image = (my < YS) & (mx < XS)
    pixel = my * XS + mx
    tl.store(
        Out + base + pixel[:, None].to(tl.int64) * (H * D) + d[None, :],
        acc / tl.where(in_image, norm, 1.0)[:, None], mask=in_image[:, None] & (d[None, :] < D),
    )  # fmt: skip
    lse = top + tl.log2(tl.where(in_image, norm, 1.0))
    tl.store(LSE + tl.program_id(1).to(tl.int64) * YS * XS + pixel, lse, mask=in_image)


def _tiles(q, W):
    """Side of the owned square, and the strip of the other side: at least 32 pixels, as wide as tile and halo."""
    _, Y, X, _, D = q.shape
    side = 4 if max(Y, X) <= 16 else 8
    strip_x = triton.next_power_of_2(side + W - 1)
    return {
        "D": D, "BLOCK_D": max(16, triton.next_power_of_2(D)), "SIDE": side, "STRIP_X": strip_x,
        "STRIP_Y": max(1, 32 // strip_x), "num_warps": 4,
    }  # fmt: skip


def forward(q, k, v, window):
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    B, Y, X, H, D = q.shape
    if not 0 < window <= min(Y, X) or window % 2 == 0:
        raise ValueError(f"the window is {window}; it must be odd and no longer than the sides, {Y} and {X}")
    o = torch.empty_like(q)
    lse = torch.empty(B, H, Y, X, device=q.device, dtype=torch.float32)
    tiles = _tiles(q, window)
    squares = triton.cdiv(Y, tiles["SIDE"]) * triton.cdiv(X, tiles["SIDE"])
    _window_fwd[(squares, B * H)](q, k, v, o, lse, Y, X, H, window, D**-0.5 * 1.4426950408889634, **tiles)
    return o, (q, k, v, o, lse, window)


# --- backward ---
@triton.jit
def _window_dq(
    Q, K, V, Out, DO, LSE, Delta, DQ, YS, XS, H, W, do_b, do_y, do_x, do_h, do_d, scale, scale_log2,
    D: tl.constexpr, BLOCK_D: tl.constexpr, SIDE: tl.constexpr, STRIP_Y: tl.constexpr, STRIP_X: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(XS, SIDE)
    first_y = tl.program_id(0) // across * SIDE
    first_x = tl.program_id(0) % across * SIDE
    batch = (tl.program_id(1) // H).to(tl.int64)
    head = (tl.program_id(1) % H).to(tl.int64)
    base = (batch * YS * XS * H + head) * D
    i = tl.arange(0, SIDE * SIDE)
    j = tl.arange(0, STRIP_Y * STRIP_X)
    my, mx = first_y + i // SIDE, first_x + i % SIDE
    nx = _window_begin(first_x, XS, W) + j % STRIP_X
    q = _pixels(Q + base, my, mx, YS, XS, XS * H * D, H * D, 1, D, BLOCK_D)
    o = _pixels(Out + base, my, mx, YS, XS, XS * H * D, H * D, 1, D, BLOCK_D)
    do = _pixels(DO + batch * do_b + head * do_h, my, mx, YS, XS, do_y, do_x, do_d, D, BLOCK_D)
    in_image = (my < YS) & (mx < XS)
    pixel = my * XS + mx
    row = (batch * H + head) * YS * XS + pixel
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(Delta + row, delta, mask=in_image)
    lse = tl.load(LSE + row, mask=in_image, other=float("inf"))
    dq = tl.zeros((SIDE * SIDE, BLOCK_D), tl.float32)
    end = _window_begin(tl.minimum(first_y + SIDE, YS) - 1, YS, W) + W
    for start in range(_window_begin(first_y, YS, W), end, STRIP_Y):
        ny = start + j // STRIP_X
        k = _pixels(K + base, ny, nx, YS, XS, XS * H * D, H * D, 1, D, BLOCK_D)
        v = _pixels(V + base, ny, nx, YS, XS, XS * H * D, H * D, 1, D, BLOCK_D)
        near = _in_window(ny[None, :], nx[None, :], my[:, None], mx[:, None], YS, XS, W)
        s = tl.where(near, tl.dot(q, tl.trans(k)) * scale_log2 - lse[:, None], float("-inf"))
        ds = tl.exp2(s) * (tl.dot(do, tl.trans(v)) - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq)
    d = tl.arange(0, BLOCK_D)
    tl.store(
        DQ + base + pixel[:, None].to(tl.int64) * (H * D) + d[None, :], dq * scale,
        mask=in_image[:, None] & (d[None, :] < D),
    )  # fmt: skip


@triton.jit
def _seen_from(first, W):
    """First query, along one axis, whose window may hold one of the keys from `first` on."""
    return tl.where(first < W, 0, first - W // 2)


@triton.jit
def _seen_to(first, size, W, SIDE: tl.constexpr):
    last = tl.minimum(first + SIDE, size) - 1
    return tl.where(last >= size - W, size, last + W // 2 + 1)


@triton.jit
def _window_dkdv(
    Q, K, V, DO, LSE, Delta, DK, DV, YS, XS, H, W, do_b, do_y, do_x, do_h, do_d, scale, scale_log2,
    D: tl.constexpr, BLOCK_D: tl.constexpr, SIDE: tl.constexpr, STRIP_Y: tl.constexpr, STRIP_X: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(XS, SIDE)
    first_y = tl.program_id(0) // across * SIDE
    first_x = tl.program_id(0) % across * SIDE
    batch = (tl.program_id(1) // H).to(tl.int64)
    head = (tl.program_id(1) % H).to(tl.int64)
    base = (batch * YS * XS * H + head) * D
    row = (batch * H + head) * YS * XS
    DO += batch * do_b + head * do_h
    i = tl.arange(0, SIDE * SIDE)
    j = tl.arange(0, STRIP_Y * STRIP_X)
    ny, nx = first_y + i // SIDE, first_x + i % SIDE
    k = _pixels(K + base, ny, nx, YS, XS, XS * H * D, H * D, 1, D, BLOCK_D)
    v = _pixels(V + base, ny, nx, YS, XS, XS * H * D, H * D, 1, D, BLOCK_D)
    dk = tl.zeros((SIDE * SIDE, BLOCK_D), tl.float32)
    dv = tl.zeros((SIDE * SIDE, BLOCK_D), tl.float32)
    # At a border the inverse window can be wider than one strip: queries are walked along both axes.
    for start_y in range(_seen_from(first_y, W), _seen_to(first_y, YS, W, SIDE), STRIP_Y):
        for start_x in range(_seen_from(first_x, W), _seen_to(first_x, XS, W, SIDE), STRIP_X):
            my, mx = start_y + j // STRIP_X, start_x + j % STRIP_X
            q = _pixels(Q + base, my, mx, YS, XS, XS * H * D, H * D, 1, D, BLOCK_D)
            do = _pixels(DO, my, mx, YS, XS, do_y, do_x, do_d, D, BLOCK_D)
            in_image = (my < YS) & (mx < XS)
            lse = tl.load(LSE + row + my * XS + mx, mask=in_image, other=float("inf"))
            delta = tl.load(Delta + row + my * XS + mx, mask=in_image, other=0.0)
            near = _in_window(ny[:, None], nx[:, None], my[None, :], mx[None, :], YS, XS, W)
            p = tl.exp2(tl.where(near, tl.dot(k, tl.trans(q)) * scale_log2 - lse[None, :], float("-inf")))
            dv = tl.dot(p.to(do.dtype), do, dv)
            ds = p * (tl.dot(v, tl.trans(do)) - delta[None, :])
            dk = tl.dot(ds.to(q.dtype), q, dk)
    d = tl.arange(0, BLOCK_D)
    at = base + (ny * XS + nx)[:, None].to(tl.int64) * (H * D) + d[None, :]
    inside = ((ny < YS) & (nx < XS))[:, None] & (d[None, :] < D)
    tl.store(DK + at, dk * scale, mask=inside)
    tl.store(DV + at, dv, mask=inside)


def backward(saved, grad_o, needs=None):
    q, k, v, o, lse, window = saved
    _, need_k, need_v = needs or (True, True, True)
    B, Y, X, H, D = q.shape
    tiles = _tiles(q, window)
    grid = (triton.cdiv(Y, tiles["SIDE"]) * triton.cdiv(X, tiles["SIDE"]), B * H)
    sizes = (Y, X, H, window, *grad_o.stride(), D**-0.5, D**-0.5 * 1.4426950408889634)
    dq, delta = torch.empty_like(q), torch.empty_like(lse)
    _window_dq[grid](q, k, v, o, grad_o, lse, delta, dq, *sizes, **tiles)
    if not (need_k or need_v):
        return dq, None, None
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    _window_dkdv[grid](q, k, v, grad_o, lse, delta, dk, dv, *sizes, **tiles)
    return dq, dk, dv


# --- check ---
SWEEP = (
    {"B": 1, "Y": 8, "X": 8, "H": 2, "D": 16, "window": 3},
    {"B": 2, "Y": 7, "X": 19, "H": 1, "D": 20, "window": 5},
    {"B": 1, "Y": 9, "X": 6, "H": 2, "D": 16, "window": 5, "dtype": "bfloat16"},
)
BENCH = ({"B": 8, "Y": 56, "X": 56, "H": 8, "D": 32, "window": 7, "dtype": "bfloat16"},)


def make_args(B, Y, X, H, D, window, dtype="float32", device="cpu", seed=0):
    if not 0 < window <= min(Y, X) or window % 2 == 0:
        raise ValueError("window must be odd and no longer than the sides")
    g = torch.Generator().manual_seed(seed)
    return (*(torch.randn(B, Y, X, H, D, generator=g).to(device, getattr(torch, dtype)) for _ in range(3)), window)


def reference(q, k, v, window):
    Y, X, _, D = q.shape[1:]
    rows, cols = (
        (torch.arange(size, device=q.device) - window // 2).clamp(0, size - window)[:, None]
        + torch.arange(window, device=q.device)
        for size in (Y, X)
    )
    # One row of the windows at a time: the keys of all columns are one advanced index.
    near_rows = [k[:, rows[:, a]] for a in range(window)]
    s = torch.stack([torch.einsum("byxhd,byxwhd->bhyxw", q, near[:, :, cols]) for near in near_rows], 4)
    p = (s.float() * D**-0.5).flatten(4).softmax(-1).unflatten(4, (window, window)).to(v.dtype)
    near_rows = [v[:, rows[:, a]] for a in range(window)]
    return sum(torch.einsum("bhyxw,byxwhd->byxhd", p[..., a, :], near[:, :, cols]) for a, near in enumerate(near_rows))
