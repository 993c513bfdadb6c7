"""Product a^T b of the rows of each sequence: one launch gives both jagged gradients, halves of its grid per operand.

y[s] = a_s^T b_s sums over the rows of sequence s, so da_s = b_s dy[s]^T and db_s = a_s dy[s] have no sum over rows:
their row tiles are independent, dealt out within each sequence, and dy is read transposed for the one half.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "jagged_jagged_bmm",
    "family": "jagged_segment",
    "op": "jagged_bmm",
    "schema": 1,
    "techniques": ("varlen", "one-launch", "loop-swap", "strided-cotangent"),
    "saves": (),
    "grads": ("a", "b"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _inner_fwd(
    A, B, Y, Offsets, K, N, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    tiles = tl.cdiv(K, BLOCK_K)
    sequence = (tl.program_id(0) // tiles).to(tl.int64)
    k = tl.program_id(0) % tiles * BLOCK_K + tl.arange(0, BLOCK_K)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    r = tl.load(Offsets + sequence).to(tl.int64) + tl.arange(0, BLOCK_R)
    end = tl.load(Offsets + sequence + 1).to(tl.int64)
    acc = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    for _ in range(tl.cdiv(end - tl.load(Offsets + sequence).to(tl.int64), BLOCK_R)):
        a = tl.load(A + r[:, None] * K + k[None, :], mask=(r[:, None] < end) & (k[None, :] < K), other=0.0)
        b = tl.load(B + r[:, None] * N + n[None, :], mask=(r[:, None] < end) & (n[None, :] < N), other=0.0)
        acc = tl.dot(tl.trans(a), b, acc)
        r += BLOCK_R
    y_at = Y + (sequence * K + k[:, None]) * N + n[None, :]
    tl.store(y_at, acc, mask=(k[:, None] < K) & (n[None, :] < N))


def forward(a, b, offsets):
    """a (L, K), b (L, N); sequence s is rows offsets[s] to offsets[s + 1] of both. The result is (S, K, N)."""
    a, b = a.contiguous(), b.contiguous()
    K, N = a.shape[1], b.shape[1]
    sequences = offsets.numel() - 1
    y = torch.empty(sequences, K, N, device=a.device, dtype=a.dtype)
    _inner_fwd[(sequences * triton.cdiv(K, 64), triton.cdiv(N, 64))](
        a, b, y, offsets, K, N, BLOCK_R=128 // a.element_size(), BLOCK_K=64, BLOCK_N=64, num_warps=4, num_stages=3
    )
    return y, (a, b, offsets)


# --- backward ---
@triton.jit
def _rows_of_product(
    Rows, DY, Out, begin, end, J, C, dy_j, dy_c, first_row, row_step, column,
    BLOCK_R: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    # out[r, c] = sum over j of rows[r, j] dy[j, c] for the rows that this program is dealt.
    c = column * BLOCK_C + tl.arange(0, BLOCK_C).to(tl.int64)
    for start in range(begin + first_row, end, row_step):
        r = start + tl.arange(0, BLOCK_R)
        acc = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
        for first in range(0, J, BLOCK_J):
            j = first + tl.arange(0, BLOCK_J).to(tl.int64)
            rows = tl.load(Rows + r[:, None] * J + j[None, :], mask=(r[:, None] < end) & (j[None, :] < J), other=0.0)
            dy_ok = (j[:, None] < J) & (c[None, :] < C)
            dy = tl.load(DY + j[:, None] * dy_j + c[None, :] * dy_c, mask=dy_ok, other=0.0)
            acc = tl.dot(rows, dy, acc)
        tl.store(Out + r[:, None] * C + c[None, :], acc, mask=(r[:, None] < end) & (c[None, :] < C))


@triton.jit
def _inner_bwd(
    A, B, DY, DA, DB, Offsets, K, N, tiles_a, tiles, dy_s, dy_k, dy_n,
    BLOCK_R: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    # Sequences, of which there may be very many, share the first axis with the tiles of both halves.
    sequence = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    begin = tl.load(Offsets + sequence).to(tl.int64)
    end = tl.load(Offsets + sequence + 1).to(tl.int64)
    first_row = tl.program_id(1) * BLOCK_R
    row_step = tl.num_programs(1) * BLOCK_R
    if tile < tiles_a:
        _rows_of_product(
            B, DY + sequence * dy_s, DA, begin, end, N, K, dy_n, dy_k, first_row, row_step, tile,
            BLOCK_R, BLOCK_J, BLOCK_C,
        )  # fmt: skip
    else:
        _rows_of_product(
            A, DY + sequence * dy_s, DB, begin, end, K, N, dy_k, dy_n, first_row, row_step, tile - tiles_a,
            BLOCK_R, BLOCK_J, BLOCK_C,
        )  # fmt: skip


def backward(saved, grad_y, needs=None):
    a, b, offsets = saved
    (L, K), N = a.shape, b.shape[1]
    sequences = offsets.numel() - 1
    da, db = torch.empty_like(a), torch.empty_like(b)
    tiles_a = triton.cdiv(K, 64)
    tiles = tiles_a + triton.cdiv(N, 64)
    # Twice as many programs as a sequence of average length has row tiles.
    share = max(1, triton.cdiv(2 * L, sequences * 128))
    _inner_bwd[(sequences * tiles, share)](
        a, b, grad_y, da, db, offsets, K, N, tiles_a, tiles, *grad_y.stride(),
        BLOCK_R=128, BLOCK_J=128 // a.element_size(), BLOCK_C=64, num_warps=4, num_stages=3,
    )  # fmt: skip
    return da, db


# --- check ---
SWEEP = (
    {"S": 3, "L": 192, "K": 32, "N": 48},
    {"S": 5, "L": 307, "K": 21, "N": 71},
    {"S": 2, "L": 96, "K": 40, "N": 24, "dtype": "bfloat16"},
)
BENCH = ({"S": 64, "L": 65536, "K": 256, "N": 512, "dtype": "bfloat16"},)


def make_args(S, L, K, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    a, b = torch.randn(L, K, generator=g), torch.randn(L, N, generator=g)
    # The second sequence is empty.
    cuts = torch.randint(0, L + 1, (S - 1,), generator=g).sort().values
    cuts[1:2] = cuts[:1]
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), cuts, torch.tensor([L])))
    return *(t.to(device=device, dtype=getattr(torch, dtype)) for t in (a, b)), offsets.to(device)


def reference(a, b, offsets):
    lengths = offsets.diff().tolist()
    pairs = zip(a.split(lengths), b.split(lengths), strict=True)
    return torch.stack([left.t() @ right for left, right in pairs])
