"""Grouped gate and up products with SwiGLU in the epilogue: the backward forms gate and up again, and keeps neither.

h = silu(x Wg) * (x Wu) for rows sorted by expert. Only x is kept: gate and up would be two more (T, F) tensors, and one
launch forms both from one tile of x. It stores dgate and dup, the second launch adds dgate Wg^T and dup Wu^T in
one accumulator for dx, and the third forms dWg and dWu with one load of x for both. Experts own their tiles throughout.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

META = {
    "slug": "grouped_swiglu",
    "family": "moe",
    "op": "grouped_swiglu",
    "schema": 1,
    "techniques": ("recompute", "varlen", "epilogue-fusion", "owner-grid", "strided-cotangent"),
    "saves": (),
    "grads": ("x", "w_gate", "w_up"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _row_tile(Offsets, E, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr):
    """Expert of this program's row tile and its first and last row; an empty range for superfluous programs."""
    e = tl.arange(0, BLOCK_E)
    begin = tl.load(Offsets + e, mask=e < E, other=0)
    end = tl.load(Offsets + e + 1, mask=e < E, other=0)
    tiles = (end - begin + BLOCK_M - 1) // BLOCK_M
    after = tl.cumsum(tiles, 0)
    tile = tl.program_id(1)
    expert = tl.sum((after <= tile).to(tl.int32), 0)
    mine = e == expert
    first = tl.sum(tl.where(mine, begin + (tile - after + tiles) * BLOCK_M, 0), 0)
    return expert.to(tl.int64), first.to(tl.int64), tl.sum(tl.where(mine, end, 0), 0)


@triton.jit
def _gate_up(X, WG, WU, expert, m, f, last, D, F, BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr):
    """Tiles of x Wg and x Wu in fp32; each tile of x is loaded once for both."""
    gate = tl.zeros((BLOCK_M, BLOCK_F), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_F), tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        x = tl.load(X + m[:, None] * D + d[None, :], mask=(m[:, None] < last) & (d[None, :] < D), other=0.0)
        at = (expert * D + d[:, None]) * F + f[None, :]
        inside = (d[:, None] < D) & (f[None, :] < F)
        gate = tl.dot(x, tl.load(WG + at, mask=inside, other=0.0), gate)
        up = tl.dot(x, tl.load(WU + at, mask=inside, other=0.0), up)
    return gate, up


@triton.jit
def _swiglu_fwd(
    X, WG, WU, Offsets, Y, D, F, E,
    BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    expert, first, last = _row_tile(Offsets, E, BLOCK_M, BLOCK_E)
    if first >= last:
        return
    m = first + tl.arange(0, BLOCK_M)
    f = tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)
    gate, up = _gate_up(X, WG, WU, expert, m, f, last, D, F, BLOCK_M, BLOCK_F, BLOCK_D)
    tl.store(Y + m[:, None] * F + f[None, :], gate * tl.sigmoid(gate) * up, mask=(m[:, None] < last) & (f[None, :] < F))


def _side(size, most=128):
    return max(16, min(most, triton.next_power_of_2(size)))


