"""RetNet's retention in its parallel (T, T) form: off the diagonal the decay matrix is a product of two vectors.

o_i = sum over j <= i of g^(i - j) (q_i . k_j) v_j. For a tile of queries from M on and keys before it, g^(i - j) =
g^(i - M) g^(M - j): the loop over whole tiles multiplies columns by a vector of powers, the row powers are applied to
the finished sum once, and only tiles on the diagonal build a matrix of powers. dq takes the same cut; dk and dv,
owned by key tiles that end before E, use g^(i - E) g^(E - j). All exponents are >= 0. There is no softmax, hence
neither statistics nor delta.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "retention_parallel",
    "family": "linear_attention",
    "op": "retention",
    "schema": 1,
    "techniques": ("loop-swap", "owner-grid", "causal-bounds", "recompute", "strided-cotangent"),
    "saves": (),
    "grads": ("q", "k", "v"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _power(log2_decay, steps):
    return tl.exp2(steps.to(tl.float32) * log2_decay)


@triton.jit
def _triangle(log2_decay, later, earlier):
    ago = later - earlier
    return tl.where(ago >= 0, _power(log2_decay, tl.maximum(ago, 0)), 0.0)


@triton.jit
def _load_rows(X, row, rows, stride_row, stride_col, width, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    at = row[:, None].to(tl.int64) * stride_row + c[None, :] * stride_col
    return tl.load(X + at, mask=(row[:, None] < rows) & (c[None, :] < width), other=0.0)


@triton.jit
def _store_rows(X, tile, row, rows, width, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    tl.store(
        X + row[:, None].to(tl.int64) * width + c[None, :], tile, mask=(row[:, None] < rows) & (c[None, :] < width)
    )


@triton.jit
def _mix_earlier(
    A, B, C, Out, Log2Decay, H, T, DA, DC, a_b, a_h, a_t, a_d, scale,
    BLOCK_A: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # out_i = scale * sum over j <= i of g^(i - j) (a_i . b_j) c_j: the output for (q, k, v), dq for (do, v, k).
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    head = tl.program_id(1).to(tl.int64)
    log2_decay = tl.load(Log2Decay + head % H)
    m = first + tl.arange(0, BLOCK_M)
    a = _load_rows(A + head // H * a_b + head % H * a_h, m, T, a_t, a_d, DA, BLOCK_A)
    B += head * T * DA
    C += head * T * DC
    out = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    for start in range(0, first, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        b = _load_rows(B, n, T, DA, 1, DA, BLOCK_A)
        c = _load_rows(C, n, T, DC, 1, DC, BLOCK_C)
        scores = tl.dot(a, tl.trans(b)) * _power(log2_decay, first - n)[None, :]
        out = tl.dot(scores.to(c.dtype), c, out)
    out *= _power(log2_decay, m - first)[:, None]
    for start in range(first, tl.minimum(first + BLOCK_M, T), BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        b = _load_rows(B, n, T, DA, 1, DA, BLOCK_A)
        c = _load_rows(C, n, T, DC, 1, DC, BLOCK_C)
        scores = tl.dot(a, tl.trans(b)) * _triangle(log2_decay, m[:, None], n[None, :])
        out = tl.dot(scores.to(c.dtype), c, out)
    _store_rows(Out + head * T * DC, out * scale, m, T, DC, BLOCK_C)


def _run_mix(a, b, c, log2_decay, scale):
    (B, H, T, DA), DC = a.shape, c.shape[3]
    out = torch.empty_like(c)
    BLOCK_A, BLOCK_C = (max(16, triton.next_power_of_2(n)) for n in (DA, DC))
    own, other, warps = _blocks(T, BLOCK_A + BLOCK_C, a)
    _mix_earlier[(triton.cdiv(T, own), B * H)](
        a, b, c, out, log2_decay, H, T, DA, DC, *a.stride(), scale,
        BLOCK_A=BLOCK_A, BLOCK_C=BLOCK_C, BLOCK_M=own, BLOCK_N=other, num_warps=warps,
    )  # fmt: skip
    return out


def _blocks(T, width, x):
    """(owned rows, rows of the other side, warps); the second divides the first."""
    if T <= 256:
        return 32, 16, 4
    if x.element_size() == 4:
        return 64, 32, 8
    return (128, 64, 8) if width <= 128 else (128, 32, 8)


def forward(q, k, v, log2_decay):
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    return _run_mix(q, k, v, log2_decay, q.shape[3] ** -0.5), (q, k, v, log2_decay)


# --- backward ---
@triton.jit
def _retention_dkdv(
    Q, K, V, DO, DKey, DVal, Log2Decay, H, T, DK, DV, do_b, do_h, do_t, do_d, scale,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BLOCK_N
    end = first + BLOCK_N
    head = tl.program_id(1).to(tl.int64)
    log2_decay = tl.load(Log2Decay + head % H)
    n = first + tl.arange(0, BLOCK_N)
    k = _load_rows(K + head * T * DK, n, T, DK, 1, DK, BLOCK_K)
    v = _load_rows(V + head * T * DV, n, T, DV, 1, DV, BLOCK_V)
    Q += head * T * DK
    DO += head // H * do_b + head % H * do_h
    dk = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    # Later queries first: their common power of each key is applied before the diagonal is added.
    for start in range(end, T, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        q = _load_rows(Q, m, T, DK, 1, DK, BLOCK_K)
        do = _load_rows(DO, m, T, do_t, do_d, DV, BLOCK_V)
        powers = _power(log2_decay, m - end)[None, :]
        dv = tl.dot((tl.dot(k, tl.trans(q)) * powers).to(do.dtype), do, dv)
        dk = tl.dot((tl.dot(v, tl.trans(do)) * powers).to(q.dtype), q, dk)
    to_end = _power(log2_decay, end - n)[:, None]
    dk *= to_end
    dv *= to_end
    for start in range(first, tl.minimum(end, T), BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        q = _load_rows(Q, m, T, DK, 1, DK, BLOCK_K)
        do = _load_rows(DO, m, T, do_t, do_d, DV, BLOCK_V)
        powers = _triangle(log2_decay, m[None, :], n[:, None])
        dv = tl.dot((tl.dot(k, tl.trans(q)) * powers).to(do.dtype), do, dv)
        dk = tl.dot((tl.dot(v, tl.trans(do)) * powers).to(q.dtype), q, dk)
    _store_rows(DKey + head * T * DK, dk * scale, n, T, DK, BLOCK_K)
    _store_rows(DVal + head * T * DV, dv * scale, n, T, DV, BLOCK_V)


def backward(saved, grad_out, needs=None):
    q, k, v, log2_decay = saved
    need_q, need_k, need_v = needs or (True, True, True)
    (B, H, T, DK), DV = q.shape, v.shape[3]
    scale = DK**-0.5
    dq = _run_mix(grad_out, v, k, log2_decay, scale) if need_q else None
    if not (need_k or need_v):
        return dq, None, None
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    BLOCK_K, BLOCK_V = (max(16, triton.next_power_of_2(n)) for n in (DK, DV))
    own, other, warps = _blocks(T, BLOCK_K + BLOCK_V, q)
    _retention_dkdv[(triton.cdiv(T, own), B * H)](
        q, k, v, grad_out, dk, dv, log2_decay, H, T, DK, DV, *grad_out.stride(), scale,
        BLOCK_K=BLOCK_K, BLOCK_V=BLOCK_V, BLOCK_M=other, BLOCK_N=own, num_warps=warps,
    )  # fmt: skip
    return dq, dk, dv


# --- check ---
SWEEP = (
    {"B": 1, "H": 2, "T": 64, "K": 16, "V": 32},
    {"B": 2, "H": 1, "T": 71, "K": 12, "V": 20},
    {"B": 1, "H": 2, "T": 50, "K": 16, "V": 16, "dtype": "bfloat16"},
)
BENCH = ({"B": 2, "H": 16, "T": 2048, "K": 64, "V": 128, "dtype": "bfloat16"},)


def make_args(B, H, T, K, V, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, H, T, n, generator=g).to(device, getattr(torch, dtype)) for n in (K, K, V))
    # RetNet's decays 1 - 2^(-5 - h), as exact logarithms.
    log2_decay = torch.log1p(-(2.0 ** (-5.0 - torch.arange(H).double()))) / 0.6931471805599453
    return q, k, v, log2_decay.float().to(device)


def reference(q, k, v, log2_decay):
    at = torch.arange(q.shape[2], device=q.device)
    ago = (at[:, None] - at[None, :]).clamp(min=0)
    decay = torch.exp2(ago * log2_decay[:, None, None].float()).tril()
    scores = (q @ k.transpose(-1, -2)).float() * decay * q.shape[-1] ** -0.5
    return scores.to(v.dtype) @ v
