"""Reads the SWEEP of an imported file, or a literal BENCH, into `ShapeEntry` records."""

from __future__ import annotations

import ast
import math
import numbers
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from kernel_agent.errors import InputError
from kernel_agent.pairs.spec import Dim, ShapeEntry

_REMEDY = "{name} is a list of dicts of dims, such as [dict(M=128, N=512), dict(M=7, N=33, required=False)]."


def read_sweep(value: Any, path: Path, node: ast.expr | None = None, name: str = "SWEEP") -> tuple[ShapeEntry, ...]:
    """Turn SWEEP's value into entries; `node`, what the file assigns to it, gives messages their lines.

    Raises `InputError` when it is empty or no sequence of dicts of plain values.
    """
    remedy = _REMEDY.format(name=name)
    line = None if node is None else node.lineno
    if isinstance(value, dict) or not hasattr(value, "__iter__"):
        raise InputError(f"{name} is {_a(value)}", remedy=remedy, path=path, line=line)
    items = list(value)
    lines = [line] * len(items)
    if isinstance(node, (ast.List, ast.Tuple)) and len(node.elts) == len(items):
        lines = [item.lineno for item in node.elts]
    entries = tuple(_entry(item, f"{name}[{index}]", path, lines[index], remedy) for index, item in enumerate(items))
    if not entries:
        raise InputError(f"{name} is empty", remedy=remedy, path=path, line=line)
    return entries


def smallest(sweep: tuple[ShapeEntry, ...]) -> ShapeEntry:
    """The entry with the least product of whole-number dims; the first of equals."""
    return min(sweep, key=_volume)


def largest_required(sweep: tuple[ShapeEntry, ...]) -> int:
    """Position of the required entry with the greatest product of whole-number dims; of all, where none is required."""
    places = [place for place, entry in enumerate(sweep) if entry.required] or list(range(len(sweep)))
    return max(places, key=lambda place: _volume(sweep[place]))


def _volume(entry: ShapeEntry) -> int:
    return math.prod(max(size, 1) for dim in entry.dims.values() for size in _sizes(dim))


def _sizes(dim: Dim) -> list[int]:
    if isinstance(dim, tuple):
        return [size for inner in dim for size in _sizes(inner)]
    return [dim] if type(dim) is int else []


def _entry(item: Any, where: str, path: Path, line: int | None, remedy: str) -> ShapeEntry:
    if not isinstance(item, dict) or not all(isinstance(name, str) for name in item):
        message = f"{where} is no dict with names as keys: {item!r:.60}"
        raise InputError(message, remedy=remedy, path=path, line=line)
    required = item.get("required", True)
    if not isinstance(required, bool):
        message = f'{where}["required"] is {required!r:.60}'
        raise InputError(message, remedy="Write True or False.", path=path, line=line)
    dims = {name: _dim(value, f"{where}[{name!r}]", path, line) for name, value in item.items() if name != "required"}
    try:
        return ShapeEntry(dims=dims, required=required)
    except ValidationError:
        raise InputError(f"{where} nests tuples too deeply", remedy=remedy, path=path, line=line) from None


def _dim(value: Any, where: str, path: Path, line: int | None) -> Any:
    if value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)  # numpy's integers
    if isinstance(value, (tuple, list)):
        return tuple(_dim(inner, where, path, line) for inner in value)
    import torch  # a literal has no other values; a file that was imported has loaded torch

    if isinstance(value, torch.dtype):
        return str(value)
    raise InputError(
        f"{where} is {_a(value)}",
        remedy="An entry holds numbers, flags, names, dtypes and tuples of them; make tensors in make_args.",
        path=path,
        line=line,
    )


def _a(value: Any) -> str:
    """`a dict`, `an object`."""
    name = type(value).__name__
    return f"an {name}" if name[0].lower() in "aeiou" else f"a {name}"