def forward(x, w_gate, w_up, offsets):
    # Rows offsets[e] to offsets[e + 1] of x belong to expert e.
    x, w_gate, w_up = x.contiguous(), w_gate.contiguous(), w_up.contiguous()
    T, (E, D, F) = x.shape[0], w_gate.shape
    y = torch.empty(T, F, device=x.device, dtype=x.dtype)
    BLOCK_F = _side(F)
    _swiglu_fwd[(triton.cdiv(F, BLOCK_F), triton.cdiv(T, 64) + E)](
        x, w_gate, w_up, offsets, y, D, F, E,
        BLOCK_M=64, BLOCK_F=BLOCK_F, BLOCK_D=_side(D, 128 // x.element_size()), BLOCK_E=triton.next_power_of_2(E),
        num_warps=8, num_stages=3,
    )  # fmt: skip
    return y, (x, w_gate, w_up, offsets)


# --- backward ---
@triton.jit
def _slopes_out(gate, up, DY, DGate, DUp, m, f, last, F, d_m, dy_m, dy_f):
    """Store a piece of dgate and dup."""
    inside = (m[:, None] < last) & (f[None, :] < F)
    dy = tl.load(DY + m[:, None] * dy_m + f[None, :].to(tl.int64) * dy_f, mask=inside, other=0.0).to(tl.float32)
    s = tl.sigmoid(gate)
    at = m[:, None] * d_m + f[None, :]
    tl.store(DUp + at, dy * gate * s, mask=inside)
    tl.store(DGate + at, dy * up * s * (1.0 + gate * (1.0 - s)), mask=inside)


@triton.jit
def _swiglu_slopes(
    DY, X, WG, WU, Offsets, DGate, DUp, D, F, E, d_m, dy_m, dy_f,
    BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    expert, first, last = _row_tile(Offsets, E, BLOCK_M, BLOCK_E)
    if first >= last:
        return
    expert, row, col = expert.to(tl.int32), first.to(tl.int32), tl.program_id(0) * BLOCK_F
    gate = tl.zeros((BLOCK_M, BLOCK_F), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_F), tl.float32)
    # Rows of the next expert are read past `last`, and not stored.
    for d in range(0, D, BLOCK_D):
        x = X.load([row, d])
        gate = tl.dot(x, tl.reshape(WG.load([expert, d, col]), (BLOCK_D, BLOCK_F)), gate)
        up = tl.dot(x, tl.reshape(WU.load([expert, d, col]), (BLOCK_D, BLOCK_F)), up)
    # The tile leaves in halves of its columns, which need half the registers each.
    gate_l, gate_r = tl.split(tl.permute(tl.reshape(gate, (BLOCK_M, 2, BLOCK_F // 2)), (0, 2, 1)))
    up_l, up_r = tl.split(tl.permute(tl.reshape(up, (BLOCK_M, 2, BLOCK_F // 2)), (0, 2, 1)))
    m, f = first + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_F // 2)
    _slopes_out(gate_l, up_l, DY, DGate, DUp, m, f, last, F, d_m, dy_m, dy_f)
    _slopes_out(gate_r, up_r, DY, DGate, DUp, m, f + BLOCK_F // 2, last, F, d_m, dy_m, dy_f)


@triton.jit
def _swiglu_dx(
    DGate, DUp, WG, WU, Offsets, DX, D, F, E,
    BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    expert, first, last = _row_tile(Offsets, E, BLOCK_M, BLOCK_E)
    if first >= last:
        return
    expert, row, col = expert.to(tl.int32), first.to(tl.int32), tl.program_id(0) * BLOCK_D
    dx = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for f in range(0, F, BLOCK_F):
        dx = tl.dot(DGate.load([row, f]), tl.reshape(WG.load([expert, col, f]), (BLOCK_D, BLOCK_F)).T, dx)
    for f in range(0, F, BLOCK_F):
        dx = tl.dot(DUp.load([row, f]), tl.reshape(WU.load([expert, col, f]), (BLOCK_D, BLOCK_F)).T, dx)
    m, d = first + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_D)
    tl.store(DX + m[:, None] * D + d[None, :], dx, mask=(m[:, None] < last) & (d[None, :] < D))


@triton.jit
def _swiglu_dw(
    DGate, DUp, X, Offsets, DWG, DWU, D, F, BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr
):
    expert = tl.program_id(2)
    row, col = tl.program_id(0) * BLOCK_D, tl.program_id(1) * BLOCK_F
    first = tl.load(Offsets + expert).to(tl.int32)
    last = tl.load(Offsets + expert + 1).to(tl.int32)
    whole = first + (last - first) // BLOCK_M * BLOCK_M
    dwg = tl.zeros((BLOCK_D, BLOCK_F), tl.float32)
    dwu = tl.zeros((BLOCK_D, BLOCK_F), tl.float32)
    for m in range(first, whole, BLOCK_M):
        xt = X.load([m, row]).T
        dwg = tl.dot(xt, DGate.load([m, col]), dwg)
        dwu = tl.dot(xt, DUp.load([m, col]), dwu)
    if whole < last:
        # The last step shares its rows with the next expert, whose rows are cleared in all operands.
        own = (whole + tl.arange(0, BLOCK_M))[:, None] < last
        xt = tl.where(own, X.load([whole, row]), 0.0).T
        dwg = tl.dot(xt, tl.where(own, DGate.load([whole, col]), 0.0), dwg)
        dwu = tl.dot(xt, tl.where(own, DUp.load([whole, col]), 0.0), dwu)
    d, f = row + tl.arange(0, BLOCK_D), col + tl.arange(0, BLOCK_F)
    out = (expert.to(tl.int64) * D + d[:, None]) * F + f[None, :]
    inside = (d[:, None] < D) & (f[None, :] < F)
    tl.store(DWG + out, dwg, mask=inside)
    tl.store(DWU + out, dwu, mask=inside)


def _tiles(tensor, *block):
    """A descriptor of tiles of a matrix, or of the matrices of a batch; of a copy where rows are not aligned."""
    step = 16 // tensor.element_size()
    width = tensor.shape[-1]
    outer = tensor.stride()[:-1]
    if tensor.stride(-1) != 1 or any(s % step or s < width for s in outer) or tensor.storage_offset() % step:
        dense = tensor.new_empty(*tensor.shape[:-1], triton.cdiv(width, step) * step)[..., :width]
        dense.copy_(tensor)
        tensor = dense
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(block))


def _up(size):
    return max(16, triton.next_power_of_2(size))


def backward(saved, grad_y, needs=(True, True, True)):
    x, w_gate, w_up, offsets = saved
    T, (E, D, F) = x.shape[0], w_gate.shape
    step, BLOCK_E, mean = 128 // x.element_size(), triton.next_power_of_2(E), _up(T // E)
    width = triton.cdiv(F, 8) * 8
    dgate, dup = torch.empty(2, T, width, device=x.device, dtype=x.dtype)[:, :, :F]
    BM, BF, BD = min(128, mean), min(128, _up(F)), min(step, _up(D))
    _swiglu_slopes[(triton.cdiv(F, BF), triton.cdiv(T, BM) + E)](
        grad_y, _tiles(x, BM, BD), _tiles(w_gate, 1, BD, BF), _tiles(w_up, 1, BD, BF), offsets, dgate, dup, D, F, E,
        width, *grad_y.stride(), BLOCK_M=BM, BLOCK_F=BF, BLOCK_D=BD, BLOCK_E=BLOCK_E, num_warps=8, num_stages=4,
    )  # fmt: skip
    dx = dwg = dwu = None
    if needs[0]:
        dx = torch.empty_like(x)
        BM, BD, BF = min(256, mean), min(128, _up(D)), min(step, _up(F))
        _swiglu_dx[(triton.cdiv(D, BD), triton.cdiv(T, BM) + E)](
            *(_tiles(t, BM, BF) for t in (dgate, dup)), *(_tiles(w, 1, BD, BF) for w in (w_gate, w_up)), offsets, dx,
            D, F, E, BLOCK_M=BM, BLOCK_F=BF, BLOCK_D=BD, BLOCK_E=BLOCK_E, num_warps=8, num_stages=4,
        )  # fmt: skip
    if needs[1] or needs[2]:
        dwg, dwu = torch.empty_like(w_gate), torch.empty_like(w_up)
        # Two accumulators share the registers.
        BD, BF, BM = min(128, _up(D)), min(128, _up(F)), min(step, mean)
        _swiglu_dw[(triton.cdiv(D, BD), triton.cdiv(F, BF), E)](
            *(_tiles(t, BM, BF) for t in (dgate, dup)), _tiles(x, BM, BD), offsets, dwg, dwu, D, F,
            BLOCK_M=BM, BLOCK_F=BF, BLOCK_D=BD, num_warps=8, num_stages=4,
        )  # fmt: skip
    return dx, dwg, dwu


# --- check ---
SWEEP = (
    {"T": 128, "E": 2, "D": 32, "F": 64},
    {"T": 151, "E": 5, "D": 24, "F": 35},
    {"T": 60, "E": 3, "D": 16, "F": 40, "dtype": "bfloat16"},
    {"T": 70, "E": 1, "D": 40, "F": 20, "dtype": "float16"},
)
BENCH = ({"T": 16384, "E": 8, "D": 2048, "F": 2048, "dtype": "bfloat16"},)


def make_args(T, E, D, F, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    tensors = (
        torch.randn(T, D, generator=g),
        torch.randn(E, D, F, generator=g) * D**-0.5,
        torch.randn(E, D, F, generator=g) * D**-0.5,
    )
    cuts = torch.randint(0, T + 1, (E - 1,), generator=g).sort().values
    # With more than two, the second expert gets no rows.
    if E > 2:
        cuts[1] = cuts[0]
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), cuts, torch.tensor([T]))).to(torch.int32)
    return *(t.to(device=device, dtype=getattr(torch, dtype)) for t in tensors), offsets.to(device)


def reference(x, w_gate, w_up, offsets):
    cuts = offsets.tolist()
    parts = []
    for first, last, gate, up in zip(cuts[:-1], cuts[1:], w_gate, w_up, strict=True):
        rows = x[first:last]
        parts.append((torch.nn.functional.silu((rows @ gate).float()) * (rows @ up).float()).to(x.dtype))
    return torch.cat(parts)
