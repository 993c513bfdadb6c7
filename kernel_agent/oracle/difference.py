"""Truth-child half of the cross-check: central differences of the forward.

The gradients under test come from autograd through the executor. Differences use the executor without autograd, so a
wrong derivative rule, a lost connection or a detached branch shows as a disagreement.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernel_agent.ir import as_image, standin
from kernel_agent.oracle.child import Stub, answered, arguments_at, load, plain, run
from kernel_agent.oracle.records import Point

if TYPE_CHECKING:
    from kernel_agent.sandbox import Call

STEP = 1e-6
"""Step along the direction, relative to the RMS of each input; the direction has RMS 1 times that size."""


class Slope(str, enum.Enum):
    """How difference quotients behave as the step shrinks."""

    SMOOTH = "smooth"
    JUMPS = "jumps"


@dataclass(frozen=True)
class Quotient:
    """A central-difference directional derivative."""

    value: float
    slope: Slope
    """JUMPS when the forward is discontinuous along the direction: the quotient then grows as the step shrinks."""


def differences(call: Call) -> None:
    """Payload: `spec`, `point`, `sets`; tensors: cotangents as for `gradients` and one `direction.NAME` per gradient.

    Sends, per set of cotangents, the difference quotient of sum(<cotangent, output>) along the direction.
    """
    with answered(call), standin():
        stub = load(call)
        point = Point.model_validate(call.payload["point"])
        args, kwargs = arguments_at(stub, point)
        places = stub.leaves(args, kwargs)
        steps = {
            place: _scaled(call.tensors[f"direction.{name}"], args, kwargs, place) for name, place in places.items()
        }
        wide, half, none = (_outputs_at(stub, args, kwargs, steps, h) for h in (STEP, STEP / 2, 0.0))
        for keys in call.payload["sets"]:
            cotangents = [None if key is None else call.tensors[key].to(torch.float64) for key in keys]
            quotient = _quotient(cotangents, wide, half, none)
            call.send({"value": quotient.value, "slope": quotient.slope.value})


def _scaled(direction: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], place: int | str) -> Tensor:
    value = args[place] if isinstance(place, int) else kwargs[place]
    size = value.to(torch.float64).square().mean().sqrt() if value.numel() else torch.tensor(1.0)
    return direction * (size if float(size) > 0 else 1.0)


def _outputs_at(
    stub: Stub, args: tuple[Any, ...], kwargs: dict[str, Any], steps: dict[int | str, Tensor], h: float
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Outputs a step forward and a step back."""

    def moved(value: Any, place: int | str, sign: float) -> Any:
        if place not in steps:
            return value
        return as_image(value.to(torch.float64) + sign * h * steps[place], value.dtype)

    both = []
    for sign in (1.0, -1.0):
        moved_args = tuple(moved(value, i, sign) for i, value in enumerate(args))
        moved_kwargs = {name: moved(value, name, sign) for name, value in kwargs.items()}
        both.append(stub.outputs(run(stub, moved_args, moved_kwargs, sanitize=False).result))
    return both[0], both[1]


def _quotient(
    cotangents: list[Tensor | None],
    wide: tuple[tuple[Any, ...], tuple[Any, ...]],
    half: tuple[tuple[Any, ...], tuple[Any, ...]],
    none: tuple[tuple[Any, ...], tuple[Any, ...]],
) -> Quotient:
    def along(pair: tuple[tuple[Any, ...], tuple[Any, ...]]) -> float:
        forward, back = pair
        return sum(
            float((c * (plain(f) - plain(b)).nan_to_num(0.0)).sum())
            for c, f, b in zip(cotangents, forward, back, strict=True)
            if c is not None and isinstance(f, Tensor)
        )

    changes = along(wide), along(half)
    # Twice the same call may differ only by a forward that is random: no quotient means anything then.
    noise = abs(along(none))
    value = changes[1] / STEP
    coarse = changes[0] / (2 * STEP)
    size = max(abs(value), abs(coarse))
    jumps = noise > 0 or not math.isfinite(value) or abs(value - coarse) > 0.25 * size
    return Quotient(value, Slope.JUMPS if jumps else Slope.SMOOTH)
