"""`torch.autograd.Function` in stubs: its forward is run plainly, so that gradients come from the kernels.

Modules often bind `f = SomeFunction.apply` when they are imported. Imported under the stand-in they bind
`dispatching_apply`, which decides at the call whether a capture is running; afterwards it behaves as torch's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

TORCH_APPLY = torch.autograd.Function.__dict__["apply"].__func__
"""torch's own `Function.apply`, as a plain function of the class and its arguments."""

_capturing = 0


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """While the block runs, `apply` runs a function's forward plainly."""
    global _capturing
    _capturing += 1
    try:
        yield
    finally:
        _capturing -= 1


class Context:
    """What a function's forward gets as `ctx`: it keeps what is saved and answers as if all gradients were needed."""

    def __init__(self, count: int) -> None:
        self.needs_input_grad = (True,) * count
        self.saved_tensors: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        """Keep tensors."""
        self.saved_tensors = tensors

    save_for_forward = save_for_backward

    def mark_dirty(self, *_tensors: Any) -> None:
        """In-place changes are followed anyway."""

    def mark_non_differentiable(self, *_tensors: Any) -> None:
        """Which outputs need gradients is not decided here."""

    def set_materialize_grads(self, _value: bool) -> None:
        """The function's own backward never runs here."""


def dispatching_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """`Function.apply`: torch's own, unless a capture runs and the function is not one of ours."""
    if not _capturing or cls.__module__.startswith("kernel_agent.ir."):
        return TORCH_APPLY(cls, *args, **kwargs)
    separate_context = cls.setup_context is not torch.autograd.Function.setup_context
    return cls.forward(*args, **kwargs) if separate_context else cls.forward(Context(len(args)), *args, **kwargs)
