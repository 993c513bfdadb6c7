"""The words of a diagnosis: cases with one pattern together, required ones first, nothing said twice."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from prompted import DIAGNOSED

from kernel_agent.agent.diagnosiswords import matrix_lines, other_details, what_lines, where_lines
from kernel_agent.gate.diagnosis.records import MatrixRow
from kernel_agent.gate.verdict import CaseResult, Status, Verdict

ODD = "N=67 seed=0 cotangent=random"


def verdict(**changes: object) -> Verdict:
    return Verdict.model_validate({"status": Status.WRONG_GRADIENT, "diagnosis": DIAGNOSED, **changes})


def test_cases_with_one_pattern_stand_in_one_line() -> None:
    assert matrix_lines(verdict()) == (
        "dw WRONG  dx right   N=64 seed=0: cotangent=random, strided",
        "dx right   N=64 seed=0: needs=(True, False)",
    )


def test_patterns_that_break_a_required_case_come_first() -> None:
    # An odd size that fails is repaired after what the user asked for.
    rows = (MatrixRow(case=ODD, passed=(), failed=("x", "w")), *DIAGNOSED.matrix)
    cases = (CaseResult(case=ODD, required=False, status=Status.WRONG_GRADIENT),)
    lines = matrix_lines(verdict(diagnosis=DIAGNOSED.model_copy(update={"matrix": rows}), cases=cases))
    assert lines[0].startswith("dw WRONG  dx right")
    assert lines[1].startswith("dx WRONG  dw WRONG   N=67")


def test_without_a_diagnosis_nothing_is_said() -> None:
    plain = verdict(diagnosis=None, details="red: something")
    assert (matrix_lines(plain), what_lines(None), where_lines(None)) == ((), (), ())
    assert other_details(plain) == "red: something"


def test_what_the_verdict_says_already_is_not_said_again() -> None:
    statement = DIAGNOSED.what[0].statement
    assert what_lines(DIAGNOSED)
    assert what_lines(DIAGNOSED, said=f"dw is wrong: {statement}") == ()
    details = "x[0]: off by 1\nred: N=64 seed=0 cotangent=random\ngreen at this shape: needs=(True, False)"
    assert other_details(verdict(details=details)) == "x[0]: off by 1"
