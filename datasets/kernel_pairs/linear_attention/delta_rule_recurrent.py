"""Delta rule token by token: saved errors let the backward unwind the state by rank-1 steps, without checkpoints.

    u_t = v_t - S_(t - 1)^T k_t,    S_t = S_(t - 1) + k_t (beta_t u_t)^T,    o_t = scale S_t^T q_t

With u saved, S_(t - 1) = S_t - k_t (beta_t u_t)^T: the reverse loop starts from the final state and takes off what
was added. That is a sum, not a quotient, so that its rounding errors do not grow. State and its gradient D both stay
in registers:

    dq = S do,  w = D^T k,  dbeta = u . w,  du = dv = beta w,  dk = D (beta u) - S_(t - 1) du,  D <- D - k du^T

Value channels never mix: a program owns a slab of them; its shares of dq, dk and dbeta are added afterwards.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "delta_rule_recurrent",
    "family": "linear_attention",
    "op": "delta_rule",
    "schema": 1,
    "techniques": ("reverse-scan", "recompute", "two-stage-partials", "one-launch", "strided-cotangent"),
    "saves": ("errors: fp32 (B, H, T, V)", "final: fp32 (B, H, K, V)"),
    "grads": ("q", "k", "v", "beta"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _delta_rule_fwd(
    Q, K, V, Beta, Out, Errors, Final, T, DK, DV, scale, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    i = tl.arange(0, BLOCK_K)
    j = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    state = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    for t in range(T):
        row = head * T + t
        q = tl.load(Q + row * DK + i, mask=i < DK, other=0.0).to(tl.float32) * scale
        k = tl.load(K + row * DK + i, mask=i < DK, other=0.0).to(tl.float32)
        v = tl.load(V + row * DV + j, mask=j < DV, other=0.0).to(tl.float32)
        beta = tl.load(Beta + row).to(tl.float32)
        error = v - tl.sum(state * k[:, None], 0)
        state += k[:, None] * (beta * error)[None, :]
        tl.store(Errors + row * DV + j, error, mask=j < DV)
        tl.store(Out + row * DV + j, tl.sum(state * q[:, None], 0), mask=j < DV)
    in_state = (i[:, None] < DK) & (j[None, :] < DV)
    tl.store(Final + (head * DK + i[:, None]) * DV + j[None, :], state, mask=in_state)


def _slab(q, v):
    """(BLOCK_K, BLOCK_V): few value channels per program, since the loop over time is serial."""
    return triton.next_power_of_2(q.shape[3]), min(32, triton.next_power_of_2(v.shape[3]))


def forward(q, k, v, beta):
    q, k, v, beta = q.contiguous(), k.contiguous(), v.contiguous(), beta.contiguous()
    (B, H, T, DK), DV = q.shape, v.shape[3]
    out = torch.empty_like(v)
    errors = torch.empty(B, H, T, DV, device=q.device, dtype=torch.float32)
    final = torch.empty(B, H, DK, DV, device=q.device, dtype=torch.float32)
    BLOCK_K, BLOCK_V = _slab(q, v)
    _delta_rule_fwd[(triton.cdiv(DV, BLOCK_V), B * H)](
        q, k, v, beta, out, errors, final, T, DK, DV, DK**-0.5, BLOCK_K=BLOCK_K, BLOCK_V=BLOCK_V, num_warps=2
    )
    return out, (q, k, v, beta, errors, final)


# --- backward ---
@triton.jit
def _delta_rule_bwd(
    Q, K, Beta, Errors, Final, DO, DQParts, DKParts, DVal, DBetaParts, H, T, DK, DV, do_b, do_h, do_t, do_d, scale,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    i = tl.arange(0, BLOCK_K)
    j = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    DO += head // H * do_b + head % H * do_h + j.to(tl.int64) * do_d
    # Shares of this slab: (slabs, B, H, T, K), and (slabs, B, H, T) of dbeta.
    part = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + head) * T
    in_state = (i[:, None] < DK) & (j[None, :] < DV)
    state = tl.load(Final + (head * DK + i[:, None]) * DV + j[None, :], mask=in_state, other=0.0)
    dstate = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    for back in tl.range(T, num_stages=3):
        t = T - 1 - back
        row = head * T + t
        q = tl.load(Q + row * DK + i, mask=i < DK, other=0.0).to(tl.float32) * scale
        k = tl.load(K + row * DK + i, mask=i < DK, other=0.0).to(tl.float32)
        beta = tl.load(Beta + row).to(tl.float32)
        error = tl.load(Errors + row * DV + j, mask=j < DV, other=0.0)
        do = tl.load(DO + t.to(tl.int64) * do_t, mask=j < DV, other=0.0).to(tl.float32)
        tl.store(DQParts + (part + t) * DK + i, tl.sum(state * do[None, :], 1) * scale, mask=i < DK)
        state -= k[:, None] * (beta * error)[None, :]
        dstate += q[:, None] * do[None, :]
        reached = tl.sum(dstate * k[:, None], 0)
        derror = beta * reached
        tl.store(DBetaParts + part + t, tl.sum(error * reached, 0))
        tl.store(DVal + row * DV + j, derror, mask=j < DV)
        dk = tl.sum(dstate * (beta * error)[None, :] - state * derror[None, :], 1)
        tl.store(DKParts + (part + t) * DK + i, dk, mask=i < DK)
        dstate -= k[:, None] * derror[None, :]


def backward(saved, grad_out, needs=None):
    q, k, v, beta, errors, final = saved
    (B, H, T, DK), DV = q.shape, v.shape[3]
    BLOCK_K, BLOCK_V = _slab(q, v)
    slabs = triton.cdiv(DV, BLOCK_V)
    parts = torch.empty(2, slabs, B, H, T, DK, device=q.device, dtype=torch.float32)
    dbeta_parts = torch.empty(slabs, B, H, T, device=q.device, dtype=torch.float32)
    dv = torch.empty_like(v)
    _delta_rule_bwd[(slabs, B * H)](
        q, k, beta, errors, final, grad_out, parts[0], parts[1], dv, dbeta_parts, H, T, DK, DV, *grad_out.stride(),
        DK**-0.5, BLOCK_K=BLOCK_K, BLOCK_V=BLOCK_V, num_warps=4,
    )  # fmt: skip
    dq, dk = parts.sum(1).to(q.dtype).unbind(0)
    return dq, dk, dv, dbeta_parts.sum(0).to(beta.dtype)


# --- check ---
SWEEP = (
    {"B": 1, "H": 2, "T": 32, "K": 16, "V": 32},
    {"B": 2, "H": 1, "T": 27, "K": 12, "V": 20},
    {"B": 1, "H": 2, "T": 20, "K": 8, "V": 8, "dtype": "bfloat16"},
)
BENCH = ({"B": 8, "H": 16, "T": 512, "K": 64, "V": 64, "dtype": "bfloat16"},)


def make_args(B, H, T, K, V, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, H, T, n, generator=g) for n in (K, K, V))
    # Keys of unit length: a step with beta in (0, 1) then shrinks what the state holds along k.
    k = torch.nn.functional.normalize(k, dim=-1)
    beta = torch.sigmoid(torch.randn(B, H, T, generator=g))
    return tuple(x.to(device=device, dtype=getattr(torch, dtype)) for x in (q, k, v, beta))


def reference(q, k, v, beta):
    # Chunks of 64 tokens: a triangular system within, and a state that each chunk corrects.
    T = q.shape[2]
    size = 64 if T > 256 else 16
    q, k, v, beta = (
        torch.nn.functional.pad(x, (0, 0, 0, -T % size)).unflatten(2, (-1, size)) for x in (q, k, v, beta[..., None])
    )
    system = (beta * (k @ k.transpose(-1, -2))).float().tril(-1)
    right = (beta * torch.cat((k, v), -1)).float()
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).to(v.dtype)
    w, u = solved.split((k.shape[-1], v.shape[-1]), -1)
    state = torch.zeros(*q.shape[:2], k.shape[-1], v.shape[-1], device=q.device)
    states, errors = [], []
    for chunk in range(q.shape[2]):
        states.append(state.to(v.dtype))
        errors.append(u[:, :, chunk] - w[:, :, chunk] @ states[-1])
        state = state + k[:, :, chunk].transpose(-1, -2) @ errors[-1]
    out = q @ torch.stack(states, 2) + (q @ k.transpose(-1, -2)).tril() @ torch.stack(errors, 2)
    return (out * q.shape[-1] ** -0.5).flatten(2, 3)[:, :, :T]
