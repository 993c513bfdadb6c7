"""Expert product with gather and scatter inside: tokens stay in their own order, and no permuted copy is ever made.

`order` lists the T K assignments sorted by expert; assignment a is copy a % K of token a // K. Forward: a tile of
sorted positions gathers rows x[a // K], multiplies by its expert's weight, and scatters to y[a]. Backward:
    dX: the same walk with rows dy[a] and the weight turned, scattered to one row per copy, then K copies are added;
    dW: the owner of an expert's tile walks over its positions and gathers the rows of both x and dy.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "scatter2scatter_moe",
    "family": "moe",
    "op": "scattered_expert_linear",
    "schema": 1,
    "techniques": ("inverse-map", "varlen", "owner-grid", "two-stage-partials", "strided-cotangent"),
    "saves": (),
    "grads": ("x", "weight"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _scatter2scatter(
    X, W, Order, Offsets, Y, N, D, E, x_row, x_col, w_e, w_d, w_n, COPIES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    # Tiles of sorted positions never straddle experts: a program finds its own by counting tiles.
    e = tl.arange(0, BLOCK_E)
    begin = tl.load(Offsets + e, mask=e < E, other=0)
    end = tl.load(Offsets + e + 1, mask=e < E, other=0)
    tiles = (end - begin + BLOCK_M - 1) // BLOCK_M
    after = tl.cumsum(tiles, 0)
    tile = tl.program_id(1)
    if tile >= tl.sum(tiles, 0):
        return
    expert = tl.sum((after <= tile).to(tl.int32), 0)
    mine = e == expert
    place = tl.sum(tl.where(mine, begin + (tile - after + tiles) * BLOCK_M, 0), 0) + tl.arange(0, BLOCK_M)
    live = place < tl.sum(tl.where(mine, end, 0), 0)
    assignment = tl.load(Order + place, mask=live, other=0).to(tl.int64)
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D).to(tl.int64)
    x_at = X + (assignment // COPIES)[:, None] * x_row + d[None, :] * x_col
    w_at = W + expert.to(tl.int64) * w_e + d[:, None] * w_d + n[None, :] * w_n
    y = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for left in range(D, 0, -BLOCK_D):
        x = tl.load(x_at, mask=live[:, None] & (d[None, :] < left), other=0.0)
        w = tl.load(w_at, mask=(d[:, None] < left) & (n[None, :] < N), other=0.0)
        y = tl.dot(x, w, y)
        x_at += BLOCK_D * x_col
        w_at += BLOCK_D * w_d
    tl.store(Y + assignment[:, None] * N + n[None, :], y, mask=live[:, None] & (n[None, :] < N))


def _side(size, most=128):
    return max(16, min(most, triton.next_power_of_2(size)))


def _scattered(x, weight, order, offsets, copies):
    E, D, N = weight.shape
    y = torch.empty(order.numel(), N, device=x.device, dtype=x.dtype)
    BLOCK_M, BLOCK_N = 64, _side(N)
    # At most one tile per expert is partly filled; superfluous programs leave at once.
    _scatter2scatter[(triton.cdiv(N, BLOCK_N), triton.cdiv(order.numel(), BLOCK_M) + E)](
        x, weight, order, offsets, y, N, D, E, *x.stride(), *weight.stride(), COPIES=copies,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_D=_side(D, 128 // x.element_size()),
        BLOCK_E=triton.next_power_of_2(E), num_warps=4, num_stages=3,
    )  # fmt: skip
    return y


def forward(x, weight, order, offsets):
    x, weight = x.contiguous(), weight.contiguous()
    copies = order.numel() // x.shape[0]
    return _scattered(x, weight, order, offsets, copies), (x, weight, order, offsets)


# --- backward ---
@triton.jit
def _add_copies(Rows, DX, D, K: tl.constexpr, BLOCK_D: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_D,), tl.float32)
    for j in tl.static_range(K):
        total += tl.load(Rows + (token * K + j) * D + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(DX + token * D + d, total, mask=d < D)


@triton.jit
def _gathered_dw(
    X, DY, Order, Offsets, DW, N, D, dy_row, dy_col, COPIES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(2).to(tl.int64)
    d = tl.program_id(1).to(tl.int64) * BLOCK_D + tl.arange(0, BLOCK_D)
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    last = tl.load(Offsets + expert + 1)
    dw = tl.zeros((BLOCK_D, BLOCK_N), tl.float32)
    for start in range(tl.load(Offsets + expert), last, BLOCK_M):
        place = start + tl.arange(0, BLOCK_M)
        live = place < last
        assignment = tl.load(Order + place, mask=live, other=0).to(tl.int64)
        token = assignment // COPIES
        xt = tl.load(X + token[None, :] * D + d[:, None], mask=live[None, :] & (d[:, None] < D), other=0.0)
        dy_at = DY + assignment[:, None] * dy_row + n[None, :] * dy_col
        dy = tl.load(dy_at, mask=live[:, None] & (n[None, :] < N), other=0.0)
        dw = tl.dot(xt, dy, dw)
    out = DW + (expert * D + d[:, None]) * N + n[None, :]
    tl.store(out, dw, mask=(d[:, None] < D) & (n[None, :] < N))


def backward(saved, grad_y, needs=(True, True)):
    x, weight, order, offsets = saved
    (T, D), (E, _, N) = x.shape, weight.shape
    copies = order.numel() // T
    dx = dw = None
    if needs[0]:
        # Every copy has its own cotangent row, so the map is the assignment itself.
        rows = _scattered(grad_y, weight.transpose(1, 2), order, offsets, 1)
        dx = torch.empty_like(x)
        BLOCK_D = max(32, min(1024, triton.next_power_of_2(D)))
        _add_copies[(T, triton.cdiv(D, BLOCK_D))](rows, dx, D, K=copies, BLOCK_D=BLOCK_D, num_warps=4)
    if needs[1]:
        dw = torch.empty_like(weight)
        BLOCK_D, BLOCK_N = _side(D), _side(N)
        _gathered_dw[(triton.cdiv(N, BLOCK_N), triton.cdiv(D, BLOCK_D), E)](
            x, grad_y, order, offsets, dw, N, D, grad_y.stride(0), grad_y.stride(1), COPIES=copies,
            BLOCK_M=128 // x.element_size(), BLOCK_N=BLOCK_N, BLOCK_D=BLOCK_D, num_warps=8, num_stages=3,
        )  # fmt: skip
    return dx, dw


# --- check ---
SWEEP = (
    {"T": 64, "E": 4, "K": 2, "D": 32, "N": 48},
    {"T": 75, "E": 5, "K": 3, "D": 41, "N": 30},
    {"T": 40, "E": 8, "K": 2, "D": 24, "N": 20, "dtype": "bfloat16"},
    {"T": 90, "E": 2, "K": 1, "D": 16, "N": 140, "dtype": "float16"},
)
BENCH = ({"T": 8192, "E": 16, "K": 2, "D": 1024, "N": 2048, "dtype": "bfloat16"},)


def make_args(T, E, K, D, N, dtype="float32", device="cpu", seed=0):
    if K > E:
        raise ValueError("a token cannot go to more experts than there are")
    g = torch.Generator().manual_seed(seed)
    dt = getattr(torch, dtype)
    x, weight = torch.randn(T, D, generator=g), torch.randn(E, D, N, generator=g) * D**-0.5
    expert = torch.rand(T, E, generator=g).topk(K).indices.reshape(-1)
    by_expert, order = torch.sort(expert, stable=True)
    offsets = torch.searchsorted(by_expert, torch.arange(E + 1))
    return x.to(device, dt), weight.to(device, dt), order.to(device), offsets.to(device=device, dtype=torch.int32)


def reference(x, weight, order, offsets):
    copies = order.numel() // x.shape[0]
    cuts = offsets.tolist()
    rows = x[order // copies]
    y = torch.cat([rows[a:b] @ w for a, b, w in zip(cuts[:-1], cuts[1:], weight, strict=True)])
    return torch.empty_like(y).index_copy(0, order, y)
