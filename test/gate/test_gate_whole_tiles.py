"""Backwards that are right where a last tile is cut and wrong where none is, or the other way round."""

from __future__ import annotations

import pytest

from kernel_agent.gate import GateOptions, Status

STANDARD = GateOptions(seeds=(0,), values=())
KERNEL = """
@triton.heuristics({"EVEN": lambda args: args["N"] % KNOWN == 0})
@triton.jit
def _tiles(DY, X, W, RSTD, DX, DW, stride_m, stride_n, N, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    row = tl.program_id(0)
    rstd = tl.load(RSTD + row)
    total = 0.0
    tiles = TILES
    for tile in range(0, tiles):
        c = tile * BLOCK + tl.arange(0, BLOCK)
        m = c < N
        g = tl.load(DY + row * stride_m + c * stride_n, mask=m, other=0.0)
        w = tl.load(W + c, mask=m, other=0.0)
        total += tl.sum(g * w * tl.load(X + row * N + c, mask=m, other=0.0) * rstd, 0)
    for tile in range(0, tl.cdiv(N, BLOCK)):
        c = tile * BLOCK + tl.arange(0, BLOCK)
        m = (c < N) | EVEN
        g = tl.load(DY + row * stride_m + c * stride_n, mask=m, other=0.0)
        w = tl.load(W + c, mask=m, other=0.0)
        x = tl.load(X + row * N + c, mask=m, other=0.0) * rstd
        tl.store(DX + row * N + c, (g * w - x * total / N) * rstd, mask=m)
        tl.store(DW + row * N + c, g * x, mask=m)


def backward(saved, g):
    x, w, rstd = saved
    M, N = x.shape
    dx, dw = torch.empty_like(x), torch.empty((M, N), dtype=torch.float32, device=x.device)
    _tiles[(M,)](g, x, w, rstd, dx, dw, g.stride(0), g.stride(1), N, BLOCK=WIDTH)
    return dx, dw.sum(0).to(w.dtype)
"""
ALL = "tl.cdiv(N, BLOCK)"
LOST = "(N - 1) // BLOCK + tl.where(N % BLOCK > 0, 1, 0)"
"""The last tile counts by what is left of it, which is nothing where it is whole."""


def kernel(tiles: str, known: int, width: int) -> str:
    return KERNEL.replace("TILES", tiles).replace("KNOWN", str(known)).replace("WIDTH", str(width))


@pytest.mark.parametrize("width", [16, 64, 128])
def test_a_last_tile_that_is_lost_where_it_is_whole_is_red(judge, width):
    # Of this pair's sizes, and of those derived from them, none was a whole number of tiles.
    verdict = judge.with_backward("rmsnorm", kernel(LOST, width, width), STANDARD)
    assert verdict.status is Status.WRONG_GRADIENT, verdict.message
    assert "N=128" in str(verdict.case) or "N=192" in str(verdict.case)


def test_a_mask_that_is_left_out_where_another_tile_is_whole_is_red(judge):
    verdict = judge.with_backward("rmsnorm", kernel(ALL, 16, 128), STANDARD)
    assert verdict.status is Status.OUT_OF_BOUNDS, verdict.message
    assert "N=192" in str(verdict.case)


def test_a_mask_that_is_left_out_where_its_own_tile_is_whole_is_green(judge):
    verdict = judge.with_backward("rmsnorm", kernel(ALL, 128, 128), STANDARD)
    assert verdict.green, verdict.message
