import torch
import triton
import triton.language as tl


@triton.jit
def message_passing(x, src, dst, w, out, E, F, BE: tl.constexpr, BF: tl.constexpr):
    e = tl.program_id(0) * BE + tl.arange(0, BE)
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    s = tl.load(src + e, mask=e < E, other=0)
    t = tl.load(dst + e, mask=e < E, other=0)
    c = tl.load(w + e, mask=e < E, other=0.0)
    ok = (e < E)[:, None] & (f < F)[None, :]
    msg = tl.load(x + s[:, None] * F + f[None, :], mask=ok, other=0.0) * c[:, None]
    tl.atomic_add(out + t[:, None] * F + f[None, :], msg, mask=ok)


def gcn_propagate(node_feat, edge_index, edge_weight):
    E, F = edge_weight.numel(), node_feat.shape[1]
    out = torch.zeros_like(node_feat)
    message_passing[(triton.cdiv(E, 32), triton.cdiv(F, 64))](
        node_feat, edge_index[0], edge_index[1], edge_weight, out, E, F, 32, 64
    )
    return out
