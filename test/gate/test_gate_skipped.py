"""A shape at which the truth itself has no answer is skipped and said, unless the user requires it."""

from __future__ import annotations

import pytest

from kernel_agent.gate.checking import check
from kernel_agent.oracle import TruthError, Truths, describe
from kernel_agent.pairs.userfile import read_file

GUARD = "    M, N = x.shape\n    if {condition}:\n        raise ValueError('no slope')\n    y = "


@pytest.fixture
def verdict_where_the_truth_fails(judge, tmp_path):
    """Check the softmax pair; its forward raises while gradients are recorded, wherever the condition holds."""

    def run(condition):
        text = judge.source("softmax")
        old = "    M, N = x.shape\n    y = "
        assert old in text
        path = tmp_path / "softmax.py"
        path.write_text(text.replace(old, GUARD.format(condition=condition), 1))
        spec = describe(read_file(path), judge.sandbox)
        return check(spec, spec.facts.source, judge.sandbox, truths=Truths(spec, judge.sandbox))

    return run


def test_an_odd_size_without_exact_gradients_is_skipped_with_its_reason(verdict_where_the_truth_fails):
    # The truth of one odd size once ended the whole check, and every candidate with it.
    verdict = verdict_where_the_truth_fails("x.requires_grad and N == 53")
    assert verdict.green, f"{verdict.message}\n{verdict.details}"
    skipped = [note for note in verdict.notes if note.startswith("skipped")]
    assert skipped
    assert all("N=53" in note and "no slope" in note for note in skipped), verdict.notes
    assert not any("N=53" in case.case for case in verdict.cases)
    assert len(verdict.cases) == verdict.cases_planned


def test_a_required_size_without_exact_gradients_ends_the_check(verdict_where_the_truth_fails):
    with pytest.raises(TruthError, match="no slope"):
        verdict_where_the_truth_fails("x.requires_grad and N == 90")


def test_an_odd_size_that_the_forward_refuses_with_one_seed_alone_is_skipped(verdict_where_the_truth_fails):
    # The plan asks the first seed only; the second one is met when the cases are asked.
    verdict = verdict_where_the_truth_fails("N == 53 and x[0, 0].item() < 0")
    assert verdict.green, f"{verdict.message}\n{verdict.details}"
