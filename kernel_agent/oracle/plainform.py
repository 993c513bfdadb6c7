"""One text for a value that is no tensor, however it travelled: what a stub and a candidate return is compared by it.

A truth came through JSON, a candidate's value did not: a `torch.Size` is a tuple there and a numpy number is its own
type here. Both sides are described by this function, in the process where the value was made.
"""

from __future__ import annotations

import numbers
from typing import Any

import torch

LONGEST = 1000
"""Characters of a text that count."""


def plain_form(value: Any) -> str:
    """`(1000, 'mean')`: tuples of any class alike, numbers and names by value, in lists and dicts too.

    Anything else may print differently in every process (`<object at 0x7f...>`) and is known by its type alone.
    """
    return _form(value)[:LONGEST]


def _form(value: Any) -> str:
    if value is None or isinstance(value, (bool, complex)):
        return repr(value)
    if isinstance(value, numbers.Integral):
        return repr(int(value))
    if isinstance(value, numbers.Real):
        return repr(float(value))
    if isinstance(value, (str, bytes)):
        return repr(str(value) if isinstance(value, str) else bytes(value))
    if isinstance(value, (torch.dtype, torch.device)):
        return str(value)
    if isinstance(value, tuple):
        return "(" + ", ".join(_form(v) for v in value) + ("," if len(value) == 1 else "") + ")"
    if isinstance(value, list):
        return "[" + ", ".join(_form(v) for v in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_form(k)}: {_form(v)}" for k, v in value.items()) + "}"
    return f"a value of type {type(value).__name__}"
