import triton
import triton.language as tl


@triton.jit
def fused_moe_kernel(
    a_ptr,
    b_ptr,
    c_ptr,
    topk_weights_ptr,
    sorted_token_ids_ptr,
    expert_ids_ptr,
    num_tokens_post_padded_ptr,
    N,
    K,
    num_valid_tokens,
    stride_be,
    top_k: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MUL_ROUTED_WEIGHT: tl.constexpr,
):
    pid_m = tl.program_id(0)
    pid_n = tl.program_id(1)
    if pid_m * BLOCK_M >= tl.load(num_tokens_post_padded_ptr):
        return
    token = tl.load(sorted_token_ids_ptr + pid_m * BLOCK_M + tl.arange(0, BLOCK_M))
    token_mask = token < num_valid_tokens
    expert = tl.load(expert_ids_ptr + pid_m)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        a = tl.load(a_ptr + (token // top_k)[:, None] * K + (k + offs_k)[None, :], mask=token_mask[:, None], other=0.0)
        b = tl.load(b_ptr + expert * stride_be + offs_n[None, :] * K + (k + offs_k)[:, None])
        acc += tl.dot(a, b)
    if MUL_ROUTED_WEIGHT:
        acc *= tl.load(topk_weights_ptr + token, mask=token_mask, other=0.0)[:, None]
    tl.store(c_ptr + token[:, None] * N + offs_n[None, :], acc, mask=token_mask[:, None])


def invoke_fused_moe(A, B, C, topk_weights, sorted_ids, expert_ids, padded, top_k):
    grid = (triton.cdiv(sorted_ids.shape[0], 64), triton.cdiv(B.shape[1], 64))
    fused_moe_kernel[grid](
        A,
        B,
        C,
        topk_weights,
        sorted_ids,
        expert_ids,
        padded,
        B.shape[1],
        B.shape[2],
        topk_weights.numel(),
        B.stride(0),
        top_k,
        64,
        64,
        32,
        True,
    )
    return C
