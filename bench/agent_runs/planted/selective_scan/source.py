"""Selective scan: a diagonal state-space layer whose step, input and output maps depend on the token, as in Mamba.

    step[t] = softplus(delta[t] + bias)
    h[t] = exp(step[t] A) h[t - 1] + step[t] u[t] B[t]
    y[t] = (C[t] . h[t] + D u[t]) * silu(z[t])

per channel, with a state h of width N.
"""

import torch
import triton
import triton.language as tl

from kernel_agent import autodiff


@triton.jit
def selective_scan_fwd_kernel(
    U, DELTA, A, B, C, D, Z, BIAS, Y, L, CHANNELS, N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr
):
    # One program carries the states of BLOCK_C channels of one sequence through all time.
    batch = tl.program_id(1).to(tl.int64)
    channels = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    states = tl.arange(0, BLOCK_N)
    c_mask, n_mask = channels < CHANNELS, states < N
    a = tl.load(A + channels[:, None] * N + states[None, :], mask=c_mask[:, None] & n_mask[None, :], other=0.0)
    d = tl.load(D + channels, mask=c_mask, other=0.0)
    bias = tl.load(BIAS + channels, mask=c_mask, other=0.0)
    h = tl.zeros((BLOCK_C, BLOCK_N), tl.float32)
    for t in range(0, L):
        at = batch * L + t
        u = tl.load(U + at * CHANNELS + channels, mask=c_mask, other=0.0).to(tl.float32)
        z = tl.load(Z + at * CHANNELS + channels, mask=c_mask, other=0.0).to(tl.float32)
        raw = tl.load(DELTA + at * CHANNELS + channels, mask=c_mask, other=0.0).to(tl.float32) + bias
        step = tl.where(raw > 20.0, raw, tl.log(1.0 + tl.exp(tl.minimum(raw, 20.0))))
        b = tl.load(B + at * N + states, mask=n_mask, other=0.0).to(tl.float32)
        c = tl.load(C + at * N + states, mask=n_mask, other=0.0).to(tl.float32)
        h = tl.exp(step[:, None] * a) * h + (step * u)[:, None] * b[None, :]
        y = tl.sum(h * c[None, :], axis=1) + d * u
        tl.store(Y + at * CHANNELS + channels, y * z * tl.sigmoid(z), mask=c_mask)


@autodiff(inputs_require_grad=("u", "delta", "A", "B", "C", "D", "z", "bias"))
def selective_scan(u, delta, A, B, C, D, z, bias):
    """Scan over L for u, delta, z (batch, L, channels), A (channels, N), B, C (batch, L, N), D, bias (channels,).

    Returns y like u. A, D and bias are float32.
    """
    batch, L, channels = u.shape
    N = A.shape[1]
    u, delta, z, B, C = (x.contiguous() for x in (u, delta, z, B, C))
    y = torch.empty_like(u)
    BLOCK_C = 32
    selective_scan_fwd_kernel[(triton.cdiv(channels, BLOCK_C), batch)](
        u,
        delta,
        A,
        B,
        C,
        D,
        z,
        bias,
        y,
        L,
        channels,
        N=N,
        BLOCK_N=triton.next_power_of_2(N),
        BLOCK_C=BLOCK_C,
    )
    return y


SWEEP = [
    dict(batch=4, L=1024, channels=2048, N=16),
    dict(batch=4, L=1024, channels=2048, N=16, dtype="bfloat16"),
    dict(batch=2, L=23, channels=37, N=6),
]


def make_args(batch, L, channels, N, dtype="float32", device="cuda"):
    dtype = getattr(torch, dtype)
    u, delta, z = torch.randn(3, batch, L, channels, device=device).to(dtype)
    B, C = torch.randn(2, batch, L, N, device=device).to(dtype)
    A = -torch.exp(torch.randn(channels, N, device=device))
    D, bias = torch.randn(2, channels, device=device)
    return u, delta, A, B, C, D, z, bias


def reference(u, delta, A, B, C, D, z, bias):
    step = torch.nn.functional.softplus(delta.to(A.dtype) + bias)
    h = torch.zeros(u.shape[0], *A.shape, dtype=A.dtype, device=u.device)
    outputs = []
    for t in range(u.shape[1]):
        now, token = step[:, t], u[:, t].to(A.dtype)
        h = torch.exp(now[..., None] * A) * h + (now * token)[..., None] * B[:, t, None, :].to(A.dtype)
        y = (h * C[:, t, None, :].to(A.dtype)).sum(dim=-1) + D * token
        outputs.append(y * torch.nn.functional.silu(z[:, t].to(A.dtype)))
    return torch.stack(outputs, dim=1).to(u.dtype)
