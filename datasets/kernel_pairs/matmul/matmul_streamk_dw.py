"""Stream-K gradients of x W: the multiply steps of all output tiles form one line, cut into equal pieces per program.

A grid of whole tiles leaves part of the device idle in its last wave. Here step s of the line belongs to tile
s // depth, and program p does the steps [p each, (p + 1) each), across tile borders. A tile that one program finishes
is stored at once. Otherwise each leaves its partial tile in one of two slots (a piece starts or ends inside at most two
tiles), and a fix-up launch adds the slots of a tile in order: no locks, no atomics, the same bits in every run.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "matmul_streamk_dw",
    "family": "matmul",
    "op": "matmul",
    "schema": 1,
    "techniques": ("stream-k", "two-stage-partials", "persistent-grid", "owner-grid", "strided-cotangent"),
    "saves": (),
    "grads": ("x", "weight"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _tile_matmul(X, W, Y, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    row0 = tl.program_id(0).to(tl.int64) * BLOCK_M
    col0 = tl.program_id(1).to(tl.int64) * BLOCK_N
    i = row0 + tl.arange(0, BLOCK_M)[:, None]
    j = col0 + tl.arange(0, BLOCK_N)[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for s in range(tl.cdiv(K, BLOCK_K)):
        k = s * BLOCK_K + tl.arange(0, BLOCK_K)
        x = tl.load(X + i * K + k[None, :], mask=(i < M) & (k[None, :] < K), other=0.0)
        w = tl.load(W + k[:, None].to(tl.int64) * N + j, mask=(k[:, None] < K) & (j < N), other=0.0)
        acc = tl.dot(x, w, acc)
    tl.store(Y + i * N + j, acc, mask=(i < M) & (j < N))


def forward(x, weight):
    x, weight = x.contiguous(), weight.contiguous()
    (M, K), N = x.shape, weight.shape[1]
    y = torch.empty(M, N, device=x.device, dtype=x.dtype)
    _tile_matmul[(triton.cdiv(M, 128), triton.cdiv(N, 128))](
        x, weight, y, M, N, K,
        BLOCK_M=128, BLOCK_N=128, BLOCK_K=128 // x.element_size(), num_warps=8, num_stages=3,
    )  # fmt: skip
    return y, (x, weight)


# --- backward ---
@triton.jit
def _streamk_pieces(
    L, R, OUT, Slots, P, Q, K, l_p, l_k, r_k, r_q, tiles_q, depth, steps, each,
    BLOCK_P: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # OUT (P, Q) = L (P, K) R (K, Q). Strides turn the operands, so dX and dW are the same kernel.
    program = tl.program_id(0)
    begin = program * each
    end = tl.minimum(begin + each, steps)
    first_tile = begin // depth
    for tile in range(first_tile, tl.cdiv(end, depth)):
        p = (tile // tiles_q).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
        q = (tile % tiles_q).to(tl.int64) * BLOCK_Q + tl.arange(0, BLOCK_Q)
        low = tl.maximum(begin - tile * depth, 0)
        high = tl.minimum(end - tile * depth, depth)
        acc = tl.zeros((BLOCK_P, BLOCK_Q), tl.float32)
        for step in range(low, high):
            k = (step * BLOCK_K + tl.arange(0, BLOCK_K)).to(tl.int64)
            left = tl.load(L + p[:, None] * l_p + k[None, :] * l_k, mask=(p[:, None] < P) & (k[None, :] < K), other=0.0)
            right = tl.load(
                R + k[:, None] * r_k + q[None, :] * r_q, mask=(k[:, None] < K) & (q[None, :] < Q), other=0.0
            )
            acc = tl.dot(left, right, acc)
        if high - low == depth:
            tl.store(OUT + p[:, None] * Q + q[None, :], acc, mask=(p[:, None] < P) & (q[None, :] < Q))
        else:
            slot = 2 * program + tl.where(tile == first_tile, 0, 1)
            inner = tl.arange(0, BLOCK_P)[:, None] * BLOCK_Q + tl.arange(0, BLOCK_Q)[None, :]
            tl.store(Slots + slot.to(tl.int64) * (BLOCK_P * BLOCK_Q) + inner, acc)


@triton.jit
def _streamk_fixup(
    Slots, OUT, P, Q, tiles_q, depth, each, BLOCK_P: tl.constexpr, BLOCK_Q: tl.constexpr, PART: tl.constexpr
):
    # Strips of PART rows of a tile: the fix-up only streams, and needs more programs than there are tiles.
    tile = tl.program_id(0)
    first = tile * depth // each
    last = ((tile + 1) * depth - 1) // each
    if first == last:
        return
    row = tl.program_id(1) * PART + tl.arange(0, PART)
    col = tl.arange(0, BLOCK_Q)
    total = tl.zeros((PART, BLOCK_Q), tl.float32)
    for program in range(first, last + 1):
        slot = 2 * program + tl.where(program * each // depth == tile, 0, 1)
        total += tl.load(Slots + slot.to(tl.int64) * (BLOCK_P * BLOCK_Q) + row[:, None] * BLOCK_Q + col[None, :])
    p = (tile // tiles_q).to(tl.int64) * BLOCK_P + row
    q = (tile % tiles_q) * BLOCK_Q + col
    tl.store(OUT + p[:, None] * Q + q[None, :], total, mask=(p[:, None] < P) & (q[None, :] < Q))


def _streamk_product(left, right):
    (P, K), Q = left.shape, right.shape[1]
    out = torch.empty(P, Q, device=left.device, dtype=left.dtype)
    # Small products get small tiles, large ones the tile that keeps the tensor cores busy.
    side = 128 if P * Q >= 128 * 128 else 32
    BLOCK_K = 128 // left.element_size() if side == 128 else 32
    tiles_q = triton.cdiv(Q, side)
    tiles = triton.cdiv(P, side) * tiles_q
    depth = triton.cdiv(K, BLOCK_K)
    steps = tiles * depth
    processors = 2 * torch.cuda.get_device_properties(left.device).multi_processor_count if left.is_cuda else 8
    # Below three steps a program spends more time on its partial tile than on multiplying.
    each = max(3, triton.cdiv(steps, processors))
    programs = triton.cdiv(steps, each)
    slots = torch.empty(2 * programs, side, side, device=left.device, dtype=torch.float32)
    _streamk_pieces[(programs,)](
        left, right, out, slots, P, Q, K, *left.stride(), *right.stride(), tiles_q, depth, steps, each,
        BLOCK_P=side, BLOCK_Q=side, BLOCK_K=BLOCK_K, num_warps=8 if side == 128 else 4, num_stages=3,
    )  # fmt: skip
    _streamk_fixup[(tiles, side // 16)](
        slots, out, P, Q, tiles_q, depth, each, BLOCK_P=side, BLOCK_Q=side, PART=16, num_warps=4
    )
    return out


def backward(saved, grad_y, needs=(True, True)):
    x, weight = saved
    dx = _streamk_product(grad_y, weight.t()) if needs[0] else None
    dw = _streamk_product(x.t(), grad_y) if needs[1] else None
    return dx, dw


# --- check ---
SWEEP = (
    {"M": 160, "N": 64, "K": 96},
    {"M": 203, "N": 75, "K": 41},
    {"M": 96, "N": 160, "K": 136, "dtype": "bfloat16"},
    {"M": 250, "N": 32, "K": 24, "dtype": "float16"},
)
BENCH = ({"M": 8192, "N": 1536, "K": 1280, "dtype": "bfloat16"},)


def make_args(M, N, K, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(M, K, generator=g), torch.randn(K, N, generator=g) * K**-0.5
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, weight))


def reference(x, weight):
    return x @ weight
