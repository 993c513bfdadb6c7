import triton
import triton.language as tl


@triton.jit
def _rope_kernel(
    Q,
    q_row_stride,
    K,
    k_row_stride,
    COS,
    SIN,
    cs_stride,
    sl,
    n_qh: tl.constexpr,
    n_kh: tl.constexpr,
    hd: tl.constexpr,
    pad_q: tl.constexpr,
    pad_k: tl.constexpr,
    pad_h: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    Q += pid * q_row_stride
    K += pid * k_row_stride
    pos = pid % sl
    half = tl.arange(0, pad_h // 2)
    cos = tl.load(COS + pos * cs_stride + half, mask=half < hd // 2, other=0)
    sin = tl.load(SIN + pos * cs_stride + half, mask=half < hd // 2, other=0)
    q1 = tl.arange(0, pad_q)[:, None] * hd + half[None, :]
    qm = (tl.arange(0, pad_q)[:, None] < n_qh) & (half[None, :] < hd // 2)
    a = tl.load(Q + q1, mask=qm, other=0).to(sin.dtype)
    b = tl.load(Q + q1 + hd // 2, mask=qm, other=0).to(sin.dtype)
    tl.store(Q + q1, a * cos - b * sin, mask=qm)
    tl.store(Q + q1 + hd // 2, b * cos + a * sin, mask=qm)
    k1 = tl.arange(0, pad_k)[:, None] * hd + half[None, :]
    km = (tl.arange(0, pad_k)[:, None] < n_kh) & (half[None, :] < hd // 2)
    a = tl.load(K + k1, mask=km, other=0).to(sin.dtype)
    b = tl.load(K + k1 + hd // 2, mask=km, other=0).to(sin.dtype)
    tl.store(K + k1, a * cos - b * sin, mask=km)
    tl.store(K + k1 + hd // 2, b * cos + a * sin, mask=km)


def rope_forward(q, k, cos, sin):
    q, k = q.transpose(1, 2).contiguous(), k.transpose(1, 2).contiguous()
    bs, sl, nq, hd = q.shape
    nk = k.shape[2]
    p2 = triton.next_power_of_2
    _rope_kernel[(bs * sl,)](
        q, q.stride(1), k, k.stride(1), cos, sin, cos.stride(-2), sl, nq, nk, hd, p2(nq), p2(nk), p2(hd)
    )
    return q.transpose(1, 2), k.transpose(1, 2)
