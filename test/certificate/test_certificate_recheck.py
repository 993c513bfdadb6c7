"""A certificate is judged again by its sources: what it says of itself helps nobody, and can hurt nobody."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest

from kernel_agent.certificate.issue import NotGreen, gradient_records, hashes_of, issue, tier_records
from kernel_agent.certificate.judged_again import recheck
from kernel_agent.certificate.reading import read_certificate
from kernel_agent.certificate.record import Certificate, Sources
from kernel_agent.errors import InputError
from kernel_agent.gate import Status, Verdict
from kernel_agent.gate.options import STANDARD
from kernel_agent.gate.verdict import CaseResult, GradientScore, Tier
from kernel_agent.machine import Machine, installed_versions
from kernel_agent.sandbox import Sandbox

PAIR = "skip_connection"
FILE = f"{PAIR}.py"
UNSOUND = ("tl.load(B + i, mask=m, other=0.0)", "tl.load(B + i, mask=m, other=0.0) * 1.001")


@pytest.fixture(scope="module")
def issued(judge: Any) -> Certificate:
    source = judge.source(PAIR)
    return issue(judge.spec(PAIR), source, judge(PAIR), file=FILE, delivered=source.encode())


def with_pair(certificate: Certificate, pair: str) -> Certificate:
    """As who can write files would do it: another pair, and every hash made anew."""
    sources = Sources(pair=pair, forward=None)
    return certificate.model_copy(update={"sources": sources, "hashes": hashes_of(sources, pair.encode())})


@pytest.fixture(scope="module")
def from_elsewhere(issued: Certificate) -> Certificate:
    """The certificate as an older Triton on a GPU, and a gate that asked less, would have written it."""
    assert issued.suite is not None
    machine = Machine(gpu="NVIDIA H200", versions=installed_versions().model_copy(update={"triton": "3.5.0"}))
    score = GradientScore(grad="x", passed=True, ratio=0.5)
    native = CaseResult(case="n=100 native", required=True, status=Status.GREEN, grads=(score,), tier=Tier.NATIVE)
    asked = issued.suite.model_copy(update={"odd_sizes": 0, "max_cases": 1, "deterministic": True})
    update = {"suite": asked, "machine": machine, "cases": (*issued.verdict.cases, native)}
    verdict = issued.verdict.model_copy(update=update)
    rows = {"gradients": gradient_records(verdict), "tiers": tier_records(verdict)}
    return issued.model_copy(update={"verdict": verdict, **rows})


def test_a_certificate_reads_back_as_it_was_written(issued: Certificate, tmp_path: Path) -> None:
    path = tmp_path / "certificate.json"
    path.write_text(issued.model_dump_json(indent=2))
    assert read_certificate(path) == issued


def test_every_gradient_is_told_with_its_worst_case(issued: Certificate) -> None:
    assert [record.grad for record in issued.gradients] == ["x", "a"]
    for record in issued.gradients:
        scores = [score for case in issued.verdict.cases for score in case.grads if score.grad == record.grad]
        assert record.ratio == max(score.ratio for score in scores)
        assert record.cases == len(scores)
        assert record.case in {case.case for case in issued.verdict.cases}


def test_cases_name_the_distribution_of_their_inputs(issued: Certificate) -> None:
    # The field is what a reader filters by; the name of a case is words.
    other = {case.values.value for case in issued.verdict.cases if f"values={case.values.value}" in case.case}
    assert other == {"shifted", "scaled", "heavy-tailed", "zeros", "large"}


def test_a_red_verdict_is_not_certified(judge: Any) -> None:
    with pytest.raises(NotGreen):
        issue(judge.spec(PAIR), judge.source(PAIR), Verdict(status=Status.RACE), file=FILE, delivered=b"")


def test_a_certificate_of_another_triton_holds_and_says_what_changed(
    from_elsewhere: Certificate, sandbox: Sandbox
) -> None:
    found = recheck(from_elsewhere, sandbox)
    assert found.holds, found
    triton = installed_versions().triton
    assert found.machine == ("no GPU instead of NVIDIA H200", f"triton {triton} instead of 3.5.0")
    assert [(c.tier, c.grad, c.then is not None, c.now is not None) for c in found.gradients] == [
        (Tier.EXACT, "x", True, True),
        (Tier.EXACT, "a", True, True),
        (Tier.NATIVE, "x", True, False),
    ]
    # Real kernels were not looked at here, which is not the same as right.
    assert found.not_replayed == ("the native tier, real kernels on a GPU",)
    # A file that says so little was asked must not lead to asking as little.
    assert any("odd sizes at most: 4 instead of 0" in line for line in found.gate)
    assert found.now is not None
    assert found.now.suite is not None
    assert found.now.suite.odd_sizes == STANDARD.odd_sizes
    assert found.now.suite.deterministic, "what was asked beyond the usual is asked again"
    assert len(found.now.cases) > 1
    # The seeds that the certificate drew are asked again, and so are some that nobody could write a backward for.
    assert from_elsewhere.suite is not None
    (then,) = from_elsewhere.suite.drawn
    drawn = {case.case.partition("seed=")[2].split()[0] for case in found.now.cases if "values=" in case.case}
    assert str(then) in drawn
    assert len(drawn) == 2
    assert not found.missing
    assert all(str(then) not in name for name in found.new)


def test_an_unsound_backward_with_a_forged_certificate_turns_red(
    issued: Certificate, judge: Any, sandbox: Sandbox
) -> None:
    forged = with_pair(issued, judge.source(PAIR, UNSOUND))
    found = recheck(forged, sandbox)
    assert not found.disagreements, "every hash agrees, so that only judging it again can tell"
    assert found.then is Status.GREEN
    assert found.now is not None
    assert found.now.status is Status.WRONG_GRADIENT
    assert not found.holds


def test_what_a_hostile_certificate_holds_runs_in_no_process_but_a_child(
    issued: Certificate, judge: Any, sandbox: Sandbox
) -> None:
    mark = "certificate_was_run_here"
    hostile = judge.source(PAIR).replace(
        "    g = torch.Generator()",
        f"    import builtins\n\n    builtins.{mark} = True\n    raise RuntimeError\n    g = torch.Generator()",
    )
    with pytest.raises(InputError, match=r"inside the certificate.*RuntimeError"):
        recheck(with_pair(issued, hostile), sandbox)
    assert not hasattr(builtins, mark)


def test_the_rows_of_a_certificate_are_those_of_its_verdict(issued: Certificate) -> None:
    assert issued.gradients == gradient_records(issued.verdict)
