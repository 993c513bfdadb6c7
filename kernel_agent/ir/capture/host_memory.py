"""Which images code asked for in the memory of the host. In an execution all lie in one place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernel_agent.ir.capture.images import DECLARED
from kernel_agent.ir.capture.torch_calls import CallClass, class_of

_MOVES = frozenset({"to", "cuda", "type", "type_as"})
"""What may move a tensor to the GPU."""
_ON_HOST = "_made_on_host"


def note_place(name: str, result: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], *, alone: bool) -> None:
    """Note where the result of a torch function lies; `alone`: the call is given no tensor that it would lie beside."""
    devices = [value for value in (*args, *kwargs.values()) if isinstance(value, (str, torch.device))]
    if goes_to_host(name, args, kwargs):
        setattr(result, _ON_HOST, True)
    elif name in _MOVES:
        if hasattr(result, _ON_HOST):
            delattr(result, _ON_HOST)
    elif class_of(name, floats=True) is CallClass.ALLOCATION:
        default = alone and not devices and torch.get_default_device().type == "cpu"
        if default or any(str(device).split(":")[0] == "cpu" for device in devices):
            setattr(result, _ON_HOST, True)


def goes_to_host(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call gives a copy of a tensor in the memory of the host."""
    devices = (*args[1:2], kwargs.get("device")) if name == "to" else ()
    named = any(isinstance(device, (str, torch.device)) and str(device).split(":")[0] == "cpu" for device in devices)
    return name == "cpu" or named


def own_attributes() -> frozenset[str]:
    """Attributes that an execution itself sets on tensors."""
    return frozenset({DECLARED, _ON_HOST})


def made_on_host(image: Tensor) -> bool:
    """Whether code asked for this very tensor in the memory of the host. Views of it are not followed."""
    return hasattr(image, _ON_HOST)
