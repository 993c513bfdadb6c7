"""The gate on mutants of a small pair: all that are wrong die, and what is no mistake is told from what is missed."""

from __future__ import annotations

import pytest

from kernel_agent.gate import GateOptions, Status
from kernel_agent.gate.mutants.gradients import gradient_mutants
from kernel_agent.gate.mutants.judge import MutantJudge, mutation_report
from kernel_agent.gate.mutants.records import MutantResult, MutationReport, Outcome
from kernel_agent.gate.mutants.sources import MUTATORS, Mutant


@pytest.fixture(scope="module")
def softmax(judge):
    return MutantJudge(judge.truths("softmax"))


def mutant(judge, pair, old, new, mutator=MUTATORS[0]):
    return Mutant(mutator, 1, old, new, judge.source(pair, (old, new)))


def test_no_mutant_of_a_small_pair_survives(judge):
    report = mutation_report(judge.truths("softmax"), count=1)
    assert report.survivors == ()
    assert report.score == 1.0
    assert report.counts[Outcome.KILLED] > 15
    assert report.pair == "softmax"


def test_a_mutant_that_computes_the_same_is_equivalent(judge, softmax):
    found = softmax.judged(mutant(judge, "softmax", "y * (g", "1.0 * y * (g"))
    assert found.outcome is Outcome.EQUIVALENT


def test_a_mutant_that_the_rule_lets_by_is_a_survivor_with_its_case_and_diff(judge, softmax):
    # One part in a million is less than the rule allows. Taken for equivalent, it would hide how coarse the rule is.
    found = softmax.judged(mutant(judge, "softmax", "y * (g", "1.000001 * y * (g"))
    assert found.outcome is Outcome.SURVIVED
    assert "seed=0" in (found.case or "")
    assert "+" in found.diff
    assert "1.000001" in found.diff


def test_an_equivalent_says_on_what_it_was_compared_and_on_which_grids(judge, softmax):
    found = softmax.judged(mutant(judge, "softmax", "y * (g", "1.0 * y * (g"))
    assert "cases at" in found.reason
    assert "grids to _softmax_bwd" in found.reason


def test_shapes_of_several_tiles_are_among_the_cases(judge):
    # Programs that take tiles in a swizzled order are right on any grid of one row of tiles, however they are wrong.
    sizes = [question.case.point.entry.dims for question in MutantJudge(judge.truths("matmul_bias")).suites.gate]
    assert any(sum(size > 128 for size in dims.values()) >= 2 for dims in sizes), sizes


def test_mutants_run_in_one_process_and_an_endless_one_does_not_end_the_others(judge, softmax):
    endless = mutant(judge, "softmax", "    M, N = y.shape", "    M, N = [y.shape for _ in iter(int, 1)]")
    right = mutant(judge, "softmax", "y * (g", "2.0 * y * (g")
    found = softmax.judged_all([endless, right])
    assert sorted((result.outcome.value, result.status.value) for result in found) == [
        ("killed", "TIMED_OUT"),
        ("killed", "WRONG_GRADIENT"),
    ]


def test_a_mutant_that_ends_its_process_does_not_take_the_others_along(judge, softmax):
    leaving = mutant(judge, "softmax", "    M, N = y.shape", "    M, N = __import__('os')._exit(0)")
    right = mutant(judge, "softmax", "y * (g", "2.0 * y * (g")
    found = {result.status: result.outcome for result in softmax.judged_all([leaving, right])}
    assert found == {Status.CRASHED: Outcome.KILLED, Status.WRONG_GRADIENT: Outcome.KILLED}


def test_a_mistake_that_no_case_of_the_suite_reaches_is_a_survivor(judge):
    # Rows of that width are in the wider suite alone: green everywhere else, the mutant would look like no mistake.
    options = GateOptions(odd_sizes=2, seeds=(0,))
    narrow = MutantJudge(judge.truths("softmax"), options)
    widths = {question.case.point.entry.dims["N"] for question in narrow.suites.gate}
    other = max({question.case.point.entry.dims["N"] for question in narrow.suites.wider} - widths)
    found = narrow.judged(mutant(judge, "softmax", "y * (g", f"tl.where(N == {other}, 2.0, 1.0) * y * (g"))
    assert found.outcome is Outcome.SURVIVED
    assert "which the suite does not hold" in (found.case or "")


def test_a_mutant_that_does_not_compile_counts_for_nothing(judge, softmax):
    found = softmax.judged(mutant(judge, "softmax", "y * (g", "y * (gg"))
    assert found.outcome is Outcome.INVALID
    assert MutationReport(pair="softmax", results=(found,)).score is None


def test_what_rounds_alone_is_left_to_the_native_tier(judge, softmax):
    rounding = next(mutator for mutator in MUTATORS if mutator.rounds)
    found = softmax.judged(mutant(judge, "softmax", "tl.sum(g * y, 0)", "tl.sum((g * y).to(tl.float16), 0)", rounding))
    assert found.outcome is Outcome.ROUNDING


def test_every_mutant_of_a_gradient_dies_by_values_or_is_the_gradient_itself(softmax):
    found = list(gradient_mutants(softmax.suites.gate))
    assert {result.outcome for result in found} == {Outcome.KILLED}
    assert {result.status for result in found} == {Status.WRONG_GRADIENT}


def test_the_score_leaves_out_what_is_no_mistake():
    outcomes = (Outcome.KILLED, Outcome.KILLED, Outcome.SURVIVED, Outcome.EQUIVALENT, Outcome.INVALID)
    results = [MutantResult(mutator="m", mutant="m", outcome=o, status=Status.GREEN) for o in outcomes]
    assert MutationReport(pair="p", results=tuple(results)).score == pytest.approx(2 / 3)
