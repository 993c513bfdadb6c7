"""Matrix product `op(a) @ op(b)`, either operand stored transposed, with programs grouped so that tiles stay in L2."""

import torch
import triton
import triton.language as tl

from kernel_agent import autodiff

CONFIGS = [
    triton.Config(dict(BLOCK_M=128, BLOCK_N=128, BLOCK_K=32, GROUP_M=8), num_warps=8, num_stages=3),
    triton.Config(dict(BLOCK_M=64, BLOCK_N=128, BLOCK_K=32, GROUP_M=8), num_warps=4, num_stages=4),
    triton.Config(dict(BLOCK_M=64, BLOCK_N=64, BLOCK_K=64, GROUP_M=8), num_warps=4, num_stages=3),
]


@triton.autotune(configs=CONFIGS, key=["M", "N", "K"])
@triton.jit
def matmul_fwd_kernel(
    A,
    B,
    C,
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    stride_cm,
    stride_cn,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    # Programs walk down GROUP_M row blocks before they move to the next column block.
    pid = tl.program_id(0)
    blocks_m, blocks_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    group = pid // (GROUP_M * blocks_n)
    group_size = tl.minimum(blocks_m - group * GROUP_M, GROUP_M)
    block_m = group * GROUP_M + pid % (GROUP_M * blocks_n) % group_size
    block_n = pid % (GROUP_M * blocks_n) // group_size

    rows = (block_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    cols = (block_n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    b_acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        inner = start + tl.arange(0, BLOCK_K)
        a_mask = (rows < M)[:, None] & (inner < K)[None, :]
        b_mask = (inner < K)[:, None] & (cols < N)[None, :]
        b_a = tl.load(A + rows[:, None] * stride_am + inner[None, :] * stride_ak, mask=a_mask, other=0.0)
        b_b = tl.load(B + inner[:, None] * stride_bk + cols[None, :] * stride_bn, mask=b_mask, other=0.0)
        b_acc += tl.dot(b_a, b_b)
    c_mask = (rows < M)[:, None] & (cols < N)[None, :]
    tl.store(C + rows[:, None] * stride_cm + cols[None, :] * stride_cn, b_acc, mask=c_mask)


@autodiff(inputs_require_grad=("a", "b"))
def matmul(a, b, transpose_a=False, transpose_b=False):
    """`op(a) @ op(b)` (M, N), where op transposes if its flag is set: a is (M, K) or (K, M), b is (K, N) or (N, K)."""
    a = a.T if transpose_a else a
    b = b.T if transpose_b else b
    M, K = a.shape
    N = b.shape[1]
    c = torch.empty((M, N), dtype=a.dtype, device=a.device)

    def grid(meta):
        return (triton.cdiv(M, meta["BLOCK_M"]) * triton.cdiv(N, meta["BLOCK_N"]),)

    matmul_fwd_kernel[grid](a, b, c, M, N, K, *a.stride(), *b.stride(), *c.stride())
    return c


SWEEP = [
    dict(M=4096, N=4096, K=4096, dtype="float16"),
    dict(M=4096, N=11008, K=4096, transpose_b=True, dtype="bfloat16"),
    dict(M=1000, N=333, K=77),
    dict(M=65, N=130, K=40, transpose_a=True),
    dict(M=31, N=100, K=70, transpose_b=True),
    dict(M=100, N=31, K=33, transpose_a=True, transpose_b=True),
]


def make_args(dims, device="cuda"):
    M, N, K = dims["M"], dims["N"], dims["K"]
    transpose_a, transpose_b = dims.get("transpose_a", False), dims.get("transpose_b", False)
    dtype = getattr(torch, dims.get("dtype", "float32"))
    a = torch.randn((K, M) if transpose_a else (M, K), device=device).to(dtype)
    b = torch.randn((N, K) if transpose_b else (K, N), device=device).to(dtype)
    return a, b, transpose_a, transpose_b


def reference(a, b, transpose_a=False, transpose_b=False):
    return (a.T if transpose_a else a) @ (b.T if transpose_b else b)


def flops(dims, mode):
    product = 2 * dims["M"] * dims["N"] * dims["K"]
    return product if mode == "forward" else 2 * product
