import triton
import triton.language as tl


@triton.jit
def conv2d_forward_kernel(
    input_pointer,
    weight_pointer,
    output_pointer,
    N,
    C,
    H,
    Wd,
    K,
    P,
    Q,
    R: tl.constexpr,
    S: tl.constexpr,
    sh,
    sw,
    ph,
    pw,
    BLOCK_NPQ: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    npq = tl.program_id(0) * BLOCK_NPQ + tl.arange(0, BLOCK_NPQ)
    ko = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    n = npq // (P * Q)
    p = (npq // Q) % P
    q = npq % Q
    acc = tl.zeros((BLOCK_NPQ, BLOCK_K), dtype=tl.float32)
    for h in range(R):
        for w in range(S):
            for c0 in range(0, C, BLOCK_C):
                c = c0 + tl.arange(0, BLOCK_C)
                ih = h - ph + sh * p
                iw = w - pw + sw * q
                ok = (c < C)[None, :] & ((0 <= ih) & (ih < H) & (0 <= iw) & (iw < Wd) & (n < N))[:, None]
                x = tl.load(
                    input_pointer + ((n * C)[:, None] + c[None, :]) * H * Wd + (ih * Wd + iw)[:, None],
                    mask=ok,
                    other=0.0,
                )
                f = tl.load(
                    weight_pointer + ((ko * C)[None, :] + c[:, None]) * R * S + h * S + w,
                    mask=(c < C)[:, None] & (ko < K)[None, :],
                    other=0.0,
                )
                acc += tl.dot(x, f)
    o = output_pointer + ((n * K)[:, None] + ko[None, :]) * P * Q + (p * Q + q)[:, None]
    tl.store(o, acc, mask=(n < N)[:, None] & (ko < K)[None, :])


def conv2d(x, weight, stride=(1, 1), padding=(0, 0)):
    N, C, H, Wd = x.shape
    K, _, R, S = weight.shape
    P = (H + 2 * padding[0] - R) // stride[0] + 1
    Q = (Wd + 2 * padding[1] - S) // stride[1] + 1
    out = x.new_empty(N, K, P, Q)
    conv2d_forward_kernel[(triton.cdiv(N * P * Q, 64), triton.cdiv(K, 32))](
        x, weight, out, N, C, H, Wd, K, P, Q, R, S, *stride, *padding, 64, 32, 32
    )
    return out
