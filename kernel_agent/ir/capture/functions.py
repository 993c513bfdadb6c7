"""`torch.autograd.Function` in stubs: its forward is run plainly, so that gradients come from the kernels.

Modules often bind `f = SomeFunction.apply` when they are imported, long before anything is captured. So it is not the
attribute `apply` that is replaced but the code of torch's own function behind all of them; outside of a capture, and on
other threads, it does what it always did.
"""

from __future__ import annotations

import inspect
import types
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from kernel_agent.errors import EnvironmentProblem
from kernel_agent.ir.capture.patches import CodePatch

if TYPE_CHECKING:
    from kernel_agent.ir.capture.capture import Capture

_APPLY: types.FunctionType = torch.autograd.Function.__dict__["apply"].__func__
"""torch's own `Function.apply`, a function of the class and its arguments. Its code is exchanged during captures."""

torch_apply = types.FunctionType(
    _APPLY.__code__, _APPLY.__globals__, _APPLY.__name__, _APPLY.__defaults__, _APPLY.__closure__
)
"""The same with the code it had at first."""


class _Twin:
    """Gives the code below a free variable `__class__`, as torch's own has it for the sake of its `super()`."""

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs as `torch.autograd.Function.apply`, with the globals of torch's module."""
        __class__  # type: ignore[name-defined]  # noqa: B018
        from kernel_agent.ir.capture.capture import SCENE
        from kernel_agent.ir.capture.functions import apply

        return apply(SCENE.actor, cls, *args, **kwargs)


def apply_patch() -> CodePatch:
    """What makes every `apply` ask for a capture first. Raises `EnvironmentProblem` on an unknown torch."""
    code = _Twin.apply.__code__
    if code.co_freevars != torch_apply.__code__.co_freevars:
        raise EnvironmentProblem(
            f"torch {torch.__version__} writes autograd.Function.apply in a way that is not known",
            remedy="Install a supported torch: 2.11 or newer.",
        )
    return CodePatch(_APPLY, code)


class Context:
    """What a function's forward gets as `ctx`: it keeps what is saved and answers as if all gradients were needed."""

    def __init__(self, inputs: tuple[Any, ...]) -> None:
        self.needs_input_grad = tuple(
            isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()) for value in inputs
        )
        self.saved_tensors: tuple[Any, ...] = ()
        self.non_differentiable: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        """Keep tensors."""
        self.saved_tensors = tensors

    save_for_forward = save_for_backward

    def mark_dirty(self, *_tensors: Any) -> None:
        """In-place changes are followed anyway."""

    def mark_non_differentiable(self, *tensors: Any) -> None:
        """Outputs that no gradient goes through."""
        self.non_differentiable = tensors

    def set_materialize_grads(self, _value: bool) -> None:
        """The function's own backward never runs here."""

    def maybe_clear_saved_tensors(self) -> None:
        """Nothing is freed early."""


def apply(capture: Capture | None, cls: Any, *args: Any, **kwargs: Any) -> Any:
    """`Function.apply`: torch's own, unless a capture runs and the function is not one of this package."""
    if capture is None or cls.__module__.startswith("kernel_agent.ir."):
        return torch_apply(cls, *args, **kwargs)
    with capture.inside_function():
        ctx, output = _forward(cls, args, kwargs)
    marked = {id(tensor) for tensor in ctx.non_differentiable}
    # a copy: kernels that read the memory of what is marked must not find its gradient there
    return tree_map(lambda part: part.detach().clone() if id(part) in marked else part, output)


def _forward(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Context, Any]:
    if cls.setup_context is torch.autograd.Function.setup_context:
        ctx = Context(args)
        return ctx, cls.forward(ctx, *args, **kwargs)
    bound = inspect.signature(cls.forward).bind(*args, **kwargs)
    bound.apply_defaults()
    ctx = Context(bound.args)
    output = cls.forward(*bound.args, **bound.kwargs)
    cls.setup_context(ctx, bound.args, output)
    return ctx, output
