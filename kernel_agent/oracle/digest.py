"""Hashes of what a truth was computed from, alike in the parent and in a truth child."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_ROOMS = ("ir", "oracle", "pairs")
"""Rooms of this package whose code decides what a truth is."""


@lru_cache(maxsize=1)
def code_digest() -> str:
    """SHA-256 over the source of the executor and the oracle: a truth of other code is never met again."""
    package = Path(__file__).resolve().parent.parent
    total = hashlib.sha256()
    for path in sorted(path for room in _ROOMS for path in (package / room).rglob("*.py")):
        total.update(path.relative_to(package).as_posix().encode() + path.read_bytes())
    return total.hexdigest()


def tensor_digest(tensor: Tensor) -> str:
    """SHA-256 of dtype, shape and values; the layout does not matter to a truth."""
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(
        tensor.detach().flatten()
    )  # any stride, one element too
    raw = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    head = f"{tensor.dtype}{tuple(tensor.shape)}".encode()
    return hashlib.sha256(head + raw).hexdigest()


def arguments_digest(form: Any, tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of the arguments of a launching function, as `wire.pack` gives them."""
    table = {name: tensor_digest(tensor) for name, tensor in tensors.items()}
    return hashlib.sha256(json.dumps([form, table], sort_keys=True).encode()).hexdigest()
