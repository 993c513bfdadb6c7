"""What operations on whole tiles mean, on torch tensors: shapes, reductions, scans, products."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernel_agent.compiler.ssa.arithmetic import held_as
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Op
from kernel_agent.ir.operations.integers import ordered

Combine = Callable[[list[Tensor]], list[Tensor]]
"""Two groups of n tiles, one after the other -> n tiles."""


def compute(op: Op, operands: list[Tensor]) -> list[Tensor]:
    """Of what is neither elementwise nor has blocks. Raises KeyError for anything else."""
    return _MEANINGS[op.code](op, operands)


def reduce(op: Op, operands: list[Tensor], combine: Combine) -> list[Tensor]:
    """A REDUCE: from the first slice to the last."""
    slices = _slices(op, operands)
    total = slices[0]
    for group in slices[1:]:
        total = combine([*total, *group])
    return total


def scan(op: Op, operands: list[Tensor], combine: Combine) -> list[Tensor]:
    """A SCAN: running totals from the first slice, with `reverse` from the last."""
    order = _slices(op, operands)
    if op.attributes.get("reverse"):
        order.reverse()
    totals = [order[0]]
    for group in order[1:]:
        totals.append(combine([*totals[-1], *group]))
    if op.attributes.get("reverse"):
        totals.reverse()
    return [torch.stack(list(parts), dim=op.attributes["axis"]) for parts in zip(*totals, strict=True)]


def _slices(op: Op, operands: list[Tensor]) -> list[list[Tensor]]:
    axis = op.attributes["axis"]
    return [list(group) for group in zip(*(value.unbind(axis) for value in operands), strict=True)]


def _expand(op: Op, operands: list[Tensor]) -> list[Tensor]:
    (value,) = operands
    return [value.unsqueeze(op.attributes["axis"]) if value.dim() else value]


def _trans(op: Op, operands: list[Tensor]) -> list[Tensor]:
    (value,) = operands
    return [value.permute(op.attributes["order"]) if value.dim() else value]


def _sum(op: Op, operands: list[Tensor]) -> list[Tensor]:
    return [operands[0].sum(op.attributes["axis"]).to(held_as(op.result.element))]


def _extreme(op: Op, operands: list[Tensor]) -> list[Tensor]:
    (value,) = operands
    axis, largest = op.attributes["axis"], op.code is Code.REDUCE_MAX
    find = torch.amax if largest else torch.amin
    if op.attributes.get("unsigned"):
        return [ordered(find(ordered(value), axis))]
    if not value.dtype.is_floating_point or op.attributes.get("nan"):
        return [find(value, axis)]
    missing = value.isnan()
    found = find(torch.where(missing, float("-inf") if largest else float("inf"), value), axis)
    return [torch.where(missing.all(axis), float("nan"), found)]


def _first_extreme(op: Op, operands: list[Tensor]) -> list[Tensor]:
    (value,) = operands
    axis = op.attributes["axis"]
    if value.dtype.is_floating_point:
        value = value.nan_to_num(nan=float("-inf") if op.code is Code.ARG_MAX else float("inf"), posinf=float("inf"),
                                 neginf=float("-inf"))  # fmt: skip
    best = (torch.amax if op.code is Code.ARG_MAX else torch.amin)(value, axis, keepdim=True)
    extent = value.shape[axis]
    places = torch.arange(extent).view([extent if k == axis else 1 for k in range(value.dim())])
    return [torch.where(value == best, places, extent).amin(axis).to(held_as(op.result.element))]


def _cumsum(op: Op, operands: list[Tensor]) -> list[Tensor]:
    (value,) = operands
    axis, wanted = op.attributes["axis"], held_as(op.result.element)
    if op.attributes.get("reverse"):
        return [value.flip(axis).cumsum(axis).flip(axis).to(wanted)]
    return [value.cumsum(axis).to(wanted)]


def _linear_scan(op: Op, operands: list[Tensor]) -> list[Tensor]:
    factors, terms = torch.broadcast_tensors(*operands)
    axis = op.attributes["axis"]
    trips = list(zip(factors.unbind(axis), terms.unbind(axis), strict=True))
    if op.attributes.get("reverse"):
        trips.reverse()
    state = torch.zeros_like(trips[0][1])
    before, after = [], []
    for factor, term in trips:
        before.append(state)
        state = factor * state + term
        after.append(state)
    found = after if op.code is Code.LINEAR_SCAN else before
    if op.attributes.get("reverse"):
        found.reverse()
    return [torch.stack(found, dim=axis)]


def _gather(op: Op, operands: list[Tensor]) -> list[Tensor]:
    source, places = operands
    return [torch.gather(source, op.attributes["axis"], places.long())]


def _dot(op: Op, operands: list[Tensor]) -> list[Tensor]:
    wanted = held_as(op.result.element)
    return [torch.matmul(*(value.to(wanted) for value in operands))]


_MEANINGS: dict[Code, Callable[[Op, list[Tensor]], list[Tensor]]] = {
    Code.ARANGE: lambda op, _: [torch.arange(op.attributes["start"], op.attributes["end"], dtype=torch.int32)],
    Code.FULL: lambda op, values: [values[0].expand(op.result.shape)],
    Code.BROADCAST: lambda op, values: [values[0].expand(op.result.shape)],
    Code.RESHAPE: lambda op, values: [values[0].reshape(op.result.shape)],
    Code.EXPAND: _expand,
    Code.TRANS: _trans,
    Code.JOIN: lambda _, values: [torch.stack(values, dim=-1)],
    Code.SPLIT: lambda _, values: list(values[0].unbind(-1)),
    Code.FLIP: lambda op, values: [values[0].flip(op.attributes["axis"])],
    Code.GATHER: _gather,
    Code.SUM: _sum,
    Code.REDUCE_MAX: _extreme,
    Code.REDUCE_MIN: _extreme,
    Code.ARG_MAX: _first_extreme,
    Code.ARG_MIN: _first_extreme,
    Code.CUMSUM: _cumsum,
    Code.LINEAR_SCAN: _linear_scan,
    Code.LINEAR_SCAN_BEFORE: _linear_scan,
    Code.DOT: _dot,
}
