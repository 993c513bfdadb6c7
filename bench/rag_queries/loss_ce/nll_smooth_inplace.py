import torch
import triton
import triton.language as tl


@triton.jit
def ce_kernel(X, ldx, Y, L, V, n_valid, eps, zc, BV: tl.constexpr):
    i = tl.program_id(0).to(tl.int64)
    y = tl.load(Y + i)
    X += i * ldx
    mx = float("-inf")
    d = 0.0
    sm = 0.0
    for j in range(0, V, BV):
        v = j + tl.arange(0, BV)
        x = tl.load(X + v, mask=v < V, other=float("-inf")).to(tl.float32)
        nb = tl.maximum(mx, tl.max(x))
        d = d * tl.exp(mx - nb) + tl.sum(tl.exp(x - nb))
        mx = nb
        sm += tl.sum(tl.where(v < V, -eps / V * x, 0.0))
    lse = mx + tl.log(d)
    hit = tl.load(X + y).to(tl.float32)
    loss = (lse - hit) * (1 - eps) + sm + eps * lse + zc * lse * lse
    tl.store(L + i, loss / n_valid)
    for j in range(0, V, BV):
        v = j + tl.arange(0, BV)
        x = tl.load(X + v, mask=v < V, other=float("-inf")).to(tl.float32)
        g = tl.exp(x - mx) / d * (1 + 2 * zc * lse) - eps / V
        g = tl.where(v == y, g - (1 - eps), g)
        tl.store(X + v, g / n_valid, mask=v < V)


def label_smoothed_nll(logits, target, smoothing=0.1, z_loss=1e-4):
    n, V = logits.shape
    loss = torch.zeros(n, device=logits.device)
    ce_kernel[(n,)](
        logits, logits.stride(0), target, loss, V, n, smoothing, z_loss, BV=min(32768, triton.next_power_of_2(V))
    )
    return loss.sum()
