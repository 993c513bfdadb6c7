import torch
import triton
import triton.language as tl


@triton.jit
def causal_conv1d_fwd_kernel(
    x, weight, bias, y, T, D, W: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, ACTIVATION: tl.constexpr
):
    i_d, i_t, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    o_d = i_d * BD + tl.arange(0, BD)
    o_t = i_t * BT + tl.arange(0, BT)
    m_d = o_d < D
    b_y = tl.zeros((BT, BD), dtype=tl.float32)
    for i_w in tl.static_range(W):
        o_x = o_t - (W - 1) + i_w
        m_x = ((o_x >= 0) & (o_x < T))[:, None] & m_d[None, :]
        b_x = tl.load(x + (i_b * T + o_x)[:, None] * D + o_d[None, :], mask=m_x, other=0.0)
        b_w = tl.load(weight + o_d * W + i_w, mask=m_d, other=0.0)
        b_y += b_x * b_w[None, :]
    b_y += tl.load(bias + o_d, mask=m_d, other=0.0)[None, :]
    if ACTIVATION:
        b_y = b_y * tl.sigmoid(b_y)
    tl.store(y + (i_b * T + o_t)[:, None] * D + o_d[None, :], b_y, mask=(o_t < T)[:, None] & m_d[None, :])


def causal_conv1d(x, weight, bias, activation="silu"):
    B, T, D = x.shape
    y = torch.empty_like(x)
    grid = (triton.cdiv(D, 64), triton.cdiv(T, 64), B)
    causal_conv1d_fwd_kernel[grid](x, weight, bias, y, T, D, weight.shape[1], 64, 64, activation == "silu")
    return y
