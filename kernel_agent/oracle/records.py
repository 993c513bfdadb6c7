"""What the oracle answers: forwards, gradients and refusals at one point of a spec."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernel_agent.errors import EnvironmentProblem, ExitCode, InputError, KernelAgentError
from kernel_agent.oracle.provenance import Provenance
from kernel_agent.pairs.arguments import argument_places
from kernel_agent.pairs.spec import KernelSpec, ShapeEntry
from kernel_agent.pairs.values import EXTREME, Values
from kernel_agent.record import Record

ROUNDOFF = 1e-6
"""Part of the natural gradient size (see `GradientTruth.scale`) below which a gradient is rounding of a zero."""


class TruthError(KernelAgentError):
    """The truth of a valid forward cannot be computed here: an operation we do not know, or too large a computation."""


class TruthTooLarge(TruthError):
    """The forward does not end, or takes more memory than there is: what the file asks for has to change."""

    exit_code = ExitCode.BAD_INPUT


class Point(Record):
    """One place at which a forward is evaluated: the dims of a SWEEP entry, a seed, how values are distributed."""

    entry: ShapeEntry
    seed: int = 0
    values: Values = Values.AS_MADE

    @property
    def label(self) -> str:
        """`M=17 N=100 seed=0`, and `values=scaled` behind it where they are not as `make_args` gives them."""
        other = "" if self.values is Values.AS_MADE else f" values={self.values.value}"
        return f"{self.entry.label} seed={self.seed}{other}"

    @property
    def extreme(self) -> bool:
        """Whether a gradient there is asked to be finite and nothing else: see `pairs.values.EXTREME`."""
        return self.values in EXTREME


class RefusalKind(str, enum.Enum):
    """Why a forward gave no answer at a point."""

    ARGUMENTS = "make_args raised"
    VALUES = "there are no other values to try"
    STUB = "the forward raised"
    UNSUPPORTED = "unsupported operation"
    COMPILE = "the kernel does not compile"
    MEMORY = "the forward leaves the bounds of its buffers"
    NOT_FINITE = "the forward's output is not finite"
    RESOURCES = "too large for this machine"


class Refusal(Record):
    """A point at which the forward itself fails: no candidate can be blamed there."""

    kind: RefusalKind
    message: str
    line: int | None = None

    def __str__(self) -> str:
        return f"{self.kind.value}: {self.message}" if self.message else self.kind.value


@dataclass(frozen=True)
class OutputForm:
    """Shape and dtype of one tensor output at one point, and how it lies in memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool
    strides: tuple[int, ...] = ()
    """In elements; empty where nobody looked."""
    on_host: bool = False
    """It was made in the memory of the host."""
    shares: bool = False
    """It lies in memory of an argument or of an output before it."""


@dataclass(frozen=True)
class ForwardTruth:
    """What the forward computes at one point."""

    point: Point
    args: tuple[Any, ...]
    """Positional arguments of `make_args`: tensors of their real dtypes on the CPU, and plain values."""
    kwargs: dict[str, Any]
    outputs: tuple[Any, ...]
    """One entry per output: float64 tensors for floating outputs, integer tensors, the `plain_form` of all else."""
    forms: tuple[OutputForm | None, ...]
    """One entry per output; None for what is not a tensor."""
    launches: tuple[str, ...]
    torch_ops: tuple[str, ...]
    """Names of computing torch functions the stub itself calls."""
    findings: tuple[str, ...]
    """What the sanitizer says of the forward's own launches."""
    mutated: tuple[str, ...]
    """Arguments that the forward changes in place."""
    seconds: float
    """Wall time of the execution in the child."""
    provenance: Provenance

    def argument(self, spec: KernelSpec, name: str) -> Any:
        """The argument of one of the names in `spec.inputs`; None where `make_args` does not pass it here."""
        place = argument_places([fact.name for fact in spec.inputs], self.args, self.kwargs).get(name)
        return self.args[place] if isinstance(place, int) else self.kwargs.get(name)

    @property
    def elements(self) -> int:
        """Elements of all tensor arguments and outputs together."""
        return sum(t.numel() for t in _tensors((self.args, self.kwargs, self.outputs)))


@dataclass(frozen=True)
class GradientTruth:
    """The exact gradients of one forward for one set of cotangents."""

    grads: dict[str, Tensor | None]
    """Float64, one per name in `KernelSpec.grads`; None where that argument is no floating tensor at this point."""
    units: dict[str, tuple[float, ...]]
    """RMS of each gradient under a random normal cotangent of RMS 1 on one output alone, one entry per output."""
    natural: dict[str, tuple[float, ...]]
    """norm(output) / norm(input) per output: the size of a gradient norm by units alone, for a cotangent of norm 1."""
    provenance: Provenance

    def scale(self, grad: str, cotangent_rms: tuple[float, ...], sizes: tuple[int, ...]) -> float:
        """S per element: RMS of this gradient under random normal cotangents with these RMS values, one per output.

        By linearity that is the root of the summed squares of `units` times RMS. A gradient that is zero by algebra has
        only rounding there, which two correct programs round differently, so S never falls below `ROUNDOFF` of the
        natural gradient size: with RELATIVE and SCALED of the rule that allows 1e-14 of it, some ulps of float64.
        """
        units = zip(self.units[grad], cotangent_rms, strict=True)
        linear = math.hypot(*(u * r for u, r in units))
        natural = self.natural_size(grad, cotangent_rms, sizes)
        return max(linear, ROUNDOFF * natural) if math.isfinite(natural) else linear

    def natural_size(self, grad: str, cotangent_rms: tuple[float, ...], sizes: tuple[int, ...]) -> float:
        """Size of an element by units alone under cotangents with these RMS values and elements, one per output."""
        natural = zip(self.natural[grad], cotangent_rms, sizes, strict=True)
        norm = math.hypot(*(n * r * math.sqrt(size) for n, r, size in natural))
        truth = self.grads[grad]
        return norm / math.sqrt(max(truth.numel() if truth is not None else 0, 1))


def error_form(error: KernelAgentError) -> dict[str, Any]:
    """An error as JSON, to be raised again by `raise_again` in another process."""
    if isinstance(error, EnvironmentProblem):
        return {"type": EnvironmentProblem.__name__, "message": error.message, "remedy": error.remedy}
    place = (
        {"path": str(error.path) if error.path else None, "line": error.line} if isinstance(error, InputError) else {}
    )
    return {"type": type(error).__name__, "message": error.message, "remedy": error.remedy, **place}


def raise_again(form: Mapping[str, Any]) -> None:
    """Raise the error that `error_form` described: `InputError`, `EnvironmentProblem`, or `TruthError` for all else."""
    if form["type"] == "InputError":
        path = Path(form["path"]) if form["path"] else None
        raise InputError(form["message"], remedy=form["remedy"], path=path, line=form["line"])
    if form["type"] == "EnvironmentProblem":
        raise EnvironmentProblem(form["message"], remedy=form["remedy"])
    raise TruthError(form["message"], remedy=form["remedy"])


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = tuple(value.values())
    return [t for v in value for t in _tensors(v)] if isinstance(value, (list, tuple)) else []
