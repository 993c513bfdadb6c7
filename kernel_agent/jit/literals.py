"""Source that gives a plain value again."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton.language as tl

_PLAIN = (type(None), bool, int, str, bytes)


def literal(value: Any) -> str | None:
    """An expression over `torch` and `tl`, or None for what cannot be written as one."""
    if type(value) in _PLAIN:
        return repr(value)
    if type(value) is float:
        return repr(value) if math.isfinite(value) else f'float("{value}")'
    if isinstance(value, torch.dtype):
        return repr(value)
    if isinstance(value, torch.device):
        return f"torch.{value!r}"
    if isinstance(value, tl.constexpr):
        inner = literal(value.value)
        return None if inner is None else f"tl.constexpr({inner})"
    if type(value) is tl.dtype:
        return f"tl.dtype({value.name!r})"
    if type(value) in (tuple, list):
        parts = [literal(part) for part in value]
        if any(part is None for part in parts):
            return None
        inner = ", ".join(str(part) for part in parts)
        return f"[{inner}]" if type(value) is list else f"({inner}{',' if len(parts) == 1 else ''})"
    if type(value) is dict:
        items = [(literal(key), literal(part)) for key, part in value.items()]
        if any(key is None or part is None for key, part in items):
            return None
        return "{" + ", ".join(f"{key}: {part}" for key, part in items) + "}"
    return None
