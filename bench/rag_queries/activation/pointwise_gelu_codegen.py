import torch
import triton
import triton.language as tl

erf = tl.math.erf


@triton.jit
def gelu_none(x):
    return 0.5 * x * (1 + erf(x * 0.7071067811865476))


@triton.jit
def gelu_tanh(x):
    inner = 0.79788456 * x * (1 + 0.044715 * x * x)
    return 0.5 * x * (2 * tl.sigmoid(2 * inner))


@triton.jit
def pointwise(in0, out0, numel, TANH: tl.constexpr, TILE: tl.constexpr):
    tid = tl.program_id(0) * TILE + tl.arange(0, TILE)
    live = tid < numel
    x = tl.load(in0 + tid, mask=live).to(tl.float32)
    y = gelu_tanh(x) if TANH else gelu_none(x)
    tl.store(out0 + tid, y, mask=live)


def gelu(A, *, approximate="none"):
    out = torch.empty_like(A)
    pointwise[(triton.cdiv(A.numel(), 1024),)](A, out, A.numel(), approximate == "tanh", TILE=1024)
    return out
