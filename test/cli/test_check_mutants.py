"""`check --mutants`: what is shown of mutants, and what is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_agent.cli import mutants
from kernel_agent.cli.check import check
from kernel_agent.errors import InputError
from kernel_agent.gate import Status
from kernel_agent.gate.mutants.records import MutantResult, MutationReport, Outcome

DEAD = MutantResult(
    mutator="wrong sign", mutant="line 4: a -> -a", outcome=Outcome.KILLED, status=Status.WRONG_GRADIENT
)
SURVIVOR = MutantResult(
    mutator="wrong scale",
    mutant="line 5: b -> 2.0 * b",
    outcome=Outcome.SURVIVED,
    status=Status.GREEN,
    case="N=7 seed=0 cotangent=random, gradient of x",
    diff="-b\n+2.0 * b",
)
REPORT = MutationReport(pair="pair", results=(DEAD, SURVIVOR))


def test_a_survivor_is_printed_with_its_case_and_its_diff(capsys):
    mutants.render_mutants(REPORT)
    shown = capsys.readouterr().out
    assert "1 of 2 killed" in shown
    for word in ("survived: wrong scale", "N=7 seed=0", "+2.0 * b"):
        assert word in shown


def test_survivors_and_the_record_are_kept(tmp_path):
    mutants.keep_mutants(REPORT, tmp_path / "kept")
    assert MutationReport.model_validate_json((tmp_path / "kept" / "mutants.json").read_text()) == REPORT
    (diff,) = (tmp_path / "kept").glob("*.diff")
    assert "+2.0 * b" in diff.read_text()


def test_a_sample_without_mutants_is_refused():
    # Ignored, it would look as if mutants had been made.
    with pytest.raises(InputError, match="belong to --mutants"):
        check(Path("pair.py"), sample=3)
