"""How far honest rounding takes a kernel: the same kernels in faithful and in exact arithmetic, without a GPU.

A backward in float16 cannot equal the exact gradient. What it may miss it by is what its own arithmetic loses when
nothing else is wrong, and that is the difference of these two executions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from pydantic import Field
from torch import Tensor

from kernel_agent.ir import ExecOptions, Numerics, declared_dtype, execute, standin
from kernel_agent.oracle.child import answered, arguments_at, load, run
from kernel_agent.oracle.job import run_truth
from kernel_agent.oracle.records import Point, Refusal, TruthError
from kernel_agent.record import Record

if TYPE_CHECKING:
    from kernel_agent.oracle.truth import Truths
    from kernel_agent.sandbox import Call


class RoundingError(Record):
    """What rounding makes of one output or gradient at one point. Errors are taken over elements finite both ways."""

    name: str
    dtype: str = Field(description="what it is stored in, such as `float16`")
    elements: int
    rms: float = Field(description="root mean square of the error over that of the exact values")
    largest: float = Field(description="largest absolute error over the root mean square of the exact values")
    rms_ulps: float = Field(description="root mean square of the error in ulps of the dtype at the exact values' RMS")
    largest_ulps: float = Field(description="largest absolute error in those ulps")
    overflowed: int = Field(description="elements that are finite exactly and infinite or NaN when rounded")

    def __str__(self) -> str:
        lost = f", {self.overflowed} of {self.elements} elements overflow" if self.overflowed else ""
        return f"{self.name} ({self.dtype}): {self.rms:.1e} RMS, {self.largest:.1e} at most{lost}"


def rounding_error(name: str, measured: Tensor, exact: Tensor, dtype: torch.dtype) -> RoundingError:
    """The error of `measured` against `exact`, tensors of equal shape, where results are stored in `dtype`."""
    measured, exact = measured.detach().to(torch.float64), exact.detach().to(torch.float64)
    both = measured.isfinite() & exact.isfinite()
    error = torch.where(both, measured - exact, 0.0)
    truth = torch.where(both, exact, 0.0)
    count = max(1, int(both.sum()))
    size = float(truth.norm()) / math.sqrt(count)
    rms = float(error.norm()) / math.sqrt(count)
    largest = float(error.abs().max()) if error.numel() else 0.0
    ulp = torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(size)) if size else 0.0
    return RoundingError(
        name=name,
        dtype=str(dtype).removeprefix("torch."),
        elements=exact.numel(),
        rms=rms / size if size else 0.0,
        largest=largest / size if size else 0.0,
        rms_ulps=rms / ulp if ulp else 0.0,
        largest_ulps=largest / ulp if ulp else 0.0,
        overflowed=int((exact.isfinite() & ~measured.isfinite()).sum()),
    )


def rounding_of_outputs(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> tuple[RoundingError, ...]:
    """One record per floating output of a stub, run in this process; named by position. Raises as `execute` does."""
    faithful, exact = (_values(_run(function, args, kwargs, numerics)) for numerics in _BOTH)
    return _compared([str(i) for i in range(len(exact))], faithful, exact)


def rounding_of_gradients(
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    args: tuple[Any, ...],
    cotangents: Sequence[Tensor | None],
    names: Sequence[str],
    kwargs: dict[str, Any] | None = None,
) -> tuple[RoundingError, ...]:
    """One record per gradient of a pair, run in this process.

    `forward` returns (outputs, saved) and `backward(saved, *cotangents)` the gradients of `names`, as in a pair file.
    The faithful backward gets what the faithful forward saved. Raises as `execute` does.
    """
    both = []
    for numerics in _BOTH:
        _, saved = _run(forward, args, kwargs, numerics)
        both.append(_values(_run(backward, (tuple(saved), *cotangents), None, numerics)))
    return _compared(names, *both)


def rounding_at(truths: Truths, point: Point) -> tuple[RoundingError, ...]:
    """One record per floating output of a spec's forward at one point, run in a truth child.

    Raises `TruthError` where the forward refuses.
    """
    payload = {"spec": truths.spec.model_dump(mode="json"), "point": point.model_dump(mode="json")}
    (message,) = run_truth(truths.sandbox, "rounding_error:estimated", truths.spec.facts, payload)
    if "refusal" in message.record:
        raise TruthError(f"no rounding error at {point.label}: {Refusal.model_validate(message.record['refusal'])}")
    return tuple(RoundingError.model_validate(form) for form in message.record["errors"])


def estimated(call: Call) -> None:
    """Entry of the truth child. Payload: `spec`, `point`. Sends one message with a `RoundingError` per output."""
    with answered(call), standin():
        stub = load(call)
        args, kwargs = arguments_at(stub, Point.model_validate(call.payload["point"]))
        faithful, exact = (
            stub.outputs(run(stub, args, kwargs, sanitize=False, numerics=numerics).result) for numerics in _BOTH
        )
        names = [fact.name for fact in stub.spec.outputs]
        call.send({"errors": [error.model_dump(mode="json") for error in _compared(names, faithful, exact)]})


_BOTH = (Numerics.FAITHFUL, Numerics.EXACT)


def _run(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None, numerics: Numerics) -> Any:
    return execute(function, args, kwargs, options=ExecOptions(sanitize=False, numerics=numerics)).result


def _values(result: Any) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def _compared(names: Sequence[str], faithful: Sequence[Any], exact: Sequence[Any]) -> tuple[RoundingError, ...]:
    return tuple(
        rounding_error(name, rounded, truth, declared_dtype(truth))
        for name, rounded, truth in zip(names, faithful, exact, strict=False)
        if isinstance(truth, Tensor) and isinstance(rounded, Tensor) and truth.is_floating_point()
    )
