"""`CallForm`: what a backward is derived for, of one call: all but the sizes, the numbers and the values."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils._pytree import tree_leaves

from kernel_agent.jit.errors import CannotTrain


@dataclass(frozen=True)
class CallForm:
    """A configuration as the arguments of a call show it."""

    parts: tuple[tuple[str, str], ...]
    """By parameter: dtype and rank of a tensor, the value of a flag or a name, the type of a number."""
    grads: tuple[str, ...]
    """Tensor arguments that gradients are wanted of, in order."""

    def __str__(self) -> str:
        return ", ".join(f"{name}: {part}" for name, part in self.parts) + f"; gradients of {', '.join(self.grads)}"


def call_form(arguments: Mapping[str, Any], grads: tuple[str, ...]) -> CallForm:
    """The form of a call with these arguments."""
    return CallForm(tuple((name, _part(value)) for name, value in arguments.items()), grads)


def wanted_gradients(arguments: Mapping[str, Any], allowed: tuple[str, ...] | None) -> tuple[str, ...]:
    """The arguments that gradients are wanted of. `allowed`: those that may have one; None: all floating tensors."""
    return tuple(
        name
        for name, value in arguments.items()
        if isinstance(value, Tensor) and value.requires_grad and (allowed is None or name in allowed)
    )


def check_signature(stub: Callable[..., Any]) -> None:
    """Raise `CannotTrain` for a stub whose arguments are not all named."""
    for parameter in inspect.signature(stub).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            star = "*" if parameter.kind is parameter.VAR_POSITIONAL else "**"
            raise CannotTrain(
                f"`{stub.__name__}` takes `{star}{parameter.name}`, of which it cannot be told what has a gradient",
                remedy="Name every argument.",
            )


def bound(
    signature: inspect.Signature, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> inspect.BoundArguments:
    """The arguments of a call, defaults among them. Raises `TypeError` in the words of a call of the stub."""
    try:
        found = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{name}() {error}") from None
    found.apply_defaults()
    return found


def check_arguments(stub: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Raise `CannotTrain` for tensors inside of tuples, lists or dicts that require gradients, and for tensors that no
    kernel has gradients of."""
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            _check_tensor(stub, name, value)
        elif any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(value)):
            raise CannotTrain(
                f"`{name}` of `{stub.__name__}` is a {type(value).__name__} of tensors that require gradients",
                remedy="Pass each tensor as an argument of its own.",
            )


def _check_tensor(stub: Callable[..., Any], name: str, value: Tensor) -> None:
    """Raise `CannotTrain` for a tensor that Triton has no pointer to."""
    what, remedy = "", ""
    if not torch.compiler.is_compiling() and is_functorch_wrapped_tensor(value):  # which it cannot trace
        what, remedy = "is a tensor of torch.func or torch.vmap", "Take gradients by backward() or torch.autograd.grad."
    elif value.layout is not torch.strided:
        what, remedy = f"is a tensor of layout {value.layout}", "Pass it dense, by to_dense()."
    elif value.is_complex():
        what, remedy = "is a complex tensor, which no kernel takes", "Pass it by torch.view_as_real."
    if what:
        raise CannotTrain(f"`{name}` of `{stub.__name__}` {what}", remedy=remedy)


def _part(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} of rank {value.dim()}"
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__}({', '.join(map(_part, value))})"
    if type(value) in (int, float):
        return type(value).__name__
    return repr(value)
