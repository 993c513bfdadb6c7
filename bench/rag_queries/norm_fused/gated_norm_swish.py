import torch
import triton
import triton.language as tl


@triton.jit
def layer_norm_gated_fwd_kernel(
    x,
    g,
    y,
    w,
    b,
    mean,
    rstd,
    T,
    D: tl.constexpr,
    BD: tl.constexpr,
    BT: tl.constexpr,
    eps,
    ACT: tl.constexpr,
    IS_RMS: tl.constexpr,
):
    i_t = tl.program_id(0)
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    p_x = tl.make_block_ptr(x, (T, D), (D, 1), (i_t * BT, 0), (BT, BD), (1, 0))
    b_x = tl.load(p_x, boundary_check=(0, 1)).to(tl.float32)
    if not IS_RMS:
        b_mean = tl.sum(b_x, axis=1) / D
        tl.store(mean + i_t * BT + tl.arange(0, BT), b_mean)
        b_x = tl.where(m_d[None, :], b_x - b_mean[:, None], 0.0)
    b_rstd = 1 / tl.sqrt(tl.sum(b_x * b_x, axis=1) / D + eps)
    b_w = tl.load(w + o_d, mask=m_d)
    b_y = b_x * b_rstd[:, None] * b_w[None, :]
    p_g = tl.make_block_ptr(g, (T, D), (D, 1), (i_t * BT, 0), (BT, BD), (1, 0))
    b_g = tl.load(p_g, boundary_check=(0, 1)).to(tl.float32)
    if ACT == "swish":
        b_y = b_y * b_g * tl.sigmoid(b_g)
    elif ACT == "sigmoid":
        b_y = b_y * tl.sigmoid(b_g)
    p_y = tl.make_block_ptr(y, (T, D), (D, 1), (i_t * BT, 0), (BT, BD), (1, 0))
    tl.store(p_y, b_y.to(p_y.dtype.element_ty), boundary_check=(0, 1))


def rms_norm_swish_gate(x, g, weight, bias=None, eps=1e-5):
    T, D = x.shape
    y = torch.empty_like(x)
    rstd = torch.empty((T,), dtype=torch.float, device=x.device)
    layer_norm_gated_fwd_kernel[(triton.cdiv(T, 16),)](
        x, g, y, weight, bias, None, rstd, T, D, triton.next_power_of_2(D), 16, eps, ACT="swish", IS_RMS=True
    )
    return y
