"""Mutants made on source: one changed place each, of every class that a backward has a place for."""

from __future__ import annotations

import ast

import pytest

from kernel_agent.gate.mutants.sources import MUTATORS, sample, source_mutants


@pytest.mark.parametrize("pair", ["softmax", "layernorm", "matmul_bias", "two_outputs"])
def test_a_mutant_is_python_that_differs_in_its_line_of_the_backward_alone(judge, pair):
    # A mutant that also moved lines, or touched the forward, would be judged for something else.
    source = judge.source(pair)
    mutants = source_mutants(source)
    assert len({m.source for m in mutants}) == len(mutants)
    for mutant in mutants:
        ast.parse(mutant.source)
        lines = zip(source.splitlines(), mutant.source.splitlines(), strict=True)
        assert [n for n, (old, new) in enumerate(lines, 1) if old != new] == [mutant.line], mutant.words
        assert mutant.line > source.splitlines().index("# --- backward ---"), mutant.words


def test_a_backward_with_everything_in_it_has_mutants_of_all_common_classes(judge):
    names = {m.mutator.name for m in source_mutants(judge.source("layernorm"))}
    wanted = "dropped term, wrong sign, wrong scale, dropped mask, off by one bound, plain store, stale statistic"
    assert set(wanted.split(", ")) <= names
    assert {"swapped gradients", "missing dependence", "ignored cotangent stride", "shifted cotangent"} <= names


def test_every_class_says_in_a_sentence_what_is_wrong():
    assert len({mutator.name for mutator in MUTATORS}) == len(MUTATORS)
    assert all(mutator.sentence.endswith(".") for mutator in MUTATORS)


def test_a_sample_holds_every_class_and_no_more_of_one_than_asked_for(judge):
    mutants = source_mutants(judge.source("layernorm"))
    chosen = sample(mutants, 1)
    assert [m.mutator.name for m in chosen] == list(dict.fromkeys(m.mutator.name for m in mutants))
    assert sample(mutants, 0) == mutants
