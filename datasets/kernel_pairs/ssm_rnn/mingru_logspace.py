"""minGRU in log space: a scan of log-sum-exps forwards, and backwards a plain scan of shares that all lie in [0, 1].

h_t = (1 - z_t) h_(t-1) + z_t g(v_t),  z = sigmoid(k),  g(v) = v + 1/2 for v >= 0, else sigmoid(v);  all terms positive.
With a_t = log(1 - z_t) and b_t = log z_t + log g(v_t), log h_t = logaddexp(a_t + log h_(t-1), b_t). What reaches
log h_t goes on in the share p_t = exp(a_t + log h_(t-1) - log h_t) to the state before, in 1 - p_t to the step's term:

    G_t = dh_t h_t + p_(t+1) G_(t+1),    da_t = p_t G_t,    db_t = (1 - p_t) G_t.

p_t comes from the saved log h, so that nothing is scanned twice and nothing overflows, however far h has decayed.
1 - p_t is exp(b_t - log h_t): a difference would cancel. Channels are independent, tiles of time pass one row on.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "mingru_logspace",
    "family": "ssm_rnn",
    "op": "min_gru",
    "schema": 1,
    "techniques": ("reverse-scan", "saved-output", "saved-lse", "recompute", "column-owner", "strided-cotangent"),
    "saves": ("log_h: fp32 (B, T, D)",),
    "grads": ("k", "v", "h0"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _softplus(x):
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def _log_terms(k, v):
    """log(1 - z) and log z + log g(v)."""
    log_g = tl.where(v >= 0.0, tl.log(tl.maximum(v, 0.0) + 0.5), -_softplus(-v))
    return -_softplus(k), log_g - _softplus(-k)


@triton.jit
def _log_affine(a1, b1, a2, b2):
    # Step 1, then step 2, of log h -> logaddexp(a + log h, b).
    through = a2 + b1
    top = tl.maximum(through, b2)
    return a1 + a2, top + tl.log(1.0 + tl.exp(-tl.abs(through - b2)))


@triton.jit
def _mingru_fwd(K, V, H0, Y, LogH, T, D, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    batch = tl.program_id(1).to(tl.int64)
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    last = (tl.arange(0, BLOCK_T) == BLOCK_T - 1)[:, None]
    # h0 is positive, as every state.
    state = tl.log(tl.load(H0 + batch * D + d, mask=d < D, other=1.0).to(tl.float32))
    for start in range(0, T, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        at = (batch * T + t[:, None]) * D + d[None, :]
        inside = (t[:, None] < T) & (d[None, :] < D)
        k = tl.load(K + at, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(V + at, mask=inside, other=0.0).to(tl.float32)
        a, b = _log_terms(k, v)
        total, local = tl.associative_scan((a, b), 0, _log_affine)
        _, log_h = _log_affine(0.0, state[None, :] + tl.zeros_like(local), total, local)
        tl.store(LogH + at, log_h, mask=inside)
        tl.store(Y + at, tl.exp(log_h), mask=inside)
        state = tl.sum(tl.where(last, log_h, 0.0), 0)


def _tile(T):
    return {"BLOCK_T": 16 if T <= 64 else 32, "BLOCK_D": 32, "num_warps": 4}


def forward(k, v, h0):
    # k, v (B, T, D), h0 (B, D) positive.
    k, v, h0 = k.contiguous(), v.contiguous(), h0.contiguous()
    B, T, D = k.shape
    y = torch.empty_like(k)
    log_h = torch.empty(B, T, D, device=k.device, dtype=torch.float32)
    _mingru_fwd[(triton.cdiv(D, 32), B)](k, v, h0, y, log_h, T, D, **_tile(T))
    return y, (k, v, h0, log_h)


# --- backward ---
@triton.jit
def _pull(share1, g1, share2, g2):
    # Step 1, then step 2 before it in time, of G -> share G + g.
    return share1 * share2, share2 * g1 + g2


@triton.jit
def _mingru_bwd(
    DY, K, V, H0, LogH, DK, DV, DH0, T, D, dy_b, dy_t, dy_d, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    batch = tl.program_id(1).to(tl.int64)
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    live = d < D
    first = (tl.arange(0, BLOCK_T) == 0)[:, None]
    DY += batch * dy_b + d[None, :].to(tl.int64) * dy_d
    h0 = tl.load(H0 + batch * D + d, mask=live, other=1.0).to(tl.float32)
    # What later tiles ask of this one's last state, their first share taken already.
    carry = tl.zeros((BLOCK_D,), tl.float32)
    tiles = tl.cdiv(T, BLOCK_T)
    for back in range(tiles):
        t = (tiles - 1 - back) * BLOCK_T + tl.arange(0, BLOCK_T)
        at = (batch * T + t[:, None]) * D + d[None, :]
        inside = (t[:, None] < T) & live[None, :]
        k = tl.load(K + at, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(V + at, mask=inside, other=0.0).to(tl.float32)
        log_h = tl.load(LogH + at, mask=inside, other=0.0)
        before = tl.load(LogH + at - D, mask=inside & (t[:, None] > 0), other=0.0)
        before = tl.where(t[:, None] == 0, tl.log(h0)[None, :], before)
        dy = tl.load(DY + t[:, None].to(tl.int64) * dy_t, mask=inside, other=0.0).to(tl.float32)
        a, b = _log_terms(k, v)
        kept = tl.exp(a + before - log_h)
        # The share that the following step takes of this state; the tile's last one is in the carry.
        within = inside & (t[:, None] + 1 < T) & (t[:, None] % BLOCK_T < BLOCK_T - 1)
        log_after = tl.load(LogH + at + D, mask=within, other=0.0)
        k_after = tl.load(K + at + D, mask=within, other=0.0).to(tl.float32)
        kept_after = tl.where(within, tl.exp(log_h - _softplus(k_after) - log_after), 1.0)
        total, local = tl.associative_scan((kept_after, dy * tl.exp(log_h)), 0, _pull, reverse=True)
        g = tl.where(inside, local + total * carry[None, :], 0.0)
        through = kept * g
        own = tl.exp(b - log_h) * g
        z = tl.sigmoid(k)
        # d log(1 - z)/dk = -z, d log z/dk = 1 - z; d log g/dv = 1 / (v + 1/2) or 1 - sigmoid(v).
        tl.store(DK + at, (1.0 - z) * own - z * through, mask=inside)
        slope = tl.where(v >= 0.0, 1.0 / (tl.maximum(v, 0.0) + 0.5), tl.sigmoid(-v))
        tl.store(DV + at, slope * own, mask=inside)
        carry = tl.sum(tl.where(first, through, 0.0), 0)
    tl.store(DH0 + batch * D + d, carry / h0, mask=live)


def backward(saved, grad_y, needs=None):
    k, v, h0, log_h = saved
    B, T, D = k.shape
    dk, dv, dh0 = torch.empty_like(k), torch.empty_like(v), torch.empty_like(h0)
    _mingru_bwd[(triton.cdiv(D, 32), B)](grad_y, k, v, h0, log_h, dk, dv, dh0, T, D, *grad_y.stride(), **_tile(T))
    return dk, dv, dh0


# --- check ---
SWEEP = (
    {"B": 1, "T": 96, "D": 32},
    {"B": 2, "T": 43, "D": 37},
    {"B": 2, "T": 30, "D": 16, "dtype": "bfloat16"},
    {"B": 1, "T": 20, "D": 9, "dtype": "float16"},
)
BENCH = ({"B": 16, "T": 2048, "D": 1024, "dtype": "bfloat16"},)


def make_args(B, T, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    k, v = torch.randn(B, T, D, generator=g) - 1.0, 2.0 * torch.randn(B, T, D, generator=g)
    h0 = torch.rand(B, D, generator=g) + 0.1
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (k, v, h0))


def reference(k, v, h0):
    softplus = torch.nn.functional.softplus
    kf, vf = k.float(), v.float()
    log_g = torch.where(vf >= 0.0, torch.log(vf.relu() + 0.5), -softplus(-vf))
    decay = -softplus(kf).cumsum(1)
    terms = torch.cat((h0.float().log()[:, None], log_g - softplus(-kf) - decay), 1)
    return torch.exp(decay + torch.logcumsumexp(terms, 1)[:, 1:]).to(k.dtype)
