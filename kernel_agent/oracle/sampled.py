"""What can be said of a shape that is too large to be compared whole: a few of its programs, and in words, no more.

The shape itself is stood in for by the largest shrunk one (`fit`). Beside that, some programs of the forward run at the
size that was asked for, and what they write, with its gradients, is compared with the user's `reference` there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from pydantic import Field

from kernel_agent.oracle.against_reference import tolerance_of
from kernel_agent.oracle.fit import Fit, volume
from kernel_agent.oracle.job import run_truth
from kernel_agent.oracle.records import Point, Refusal, TruthError
from kernel_agent.record import Record
from kernel_agent.sandbox import Limits

if TYPE_CHECKING:
    from kernel_agent.oracle.truth import Truths

LIMITS = Limits(wall_s=60.0)
PROGRAMS = 4
"""Of each launch."""
MAX_ELEMENTS = 1 << 26
"""Elements of the arguments of a shape that is looked at; each is held as float64, some of them twice."""


MAX_REFERENCE_ELEMENTS = 1 << 25
"""The same for the reference, which may make many more."""
MAX_VOLUME = 1 << 31
"""Work (see `fit.volume`) up to which the reference is run whole, in float64 on a CPU."""


class Look(Record):
    """A few programs at one point."""

    shares: tuple[str, ...] = Field(description="what was run of each launch: '4 of 4096 programs of softmax_kernel'")
    parts: dict[str, tuple[int, int]] = Field(description="by output: elements that are known, and all elements")
    findings: tuple[str, ...] = Field(description="what the sanitizer says of the programs that ran")
    reference: str | None = Field(default=None, description="why there is no comparison; None: there is no reference")
    dtypes: tuple[str, ...] = Field(default=(), description="floating dtypes that the reference computes in")
    errors: dict[str, float] = Field(
        default={}, description="by output or gradient: worst error relative to the RMS of the reference"
    )

    @property
    def tolerance(self) -> float:
        """Largest error that counts as agreement: what the coarsest dtype of the reference allows."""
        eps = torch.finfo(torch.float64).eps
        coarsest = max((getattr(torch, name) for name in self.dtypes), key=lambda d: torch.finfo(d).eps, default=None)
        return tolerance_of(coarsest or torch.float64) if self.dtypes else eps

    @property
    def disagrees(self) -> tuple[str, ...]:
        """Outputs and gradients that differ from the reference."""
        return tuple(name for name, error in self.errors.items() if not error <= self.tolerance)


class FullSize(Record):
    """A shape that was shrunk, and what is known of it at the size that was asked for."""

    fit: Fit
    look: Look | None = None
    why_not: str = Field(default="", description="why no programs ran at the asked size")

    @property
    def words(self) -> str:
        """One sentence for the reader of a verdict: what was looked at there, and that the rest was not."""
        asked, run = self.fit.asked.label, self.fit.entry.label
        rest = f"the candidate was compared at {run} only"
        if self.look is None:
            return f"nothing was run at {asked} itself ({self.why_not}): {rest}"
        parts = "; ".join(f"{known} of {of} elements of `{name}`" for name, (known, of) in self.look.parts.items())
        return f"at {asked} itself, {', '.join(self.look.shares)} of the forward ran ({parts}): {self._said()}; {rest}"

    def _said(self) -> str:
        look = self.look
        if look is None:
            return ""
        if look.findings:
            return look.findings[0]
        if look.reference is None:
            return "in bounds and without races, and there is no reference to compare with"
        if look.reference:
            return f"in bounds and without races; not compared with the reference there ({look.reference})"
        if look.disagrees:
            worst = look.disagrees[0]
            return f"{worst} differs from the reference by {look.errors[worst]:.1e} of its RMS"
        return f"{', '.join(look.errors)} agree with the reference on sampled rows"


def at_full_size(truths: Truths, fits: Sequence[Fit], seed: int = 0) -> tuple[FullSize, ...]:
    """Look at the asked size of every shrunk entry, once per `Truths`, whoever asks. What cannot be looked at says why.

    Raises `InputError` and `EnvironmentProblem` as every question to the truth child does.
    """
    found = []
    for fit in (fit for fit in fits if fit.shrunk):
        label = f"{fit.asked.label} seed={seed}"
        found.append(truths.looks.of(label, partial(_looked, truths, fit, seed)))
    return tuple(found)


def _looked(truths: Truths, fit: Fit, seed: int) -> FullSize:
    """With the reference if its work seems bearable, else, or where it takes the child with it, without."""
    refused: TruthError | None = None
    for elements in (MAX_REFERENCE_ELEMENTS, 0) if volume(fit.asked) <= MAX_VOLUME else (0,):
        payload = {
            "spec": truths.spec.model_dump(mode="json"),
            "points": [Point(entry=fit.asked, seed=seed).model_dump(mode="json")],
            "programs": PROGRAMS,
            "max_elements": MAX_ELEMENTS,
            "max_reference_elements": elements,
        }
        try:
            (message,) = run_truth(truths.sandbox, "sampled_child:sampled", truths.spec.facts, payload, limits=LIMITS)
        except TruthError as error:
            refused = error
            continue
        if "refusal" in message.record:
            return FullSize(fit=fit, why_not=str(Refusal.model_validate(message.record["refusal"])))
        return FullSize(fit=fit, look=Look.model_validate(message.record["look"]))
    return FullSize(fit=fit, why_not=refused.message if refused else "no answer")
