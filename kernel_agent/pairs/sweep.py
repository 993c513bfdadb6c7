"""Reads the SWEEP of an imported file into `ShapeEntry` records."""

from __future__ import annotations

import math
import numbers
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from kernel_agent.errors import InputError
from kernel_agent.pairs.spec import Dim, ShapeEntry

_REMEDY = "SWEEP is a list of dicts of dims, such as [dict(M=128, N=512), dict(M=7, N=33, required=False)]."


def read_sweep(value: Any, path: Path) -> tuple[ShapeEntry, ...]:
    """Turn SWEEP's value into entries. Raises `InputError` when it is empty or no sequence of dicts of plain values."""
    if isinstance(value, dict) or not hasattr(value, "__iter__"):
        raise InputError(f"SWEEP is a {type(value).__name__}", remedy=_REMEDY, path=path)
    entries = tuple(_entry(item, index, path) for index, item in enumerate(value))
    if not entries:
        raise InputError("SWEEP is empty", remedy=_REMEDY, path=path)
    return entries


def smallest(sweep: tuple[ShapeEntry, ...]) -> ShapeEntry:
    """The entry with the least product of whole-number dims; the first of equals."""
    return min(sweep, key=lambda entry: math.prod(max(size, 1) for dim in entry.dims.values() for size in _sizes(dim)))


def _sizes(dim: Dim) -> list[int]:
    if isinstance(dim, tuple):
        return [size for inner in dim for size in _sizes(inner)]
    return [dim] if type(dim) is int else []


def _entry(item: Any, index: int, path: Path) -> ShapeEntry:
    if not isinstance(item, dict) or not all(isinstance(name, str) for name in item):
        raise InputError(f"SWEEP[{index}] is no dict with names as keys: {item!r}", remedy=_REMEDY, path=path)
    required = item.get("required", True)
    if not isinstance(required, bool):
        raise InputError(f'SWEEP[{index}]["required"] is {required!r}', remedy="Write True or False.", path=path)
    dims = {name: _dim(value, f"SWEEP[{index}][{name!r}]", path) for name, value in item.items() if name != "required"}
    try:
        return ShapeEntry(dims=dims, required=required)
    except ValidationError:
        raise InputError(f"SWEEP[{index}] nests tuples too deeply", remedy=_REMEDY, path=path) from None


def _dim(value: Any, where: str, path: Path) -> Any:
    if value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)  # numpy's integers
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, (tuple, list)):
        return tuple(_dim(inner, where, path) for inner in value)
    raise InputError(
        f"{where} is a {type(value).__name__}",
        remedy="A SWEEP entry holds numbers, flags, names, dtypes and tuples of them; make tensors in make_args.",
        path=path,
    )
