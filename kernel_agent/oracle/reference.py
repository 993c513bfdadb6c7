"""Truth-child half of the comparison with the user's `reference`: its outputs, its gradients by autograd, and in what
precision it computes them.

A reference is written for people: it may call `.float()` inside, or not take float64 at all. Every dtype it computes in
is therefore watched, since the comparison can be no finer than the coarsest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from kernel_agent.ir.watching import Watch
from kernel_agent.oracle.child import answered, arguments_at, load, plain
from kernel_agent.oracle.leaves import LeafCall, leaf_call
from kernel_agent.oracle.records import Point
from kernel_agent.pairs.blame import first_line

if TYPE_CHECKING:
    from kernel_agent.sandbox import Call


class FloatsSeen(Watch):
    """Watches which floating dtypes torch makes while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation and look at what it made."""
        result = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        self.dtypes.update(tensor.dtype for tensor in made if tensor.numel() > 0)
        return result


@dataclass(frozen=True)
class Referenced:
    """What the reference gave."""

    outputs: tuple[Any, ...] = ()
    leaves: dict[str, Tensor] = field(default_factory=dict)
    dtypes: frozenset[torch.dtype] = frozenset()
    failed: str = ""
    """What it raised, with float64 arguments and with those of their own dtypes."""


def compared(call: Call) -> None:
    """Payload: `spec`, `point`; tensors: a cotangent `cotangent.i` for every output i to be differentiated.

    Sends one message: outputs by position, and for the outputs that the reference connects with its inputs (`used`) the
    gradients `grad.NAME`.
    """
    with answered(call):
        stub = load(call)
        args, kwargs = arguments_at(stub, Point.model_validate(call.payload["point"]))
        wanted = {int(key.removeprefix("cotangent.")): tensor for key, tensor in call.tensors.items()}
        places = stub.leaves(args, kwargs) if wanted else {}
        found = called(stub.module.reference, lambda dtype: leaf_call(args, kwargs, places, dtype))
        if found.failed:
            call.send({"failed": found.failed})
            return
        tensors = {str(i): plain(o).to(torch.float64) for i, o in enumerate(found.outputs) if isinstance(o, Tensor)}
        used = [
            i
            for i, cotangent in wanted.items()
            if i < len(found.outputs)
            and isinstance(found.outputs[i], Tensor)
            and found.outputs[i].requires_grad
            and found.outputs[i].shape == cotangent.shape
        ]
        record: dict[str, Any] = {
            "dtypes": sorted(str(dtype).removeprefix("torch.") for dtype in found.dtypes),
            "used": used,
            "failed": "",
        }
        try:
            tensors |= _gradients(found, used, wanted)
        except Exception as error:  # the user's code may hold autograd functions of its own
            record |= {"used": [], "gradients_failed": first_line(error)}
        call.send(record, tensors)


def called(reference: Callable[..., Any], prepare: Callable[[torch.dtype | None], LeafCall]) -> Referenced:
    """Call the reference with float64 arguments, or with their own dtypes where it does not take those."""
    said = ""
    for dtype in (torch.float64, None):
        prepared = prepare(dtype)
        try:
            with FloatsSeen() as seen, torch.enable_grad():
                result = reference(*prepared.args, **prepared.kwargs)
        except Exception as error:  # the user's code: said to the user
            said = said or first_line(error)
            continue
        outputs = tuple(result) if isinstance(result, (tuple, list)) else (result,)
        floats = {o.dtype for o in outputs if isinstance(o, Tensor) and o.is_floating_point()}
        own = {v.dtype for v in prepared.leaves.values()} if dtype is None else set()
        return Referenced(outputs, prepared.leaves, frozenset(seen.dtypes | floats | own))
    return Referenced(failed=said)


def _gradients(found: Referenced, used: Sequence[int], cotangents: dict[int, Tensor]) -> dict[str, Tensor]:
    if not used or not found.leaves:
        return {}
    outputs = [found.outputs[i] for i in used]
    grads = torch.autograd.grad(
        outputs,
        list(found.leaves.values()),
        [cotangents[i].to(output.dtype) for i, output in zip(used, outputs, strict=True)],
        allow_unused=True,
    )
    return {
        f"grad.{name}": torch.zeros_like(leaf, dtype=torch.float64) if grad is None else plain(grad).to(torch.float64)
        for (name, leaf), grad in zip(found.leaves.items(), grads, strict=True)
    }
