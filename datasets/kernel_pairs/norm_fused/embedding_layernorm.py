"""Token plus position embedding, then LayerNorm: one row pass scatters its gradient into two tables in two ways.

h[b, s] = token[ids[b, s]] + position[s],    y = (h - mean) rstd weight + bias
Nothing but mean and rstd is saved: h is gathered again. The gradient of h goes into both tables. A position is met once
in every sequence, at a known place, so a program owns positions and walks the batch: dposition is a sum in registers,
in a fixed order. Where a token is met nobody knows beforehand: its rows meet through atomic adds in fp32. dweight and
dbias stay in registers over all positions of a program, which leaves one partial row of each.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "embedding_layernorm",
    "family": "norm_fused",
    "op": "embedding_layer_norm",
    "schema": 1,
    "techniques": ("atomics", "persistent-grid", "two-stage-partials", "recompute", "saved-statistics"),
    "saves": ("mean: fp32 (B, S)", "rstd: fp32 (B, S)"),
    "grads": ("token", "position", "weight", "bias"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _embed_norm_fwd(Ids, Token, Position, W, Bias, Y, Mean, Rstd, S, N, eps, BLOCK: tl.constexpr):
    # Neighbouring programs read neighbouring positions of one sequence.
    place = tl.program_id(1).to(tl.int64) * S + tl.program_id(0)
    n = tl.arange(0, BLOCK)
    inside = n < N
    h = tl.load(Token + tl.load(Ids + place) * N + n, mask=inside, other=0.0).to(tl.float32)
    h += tl.load(Position + tl.program_id(0).to(tl.int64) * N + n, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(h, 0) / N
    centred = tl.where(inside, h - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, 0) / N + eps)
    w = tl.load(W + n, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(Bias + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(Y + place * N + n, centred * rstd * w + bias, mask=inside)
    tl.store(Mean + place, mean)
    tl.store(Rstd + place, rstd)


def _row(N):
    block = triton.next_power_of_2(N)
    return {"BLOCK": block, "num_warps": max(1, min(8, block // 256))}


def forward(ids, token, position, weight, bias, eps=1e-5):
    # ids (B, S) are int64; position has a row for each of the S places.
    ids, token, position = ids.contiguous(), token.contiguous(), position.contiguous()
    (B, S), N = ids.shape, token.shape[1]
    y = torch.empty(B, S, N, device=token.device, dtype=token.dtype)
    mean, rstd = (torch.empty(B, S, device=token.device, dtype=torch.float32) for _ in range(2))
    _embed_norm_fwd[(S, B)](ids, token, position, weight, bias, y, mean, rstd, S, N, eps, **_row(N))
    return y, (ids, token, position, weight, mean, rstd)


# --- backward ---
@triton.jit
def _embed_norm_bwd(
    DY, Ids, Token, Position, W, Mean, Rstd, DToken, DPosition, Parts, B, S, N, dy_b, dy_s, dy_n,
    NEED_TOKEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    inside = n < N
    w = tl.load(W + n, mask=inside, other=0.0).to(tl.float32)
    dw = tl.zeros((BLOCK,), tl.float32)
    dbias = tl.zeros((BLOCK,), tl.float32)
    for s in tl.range(pid, S, tl.num_programs(0), num_stages=2):
        here = tl.load(Position + s * N + n, mask=inside, other=0.0).to(tl.float32)
        dhere = tl.zeros((BLOCK,), tl.float32)
        for b in tl.range(B, num_stages=3):
            place = b * S + s
            word = tl.load(Ids + place) * N
            h = here + tl.load(Token + word + n, mask=inside, other=0.0).to(tl.float32)
            source = DY + b * dy_b + s * dy_s + n.to(tl.int64) * dy_n
            dy = tl.load(source, mask=inside, other=0.0).to(tl.float32)
            rstd = tl.load(Rstd + place)
            xhat = tl.where(inside, (h - tl.load(Mean + place)) * rstd, 0.0)
            slope = dy * w
            shift = tl.sum(slope, 0) / N
            tilt = tl.sum(slope * xhat, 0) / N
            dh = rstd * (slope - shift - xhat * tilt)
            if NEED_TOKEN:
                tl.atomic_add(DToken + word + n, dh, mask=inside, sem="relaxed")
            dhere += dh
            dw += dy * xhat
            dbias += dy
        tl.store(DPosition + s * N + n, dhere, mask=inside)
    tl.store(Parts + 2 * pid * N + n, dw, mask=inside)
    tl.store(Parts + (2 * pid + 1) * N + n, dbias, mask=inside)


def backward(saved, grad_y, needs=(True, True, True, True)):
    ids, token, position, weight, mean, rstd = saved
    (B, S), N = ids.shape, token.shape[1]
    row = _row(N)
    # One wave at 32 warps for each of 132 processors.
    programs = min(S, 132 * 32 // row["num_warps"])
    dtoken = torch.zeros(token.shape, device=token.device, dtype=torch.float32) if needs[0] else None
    dposition = torch.empty_like(position)
    parts = torch.empty(programs, 2, N, device=token.device, dtype=torch.float32)
    _embed_norm_bwd[(programs,)](
        grad_y, ids, token, position, weight, mean, rstd, dtoken, dposition, parts, B, S, N, *grad_y.stride(),
        NEED_TOKEN=needs[0], **row,
    )  # fmt: skip
    dweight, dbias = parts.sum(0).to(weight.dtype)
    return dtoken.to(token.dtype) if needs[0] else None, dposition, dweight, dbias


# --- check ---
SWEEP = (
    {"B": 3, "S": 8, "N": 64, "V": 11},
    {"B": 5, "S": 13, "N": 83, "V": 29, "dtype": "float16"},
    {"B": 2, "S": 9, "N": 48, "V": 7, "dtype": "bfloat16"},
)
BENCH = ({"B": 64, "S": 512, "N": 1024, "V": 30522, "dtype": "bfloat16"},)


def make_args(B, S, N, V, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, V, (B, S), generator=g)
    tables = (torch.randn(V, N, generator=g), torch.randn(S, N, generator=g))
    affine = (torch.rand(N, generator=g) + 0.5, torch.randn(N, generator=g))
    return ids.to(device), *(t.to(device=device, dtype=getattr(torch, dtype)) for t in (*tables, *affine))


def reference(ids, token, position, weight, bias, eps=1e-5):
    h = torch.nn.functional.embedding(ids, token).float() + position.float()
    y = torch.nn.functional.layer_norm(h, (token.shape[1],), weight.float(), bias.float(), eps)
    return y.to(token.dtype)
