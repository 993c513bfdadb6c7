"""SwiGLU with its output quantised in groups: the saved scale of a group tells which elements were clipped.

A group's scale is a share of its largest value, so that the largest are clipped and the rest is resolved more finely.
Gradients pass the rounding straight through, stop at the clip, and take the scale for a constant. The scale is saved,
one number for each group: without it the backward would have to reduce over groups once more to find the clipped ones.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

META = {
    "slug": "swiglu_quant_out",
    "family": "glu",
    "op": "swiglu",
    "schema": 1,
    "techniques": ("straight-through", "saved-statistics", "multi-row-tile", "recompute", "strided-cotangent"),
    "saves": ("scales: fp32 (M, G)",),
    "grads": ("gate", "up"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "gradient": "custom",
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": False,
}


# --- forward ---
@triton.jit
def _group_place(groups, N, GROUP: tl.constexpr, BLOCK_G: tl.constexpr):
    """Groups (BLOCK_G,) of this program and the columns (BLOCK_G, GROUP) that exist; GROUP is a power of two."""
    g = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)
    c = g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    return g, c, c < N


@triton.jit
def _hidden(Gate, Up, row, c, mask, g_row, u_row):
    gate = tl.load(Gate + row * g_row + c, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(Up + row * u_row + c, mask=mask, other=0.0).to(tl.float32)
    return gate, up, tl.sigmoid(gate)


@triton.jit
def _level(h, scale):
    return libdevice.rint(tl.div_rn(h, tl.broadcast_to(scale, h.shape)))


@triton.jit
def _swiglu_quant_fwd(Gate, Up, Y, Scales, N, groups, share, g_row, u_row, GROUP: tl.constexpr, BLOCK_G: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    g, c, mask = _group_place(groups, N, GROUP, BLOCK_G)
    gate, up, s = _hidden(Gate, Up, row, c, mask, g_row, u_row)
    h = gate * s * up
    peak = tl.max(tl.abs(h), 1, keep_dims=True)
    scale = tl.where(peak > 0, share * peak, 1.0) / 127.0
    level = tl.minimum(tl.maximum(_level(h, scale), -127.0), 127.0)
    tl.store(Y + row * N + c, level * scale, mask=mask)
    tl.store(Scales + row * groups + g, tl.reshape(scale, (BLOCK_G,)), mask=g < groups)


def _rows_dense(x):
    return x if x.stride(1) == 1 else x.contiguous()


def _groups(N, group):
    """Number of groups in a row, and in a tile of at most 2048 elements."""
    groups = triton.cdiv(N, group)
    return groups, max(1, min(triton.next_power_of_2(groups), 2048 // group))


def forward(gate, up, group=128, share=0.9):
    if group & (group - 1):
        raise ValueError(f"a group of {group} columns is no power of two")
    gate, up = _rows_dense(gate), _rows_dense(up)
    M, N = gate.shape
    groups, BLOCK_G = _groups(N, group)
    y = torch.empty(M, N, device=gate.device, dtype=gate.dtype)
    scales = torch.empty(M, groups, device=gate.device, dtype=torch.float32)
    _swiglu_quant_fwd[(M, triton.cdiv(groups, BLOCK_G))](
        gate, up, y, scales, N, groups, share, gate.stride(0), up.stride(0), GROUP=group, BLOCK_G=BLOCK_G
    )
    return y, (gate, up, scales, group)


# --- backward ---
@triton.jit
def _swiglu_quant_bwd(
    DY, Gate, Up, Scales, DGate, DUp, N, groups, dy_row, dy_col, g_row, u_row,
    GROUP: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    g, c, mask = _group_place(groups, N, GROUP, BLOCK_G)
    gate, up, s = _hidden(Gate, Up, row, c, mask, g_row, u_row)
    act = gate * s
    scale = tl.load(Scales + row * groups + g, mask=g < groups, other=1.0)[:, None]
    dy = tl.load(DY + row * dy_row + c.to(tl.int64) * dy_col, mask=mask, other=0.0).to(tl.float32)
    # The rounded level decides, as in the forward: what rounds to the last level is inside.
    dh = tl.where(tl.abs(_level(act * up, scale)) <= 127.0, dy, 0.0)
    tl.store(DGate + row * N + c, dh * up * (s + act * (1.0 - s)), mask=mask)
    tl.store(DUp + row * N + c, dh * act, mask=mask)


def backward(saved, grad_y, needs=None):
    gate, up, scales, group = saved
    M, N = gate.shape
    groups, BLOCK_G = _groups(N, group)
    dgate = torch.empty(M, N, device=gate.device, dtype=gate.dtype)
    dup = torch.empty(M, N, device=up.device, dtype=up.dtype)
    _swiglu_quant_bwd[(M, triton.cdiv(groups, BLOCK_G))](
        grad_y, gate, up, scales, dgate, dup, N, groups, *grad_y.stride(), gate.stride(0), up.stride(0),
        GROUP=group, BLOCK_G=BLOCK_G,
    )  # fmt: skip
    return dgate, dup


# --- check ---
SWEEP = (
    {"M": 6, "N": 128, "group": 32, "dtype": "float16"},
    {"M": 5, "N": 201, "group": 16},
    {"M": 3, "N": 256, "group": 128, "dtype": "bfloat16"},
)
BENCH = ({"M": 4096, "N": 8192, "group": 128, "dtype": "bfloat16"},)


def make_args(M, N, group=128, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    gate, up = (torch.randn(M, N, generator=g).to(getattr(torch, dtype)) for _ in range(2))
    # What lies at the clip is made zero: there rounding decides whether an element has a gradient at all.
    level = _clipped(gate.float(), up.float(), group, 0.9)[0].flatten(1)[:, :N]
    up = up.masked_fill((level.abs() - 127.5).abs() < 0.01, 0.0)
    return gate.to(device), up.to(device), group


def _clipped(gate, up, group, share):
    h = torch.nn.functional.silu(gate) * up
    wide = torch.nn.functional.pad(h, (0, -h.shape[1] % group)).unflatten(1, (-1, group))
    peak = wide.detach().abs().amax(-1, keepdim=True)
    scale = torch.where(peak > 0, share * peak, 1.0) / 127.0
    return wide / scale, scale, h.shape[1]


def reference(gate, up, group=128, share=0.9):
    level, scale, N = _clipped(gate.float(), up.float(), group, share)
    return (level.round().clamp(-127, 127) * scale).flatten(1)[:, :N].to(gate.dtype)


def surrogate(gate, up, group=128, share=0.9):
    level, scale, N = _clipped(gate, up, group, share)
    straight = (level + (level.round() - level).detach()).clamp(-127, 127)
    return (straight * scale).flatten(1)[:, :N].to(gate.dtype)
