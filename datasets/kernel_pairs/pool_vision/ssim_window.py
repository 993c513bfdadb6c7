"""SSIM loss over box windows: five window sums forwards; backwards four slopes per window, then their adjoint windows.

Per window of SIDE^2 pixels the means m_x, m_y, E[xx], E[yy] and E[xy] give s = (2 m_x m_y + C1)(2 cov + C2) / ((m_x^2 +
m_y^2 + C1)(var_x + var_y + C2)), and the loss of an image is 1 - mean s. The backward forms the five sums again and
stores the derivatives of s by m_x, m_y, E[xx] (which is that by E[yy]) and E[xy]: four maps, where each pixel needs
only the sums over the windows that contain it: dx = sum ds/dm_x + 2 x sum ds/dE[xx] + y sum ds/dE[xy], and dy alike.
Both images' gradients take the same four sums.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "ssim_window",
    "family": "pool_vision",
    "op": "ssim_loss",
    "schema": 1,
    "techniques": ("gather-form", "halo", "recompute", "delta-preprocess", "two-stage-partials"),
    "saves": (),
    "grads": ("x", "y"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _window_means(X, Y, plane, h, w, W, live, SIDE: tl.constexpr):
    """Means of x, y, xx, yy and xy over the windows that begin at (h, w); zero for windows that are not live."""
    mean_x = tl.zeros(live.shape, tl.float32)
    mean_y = tl.zeros(live.shape, tl.float32)
    mean_xx = tl.zeros(live.shape, tl.float32)
    mean_yy = tl.zeros(live.shape, tl.float32)
    mean_xy = tl.zeros(live.shape, tl.float32)
    at = plane + h[:, None] * W + w[None, :]
    for i in range(SIDE):
        for j in tl.static_range(SIDE):
            x = tl.load(X + at + i * W + j, mask=live, other=0.0).to(tl.float32)
            y = tl.load(Y + at + i * W + j, mask=live, other=0.0).to(tl.float32)
            mean_x += x
            mean_y += y
            mean_xx += x * x
            mean_yy += y * y
            mean_xy += x * y
    share: tl.constexpr = 1.0 / (SIDE * SIDE)
    return mean_x * share, mean_y * share, mean_xx * share, mean_yy * share, mean_xy * share


@triton.jit
def _ssim_fwd(X, Y, Parts, H, W, HO, WO, c1, c2, SIDE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr):
    down = tl.cdiv(HO, BLOCK_H)
    plane = (tl.program_id(0) // down).to(tl.int64) * H * W
    h = tl.program_id(0) % down * BLOCK_H + tl.arange(0, BLOCK_H)
    w = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    live = (h[:, None] < HO) & (w[None, :] < WO)
    m_x, m_y, xx, yy, xy = _window_means(X, Y, plane, h, w, W, live, SIDE)
    light = (2.0 * m_x * m_y + c1) / (m_x * m_x + m_y * m_y + c1)
    structure = (2.0 * (xy - m_x * m_y) + c2) / (xx - m_x * m_x + yy - m_y * m_y + c2)
    total = tl.sum(tl.where(live, light * structure, 0.0))
    tl.store(Parts + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), total)


def _patch(H, W):
    BLOCK_W = min(64, triton.next_power_of_2(W))
    return {"BLOCK_H": min(512 // BLOCK_W, triton.next_power_of_2(H)), "BLOCK_W": BLOCK_W, "num_warps": 4}


def forward(x, y, side, c1=1e-4, c2=9e-4):
    x, y = x.contiguous(), y.contiguous()
    B, C, H, W = x.shape
    HO, WO = H - side + 1, W - side + 1
    patch = _patch(HO, WO)
    grid = (B * C * triton.cdiv(HO, patch["BLOCK_H"]), triton.cdiv(WO, patch["BLOCK_W"]))
    parts = torch.empty(B, grid[0] // B * grid[1], device=x.device, dtype=torch.float32)
    _ssim_fwd[grid](x, y, parts, H, W, HO, WO, c1, c2, SIDE=side, **patch)
    return 1.0 - parts.sum(1) / (C * HO * WO), (x, y, side, c1, c2)


# --- backward ---
@triton.jit
def _ssim_slopes(
    DLoss, X, Y, Slopes, C, H, W, HO, WO, c1, c2, dloss_stride, map_size,
    SIDE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    # Derivatives of the loss by the window's sums: its cotangent, sign and counts are multiplied in here, once.
    down = tl.cdiv(HO, BLOCK_H)
    plane = (tl.program_id(0) // down).to(tl.int64)
    h = tl.program_id(0) % down * BLOCK_H + tl.arange(0, BLOCK_H)
    w = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    live = (h[:, None] < HO) & (w[None, :] < WO)
    m_x, m_y, xx, yy, xy = _window_means(X, Y, plane * H * W, h, w, W, live, SIDE)
    scale = -tl.load(DLoss + plane // C * dloss_stride).to(tl.float32) / (SIDE * SIDE)
    scale = scale / (tl.cast(C, tl.float32) * HO * WO)
    per_light = 1.0 / (m_x * m_x + m_y * m_y + c1)
    per_structure = 1.0 / (xx - m_x * m_x + yy - m_y * m_y + c2)
    light = (2.0 * m_x * m_y + c1) * per_light
    structure = (2.0 * (xy - m_x * m_y) + c2) * per_structure
    by_xy = scale * 2.0 * light * per_structure
    by_squares = -scale * light * structure * per_structure
    # The means enter light directly, and structure through covariance and variances.
    of_light = scale * 2.0 * structure * per_light
    own = light * of_light + 2.0 * by_squares
    cross = of_light - by_xy
    at = Slopes + (plane * HO + h[:, None]) * WO + w[None, :]
    tl.store(at, cross * m_y - own * m_x, mask=live)
    tl.store(at + map_size, cross * m_x - own * m_y, mask=live)
    tl.store(at + 2 * map_size, by_squares, mask=live)
    tl.store(at + 3 * map_size, by_xy, mask=live)


@triton.jit
def _ssim_adjoint(
    X, Y, Slopes, DX, DY, H, W, HO, WO, map_size, SIDE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr
):
    down = tl.cdiv(H, BLOCK_H)
    plane = (tl.program_id(0) // down).to(tl.int64)
    h = tl.program_id(0) % down * BLOCK_H + tl.arange(0, BLOCK_H)
    w = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    inside = (h[:, None] < H) & (w[None, :] < W)
    by_x = tl.zeros((BLOCK_H, BLOCK_W), tl.float32)
    by_y = tl.zeros((BLOCK_H, BLOCK_W), tl.float32)
    by_squares = tl.zeros((BLOCK_H, BLOCK_W), tl.float32)
    by_xy = tl.zeros((BLOCK_H, BLOCK_W), tl.float32)
    at = Slopes + (plane * HO + h[:, None]) * WO + w[None, :]
    for i in range(SIDE):
        for j in tl.static_range(SIDE):
            # The window that begins i rows above and j columns before.
            covers = ((h >= i) & (h - i < HO))[:, None] & ((w >= j) & (w - j < WO))[None, :]
            window = at - (i * WO + j)
            by_x += tl.load(window, mask=covers, other=0.0)
            by_y += tl.load(window + map_size, mask=covers, other=0.0)
            by_squares += tl.load(window + 2 * map_size, mask=covers, other=0.0)
            by_xy += tl.load(window + 3 * map_size, mask=covers, other=0.0)
    pixel = (plane * H + h[:, None]) * W + w[None, :]
    x = tl.load(X + pixel, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(Y + pixel, mask=inside, other=0.0).to(tl.float32)
    tl.store(DX + pixel, by_x + 2.0 * x * by_squares + y * by_xy, mask=inside)
    tl.store(DY + pixel, by_y + 2.0 * y * by_squares + x * by_xy, mask=inside)


def backward(saved, grad_loss, needs=None):
    x, y, side, c1, c2 = saved
    B, C, H, W = x.shape
    HO, WO = H - side + 1, W - side + 1
    slopes = torch.empty(4, B, C, HO, WO, device=x.device, dtype=torch.float32)
    patch = _patch(HO, WO)
    _ssim_slopes[(B * C * triton.cdiv(HO, patch["BLOCK_H"]), triton.cdiv(WO, patch["BLOCK_W"]))](
        grad_loss, x, y, slopes, C, H, W, HO, WO, c1, c2, grad_loss.stride(0), slopes.stride(0), SIDE=side, **patch
    )
    dx, dy = torch.empty_like(x), torch.empty_like(y)
    patch = _patch(H, W)
    _ssim_adjoint[(B * C * triton.cdiv(H, patch["BLOCK_H"]), triton.cdiv(W, patch["BLOCK_W"]))](
        x, y, slopes, dx, dy, H, W, HO, WO, slopes.stride(0), SIDE=side, **patch
    )
    return dx, dy


# --- check ---
SWEEP = (
    {"B": 2, "C": 1, "H": 16, "W": 16, "side": 3},
    {"B": 2, "C": 3, "H": 11, "W": 19, "side": 5},
    {"B": 1, "C": 2, "H": 8, "W": 9, "side": 7, "dtype": "bfloat16"},
    {"B": 3, "C": 1, "H": 5, "W": 6, "side": 2, "dtype": "float16"},
)
BENCH = ({"B": 16, "C": 3, "H": 512, "W": 512, "side": 7, "dtype": "float32"},)


def make_args(B, C, H, W, side, dtype="float32", device="cpu", seed=0):
    if side > min(H, W):
        raise ValueError("the window must fit into the image")
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(B, C, H, W, generator=g)
    y = (x + 0.3 * torch.randn(B, C, H, W, generator=g)).clamp(0.0, 1.0)
    return *(t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, y)), side


def reference(x, y, side, c1=1e-4, c2=9e-4):
    x, y = x.float(), y.float()
    means = torch.nn.functional.avg_pool2d(torch.cat((x, y, x * x, y * y, x * y), 1), side, stride=1)
    m_x, m_y, xx, yy, xy = means.chunk(5, 1)
    light = (2 * m_x * m_y + c1) / (m_x**2 + m_y**2 + c1)
    structure = (2 * (xy - m_x * m_y) + c2) / (xx - m_x**2 + yy - m_y**2 + c2)
    return 1.0 - (light * structure).mean((1, 2, 3))
