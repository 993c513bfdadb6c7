# --- backward ---
@triton.jit
def _cross_entropy_bwd_kernel(
    DLOSS, LOGITS, LABELS, LSE, DLOGITS, V, n_blocks, stride_g, stride_m, ignore_index, BLOCK_V: tl.constexpr
):
    pid = tl.program_id(0)
    row = (pid // n_blocks).to(tl.int64)
    cols = (pid % n_blocks) * BLOCK_V + tl.arange(0, BLOCK_V)
    mask = cols < V
    label = tl.load(LABELS + row)
    out = DLOGITS + row * V + cols
    if label == ignore_index:
        tl.store(out, tl.zeros((BLOCK_V,), tl.float32), mask=mask)
    else:
        g = tl.load(DLOSS + row * stride_g).to(tl.float32)
        lse = tl.load(LSE + row)
        x = tl.load(LOGITS + row * stride_m + cols, mask=mask, other=float("-inf")).to(tl.float32)
        p = tl.exp(x - lse)
        p = tl.where(cols == label.to(tl.int32), p - 1.0, p)
        tl.store(out, g * p, mask=mask)


def backward(saved, grad_loss, grad_lse, needs=None):
    logits, labels, loss, lse, ignore_index = saved
    if needs is not None and not needs[0]:
        return None
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    labels = labels.contiguous()
    M, V = logits.shape
    dlogits = torch.empty((M, V), dtype=logits.dtype, device=logits.device)
    BLOCK_V = min(triton.next_power_of_2(V), 4096)
    n_blocks = triton.cdiv(V, BLOCK_V)
    _cross_entropy_bwd_kernel[(M * n_blocks,)](
        grad_loss, logits, labels, lse, dlogits, V, n_blocks, grad_loss.stride(0), logits.stride(0), ignore_index,
        BLOCK_V=BLOCK_V, num_warps=8,
    )
    return dlogits
