"""RWKV-4's weighted key-value average in log space: gradients of numerator and denominator run back as states.

    y_t = (a + e^(u + k_t) v_t) / (b + e^(u + k_t)),    a <- e^-w a + e^k_t v_t,    b <- e^-w b + e^k_t

per channel, with a and b kept as mantissas of a common exponent that is never below the largest term. The forward
saves y and the logarithm of the denominator, which is all the reverse loop needs for dk and dv: its states, the
gradients of a and b, carry an exponent of their own. dw and du come from a loop forwards in time that carries the
derivatives of a and b by w. The two loops are independent: half of the programs run each.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "rwkv4_wkv",
    "family": "linear_attention",
    "op": "wkv",
    "schema": 1,
    "techniques": (
        "reverse-scan", "saved-statistics", "saved-output", "recompute", "one-launch", "two-stage-partials",
        "strided-cotangent",
    ),
    "saves": ("y: fp32 or bf16 (B, T, C)", "log_den: fp32 (B, T, C)"),
    "grads": ("w", "u", "k", "v"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}  # fmt: skip


# --- forward ---
@triton.jit
def _wkv_fwd(W, U, K, V, Y, LogDen, T, C, BLOCK: tl.constexpr):
    base = tl.program_id(1).to(tl.int64) * T * C
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = c < C
    w = tl.load(W + c, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(U + c, mask=inside, other=0.0).to(tl.float32)
    a = tl.zeros((BLOCK,), tl.float32)
    b = tl.zeros((BLOCK,), tl.float32)
    top = tl.full((BLOCK,), -1e30, tl.float32)
    for t in range(T):
        at = base + t * C + c
        k = tl.load(K + at, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(V + at, mask=inside, other=0.0).to(tl.float32)
        high = tl.maximum(top, u + k)
        past, now = tl.exp(top - high), tl.exp(u + k - high)
        den = b * past + now
        tl.store(Y + at, (a * past + now * v) / den, mask=inside)
        tl.store(LogDen + at, high + tl.log(den), mask=inside)
        high = tl.maximum(top - w, k)
        past, now = tl.exp(top - w - high), tl.exp(k - high)
        a = a * past + now * v
        b = b * past + now
        top = high


def forward(w, u, k, v):
    k, v = k.contiguous(), v.contiguous()
    B, T, C = k.shape
    y = torch.empty_like(v)
    log_den = torch.empty(B, T, C, device=k.device, dtype=torch.float32)
    # A warp's worth of channels: the loop over time is serial, so that more programs are what helps.
    _wkv_fwd[(triton.cdiv(C, 32), B)](w, u, k, v, y, log_den, T, C, BLOCK=32, num_warps=1)
    return y, (w, u, k, v, y, log_den)


# --- backward ---
@triton.jit
def _wkv_bwd(
    W, U, K, V, Y, LogDen, DY, DWParts, DUParts, DKey, DVal, T, C, dy_b, dy_t, dy_c, BLOCK: tl.constexpr
):  # fmt: skip
    batch = tl.program_id(1).to(tl.int64)
    base = batch * T * C
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = c < C
    DY += batch * dy_b + c.to(tl.int64) * dy_c
    w = tl.load(W + c, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(U + c, mask=inside, other=0.0).to(tl.float32)
    if tl.program_id(2) == 0:
        a = tl.zeros((BLOCK,), tl.float32)
        b = tl.zeros((BLOCK,), tl.float32)
        # Derivatives of a and b by w, under the same exponent.
        a_w = tl.zeros((BLOCK,), tl.float32)
        b_w = tl.zeros((BLOCK,), tl.float32)
        top = tl.full((BLOCK,), -1e30, tl.float32)
        dw = tl.zeros((BLOCK,), tl.float32)
        du = tl.zeros((BLOCK,), tl.float32)
        for t in range(T):
            at = base + t * C + c
            k = tl.load(K + at, mask=inside, other=0.0).to(tl.float32)
            v = tl.load(V + at, mask=inside, other=0.0).to(tl.float32)
            y = tl.load(Y + at, mask=inside, other=0.0).to(tl.float32)
            log_den = tl.load(LogDen + at, mask=inside, other=0.0)
            dy = tl.load(DY + t.to(tl.int64) * dy_t, mask=inside, other=0.0).to(tl.float32)
            dw += dy * (a_w - y * b_w) * tl.exp(top - log_den)
            du += dy * (v - y) * tl.exp(u + k - log_den)
            high = tl.maximum(top - w, k)
            past, now = tl.exp(top - w - high), tl.exp(k - high)
            a_w = (a_w - a) * past
            b_w = (b_w - b) * past
            a = a * past + now * v
            b = b * past + now
            top = high
        tl.store(DWParts + batch * C + c, dw, mask=inside)
        tl.store(DUParts + batch * C + c, du, mask=inside)
    else:
        da = tl.zeros((BLOCK,), tl.float32)
        db = tl.zeros((BLOCK,), tl.float32)
        top = tl.full((BLOCK,), -1e30, tl.float32)
        for back in range(T):
            t = T - 1 - back
            at = base + t * C + c
            k = tl.load(K + at, mask=inside, other=0.0).to(tl.float32)
            v = tl.load(V + at, mask=inside, other=0.0).to(tl.float32)
            y = tl.load(Y + at, mask=inside, other=0.0).to(tl.float32)
            log_den = tl.load(LogDen + at, mask=inside, other=0.0)
            dy = tl.load(DY + t.to(tl.int64) * dy_t, mask=inside, other=0.0).to(tl.float32)
            # What later tokens ask of e^k_t v_t and of e^k_t, then what this one does.
            later, now = tl.exp(k + top), tl.exp(u + k - log_den)
            tl.store(DVal + at, da * later + dy * now, mask=inside)
            tl.store(DKey + at, (v * da + db) * later + dy * (v - y) * now, mask=inside)
            high = tl.maximum(top - w, -log_den)
            past, now = tl.exp(top - w - high), tl.exp(-log_den - high)
            da = da * past + dy * now
            db = db * past - dy * y * now
            top = high


def backward(saved, grad_y, needs=None):
    w, u, k, v, y, log_den = saved
    B, T, C = k.shape
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    parts = torch.empty(2, B, C, device=k.device, dtype=torch.float32)
    _wkv_bwd[(triton.cdiv(C, 32), B, 2)](
        w, u, k, v, y, log_den, grad_y, parts[0], parts[1], dk, dv, T, C, *grad_y.stride(), BLOCK=32, num_warps=1
    )
    dw, du = parts.sum(1).unbind(0)
    return dw.to(w.dtype), du.to(u.dtype), dk, dv


# --- check ---
SWEEP = (
    {"B": 1, "T": 32, "C": 32},
    {"B": 2, "T": 27, "C": 43},
    {"B": 2, "T": 20, "C": 20, "dtype": "bfloat16"},
)
BENCH = ({"B": 8, "T": 1024, "C": 2048, "dtype": "bfloat16"},)


def make_args(B, T, C, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(B, T, C, generator=g).to(device, getattr(torch, dtype)) for _ in range(2))
    # Decay and bonus of a channel stay in fp32; w > 0, as the layer's exp makes it.
    w = torch.exp(torch.randn(C, generator=g) - 1.0)
    return w.to(device), torch.randn(C, generator=g).to(device), k, v


def reference(w, u, k, v):
    # Both sums by doubling: after each turn every step has taken in twice as many steps before it. Of a channel's keys
    # the largest is taken off, which changes no quotient.
    pad = torch.nn.functional.pad
    kf, vf = k.float() - k.float().detach().amax(1, keepdim=True), v.float()
    sums, reach = torch.stack((kf.exp() * vf, kf.exp())), 1
    while reach < k.shape[1]:
        sums = sums + (-reach * w.float()).exp() * pad(sums[:, :, :-reach], (0, 0, reach, 0))
        reach *= 2
    past, now = pad(sums[:, :, :-1], (0, 0, 1, 0)), (kf + u.float()).exp()
    return ((past[0] + now * vf) / (past[1] + now)).to(v.dtype)
