"""Expert-choice routing: every expert picks its tokens, so a token may be picked often or never.

out[e, c] = w[e, c] x[pick[e, c]],    dw[e, c] = <dout[e, c], x[pick]>,    dx[t] = sum over the picks of t of w dout.
The forward is a gather; its adjoint has as many terms per token as experts that liked it, unknown beforehand. A program
per pick reads the row of dout once for both gradients and adds w dout atomically to an fp32 row of dx. Tokens that no
expert picked keep the zeros of the fill. Collisions are few: a row meets at most E additions.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "expert_choice_gather",
    "family": "moe",
    "op": "expert_choice_dispatch",
    "schema": 1,
    "techniques": ("atomics", "one-launch", "row-local", "strided-cotangent"),
    "saves": (),
    "grads": ("x", "weight"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _picked_rows(X, Weight, Pick, OUT, D, BLOCK_D: tl.constexpr):
    place = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    token = tl.load(Pick + place).to(tl.int64)
    x = tl.load(X + token * D + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(OUT + place * D + d, tl.load(Weight + place) * x, mask=d < D)


def forward(x, weight, pick):
    x, weight, pick = x.contiguous(), weight.contiguous(), pick.contiguous()
    D, (E, C) = x.shape[1], pick.shape
    out = torch.empty(E, C, D, device=x.device, dtype=x.dtype)
    BLOCK_D = max(32, min(1024, triton.next_power_of_2(D)))
    _picked_rows[(E * C, triton.cdiv(D, BLOCK_D))](
        x, weight, pick, out, D, BLOCK_D=BLOCK_D, num_warps=max(1, min(4, BLOCK_D // 256))
    )
    return out, (x, weight, pick)


# --- backward ---
@triton.jit
def _return_rows(
    DOut, X, Weight, Pick, DX, DWeight, C, D, do_e, do_c, do_d,
    NEED_X: tl.constexpr, NEED_W: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    token = tl.load(Pick + place).to(tl.int64)
    weight = tl.load(Weight + place)
    row = DOut + place // C * do_e + place % C * do_c
    dot = tl.zeros((BLOCK_D,), tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        dout = tl.load(row + d.to(tl.int64) * do_d, mask=d < D, other=0.0).to(tl.float32)
        if NEED_W:
            dot += dout * tl.load(X + token * D + d, mask=d < D, other=0.0).to(tl.float32)
        if NEED_X:
            tl.atomic_add(DX + token * D + d, weight * dout, mask=d < D, sem="relaxed")
    if NEED_W:
        tl.store(DWeight + place, tl.sum(dot, 0))


def backward(saved, grad_out, needs=(True, True)):
    x, weight, pick = saved
    D, (E, C) = x.shape[1], pick.shape
    dx = torch.zeros(x.shape, device=x.device, dtype=torch.float32) if needs[0] else None
    dw = torch.empty_like(weight) if needs[1] else None
    BLOCK_D = max(32, min(1024, triton.next_power_of_2(D)))
    _return_rows[(E * C,)](
        grad_out, x, weight, pick, dx, dw, C, D, *grad_out.stride(),
        NEED_X=needs[0], NEED_W=needs[1], BLOCK_D=BLOCK_D, num_warps=max(1, min(4, BLOCK_D // 256)),
    )  # fmt: skip
    return dx.to(x.dtype) if needs[0] else None, dw


# --- check ---
SWEEP = (
    {"T": 24, "E": 4, "C": 12, "D": 64},
    {"T": 37, "E": 5, "C": 9, "D": 75},
    {"T": 16, "E": 8, "C": 4, "D": 40, "dtype": "bfloat16"},
    {"T": 20, "E": 2, "C": 10, "D": 130, "dtype": "float16"},
)
BENCH = ({"T": 16384, "E": 64, "C": 512, "D": 2048, "dtype": "bfloat16"},)


def make_args(T, E, C, D, dtype="float32", device="cpu", seed=0):
    if C > T:
        raise ValueError("an expert cannot pick more tokens than there are")
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(T, D, generator=g).to(device=device, dtype=getattr(torch, dtype))
    # Popular tokens are picked by several experts.
    score = torch.randn(E, T, generator=g) + 1.5 * torch.randn(T, generator=g)
    weight, pick = torch.softmax(score, 0).topk(C, dim=1)
    return x, weight.to(device), pick.to(device)


def reference(x, weight, pick):
    return (weight[..., None] * x.float()[pick]).to(x.dtype)
