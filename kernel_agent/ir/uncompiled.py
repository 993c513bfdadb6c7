"""What to import before children are forked: meta arithmetic of torch then does without torch's compiler.

Forms of results are found on meta tensors. There torch disables its elementwise functions for its compiler when they
are first called: in each child that took a second, to import the compiler.
"""

from __future__ import annotations

import gc
from types import FunctionType

import torch  # noqa: F401 - its functions are what is looked through
import torch._prims_common.wrappers as elementwise
from torch import _compile


def _spare() -> None:
    """Take each such function for disabled already: nothing is compiled in children that execute kernels."""
    for found in gc.get_objects():
        if type(found) is FunctionType and found.__code__.co_filename == _compile.__file__:
            bound = dict(zip(found.__code__.co_freevars, found.__closure__ or (), strict=True))
            inner = bound["fn"].cell_contents if "fn" in bound else None
            if type(inner) is FunctionType and inner.__code__.co_filename == elementwise.__file__:
                inner.__dict__.setdefault("__dynamo_disable", inner)


_spare()
