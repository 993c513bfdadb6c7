"""Triangle multiplication with gates: y[i, j] = sum over k of a[i, k] b[j, k] per channel, a and b gated as they load.

a = sigmoid(ga) pa,  b = sigmoid(gb) pb:    da = dY b,    db = dY^T a,    dp = da sigmoid(g),  dg = da p s (1 - s).
Channels lead, so that each is a product of matrices. The owner of a tile (i, k) walks over j and gates b again on the
way; the owner of (j, k) walks over i and gates a. Each ends with its own gate: the finished tile of da or db is split
into the gradients of value and gate without ever being stored. Neither a nor b exists in memory in either direction.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "triangle_mult_outgoing",
    "family": "matmul",
    "op": "triangle_multiplication",
    "schema": 1,
    "techniques": ("prologue-fusion", "epilogue-fusion", "recompute", "loop-swap", "strided-cotangent"),
    "saves": (),
    "grads": ("pa", "ga", "pb", "gb"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _gated(P, G, at, inside):
    """Tile sigmoid(g) p in the inputs' dtype; zero outside, since p is."""
    p = tl.load(P + at, mask=inside, other=0.0)
    g = tl.load(G + at, mask=inside, other=0.0).to(tl.float32)
    return (tl.sigmoid(g) * p.to(tl.float32)).to(p.dtype)


@triton.jit
def _triangle_fwd(PA, GA, PB, GB, Y, N, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_K: tl.constexpr):
    base = tl.program_id(2).to(tl.int64) * N * N
    i = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    j = tl.program_id(1) * BLOCK_J + tl.arange(0, BLOCK_J)
    y = tl.zeros((BLOCK_I, BLOCK_J), tl.float32)
    for start in range(0, N, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a = _gated(PA, GA, base + i[:, None] * N + k[None, :], (i[:, None] < N) & (k[None, :] < N))
        b = _gated(PB, GB, base + j[:, None] * N + k[None, :], (j[:, None] < N) & (k[None, :] < N))
        y = tl.dot(a, tl.trans(b), y)
    tl.store(Y + base + i[:, None] * N + j[None, :], y, mask=(i[:, None] < N) & (j[None, :] < N))


def _side(size, most=128):
    return max(16, min(most, triton.next_power_of_2(size)))


def forward(pa, ga, pb, gb):
    pa, ga, pb, gb = pa.contiguous(), ga.contiguous(), pb.contiguous(), gb.contiguous()
    C, N, _ = pa.shape
    y = torch.empty_like(pa)
    side = _side(N)
    _triangle_fwd[(triton.cdiv(N, side), triton.cdiv(N, side), C)](
        pa, ga, pb, gb, y, N,
        BLOCK_I=side, BLOCK_J=side, BLOCK_K=_side(N, 64 // pa.element_size()), num_warps=8, num_stages=2,
    )  # fmt: skip
    return y, (pa, ga, pb, gb)


# --- backward ---
@triton.jit
def _triangle_bwd(
    DY, PMine, GMine, POther, GOther, DP, DG, N, dy_c, dy_mine, dy_other,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # Rows i of my factor against rows j of the other; the strides of dY say which of its axes is mine.
    c = tl.program_id(2).to(tl.int64)
    base = c * N * N
    i = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    dy_rows = DY + c * dy_c + i[:, None].to(tl.int64) * dy_mine
    acc = tl.zeros((BLOCK_I, BLOCK_K), tl.float32)
    for start in range(0, N, BLOCK_J):
        j = start + tl.arange(0, BLOCK_J)
        dy = tl.load(dy_rows + j[None, :].to(tl.int64) * dy_other, mask=(i[:, None] < N) & (j[None, :] < N), other=0.0)
        other = _gated(POther, GOther, base + j[:, None] * N + k[None, :], (j[:, None] < N) & (k[None, :] < N))
        acc = tl.dot(dy, other, acc)
    at = base + i[:, None] * N + k[None, :]
    inside = (i[:, None] < N) & (k[None, :] < N)
    s = tl.sigmoid(tl.load(GMine + at, mask=inside, other=0.0).to(tl.float32))
    p = tl.load(PMine + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(DP + at, acc * s, mask=inside)
    tl.store(DG + at, acc * p * s * (1.0 - s), mask=inside)


def backward(saved, grad_y, needs=(True,) * 4):
    pa, ga, pb, gb = saved
    C, N, _ = pa.shape
    of_c, of_i, of_j = grad_y.stride()
    # The gate's sigmoid and three tiles of it share the registers with the accumulator: half the columns.
    side, width, step = _side(N), _side(N, 64), _side(N, 64 // pa.element_size())
    grads = []
    for p, g, p_other, g_other, mine, other, need in (
        (pa, ga, pb, gb, of_i, of_j, needs[0] or needs[1]),
        (pb, gb, pa, ga, of_j, of_i, needs[2] or needs[3]),
    ):
        dp, dg = (torch.empty_like(p), torch.empty_like(g)) if need else (None, None)
        if need:
            _triangle_bwd[(triton.cdiv(N, side), triton.cdiv(N, width), C)](
                grad_y, p, g, p_other, g_other, dp, dg, N, of_c, mine, other,
                BLOCK_I=side, BLOCK_J=step, BLOCK_K=width, num_warps=8, num_stages=2,
            )  # fmt: skip
        grads += [dp, dg]
    return tuple(grads)


# --- check ---
SWEEP = (
    {"C": 3, "N": 32},
    {"C": 2, "N": 75},
    {"C": 2, "N": 41, "dtype": "bfloat16"},
    {"C": 1, "N": 130, "dtype": "float16"},
)
BENCH = ({"C": 128, "N": 512, "dtype": "bfloat16"},)


def make_args(C, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    tensors = (torch.randn(C, N, N, generator=g) for _ in range(4))
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in tensors)


def reference(pa, ga, pb, gb):
    a, b = torch.sigmoid(ga.float()) * pa.float(), torch.sigmoid(gb.float()) * pb.float()
    return a.to(pa.dtype) @ b.to(pa.dtype).transpose(1, 2)
