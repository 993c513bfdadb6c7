import torch
import triton
import triton.language as tl


@triton.jit
def _chunk_state_fwd_kernel(
    x_ptr,
    b_ptr,
    states_ptr,
    dt_ptr,
    dA_cumsum_ptr,
    hdim,
    dstate,
    chunk_size,
    seqlen,
    nheads,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    pid_c, pid_h = tl.program_id(1), tl.program_id(2)
    nb = tl.cdiv(dstate, BLOCK_N)
    m = tl.program_id(0) // nb * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) % nb * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    base = pid_c * chunk_size
    dA_last = tl.load(dA_cumsum_ptr + pid_h * seqlen + base + chunk_size - 1).to(tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k0 in range(0, chunk_size, BLOCK_K):
        t = base + k0 + k
        x = tl.load(
            x_ptr + (t * nheads + pid_h)[None, :] * hdim + m[:, None],
            mask=(m < hdim)[:, None] & (t < seqlen)[None, :],
            other=0.0,
        )
        b = tl.load(
            b_ptr + t[:, None] * dstate + n[None, :], mask=(n < dstate)[None, :] & (t < seqlen)[:, None], other=0.0
        ).to(tl.float32)
        dA = tl.load(dA_cumsum_ptr + pid_h * seqlen + t, mask=t < seqlen, other=0.0).to(tl.float32)
        dt = tl.load(dt_ptr + pid_h * seqlen + t, mask=t < seqlen, other=0.0).to(tl.float32)
        b *= (tl.exp(dA_last - dA) * dt)[:, None]
        acc += tl.dot(x, b.to(x.dtype))
    at = states_ptr + ((pid_c * nheads + pid_h) * hdim + m[:, None]) * dstate + n[None, :]
    tl.store(at, acc, mask=(m < hdim)[:, None] & (n < dstate)[None, :])


def _chunk_state_fwd(B, x, dt, dA_cumsum, chunk_size):
    seqlen, nheads, hdim = x.shape
    dstate = B.shape[-1]
    nchunks = triton.cdiv(seqlen, chunk_size)
    states = x.new_empty(nchunks, nheads, hdim, dstate, dtype=torch.float32)
    grid = (triton.cdiv(hdim, 64) * triton.cdiv(dstate, 64), nchunks, nheads)
    _chunk_state_fwd_kernel[grid](x, B, states, dt, dA_cumsum, hdim, dstate, chunk_size, seqlen, nheads, 64, 64, 32)
    return states
