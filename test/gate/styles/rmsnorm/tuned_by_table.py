"""Launch parameters from a cached table of frozen records, an enumeration, a partial function and checked arguments."""

import enum
import functools
import logging
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["backward"]
logger = logging.getLogger(__name__)
_VERBOSE = bool(int(os.environ.get("RMSNORM_VERBOSE", "0")))


class Casting(enum.IntEnum):
    NONE = -1
    LLAMA = 0
    GEMMA = 1


@dataclass(frozen=True)
class Launch:
    block: int
    warps: int = 4
    options: dict = field(default_factory=dict)


class Gradients(NamedTuple):
    x: Tensor | None
    w: Tensor | None


@functools.cache
def _launch(columns: int, itemsize: int) -> Launch:
    block = triton.next_power_of_2(columns)
    if block * itemsize > 65536 * 4:
        raise RuntimeError(f"a row of {columns} is too long")
    return Launch(block, warps=min(max(block // 256, 1), 8))


@triton.jit
def _rms_bwd(DY, dy_row, X, W, RSTD, DX, DW, rows, columns, per, CASTING: tl.constexpr, BLOCK: tl.constexpr):
    tl.static_assert(CASTING == -1 or CASTING == 0, "no such casting")
    first = tl.program_id(0).to(tl.int64) * per
    last = min(first + per, rows)
    c = tl.arange(0, BLOCK)
    mask = c < columns
    w = tl.load(W + c, mask=mask, other=0).to(tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    DY += first * dy_row
    X += first * columns
    DX += first * columns
    for row in range(first, last):
        dy = tl.load(DY + c, mask=mask, other=0)
        x = tl.load(X + c, mask=mask, other=0)
        rstd = tl.load(RSTD + row)
        x = x.to(tl.float32)
        if CASTING == 0:
            m = (dy * w).to(tl.float32)
            total += dy * (x * rstd).to(X.dtype.element_ty)
        else:
            m = dy * w
            total += dy * (x * rstd)
        dx = rstd * m
        dx += rstd * (-(1 / columns) * rstd * rstd * tl.sum(m * x, axis=0) * x)
        tl.store(DX + c, dx.to(DX.dtype.element_ty), mask=mask)
        DY += dy_row
        X += columns
        DX += columns
    tl.store(DW + tl.program_id(0) * columns + c, total, mask=mask)


def _programs(rows: int, most: int) -> int:
    return min(rows, most)


_few_programs = functools.partial(_programs, most=6)


def backward(saved: Sequence[Tensor], grad_out: Tensor, needs: Sequence[bool] | None = None) -> Gradients:
    x, w, rstd = saved
    assert grad_out.shape == x.shape, "unexpected shape"
    dy = grad_out if grad_out.stride(-1) == 1 else grad_out.contiguous()
    rows, columns = dy.size(0), dy.size(-1)
    launch = _launch(columns, x.element_size())
    programs = _few_programs(rows)
    if _VERBOSE or logger.isEnabledFor(logging.DEBUG):
        logger.debug("rms backward of %d x %d in %d programs", rows, columns, programs)
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    parts = torch.empty((programs, columns), dtype=torch.float32, device=x.device)
    _rms_bwd[(programs,)](
        dy, dy.stride(0), x, w, rstd, dx, parts, rows, columns, math.ceil(rows / programs),
        CASTING=Casting.LLAMA.value, BLOCK=launch.block, num_warps=launch.warps, **launch.options,
    )  # fmt: skip
    return Gradients(dx, torch.sum(parts, dim=0, dtype=torch.float32).to(w.dtype))
