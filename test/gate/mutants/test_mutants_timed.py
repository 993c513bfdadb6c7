"""Mutants within a run: what can be tried without a backward, and what within some seconds."""

from __future__ import annotations

from kernel_agent.gate.mutants.records import MutationTally, Outcome
from kernel_agent.gate.mutants.sources import source_mutants
from kernel_agent.gate.mutants.timed import backward_report, gradient_report, one_of_each


def test_wrong_gradients_die_before_there_is_a_backward(judge):
    tally = gradient_report(judge.truths("skip_connection")).tally
    assert tally.killed >= 10
    assert tally.survived == 0


def test_every_class_has_its_turn_before_any_has_its_second(judge):
    # In the order of lines, a run would spend its seconds on the first kernel's masks.
    mutants = source_mutants(judge.source("layernorm"))
    names = [mutant.mutator.name for mutant in one_of_each(mutants)]
    assert sorted(names) == sorted(mutant.mutator.name for mutant in mutants)
    classes = set(names)
    assert set(names[: len(classes)]) == classes
    first = one_of_each(mutants)[: len(classes)]
    rounding = [mutant.mutator.rounds for mutant in first]
    assert rounding == sorted(rounding), "what the exact tier cannot judge comes last"


def test_what_there_was_no_time_for_is_counted(judge):
    # Left out without a word, two mutants killed would look like all of them.
    source = judge.source("layernorm")
    report = backward_report(judge.truths("layernorm"), source, 0.0)
    assert report.results == ()
    assert report.unjudged == len(source_mutants(source))
    assert f"{report.unjudged} unjudged" in report.tally.words


def test_tallies_add_up_with_their_survivors(judge):
    one = MutationTally(killed=3, survived=0, equivalent=1, rounding=0, invalid=0, seconds=1.0)
    two = MutationTally(killed=2, survived=0, equivalent=0, rounding=1, invalid=2, unjudged=7, seconds=2.0)
    both = one + two
    assert [getattr(both, outcome.value) for outcome in Outcome] == [5, 0, 1, 1, 2]
    assert both.words == "5 of 5 killed; not counted: 1 equivalent, 1 rounding, 2 invalid, 7 unjudged; 3 s"
