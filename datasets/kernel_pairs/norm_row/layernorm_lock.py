"""LayerNorm whose weight gradients meet in a few shared rows, each guarded by a spin lock.

A program owns a band of rows of dx and adds its shares of dweight and dbias once to row `program % groups` of a small
buffer, so the scratch memory does not grow with the number of rows; a second kernel adds the buffer's rows. Which
program comes first is up to the scheduler, so the last bits of dweight and dbias differ from run to run.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "layernorm_lock",
    "family": "norm_row",
    "op": "layer_norm",
    "schema": 1,
    "techniques": ("spin-lock", "two-stage-partials", "saved-statistics", "strided-cotangent"),
    "saves": ("stats: fp32 (2, M)",),
    "grads": ("x", "weight", "bias"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _ln_lock_fwd(X, W, B, Y, Stats, M, N, x_row, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    ok = col < N
    x = tl.load(X + row * x_row + col, mask=ok, other=0.0).to(tl.float32)
    mean = tl.sum(x, 0) / N
    xhat = tl.where(ok, x - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(xhat * xhat, 0) / N + eps)
    tl.store(Stats + row, mean)
    tl.store(Stats + M + row, rstd)
    y = xhat * rstd * tl.load(W + col, mask=ok, other=0.0).to(tl.float32)
    tl.store(Y + row * N + col, y + tl.load(B + col, mask=ok, other=0.0).to(tl.float32), mask=ok)


def _launch_shape(N):
    block = triton.next_power_of_2(N)
    return {"BLOCK": block, "num_warps": max(1, min(16, block // 512))}


def forward(x, weight, bias, eps=1e-5):
    # Rows may lie apart (a slice of a wider tensor); within a row elements are neighbours.
    if x.stride(1) != 1:
        x = x.contiguous()
    M, N = x.shape
    y = torch.empty(M, N, device=x.device, dtype=x.dtype)
    stats = torch.empty(2, M, device=x.device, dtype=torch.float32)
    _ln_lock_fwd[(M,)](x, weight, bias, y, stats, M, N, x.stride(0), eps, **_launch_shape(N))
    return y, (x, weight, stats)


# --- backward ---
@triton.jit
def _add_two_at_once(a0, b0, a1, b1):
    return a0 + a1, b0 + b1


@triton.jit
def _ln_lock_bwd(
    DY, X, W, Stats, DX, Sums, Locks, M, N, x_row, dy_row, dy_col, groups, rows_each,
    WEIGHTS: tl.constexpr, STAGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    ok = col < N
    w = tl.load(W + col, mask=ok, other=0.0).to(tl.float32)
    dw = tl.zeros((BLOCK,), tl.float32)
    db = tl.zeros((BLOCK,), tl.float32)
    # Rows are copied two turns ahead; the queue for a lock is met once at the end.
    for row in tl.range(pid * rows_each, tl.minimum((pid + 1) * rows_each, M), num_stages=STAGES):
        mean = tl.load(Stats + row)
        rstd = tl.load(Stats + M + row)
        x = tl.load(X + row * x_row + col, mask=ok, other=0.0).to(tl.float32)
        dy = tl.load(DY + row * dy_row + col * dy_col, mask=ok, other=0.0).to(tl.float32)
        xhat = tl.where(ok, (x - mean) * rstd, 0.0)
        dxhat = dy * w
        c1, c2 = tl.reduce((dxhat * xhat, dxhat), 0, _add_two_at_once)
        tl.store(DX + row * N + col, rstd * (dxhat - c2 / N - xhat * (c1 / N)), mask=ok)
        dw += dy * xhat
        db += dy
    if WEIGHTS:
        # dx went out before the lock is taken: only the two additions below are serialised.
        group = pid % groups
        dw_at = Sums + group * N + col
        db_at = dw_at + groups * N
        while tl.atomic_cas(Locks + group, 0, 1) == 1:
            pass
        # The first to hold the lock finds nothing to add to: the sums need no zeros beforehand.
        used = ok & (tl.atomic_xchg(Locks + groups + group, 1) == 1)
        # L1 caches are not coherent: what another multiprocessor added is read from L2.
        dw_sum = tl.load(dw_at, mask=used, other=0.0, cache_modifier=".cg") + dw
        db_sum = tl.load(db_at, mask=used, other=0.0, cache_modifier=".cg") + db
        tl.store(dw_at, dw_sum, mask=ok)
        tl.store(db_at, db_sum, mask=ok)
        # The stores of all threads precede the release by one of them.
        tl.debug_barrier()
        tl.atomic_xchg(Locks + group, 0)


@triton.jit
def _ln_lock_total(Sums, DW, DB, N, groups, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr):
    col = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    dw = tl.zeros((BLOCK_G, BLOCK_N), tl.float32)
    db = tl.zeros((BLOCK_G, BLOCK_N), tl.float32)
    for start in range(0, groups, BLOCK_G):
        group = start + tl.arange(0, BLOCK_G)
        ok = (group[:, None] < groups) & (col[None, :] < N)
        at = Sums + group[:, None] * N + col[None, :]
        dw += tl.load(at, mask=ok, other=0.0)
        db += tl.load(at + groups * N, mask=ok, other=0.0)
    tl.store(DW + col, tl.sum(dw, 0), mask=col < N)
    tl.store(DB + col, tl.sum(db, 0), mask=col < N)


def backward(saved, grad_y, needs=None):
    x, weight, stats = saved
    M, N = x.shape
    weights = needs is None or needs[1] or needs[2]
    launch = _launch_shape(N)
    # One wave: 512 threads for each of 132 processors, as the registers allow.
    rows_each = max(2, triton.cdiv(M, 132 * max(1, 16 // launch["num_warps"])))
    programs = triton.cdiv(M, rows_each)
    # More groups mean shorter queues and a larger buffer, to be cleared and added: four programs share one.
    groups = min(programs, max(16, programs // 4))
    dx = torch.empty(M, N, device=x.device, dtype=x.dtype)
    sums = torch.empty(2, groups, N, device=x.device, dtype=torch.float32)
    # A lock for each group, and whether it has been held.
    locks = torch.zeros(2, groups, device=x.device, dtype=torch.int32)
    _ln_lock_bwd[(programs,)](
        grad_y, x, weight, stats, dx, sums, locks, M, N, x.stride(0), grad_y.stride(0), grad_y.stride(1), groups,
        rows_each, WEIGHTS=weights, STAGES=3 if launch["BLOCK"] * x.element_size() <= 32768 else 1, **launch,
    )  # fmt: skip
    if not weights:
        return dx, None, None
    dweight, dbias = torch.empty_like(weight), torch.empty_like(weight)
    _ln_lock_total[(triton.cdiv(N, 32),)](sums, dweight, dbias, N, groups, BLOCK_G=64, BLOCK_N=32, num_warps=4)
    return dx, dweight, dbias


# --- check ---
SWEEP = ({"M": 7, "N": 64}, {"M": 37, "N": 90, "dtype": "float16"}, {"M": 20, "N": 128, "dtype": "bfloat16"})
BENCH = ({"M": 16384, "N": 4096, "dtype": "bfloat16"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(M, N, generator=g) * 1.5 - 0.4
    weight, bias = torch.rand(N, generator=g) + 0.5, torch.randn(N, generator=g)
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, weight, bias))


def reference(x, weight, bias, eps=1e-5):
    y = torch.nn.functional.layer_norm(x.float(), (x.shape[1],), weight.float(), bias.float(), eps)
    return y.to(x.dtype)
