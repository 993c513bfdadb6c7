"""What somebody changed in a certificate or in the file beside it is named; and what is no certificate says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kernel_agent.certificate.integrity import disagreements
from kernel_agent.certificate.issue import gradient_records, hashes_of, tier_records
from kernel_agent.certificate.reading import read_certificate
from kernel_agent.certificate.record import FORMAT, Certificate, Sources
from kernel_agent.errors import ExitCode, InputError
from kernel_agent.gate.verdict import CaseResult, GradientScore, Status, Tier, Verdict
from kernel_agent.machine import Machine, installed_versions

PAIR = (Path(__file__).parent.parent / "gate" / "pairs" / "skip_connection.py").read_text()
OWN = PAIR.partition("# --- backward ---")[0]


def score(ratio: float) -> GradientScore:
    return GradientScore(grad="x", passed=ratio <= 1.0, ratio=ratio, tile=(0,))


CASES = (
    CaseResult(case="n=100 seed=0", required=True, status=Status.GREEN, grads=(score(0.25),)),
    CaseResult(case="n=101 seed=0", required=True, status=Status.GREEN, grads=(score(0.5),)),
    CaseResult(case="n=100 native", required=True, status=Status.GREEN, grads=(score(0.75),), tier=Tier.NATIVE),
)
MACHINE = Machine(gpu="NVIDIA H200", versions=installed_versions())


@pytest.fixture
def certificate() -> Certificate:
    verdict = Verdict(status=Status.GREEN, cases=CASES, tier="exact and native", machine=MACHINE)
    sources = Sources(pair=PAIR, forward=OWN)
    return Certificate(
        delivered="skip_backward.py",
        stub="skip",
        grads=("x",),
        gradients=gradient_records(verdict),
        tiers=tier_records(verdict),
        verdict=verdict,
        inputs=(),
        sweep=(),
        sources=sources,
        hashes=hashes_of(sources, PAIR.encode()),
        issued="",
        verify="",
    )


def with_sources(certificate: Certificate, **changed: str) -> Certificate:
    return certificate.model_copy(update={"sources": certificate.sources.model_copy(update=changed)})


def test_nothing_disagrees_in_a_certificate_as_it_was_written(certificate: Certificate, tmp_path: Path) -> None:
    (tmp_path / "skip_backward.py").write_text(PAIR)
    assert disagreements(certificate, tmp_path) == ()


def test_gradients_are_told_per_tier_and_the_native_one_with_its_gpu(certificate: Certificate) -> None:
    assert [(r.tier, r.ratio, r.case, r.cases) for r in certificate.gradients] == [
        (Tier.EXACT, 0.5, "n=101 seed=0", 2),
        (Tier.NATIVE, 0.75, "n=100 native", 1),
    ]
    assert [(r.tier, r.device) for r in certificate.tiers] == [(Tier.EXACT, "CPU"), (Tier.NATIVE, "NVIDIA H200")]


@pytest.mark.parametrize(
    ("section", "old", "new"),
    [("forward", "_skip_fwd[(triton", "_skip_fwd [(triton"), ("backward", "da = None", "da = needs")],
)
def test_a_tampered_section_is_named(certificate: Certificate, section: str, old: str, new: str) -> None:
    (said,) = disagreements(with_sources(certificate, pair=PAIR.replace(old, new)))
    assert said.startswith(f"hash of `{section}`: the {section} section")


def test_a_tampered_forward_file_is_named(certificate: Certificate) -> None:
    # The truth would be computed from it, so that another one makes a wrong backward right.
    (said,) = disagreements(with_sources(certificate, forward=OWN + "\n# changed"))
    assert said.startswith("hash of `truth`")


def test_a_hash_that_was_changed_is_named_like_its_text(certificate: Certificate) -> None:
    hashes = certificate.hashes.model_copy(update={"backward": "0" * 64})
    (said,) = disagreements(certificate.model_copy(update={"hashes": hashes}))
    assert "hash of `backward`" in said
    assert "0" * 12 in said


def test_a_delivered_file_with_another_backward_is_named(certificate: Certificate, tmp_path: Path) -> None:
    (tmp_path / "skip_backward.py").write_text(PAIR.replace("da = None", "da = needs"))
    (said,) = disagreements(certificate, tmp_path)
    assert said == "skip_backward.py beside it has another backward section"


def test_a_delivered_file_that_was_only_reformatted_is_named_too(certificate: Certificate, tmp_path: Path) -> None:
    (tmp_path / "skip_backward.py").write_text(PAIR + "\n# the end\n")
    (said,) = disagreements(certificate, tmp_path)
    assert said.startswith("hash of `delivered`")


def test_a_ratio_that_was_made_smaller_is_found(certificate: Certificate) -> None:
    rows = tuple(row.model_copy(update={"ratio": 0.0}) for row in certificate.gradients)
    assert disagreements(certificate.model_copy(update={"gradients": rows})) == (
        "the rows per gradient are not those of its cases",
    )


def test_a_green_verdict_over_red_cases_is_found(certificate: Certificate) -> None:
    cases = (CASES[0].model_copy(update={"grads": (score(41.0),)}), *CASES[1:])
    verdict = certificate.verdict.model_copy(update={"cases": cases})
    said = disagreements(certificate.model_copy(update={"verdict": verdict}))
    assert "its verdict is GREEN, and not all of its cases are: n=100 seed=0" in said


def written(path: Path, certificate: Certificate, **changed: object) -> Path:
    path.write_text(json.dumps({**json.loads(certificate.model_dump_json()), **changed}))
    return path


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("[1, 2]", "no verdict"),
        ('{"verdict": {}, "format": 2}', "no whole certificate"),
        ('{"verdict": {}}', "format 1, which carries no sources"),
        ('{"verdict": {}, "format": "two"}', "format ?"),
    ],
)
def test_what_is_no_certificate_is_refused_with_a_remedy(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "certificate.json"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_certificate(path)
    assert said in caught.value.message
    assert caught.value.remedy
    assert caught.value.exit_code is ExitCode.BAD_INPUT


def test_a_certificate_of_a_later_version_is_refused_with_the_way_out(certificate: Certificate, tmp_path: Path) -> None:
    # Read as if it were ours, what it says of new fields would be lost without a word.
    with pytest.raises(InputError, match="format 3") as caught:
        read_certificate(written(tmp_path / "c.json", certificate, format=FORMAT + 1))
    assert "version of kernel-agent that wrote it" in caught.value.remedy


def test_a_delivered_file_in_another_folder_cannot_be_named(certificate: Certificate, tmp_path: Path) -> None:
    # It would be read, and what is wrong with it told.
    with pytest.raises(InputError, match="delivered"):
        read_certificate(written(tmp_path / "c.json", certificate, delivered="../../etc/passwd"))
