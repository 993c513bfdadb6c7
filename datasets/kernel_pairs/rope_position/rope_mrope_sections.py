"""Multimodal rotary embedding: pairs are dealt to time, height and width, and each section has its own position ids.

Lane d finds its section by comparing with the section borders, the section picks one of three position ids, and that
picks the row of the table: two dependent gathers for each token, done once for all of its heads. The ids select
constants, so that the backward gathers the same way and turns back.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "rope_mrope_sections",
    "family": "rope_position",
    "op": "rotary_embedding",
    "schema": 1,
    "techniques": ("orthogonal-adjoint", "recompute", "strided-cotangent"),
    "saves": (),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _turn_sections(
    X, Ids, Cos, Sin, Y, tokens, S, H, HALF, first, second, x_b, x_h, x_s, x_d,
    SIGN: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    batch = (token // S).to(tl.int64)
    s = (token % S).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    inside = d < HALF
    # 0, 1 or 2: how many of the two borders lie at or below the lane.
    stream = (d >= first).to(tl.int32) + (d >= second).to(tl.int32)
    position = tl.load(Ids + stream * tokens + token, mask=inside, other=0)
    at = position * HALF + d
    cos = tl.load(Cos + at, mask=inside, other=0.0)[None, :]
    sin = tl.load(Sin + at, mask=inside, other=0.0)[None, :] * SIGN
    for start in range(0, H, BLOCK_H):
        h = (start + tl.arange(0, BLOCK_H))[:, None]
        mask = (h < H) & inside[None, :]
        source = X + batch * x_b + h.to(tl.int64) * x_h + s * x_s + d[None, :] * x_d
        a = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(source + HALF * x_d, mask=mask, other=0.0).to(tl.float32)
        target = Y + ((batch * H + h) * S + s) * (2 * HALF) + d[None, :]
        tl.store(target, a * cos - b * sin, mask=mask)
        tl.store(target + HALF, b * cos + a * sin, mask=mask)


def _launch(x, ids, cos, sin, sections, sign):
    B, H, S, D = x.shape
    y = torch.empty(B, H, S, D, device=x.device, dtype=x.dtype)
    BLOCK_D = triton.next_power_of_2(D // 2)
    BLOCK_H = max(1, min(triton.next_power_of_2(H), 1024 // BLOCK_D))
    _turn_sections[(B * S,)](
        x, ids, cos, sin, y, B * S, S, H, D // 2, sections[0], sections[0] + sections[1], *x.stride(),
        SIGN=sign, BLOCK_H=BLOCK_H, BLOCK_D=BLOCK_D,
    )  # fmt: skip
    return y


def forward(x, ids, cos, sin, sections):
    ids, cos, sin = ids.contiguous(), cos.contiguous(), sin.contiguous()
    return _launch(x, ids, cos, sin, sections, 1), (ids, cos, sin, sections)


# --- backward ---
def backward(saved, grad_y, needs=None):
    ids, cos, sin, sections = saved
    return _launch(grad_y, ids, cos, sin, sections, -1)


# --- check ---
SWEEP = (
    {"B": 2, "H": 2, "S": 9, "sections": (4, 6, 6), "dtype": "float16"},
    {"B": 1, "H": 3, "S": 13, "sections": (3, 9, 7)},
    {"B": 1, "H": 2, "S": 8, "sections": (8, 12, 12), "dtype": "bfloat16"},
)
BENCH = ({"B": 4, "H": 28, "S": 4096, "sections": (16, 24, 24), "dtype": "bfloat16"},)


def make_args(B, H, S, sections, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    HALF = sum(sections)
    x = torch.randn(B, H, S, 2 * HALF, generator=g).to(device=device, dtype=getattr(torch, dtype))
    ids = torch.randint(S + 8, (3, B, S), generator=g, dtype=torch.int32)
    theta = torch.arange(S + 8)[:, None] * 10000.0 ** (-torch.arange(HALF) / HALF)
    return x, ids.to(device), theta.cos().to(device), theta.sin().to(device), sections


def reference(x, ids, cos, sin, sections):
    def by_section(table):
        parts = torch.split(table, sections, 1)
        return torch.cat([part[stream] for part, stream in zip(parts, ids, strict=True)], -1)[:, None]

    c, s = by_section(cos), by_section(sin)
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * c - b * s, b * c + a * s), -1).to(x.dtype)
