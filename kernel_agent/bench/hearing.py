"""What a timed child says, and what of it is believed: the parent's half of the clock.

The child may be the candidate's puppet. Its times count only when the elements of the gradients kept from every
repetition are right; work on streams that it does not wait for is added; and where the parent's own clock sees far more
time pass than the child reports, the parent's counts.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import torch
from pydantic import Field, ValidationError
from torch import Tensor

from kernel_agent.bench.launches import KernelSeen
from kernel_agent.bench.statistics import Timing, timing_of
from kernel_agent.errors import KernelAgentError
from kernel_agent.gate.answer import Failure, Said
from kernel_agent.sandbox import Message, Report

PROBE_ERROR = 0.1
"""Relative error above which those elements were not computed: rounding was judged before, in the native tier."""
SLACK, SLACK_US = 1.5, 30.0
"""How much longer a call may take by the parent's clock than by the child's events: a factor, and microseconds."""
HOST_US, HOST_US_PER_LAUNCH = 300.0, 100.0
"""What a call, and each launch in it, may cost the host at most, which is not the device's time."""
MOST_LAUNCHES = 50
"""Launches of one call that may explain time of the host: the child could name any number."""
HIDDEN_US = 10.0
"""Work on other streams below this cannot be told from the latency of the device."""


class NotMeasured(KernelAgentError):
    """The candidate cannot be timed: it fails at real sizes, or what it reports cannot be true."""


class Times(Said):
    """What the child says of one entry."""

    entry: int
    times: tuple[float, ...] = Field(max_length=1000)
    late: int = Field(ge=0, le=1000)
    flushes: int
    host_us: float
    hidden_us: float


class Forward(Said):
    """Times of the candidate's own forward at one entry."""

    entry: int
    forward: tuple[float, ...] = Field(max_length=1000)


class Kernels(Said):
    """The launches of one entry."""

    entry: int
    kernels: tuple[KernelSeen, ...] = Field(max_length=1000)


@dataclass
class Ear:
    """Hears the child's messages and looks at the parent's clock when it says that it begins and ends."""

    times: dict[int, tuple[Times, Tensor]] = field(default_factory=dict)
    kernels: dict[int, Kernels] = field(default_factory=dict)
    forwards: dict[int, Forward] = field(default_factory=dict)
    begun: dict[int, float] = field(default_factory=dict)
    calls: dict[int, int] = field(default_factory=dict)
    took_us: dict[int, float] = field(default_factory=dict)
    """By the parent's clock, one call of the quickest series."""
    failure: tuple[str, Failure] | None = None
    nonsense: bool = False

    def hear(self, message: Message) -> None:
        """Take one message; what is none of ours is remembered as nonsense."""
        now, record = time.perf_counter(), message.record
        try:
            if "failure" in record:
                self.failure = (str(record["where"])[:100], Failure.model_validate(record["failure"]))
            elif "times" in record:
                said = Times.model_validate(record)
                self.times[said.entry] = (said, message.tensors["probes"])
            elif "forward" in record:
                forward = Forward.model_validate(record)
                self.forwards[forward.entry] = forward
            elif "begin" in record:
                self.begun[int(record["entry"])], self.calls[int(record["entry"])] = now, int(record["begin"])
            elif "end" in record:
                entry = int(record["entry"])
                took_us = (now - self.begun.pop(entry)) / max(1, self.calls[entry]) * 1e6
                self.took_us[entry] = min(took_us, self.took_us.get(entry, math.inf))
            else:
                kernels = Kernels.model_validate(record)
                self.kernels[kernels.entry] = kernels
        except (ValidationError, KeyError, ValueError, TypeError):
            self.nonsense = True


@dataclass(frozen=True)
class Probes:
    """Where gradients are looked at, and what stands there."""

    places: tuple[Tensor | None, ...]
    """Per gradient; None where the input is no tensor at this entry."""
    truth: Tensor | None
    """Float64, those of all gradients one after the other; None where no truth is known at the entry itself."""
    scale: float
    """Norm of S at these elements."""


@dataclass(frozen=True)
class Believed:
    """The timing of one entry, as far as it can be believed."""

    timing: Timing
    note: str = ""
    """Why it is not what the child said."""


def believed(ear: Ear, report: Report, number: int, label: str, probes: Probes) -> Believed:
    """What to make of the messages on one entry. Raises `NotMeasured`."""
    if number not in ear.times or number not in ear.took_us:
        said = f"{report.error.type}: {report.error.message}" if report.error else report.message
        raise NotMeasured(f"no time at {label}: {said}", remedy=report.stderr_tail[-1000:].strip())
    said_times, seen = ear.times[number]
    try:
        timing = timing_of(said_times.times)
    except ValueError as error:
        raise NotMeasured(f"no time at {label}: {error}") from error
    _refuse_wrong_answers(seen, probes, len(said_times.times) + said_times.late, label)
    note = ""
    if said_times.hidden_us > HIDDEN_US + 0.05 * timing.median_us:
        timing = Timing(timing.median_us + said_times.hidden_us, timing.spread, timing.repeats)
        note = f"{label}: {said_times.hidden_us:.0f} us on streams that the call does not wait for are counted"
    kernels = ear.kernels.get(number)
    launches = min(len(kernels.kernels), MOST_LAUNCHES) if kernels else 1
    host_us = min(said_times.host_us, HOST_US + HOST_US_PER_LAUNCH * launches)
    if ear.took_us[number] > SLACK * max(timing.median_us, host_us) + SLACK_US:
        note = (
            f"{label}: events on the device say {timing.median_us:.0f} us; a call takes {ear.took_us[number]:.0f} us "
            "by the clock outside of its process, and that counts"
        )
        timing = Timing(ear.took_us[number], timing.spread, timing.repeats)
    return Believed(timing, note)


def _refuse_wrong_answers(seen: Tensor, probes: Probes, repeats: int, label: str) -> None:
    """Every repetition must have computed its answer: the factors on the cotangents are divided out already."""
    if tuple(seen.shape) != (repeats, sum(len(where) for where in probes.places if where is not None)):
        raise NotMeasured(f"the candidate does not show its gradients at {label} while it is timed")
    seen = seen.to(torch.float64)
    wanted = seen[0] if probes.truth is None else probes.truth
    error = torch.where(wanted.isfinite(), seen - wanted, 0.0)
    allowed = PROBE_ERROR * (float(wanted.nan_to_num(0.0, 0.0, 0.0).norm()) + probes.scale)
    worst = float(error.norm(dim=1).nan_to_num(math.inf).max())
    if worst > allowed:
        raise NotMeasured(
            f"while it is timed at {label}, the candidate returns other gradients than when it is checked",
            remedy="Compute the gradients anew in every call, on the current stream; keep nothing between calls.",
        )
