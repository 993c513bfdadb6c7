"""Cotangents: what a backward is fed. Made by the parent, so that no candidate and no forward has a say in them.

Every cotangent has RMS 1 over its elements, but TINY and HUGE, which are that one times a constant, and zero or None.
Never `out.sum().backward()`: a cotangent of ones hides every mistake that a sum hides.
"""

from __future__ import annotations

import enum
import hashlib

import torch
from torch import Tensor

from kernel_agent.oracle.records import OutputForm


class CotangentKind(str, enum.Enum):
    """The values and the layout of the cotangents of one case."""

    RANDOM = "random"
    STRIDED = "strided"
    TRANSPOSED = "transposed"
    APART = "apart"
    EXPANDED = "expanded"
    EXPANDED_ROWS = "expanded-rows"
    ONE_HOT = "one-hot"
    TINY = "tiny"
    HUGE = "huge"
    ZERO = "zero"
    NONE = "none"
    LAST_ONLY = "last-only"


LAYOUTS = {
    CotangentKind.STRIDED: "strided",
    CotangentKind.TRANSPOSED: "transposed",
    CotangentKind.APART: "a part of something wider",
    CotangentKind.EXPANDED: "expanded (stride 0)",
    CotangentKind.EXPANDED_ROWS: "one row for all (stride 0)",
}
"""Kinds that are random and lie otherwise in memory than a tensor of their own, in words."""
OF_ROWS = (CotangentKind.TRANSPOSED, CotangentKind.APART, CotangentKind.EXPANDED_ROWS)
"""Those of them that a vector has not."""
_GAP = 16
"""Elements between rows that lie apart: strides stay multiples of 16 where sizes are, for which kernels are compiled
once, and descriptors take them."""
_FAR, _NEAR = 96, 12
"""Powers of two by which cotangents are made huge and tiny, the second where the dtype has no room for more."""

Cotangents = tuple[Tensor | None, ...]
"""One entry per output in position; None for outputs without gradient and for those left out on purpose."""


def make_cotangents(kind: CotangentKind, outputs: tuple[OutputForm | None, ...], seed: int) -> Cotangents:
    """Cotangents of one kind for outputs of these forms (None: not a tensor), reproducible from `seed`.

    Kind NONE leaves out the last differentiable output, LAST_ONLY all others: for specs with two or more alone.
    """
    generator = torch.Generator().manual_seed(_mix(kind, seed))
    last = max((i for i, form in enumerate(outputs) if form is not None and form.differentiable), default=-1)
    result: list[Tensor | None] = []
    for position, form in enumerate(outputs):
        left_out = form is None or not form.differentiable
        left_out |= kind is CotangentKind.NONE and position == last
        left_out |= kind is CotangentKind.LAST_ONLY and position != last
        result.append(None if left_out or form is None else _one(kind, form, generator))
    return tuple(result)


def unit_cotangents(outputs: tuple[OutputForm | None, ...], position: int, seed: int) -> Cotangents:
    """A random normal cotangent of RMS 1 for one output alone: measures the gradient scale that output causes."""
    chosen = tuple(form if i == position else None for i, form in enumerate(outputs))
    return make_cotangents(CotangentKind.RANDOM, chosen, seed + 7919)


def scale_of(kind: CotangentKind, dtype: torch.dtype) -> float:
    """What cotangents of a kind are multiplied by: a gradient is linear in its cotangent, so it must scale along.

    Losses are scaled by 2^16 and more, and the mean of many has cotangents of 1e-8: what bounds a cotangent or takes it
    for zero shows beyond those.
    """
    power = _FAR if torch.finfo(dtype).max > 2.0**_FAR else _NEAR
    return {CotangentKind.TINY: 2.0**-power, CotangentKind.HUGE: 2.0**power}.get(kind, 1.0)


def rms(cotangent: Tensor | None) -> float:
    """Root mean square of a cotangent; zero for None."""
    if cotangent is None or cotangent.numel() == 0:
        return 0.0
    return float(cotangent.to(torch.float64).square().mean().sqrt())


def _mix(kind: CotangentKind, seed: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{kind.value}:{seed}".encode()).digest()[:6], "little")


def _one(kind: CotangentKind, form: OutputForm, generator: torch.Generator) -> Tensor:
    shape = form.shape
    if kind is CotangentKind.ZERO:
        return torch.zeros(shape, dtype=form.dtype)
    if kind is CotangentKind.EXPANDED and shape:
        return _normal((*shape[:-1], 1), form.dtype, generator).expand(shape)
    if kind is CotangentKind.EXPANDED_ROWS and len(shape) >= 2:
        return _normal((1, *shape[1:]), form.dtype, generator).expand(shape)
    dense = _normal(shape, form.dtype, generator) * scale_of(kind, form.dtype)
    if kind is CotangentKind.ONE_HOT and dense.numel():
        hot = int(torch.randint(dense.numel(), (1,), generator=generator))
        dense = torch.zeros_like(dense)
        dense.view(-1)[hot] = dense.numel() ** 0.5
    if kind is CotangentKind.STRIDED and shape:
        # Every second element of a buffer twice as wide; the gaps hold NaN, so that reading them cannot go unnoticed.
        wide = torch.full((*shape, 2), float("nan"), dtype=form.dtype)
        wide[..., 0] = dense
        return wide[..., 0]
    if kind is CotangentKind.TRANSPOSED and len(shape) >= 2:
        return dense.transpose(-1, -2).contiguous().transpose(-1, -2)
    return _apart(dense) if kind is CotangentKind.APART and len(shape) >= 2 else dense


def _apart(dense: Tensor) -> Tensor:
    """The same as a part of something wider in every dim, where no stride but the last follows from the sizes.

    Elements of a row lie side by side, as in the gradient of one that was concatenated or split; the gaps hold NaN.
    """
    outer, width = [size + 1 for size in dense.shape[:-1]], dense.shape[-1] + _GAP
    wide = torch.full((*outer, width), float("nan"), dtype=dense.dtype)
    part = wide[tuple(slice(size) for size in dense.shape)]
    return part.copy_(dense)


def _normal(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    size = values.square().mean().sqrt() if values.numel() else torch.tensor(1.0)
    return (values / size).to(dtype)
