"""GRPO's clipped loss with a KL term straight from hidden states: one coefficient per token times a softmax gradient.

z = x W^T / tau, logp = z[label] - lse, r = exp(logp - old), k = ref - logp, mean over the tokens of the answers of
    l = -min(r A, clip(r) A) + beta (exp(k) - k - 1),    dl/dlogp = c = -r A [r decided] + beta (1 - exp(k)),
    dz = g / (tau count) c (onehot - softmax(z)).
Splits of the vocabulary find lse; then every token's c is known and saved. Prompts, padding and clipped tokens have
c = 0, in long runs: the forward lists the tiles of tokens that have any other, and the backward's kernels count in that
list, whose length never leaves the device. Tiles go by in chunks. A chunk's scratch holds c (onehot - softmax) and
serves two products; g, tau and the count, which would flush fp16 to zero, enter behind them.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "linear_grpo",
    "family": "loss_linear_fused",
    "op": "linear_grpo_loss",
    "schema": 1,
    "techniques": ("saved-lse", "recompute", "chunked", "inverse-map", "epilogue-fusion", "scalar-gradient"),
    "saves": (
        "lse: fp32 (T,)",
        "slope: fp32 (T,)",
        "live: int32 (tiles of tokens + 1,)",
        "totals: fp32 (2,)",
    ),
    "grads": ("hidden", "weight"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}

TILE = 128


# --- forward ---
@triton.jit
def _policy_logits(
    X, W, t, v, T, V, H, inv_tau, BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr
):  # fmt: skip
    """fp32 logits of tokens t against words v, divided by the temperature; zero off the end of either."""
    h = tl.arange(0, BLOCK_H)
    rows = X + t.to(tl.int64)[:, None] * H + h[None, :]
    words = W + v.to(tl.int64)[None, :] * H + h[:, None]
    z = tl.zeros((BLOCK_T, BLOCK_V), tl.float32)
    for done in range(0, H, BLOCK_H):
        x = tl.load(rows + done, mask=(t[:, None] < T) & (h[None, :] < H - done), other=0.0)
        w = tl.load(words + done, mask=(v[None, :] < V) & (h[:, None] < H - done), other=0.0)
        z = tl.dot(x, w, z)
    return z * inv_tau


@triton.jit
def _split_lse(
    X, W, Label, PartLse, Chosen, T, V, H, share, inv_tau,
    BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    split = tl.program_id(1)
    label = tl.load(Label + t, mask=t < T, other=-1)
    last = tl.minimum((split + 1) * share, V)
    top = tl.full((BLOCK_T,), -1.0e30, tl.float32)
    norm = tl.zeros((BLOCK_T,), tl.float32)
    for start in range(split * share, last, BLOCK_V):
        v = start + tl.arange(0, BLOCK_V)
        z = _policy_logits(X, W, t, v, T, V, H, inv_tau, BLOCK_T, BLOCK_V, BLOCK_H)
        mine = v[None, :] == label[:, None]
        holds = (label >= start) & (label < start + BLOCK_V) & (label < last)
        tl.store(Chosen + t, tl.sum(tl.where(mine, z, 0.0), 1), mask=holds & (t < T))
        z = tl.where(v[None, :] < last, z, -1.0e30)
        higher = tl.maximum(top, tl.max(z, 1))
        norm = norm * tl.exp(top - higher) + tl.sum(tl.exp(z - higher[:, None]), 1)
        top = higher
    tl.store(PartLse + split * T + t, top + tl.log(norm), mask=t < T)


@triton.jit
def _token_losses(
    PartLse, Chosen, Old, Ref, Advantage, Mask, Lse, Slope, TileLoss, TileCount, TileLive, T, L, splits, eps, beta,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    t = tile * BLOCK_T + tl.arange(0, BLOCK_T)
    s = tl.arange(0, BLOCK_S)
    part = tl.load(PartLse + s[:, None] * T + t[None, :], mask=(s[:, None] < splits) & (t[None, :] < T), other=-1.0e30)
    top = tl.max(part, 0)
    lse = top + tl.log(tl.sum(tl.exp(part - top[None, :]), 0))
    kept = tl.load(Mask + t, mask=t < T, other=0) != 0
    logp = tl.load(Chosen + t, mask=kept, other=0.0) - lse
    r = tl.exp(tl.where(kept, logp - tl.load(Old + t, mask=kept, other=0.0), 0.0))
    k = tl.where(kept, tl.load(Ref + t, mask=kept, other=0.0) - logp, 0.0)
    a = tl.load(Advantage + t // L, mask=kept, other=0.0)
    clipped = tl.minimum(tl.maximum(r, 1.0 - eps), 1.0 + eps)
    loss = beta * (tl.exp(k) - k - 1.0) - tl.minimum(r * a, clipped * a)
    # The advantage's sign chooses which side of the clip is closed.
    decided = tl.where(a >= 0.0, r <= 1.0 + eps, r >= 1.0 - eps)
    slope = tl.where(kept, beta * (1.0 - tl.exp(k)) - tl.where(decided, r * a, 0.0), 0.0)
    tl.store(Lse + t, lse, mask=t < T)
    tl.store(Slope + t, slope, mask=t < T)
    tl.store(TileLoss + tile, tl.sum(tl.where(kept, loss, 0.0), 0))
    tl.store(TileCount + tile, tl.sum(kept.to(tl.int32), 0))
    tl.store(TileLive + tile, tl.max((slope != 0.0).to(tl.int32), 0))


@triton.jit
def _list_tiles(TileLoss, TileCount, TileLive, Live, Totals, Loss, tiles, BLOCK: tl.constexpr):
    # Live[0] is the number of live tiles, behind it stand their numbers.
    loss = tl.zeros((BLOCK,), tl.float32)
    count = tl.zeros((BLOCK,), tl.int32)
    found = 0
    for start in range(0, tiles, BLOCK):
        tile = start + tl.arange(0, BLOCK)
        loss += tl.load(TileLoss + tile, mask=tile < tiles, other=0.0)
        count += tl.load(TileCount + tile, mask=tile < tiles, other=0)
        live = tl.load(TileLive + tile, mask=tile < tiles, other=0)
        tl.store(Live + found + tl.cumsum(live, 0), tile, mask=live != 0)
        found += tl.sum(live, 0)
    tokens = tl.maximum(tl.sum(count, 0), 1).to(tl.float32)
    mean = tl.sum(loss, 0) / tokens
    tl.store(Live, found)
    tl.store(Totals, tokens)
    tl.store(Totals + 1, mean)
    tl.store(Loss, mean)


def _side(size, most=128):
    return max(16, min(most, triton.next_power_of_2(size)))


def forward(hidden, weight, label, old, ref, advantage, mask, tau=1.0, eps=0.2, beta=0.04, chunk=4096):
    # hidden (B, L, H); label, old, ref, mask (B, L); advantage (B). The loss is the mean over the mask's tokens.
    hidden, weight, label, mask = hidden.contiguous(), weight.contiguous(), label.contiguous(), mask.contiguous()
    old, ref = old.contiguous(), ref.contiguous()
    (B, L, H), V = hidden.shape, weight.shape[0]
    T = B * L
    tiles = triton.cdiv(T, TILE)
    # Enough splits for four waves of 132 processors; each has whole tiles of words.
    wanted = max(1, min(528 // tiles, triton.cdiv(V, 128), 64))
    share = triton.cdiv(triton.cdiv(V, wanted), 128) * 128
    splits = triton.cdiv(V, share)
    fp32 = {"device": hidden.device, "dtype": torch.float32}
    part_lse, chosen, lse, slope = torch.empty(splits, T, **fp32), *(torch.empty(T, **fp32) for _ in range(3))
    tile_loss, totals, loss = torch.empty(tiles, **fp32), torch.empty(2, **fp32), torch.empty((), **fp32)
    tile_count, tile_live = (torch.empty(tiles, device=hidden.device, dtype=torch.int32) for _ in range(2))
    # Room for all tiles; entries behind the live ones are never read.
    live = torch.zeros(tiles + 1, device=hidden.device, dtype=torch.int32)
    _split_lse[(tiles, splits)](
        hidden, weight, label, part_lse, chosen, T, V, H, share, 1.0 / tau,
        BLOCK_T=TILE, BLOCK_V=_side(V), BLOCK_H=_side(H, 128 // hidden.element_size()), num_warps=8, num_stages=3,
    )  # fmt: skip
    _token_losses[(tiles,)](
        part_lse, chosen, old, ref, advantage, mask, lse, slope, tile_loss, tile_count, tile_live, T, L, splits,
        eps, beta, BLOCK_T=TILE, BLOCK_S=triton.next_power_of_2(splits), num_warps=4,
    )  # fmt: skip
    _list_tiles[(1,)](tile_loss, tile_count, tile_live, live, totals, loss, tiles, BLOCK=256, num_warps=4)
    return loss, (hidden, weight, label, lse, slope, live, totals, tau, chunk)


# --- backward ---
@triton.jit
def _live_dlogits(
    X, W, Label, Lse, Slope, Live, DZ, first, T, V, H, inv_tau,
    BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    if first + place >= tl.load(Live):
        return
    row = tl.arange(0, BLOCK_T)
    t = tl.load(Live + 1 + first + place) * BLOCK_T + row
    v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    z = _policy_logits(X, W, t, v, T, V, H, inv_tau, BLOCK_T, BLOCK_V, BLOCK_H)
    lse = tl.load(Lse + t, mask=t < T, other=0.0)
    slope = tl.load(Slope + t, mask=t < T, other=0.0)
    label = tl.load(Label + t, mask=t < T, other=-1)
    dz = slope[:, None] * (tl.where(v[None, :] == label[:, None], 1.0, 0.0) - tl.exp(z - lse[:, None]))
    at = (place.to(tl.int64) * BLOCK_T + row)[:, None] * V + v[None, :]
    tl.store(DZ + at, dz, mask=v[None, :] < V)


@triton.jit
def _live_dx(
    DLoss, Totals, DZ, W, Live, DX, first, T, V, H, inv_tau,
    BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(1)
    if first + place >= tl.load(Live):
        return
    row = tl.arange(0, BLOCK_T)
    h = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    v = tl.arange(0, BLOCK_V)
    dz_at = DZ + (place.to(tl.int64) * BLOCK_T + row)[:, None] * V + v[None, :]
    w_at = W + v.to(tl.int64)[:, None] * H + h[None, :]
    dx = tl.zeros((BLOCK_T, BLOCK_H), tl.float32)
    for done in range(0, V, BLOCK_V):
        dz = tl.load(dz_at + done, mask=v[None, :] < V - done, other=0.0)
        w = tl.load(w_at + done.to(tl.int64) * H, mask=(v[:, None] < V - done) & (h[None, :] < H), other=0.0)
        dx = tl.dot(dz, w, dx)
    t = tl.load(Live + 1 + first + place) * BLOCK_T + row
    dx *= tl.load(DLoss) / tl.load(Totals) * inv_tau
    tl.store(DX + t.to(tl.int64)[:, None] * H + h[None, :], dx, mask=(t[:, None] < T) & (h[None, :] < H))


@triton.jit
def _live_dw(
    DLoss, Totals, DZ, X, Live, DW, first, most, T, V, H, inv_tau, FIRST: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    v = tl.program_id(1).to(tl.int64) * BLOCK_V + tl.arange(0, BLOCK_V)
    row = tl.arange(0, BLOCK_T)
    count = tl.minimum(tl.load(Live) - first, most)
    if (not FIRST) and (count <= 0):
        return
    dw = tl.zeros((BLOCK_V, BLOCK_H), tl.float32)
    for place in range(count):
        t = tl.load(Live + 1 + first + place) * BLOCK_T + row
        dz_at = DZ + (place.to(tl.int64) * BLOCK_T + row)[None, :] * V + v[:, None]
        dz = tl.load(dz_at, mask=v[:, None] < V, other=0.0)
        x_at = X + t.to(tl.int64)[:, None] * H + h[None, :]
        x = tl.load(x_at, mask=(t[:, None] < T) & (h[None, :] < H), other=0.0)
        dw = tl.dot(dz, x, dw)
    dw *= tl.load(DLoss) / tl.load(Totals) * inv_tau
    out = DW + v[:, None] * H + h[None, :]
    inside = (v[:, None] < V) & (h[None, :] < H)
    if not FIRST:
        dw += tl.load(out, mask=inside, other=0.0)
    tl.store(out, dw, mask=inside)


def backward(saved, grad_loss, needs=(True, True)):
    hidden, weight, label, lse, slope, live, totals, tau, chunk = saved
    (B, L, H), V = hidden.shape, weight.shape[0]
    T = B * L
    tiles, most = triton.cdiv(T, TILE), max(1, min(chunk, T) // TILE)
    dx = torch.zeros_like(hidden) if needs[0] else None
    dw = torch.empty(V, H, device=hidden.device, dtype=torch.float32) if needs[1] else None
    scratch = torch.empty(most * TILE, V, device=hidden.device, dtype=hidden.dtype)
    BV, BH, step = _side(V), _side(H), 128 // hidden.element_size()
    for first in range(0, tiles, most):
        places = min(most, tiles - first)
        _live_dlogits[(places, triton.cdiv(V, BV))](
            hidden, weight, label, lse, slope, live, scratch, first, T, V, H, 1.0 / tau,
            BLOCK_T=TILE, BLOCK_V=BV, BLOCK_H=min(BH, step), num_warps=8, num_stages=3,
        )  # fmt: skip
        if needs[0]:
            _live_dx[(triton.cdiv(H, BH), places)](
                grad_loss, totals, scratch, weight, live, dx, first, T, V, H, 1.0 / tau,
                BLOCK_T=TILE, BLOCK_V=min(BV, step), BLOCK_H=BH, num_warps=8, num_stages=3,
            )  # fmt: skip
        if needs[1]:
            _live_dw[(triton.cdiv(H, min(BH, 2 * step)), triton.cdiv(V, BV))](
                grad_loss, totals, scratch, hidden, live, dw, first, most, T, V, H, 1.0 / tau, FIRST=first == 0,
                BLOCK_T=TILE, BLOCK_V=BV, BLOCK_H=min(BH, 2 * step), num_warps=8, num_stages=2,
            )  # fmt: skip
    return dx, dw.to(weight.dtype) if needs[1] else None


# --- check ---
SWEEP = (
    {"B": 4, "L": 64, "V": 48, "H": 32, "chunk": 128},
    {"B": 3, "L": 139, "V": 75, "H": 40, "chunk": 256},
    {"B": 2, "L": 40, "V": 33, "H": 16, "chunk": 128, "dtype": "float16"},
    {"B": 5, "L": 70, "V": 40, "H": 24, "chunk": 128, "dtype": "bfloat16"},
)
BENCH = ({"B": 8, "L": 512, "V": 32000, "H": 1024, "chunk": 4096, "dtype": "bfloat16"},)


def make_args(B, L, V, H, chunk, dtype="float32", device="cpu", seed=0):
    if V < 2:
        raise ValueError("the only word's probability is one whatever the weights are")
    g = torch.Generator().manual_seed(seed)
    dt, tau = getattr(torch, dtype), 0.8
    hidden, weight = torch.randn(B, L, H, generator=g), torch.randn(V, H, generator=g) / H**0.5
    hidden, weight = hidden.to(dt), weight.to(dt)
    label = torch.randint(0, V, (B, L), generator=g)
    # Old and reference policy are near this one; that only the label's logit is known to be z and lse about log V +
    # 1 / (2 tau^2) does well enough.
    logp = (hidden * weight[label]).float().sum(-1) / tau - torch.tensor(float(V)).log() - 0.5 / tau**2
    old, ref = (logp + 0.2 * torch.randn(B, L, generator=g) for _ in range(2))
    advantage = torch.randn(B, generator=g)
    # A prompt, an answer, padding.
    first, last = (torch.rand(2, B, 1, generator=g) * 0.5 * L).long()
    place = torch.arange(L)
    mask = (place >= first) & (place < L - last)
    return (
        hidden.to(device), weight.to(device), label.to(device), old.to(device), ref.to(device), advantage.to(device),
        mask.to(device), tau, 0.2, 0.04, chunk,
    )  # fmt: skip


def reference(hidden, weight, label, old, ref, advantage, mask, tau=1.0, eps=0.2, beta=0.04, chunk=4096):
    logits = (hidden @ weight.T).float() / tau
    logp = torch.log_softmax(logits, -1).gather(-1, label[..., None])[..., 0]
    r, k, a = torch.exp(logp - old), ref - logp, advantage[:, None]
    token = beta * (torch.exp(k) - k - 1.0) - torch.minimum(r * a, r.clamp(1.0 - eps, 1.0 + eps) * a)
    return torch.where(mask, token, 0.0).sum() / mask.sum().clamp(min=1)
