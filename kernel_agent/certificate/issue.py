"""`issue`: a certificate of a green verdict; and what of it follows from the verdict and the sources alone."""

from __future__ import annotations

from kernel_agent.certificate.record import (
    Certificate,
    GradientRecord,
    Hashes,
    InputRecord,
    Provenance,
    Sources,
    TierRecord,
    digest,
    utc_now,
)
from kernel_agent.errors import KernelAgentError
from kernel_agent.gate.mutants.records import MutationTally
from kernel_agent.gate.verdict import Status, Tier, Verdict
from kernel_agent.pairs.sections import split_sections, truth_source
from kernel_agent.pairs.spec import ArgumentKind, KernelSpec

CPU = "CPU"
"""Device of the exact tier."""


class NotGreen(KernelAgentError):
    """Only a green verdict is ever certified, only its backward delivered."""


def issue(
    spec: KernelSpec,
    pair: str,
    verdict: Verdict,
    *,
    file: str,
    delivered: bytes,
    mutants: MutationTally | None = None,
    provenance: Provenance | None = None,
    name: str = "certificate.json",
) -> Certificate:
    """Certify the verdict over a pair file, judged against `spec`.

    `file` and `delivered` are name and content of the finished file, `name` is what the certificate will be called.
    Raises `NotGreen` for a red verdict.
    """
    if not verdict.green:
        raise NotGreen(
            f"a {verdict.status.value} verdict cannot be certified",
            remedy="repair the backward until kernel-agent check is green",
        )
    forward = None if spec.facts.source == pair else spec.facts.source
    sources = Sources(pair=pair, forward=forward)
    return Certificate(
        delivered=file,
        stub=spec.facts.stub,
        grads=spec.grads,
        gradients=gradient_records(verdict),
        tiers=tier_records(verdict),
        verdict=verdict,
        inputs=input_records(spec),
        sweep=spec.sweep,
        sources=sources,
        hashes=hashes_of(sources, delivered),
        mutants=mutants,
        provenance=provenance,
        issued=utc_now(),
        verify=f"kernel-agent recheck {name}",
    )


def hashes_of(sources: Sources, delivered: bytes) -> Hashes:
    """The hashes of texts. Raises `InputError` where the pair lacks a section."""
    sections = split_sections(sources.pair)
    return Hashes(
        forward=digest(sections.forward),
        backward=digest(sections.backward),
        truth=digest(truth_source(sources.truth)),
        delivered=digest(delivered),
    )


def gradient_records(verdict: Verdict) -> tuple[GradientRecord, ...]:
    """The worst case of every gradient in every tier, in the order of the cases."""
    found: dict[tuple[Tier, str], GradientRecord] = {}
    for case in verdict.cases:
        for score in case.grads:
            known = found.get((case.tier, score.grad))
            worst = GradientRecord(
                grad=score.grad,
                tier=case.tier,
                ratio=score.ratio,
                tile=score.tile,
                relative_error=score.relative_error,
                case=case.case,
                values=case.values,
                cases=1,
            )
            if known is not None:
                kept = worst if score.ratio > known.ratio else known
                worst = kept.model_copy(update={"cases": known.cases + 1})
            found[case.tier, score.grad] = worst
    return tuple(found.values())


def tier_records(verdict: Verdict) -> tuple[TierRecord, ...]:
    """Status, number of cases and device of every tier that judged."""
    gpu = "" if verdict.machine is None else verdict.machine.gpu
    records = []
    for tier in Tier:
        statuses = [case.status for case in verdict.cases if case.tier is tier]
        if statuses:
            red = next((status for status in statuses if status is not Status.GREEN), Status.GREEN)
            device = CPU if tier is Tier.EXACT else gpu
            records.append(TierRecord(tier=tier, status=red, cases=len(statuses), device=device))
    return tuple(records)


def input_records(spec: KernelSpec) -> tuple[InputRecord, ...]:
    """Dtypes of the tensor inputs."""
    return tuple(
        InputRecord(name=fact.name, dtypes=fact.dtypes or (fact.dtype,), gradient=fact.name in spec.grads)
        for fact in spec.inputs
        if fact.kind is ArgumentKind.TENSOR
    )
