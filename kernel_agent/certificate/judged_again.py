"""`recheck`: judge the sources of a certificate again, on this machine and without a model, and say what changed.

A certificate may be hostile. Its texts are read as syntax trees here and run in children only, as those of any file
that is checked. What it says was asked can make the new check ask more, never less.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pydantic import Field

from kernel_agent.certificate.changes import (
    GradientChange,
    gate_changes,
    gradient_changes,
    machine_changes,
    missing_cases,
    new_cases,
)
from kernel_agent.certificate.integrity import disagreements, unlike_sources
from kernel_agent.certificate.record import Certificate
from kernel_agent.errors import InputError
from kernel_agent.gate.checking import OnCase, check, suite
from kernel_agent.gate.options import STANDARD, GateOptions
from kernel_agent.gate.verdict import Status, Tier, Verdict
from kernel_agent.oracle import TruthError, Truths, describe
from kernel_agent.pairs.spec import KernelSpec
from kernel_agent.pairs.userfile import read_source
from kernel_agent.record import Record
from kernel_agent.sandbox import Sandbox

_SEEDS = range(1 << 62)
"""What torch takes as a seed, and more than any gate has drawn."""


class Recheck(Record):
    """What became of a certificate."""

    holds: bool = Field(description="its sources are green here, and nothing in it disagrees with the rest")
    disagreements: tuple[str, ...] = Field(description="what was changed since it was written, hashes first")
    then: Status = Field(description="what the certificate says")
    now: Verdict | None = Field(description="what the gate says here; None where the truth cannot be computed here")
    problem: str = Field(default="", description="why it cannot; empty otherwise")
    machine: tuple[str, ...] = Field(description="such as `triton 3.7.1 instead of 3.6.0`")
    gate: tuple[str, ...] = Field(description="what is asked otherwise here")
    gradients: tuple[GradientChange, ...]
    missing: tuple[str, ...] = Field(description="cases that were asked then and are not here")
    new: tuple[str, ...] = Field(description="cases that were not asked then")
    not_replayed: tuple[str, ...] = Field(description="what the certificate says and nobody looked at here")


def recheck(
    certificate: Certificate,
    sandbox: Sandbox,
    *,
    folder: Path | None = None,
    gpu: bool = False,
    on_case: OnCase | None = None,
) -> Recheck:
    """Judge the sources of a certificate as the gate of this version does, on its seeds and on one that is drawn here.

    `folder` is where the finished file may lie. With `gpu` real kernels are judged as well. Raises `InputError` where
    the sources inside are no file that can be judged, and `EnvironmentProblem`.
    """
    said = disagreements(certificate, folder)
    spec = _described(certificate, sandbox)
    said += unlike_sources(certificate, spec)
    truths = Truths(spec, sandbox)
    options = _options(certificate)
    verdict, problem = _judged(certificate, truths, options, on_case, gpu)
    machine = None if verdict is None else verdict.machine
    return Recheck(
        holds=verdict is not None and verdict.green and not said,
        disagreements=said,
        then=certificate.verdict.status,
        now=verdict,
        problem=problem,
        machine=machine_changes(certificate.machine, machine),
        gate=gate_changes(certificate.suite, suite(truths, options)),
        gradients=gradient_changes(certificate.verdict, verdict),
        missing=() if verdict is None else missing_cases(certificate.verdict, verdict),
        new=() if verdict is None else new_cases(certificate.verdict, verdict),
        not_replayed=_not_replayed(certificate, verdict),
    )


def _described(certificate: Certificate, sandbox: Sandbox) -> KernelSpec:
    """The file that the gradients are of, run once in a truth child."""
    try:
        return describe(read_source(certificate.sources.truth, Path(certificate.delivered)), sandbox)
    except InputError as error:
        raise InputError(
            f"the forward inside the certificate cannot be judged: {error.message}",
            line=error.line,
            remedy="It was changed, or was written for another version of kernel-agent.",
        ) from None


def _options(certificate: Certificate) -> GateOptions:
    """What every verdict is made with, on the certificate's seeds, and with the seeds that it drew asked as well."""
    asked = certificate.suite
    if asked is None:
        return STANDARD
    usual = len(asked.seeds) == len(set(asked.seeds)) == len(STANDARD.seeds) and all(s in _SEEDS for s in asked.seeds)
    drawn = tuple(seed for seed in asked.drawn[:1] if seed in _SEEDS)
    return replace(
        STANDARD,
        seeds=asked.seeds if usual else STANDARD.seeds,
        drawn=drawn,
        max_cases=STANDARD.max_cases + len(drawn) * len(STANDARD.values),
        deterministic=asked.deterministic,
    )


def _judged(
    certificate: Certificate, truths: Truths, options: GateOptions, on_case: OnCase | None, gpu: bool
) -> tuple[Verdict | None, str]:
    """The verdict of the tiers that this machine has, or why there is none."""
    pair, spec, sandbox = certificate.sources.pair, truths.spec, truths.sandbox
    try:
        exact = check(spec, pair, sandbox, options, on_case, truths=truths, diagnose=False)
    except TruthError as error:
        return None, error.message
    if not gpu or not exact.green:
        return exact, ""
    from kernel_agent.bench.native import check_native
    from kernel_agent.bench.tiers import joined

    return joined(exact, check_native(spec, pair, sandbox, on_case=on_case)), ""


def _not_replayed(certificate: Certificate, verdict: Verdict | None) -> tuple[str, ...]:
    """Claims of the certificate that the replay says nothing of."""
    parts = []
    tiers = {case.tier for case in certificate.verdict.cases}
    now = set() if verdict is None else {case.tier for case in verdict.cases}
    if Tier.NATIVE in tiers - now:
        parts.append("the native tier, real kernels on a GPU")
    if certificate.mutants is not None:
        parts.append(f"mutants ({certificate.mutants.words})")
    if certificate.provenance is not None and certificate.provenance.speed is not None:
        parts.append("times")
    return tuple(parts)
