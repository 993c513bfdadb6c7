import torch
import triton
import triton.language as tl


@triton.jit
def chunk_ce(logits, ld, target, loss, V, scale, BLOCK: tl.constexpr):
    i = tl.program_id(0)
    p = logits + i * ld
    y = tl.load(target + i)
    m = float("-inf")
    z = 0.0
    for s in range(0, V, BLOCK):
        v = s + tl.arange(0, BLOCK)
        x = tl.load(p + v, mask=v < V, other=float("-inf")).to(tl.float32)
        n = tl.maximum(m, tl.max(x))
        z = z * tl.exp(m - n) + tl.sum(tl.exp(x - n))
        m = n
    tl.store(loss + i, (m + tl.log(z) - tl.load(p + y).to(tl.float32)) * scale)


def fused_linear_cross_entropy_forward(_input, weight, target, bias=None, num_chunks=8):
    """The head's product is made chunk by chunk of tokens, so that all the logits never live at once."""
    BT, H = _input.shape
    V = weight.shape[0]
    size = triton.cdiv(BT, num_chunks)
    loss_1d = torch.zeros(BT, dtype=torch.float32, device=_input.device)
    for chunk in range(num_chunks):
        rows = slice(chunk * size, min((chunk + 1) * size, BT))
        logits = _input[rows] @ weight.t()
        if bias is not None:
            logits = logits + bias
        chunk_ce[(logits.shape[0],)](logits, logits.stride(0), target[rows], loss_1d[rows], V, 1.0 / BT, BLOCK=4096)
    return loss_1d.sum()
