"""Mutants of the kinds that drafts are wrong in: each dies on the case that tells it from what was meant."""

from __future__ import annotations

import pytest

from kernel_agent.gate import Status
from kernel_agent.gate.mutants.judge import MutantJudge
from kernel_agent.gate.mutants.records import Outcome
from kernel_agent.gate.mutants.sources import source_mutants


@pytest.fixture(scope="module")
def softmax(judge):
    return MutantJudge(judge.truths("softmax"))


def made(judge, pair, name):
    return [mutant for mutant in source_mutants(judge.source(pair)) if mutant.mutator.name == name]


def test_a_block_that_is_too_small_for_a_row_dies_at_a_wider_row(judge, softmax):
    # At every shape of SWEEP, whose rows have at most ninety elements, it is the honest backward.
    (capped,) = made(judge, "softmax", "capped block")
    found = softmax.judged(capped)
    assert found.outcome is Outcome.KILLED
    assert "N=1025" in (found.case or "")


def test_a_factor_that_is_wrong_at_odd_sizes_alone_dies_at_a_derived_one(judge, softmax):
    # SWEEP holds even sizes alone: only the derived primes and ones tell.
    mutant = made(judge, "softmax", "wrong at odd sizes")[0]
    found = softmax.judged(mutant)
    assert (found.outcome, found.status) == (Outcome.KILLED, Status.WRONG_GRADIENT)


def test_a_factor_that_is_wrong_beyond_one_block_dies_at_a_shape_of_several_tiles(judge, softmax):
    mutant = made(judge, "softmax", "wrong beyond one block")[0]
    assert softmax.judged(mutant).outcome is Outcome.KILLED


def test_strides_of_the_cotangent_are_exchanged_in_the_launch(judge):
    # A contiguous square cotangent is all that they would be right for, and no other one.
    words = [mutant.words.partition(": ")[2] for mutant in made(judge, "softmax", "exchanged strides")]
    assert "grad_out.stride(0) -> grad_out.stride(1)" in words
    assert "grad_out.stride(1) -> grad_out.stride(0)" in words


def test_a_gradient_that_is_not_cast_back_is_made_of_every_cast_in_backward(judge):
    texts = {mutant.words for mutant in made(judge, "layernorm", "gradient of another dtype")}
    assert {words.partition(": ")[2] for words in texts} == {"dw.to(weight.dtype) -> dw", "db.to(bias.dtype) -> db"}
