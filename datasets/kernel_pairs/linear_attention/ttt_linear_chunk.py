"""TTT-Linear by chunks: the state is a weight trained on the fly, and its inner gradient step is differentiated.

With LN(x) = gain x^ + shift, x^ the row normalised, and for each token of a chunk the inner loss
|LN(k W) - (v - k)|^2 / 2 taken at the weight W the chunk begins with, whose gradient at u = k W is

    y = gain (LN(u) - (v - k)),    g = r (y - mean(y) - u^ mean(y u^)),    r = 1 / std(u),

the outputs and the next weight are, without any loop over tokens,

    Z = Q W - tril(Q K^T) (eta g),    o = q + LN(Z),    W <- W - K^T (eta g).

g is the backward of a normalisation: its own backward is the same projection applied once more, plus what r and u^
in it ask for. Weights are saved per chunk; one program walks the chunks of a head back and carries dW in registers.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "ttt_linear_chunk",
    "family": "linear_attention",
    "op": "ttt_linear",
    "schema": 1,
    "techniques": (
        "chunked", "checkpointed-states", "reverse-scan", "recompute", "broadcast-reduction", "two-stage-partials",
        "strided-cotangent",
    ),
    "saves": ("weights: fp32 (B, H, chunks, D, D)",),
    "grads": ("q", "k", "v", "eta", "w0", "gain", "shift"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}  # fmt: skip


# --- forward ---
@triton.jit
def _chunk_rows(X, first, T, s_t, s_d, D, C: tl.constexpr, BLOCK_D: tl.constexpr):
    t = first + tl.arange(0, C)
    d = tl.arange(0, BLOCK_D)
    inside = (t[:, None] < T) & (d[None, :] < D)
    return tl.load(X + t[:, None].to(tl.int64) * s_t + d[None, :] * s_d, mask=inside, other=0.0)


@triton.jit
def _normalised(x, D, eps, BLOCK_D: tl.constexpr):
    """(x^, 1 / std), per row; zero columns past D."""
    ok = tl.arange(0, BLOCK_D)[None, :] < D
    centred = tl.where(ok, x - (tl.sum(x, 1) / D)[:, None], 0.0)
    r = tl.rsqrt(tl.sum(centred * centred, 1) / D + eps)[:, None]
    return centred * r, r


@triton.jit
def _projected(y, x_hat, D, BLOCK_D: tl.constexpr):
    """y - mean(y) - x^ mean(y x^): what the derivative of a normalisation does, but for 1 / std. Symmetric in y."""
    ok = tl.arange(0, BLOCK_D)[None, :] < D
    mean = (tl.sum(y, 1) / D)[:, None]
    return tl.where(ok, y - mean - x_hat * (tl.sum(y * x_hat, 1) / D)[:, None], 0.0)


@triton.jit
def _inner_step(k, v, weight, gain, shift, D, eps, BLOCK_D: tl.constexpr):
    """(u^, r, y, g) of the inner loss at `weight`, all fp32."""
    u_hat, r = _normalised(tl.dot(k, weight.to(k.dtype)), D, eps, BLOCK_D)
    y = gain * (gain * u_hat + shift - (v.to(tl.float32) - k.to(tl.float32)))
    return u_hat, r, y, r * _projected(y, u_hat, D, BLOCK_D)


@triton.jit
def _per_channel(X, head, D, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    return tl.load(X + head * D + d, mask=d < D, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _ttt_fwd(Q, K, V, Eta, W0, Gain, Shift, Weights, Out, H, T, D, eps, C: tl.constexpr, BLOCK_D: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(0) % H
    i = tl.arange(0, BLOCK_D)
    c = tl.arange(0, C)
    square = i[:, None] * D + i[None, :]
    in_square = (i[:, None] < D) & (i[None, :] < D)
    gain, shift = _per_channel(Gain, head, D, BLOCK_D), _per_channel(Shift, head, D, BLOCK_D)
    weight = tl.load(W0 + head * D * D + square, mask=in_square, other=0.0).to(tl.float32)
    chunks = tl.cdiv(T, C)
    for chunk in range(chunks):
        tl.store(Weights + (row * chunks + chunk) * D * D + square, weight, mask=in_square)
        q = _chunk_rows(Q + row * T * D, chunk * C, T, D, 1, D, C, BLOCK_D)
        k = _chunk_rows(K + row * T * D, chunk * C, T, D, 1, D, C, BLOCK_D)
        v = _chunk_rows(V + row * T * D, chunk * C, T, D, 1, D, C, BLOCK_D)
        t = chunk * C + c
        eta = tl.load(Eta + row * T + t, mask=t < T, other=0.0).to(tl.float32)[:, None]
        _, _, _, g = _inner_step(k, v, weight, gain, shift, D, eps, BLOCK_D)
        stepped = (eta * g).to(k.dtype)
        scores = tl.where(c[:, None] >= c[None, :], tl.dot(q, tl.trans(k)), 0.0)
        z = tl.dot(q, weight.to(q.dtype)) - tl.dot(scores.to(q.dtype), stepped)
        z_hat, _ = _normalised(z, D, eps, BLOCK_D)
        at = (row * T + t[:, None]) * D + i[None, :]
        out = q.to(tl.float32) + gain * z_hat + shift
        tl.store(Out + at, out, mask=(t[:, None] < T) & (i[None, :] < D))
        weight -= tl.dot(tl.trans(k), stepped)


def _tiles(q):
    return {"C": 16, "BLOCK_D": max(16, triton.next_power_of_2(q.shape[3])), "num_warps": 4}


def forward(q, k, v, eta, w0, gain, shift, eps=1e-5):
    q, k, v, eta, w0, gain, shift = (x.contiguous() for x in (q, k, v, eta, w0, gain, shift))
    B, H, T, D = q.shape
    tiles = _tiles(q)
    weights = torch.empty(B, H, triton.cdiv(T, tiles["C"]), D, D, device=q.device, dtype=torch.float32)
    out = torch.empty_like(v)
    _ttt_fwd[(B * H,)](q, k, v, eta, w0, gain, shift, weights, out, H, T, D, eps, **tiles)
    return out, (q, k, v, eta, w0, gain, shift, weights, eps)


# --- backward ---
@triton.jit
def _ttt_bwd(
    Q, K, V, Eta, Gain, Shift, Weights, DO, DQ, DKey, DVal, DEta, DW0, DGain, DShift, H, T, D, eps,
    do_b, do_h, do_t, do_d, C: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(0) % H
    DO += row // H * do_b + row % H * do_h
    i = tl.arange(0, BLOCK_D)
    c = tl.arange(0, C)
    lower = c[:, None] >= c[None, :]
    square = i[:, None] * D + i[None, :]
    in_square = (i[:, None] < D) & (i[None, :] < D)
    gain, shift = _per_channel(Gain, head, D, BLOCK_D), _per_channel(Shift, head, D, BLOCK_D)
    dweight = tl.zeros((BLOCK_D, BLOCK_D), tl.float32)
    dgain = tl.zeros((BLOCK_D,), tl.float32)
    dshift = tl.zeros((BLOCK_D,), tl.float32)
    chunks = tl.cdiv(T, C)
    for back in range(chunks):
        chunk = chunks - 1 - back
        weight = tl.load(Weights + (row * chunks + chunk) * D * D + square, mask=in_square, other=0.0)
        q = _chunk_rows(Q + row * T * D, chunk * C, T, D, 1, D, C, BLOCK_D)
        k = _chunk_rows(K + row * T * D, chunk * C, T, D, 1, D, C, BLOCK_D)
        v = _chunk_rows(V + row * T * D, chunk * C, T, D, 1, D, C, BLOCK_D)
        do = _chunk_rows(DO, chunk * C, T, do_t, do_d, D, C, BLOCK_D).to(tl.float32)
        t = chunk * C + c
        eta = tl.load(Eta + row * T + t, mask=t < T, other=0.0).to(tl.float32)[:, None]
        u_hat, r, y, g = _inner_step(k, v, weight, gain, shift, D, eps, BLOCK_D)
        stepped = (eta * g).to(k.dtype)
        scores = tl.where(lower, tl.dot(q, tl.trans(k)), 0.0).to(q.dtype)
        rounded = weight.to(q.dtype)
        z_hat, r_z = _normalised(tl.dot(q, rounded) - tl.dot(scores, stepped), D, eps, BLOCK_D)

        # Through the outer LN, and the products of Z.
        dgain += tl.sum(do * z_hat, 0)
        dshift += tl.sum(do, 0)
        dz = (r_z * _projected(do * gain, z_hat, D, BLOCK_D)).to(q.dtype)
        dscores = tl.where(lower, -tl.dot(dz, tl.trans(stepped)), 0.0).to(q.dtype)
        dnext = dweight.to(q.dtype)
        dq = do + tl.dot(dz, tl.trans(rounded)) + tl.dot(dscores, k)
        dk = tl.dot(tl.trans(dscores), q) - tl.dot(stepped, tl.trans(dnext))
        dstepped = -tl.dot(tl.trans(scores), dz) - tl.dot(k, dnext)
        tl.store(DEta + row * T + t, tl.sum(dstepped * g, 1), mask=t < T)

        # Through the inner gradient: g is linear in y, and u^ and r enter it as well.
        dg = eta * dstepped
        dy = r * _projected(dg, u_hat, D, BLOCK_D)
        du_hat = -r * (dg * (tl.sum(y * u_hat, 1) / D)[:, None] + y * (tl.sum(dg * u_hat, 1) / D)[:, None])
        # y = gain (gain u^ + shift - target).
        dgain += tl.sum(dy * (2.0 * gain * u_hat + shift - (v.to(tl.float32) - k.to(tl.float32))), 0)
        dshift += tl.sum(dy * gain, 0)
        dtarget = -dy * gain
        du_hat += dy * gain * gain
        # r of g: dr = sum of dg g / r, and dr/du = -r^2 u^ / D.
        du = r * _projected(du_hat, u_hat, D, BLOCK_D) - r * u_hat * (tl.sum(dg * g, 1) / D)[:, None]
        du = du.to(k.dtype)
        dk += tl.dot(du, tl.trans(rounded)) - dtarget

        at = (row * T + t[:, None]) * D + i[None, :]
        inside = (t[:, None] < T) & (i[None, :] < D)
        tl.store(DQ + at, dq, mask=inside)
        tl.store(DKey + at, dk, mask=inside)
        tl.store(DVal + at, dtarget, mask=inside)
        dweight += tl.dot(tl.trans(q), dz) + tl.dot(tl.trans(k), du)
    # Per sequence: the first weight and the LN are shared by the batch.
    tl.store(DW0 + row * D * D + square, dweight, mask=in_square)
    tl.store(DGain + row * D + i, dgain, mask=i < D)
    tl.store(DShift + row * D + i, dshift, mask=i < D)


def backward(saved, grad_out, needs=None):
    q, k, v, eta, w0, gain, shift, weights, eps = saved
    B, H, T, D = q.shape
    dq, dk, dv, deta = (torch.empty_like(x) for x in (q, k, v, eta))
    shared = [torch.empty(B, *x.shape, device=q.device, dtype=torch.float32) for x in (w0, gain, shift)]
    _ttt_bwd[(B * H,)](
        q, k, v, eta, gain, shift, weights, grad_out, dq, dk, dv, deta, *shared, H, T, D, eps, *grad_out.stride(),
        **(_tiles(q) | {"num_warps": 8}),
    )  # fmt: skip
    dw0, dgain, dshift = (part.sum(0).to(x.dtype) for part, x in zip(shared, (w0, gain, shift), strict=True))
    return dq, dk, dv, deta, dw0, dgain, dshift


# --- check ---
SWEEP = (
    {"B": 1, "H": 2, "T": 48, "D": 16},
    {"B": 2, "H": 1, "T": 43, "D": 20},
    {"B": 1, "H": 2, "T": 33, "D": 16, "dtype": "bfloat16"},
)
BENCH = ({"B": 16, "H": 16, "T": 1024, "D": 64, "dtype": "bfloat16"},)


def make_args(B, H, T, D, dtype="float32", device="cpu", seed=0):
    r = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, H, T, D, generator=r) for _ in range(3))
    eta = torch.sigmoid(torch.randn(B, H, T, generator=r)) / D
    w0 = torch.randn(H, D, D, generator=r) * D**-0.5
    gain, shift = 1.0 + 0.2 * torch.randn(H, D, generator=r), 0.2 * torch.randn(H, D, generator=r)
    return tuple(x.to(device, getattr(torch, dtype)) for x in (q, k, v, eta, w0, gain, shift))


def reference(q, k, v, eta, w0, gain, shift, eps=1e-5):
    gain, shift = gain.float()[:, None], shift.float()[:, None]

    def unit(x):
        x = x - x.mean(-1, keepdim=True)
        r = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        return x * r, r

    weight, outs = w0.float().expand(q.shape[0], -1, -1, -1), []
    for qc, kc, vc, ec in zip(*(x.split(16, 2) for x in (q, k, v, eta)), strict=True):
        u, r = unit((kc @ weight.to(q.dtype)).float())
        y = gain * (gain * u + shift - (vc.float() - kc.float()))
        g = r * (y - y.mean(-1, keepdim=True) - u * (y * u).mean(-1, keepdim=True))
        stepped = (ec.float()[..., None] * g).to(k.dtype)
        z = (qc @ weight.to(q.dtype)).float() - ((qc @ kc.transpose(-1, -2)).tril() @ stepped).float()
        outs.append(qc.float() + gain * unit(z)[0] + shift)
        weight = weight - (kc.transpose(-1, -2) @ stepped).float()
    return torch.cat(outs, 2).to(v.dtype)
