"""Mutants that only round, before the rule of the native tier in faithful arithmetic: a coarse accumulator dies."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernel_agent.bench.faithful import FaithfulTier
from kernel_agent.bench.faithful_child import coarsest_product
from kernel_agent.gate import Status
from kernel_agent.gate.mutants.judge import MutantJudge
from kernel_agent.gate.mutants.records import Kind, Outcome
from kernel_agent.gate.mutants.sources import MUTATORS, Mutant
from kernel_agent.ir import execute, import_module

ROUNDS = next(mutator for mutator in MUTATORS if mutator.rounds)


@pytest.fixture(scope="module")
def layernorm(judge):
    truths = judge.truths("layernorm")
    return MutantJudge(truths, rounding=FaithfulTier(truths))


def mutant(judge, pair, old, new):
    return Mutant(ROUNDS, 1, old, new, judge.source(pair, (old, new)))


def test_an_accumulator_in_float16_is_killed_and_an_honest_backward_is_not(judge, layernorm):
    # Exact arithmetic has no float16: there both are the same.
    old = "dw = torch.zeros(N, device=x.device, dtype=torch.float32)"
    found = layernorm.judged(mutant(judge, "layernorm", old, old.replace("float32", "float16")))
    assert (found.outcome, found.status) == (Outcome.KILLED, Status.PRECISION_DOWNGRADE)
    assert "as far off as honest arithmetic may be" in found.message
    assert layernorm.notes == (), "a case at which the honest backward is red would be named here"


def test_summands_cut_to_bfloat16_before_a_sum_are_killed(judge, layernorm):
    old = "c2 = tl.sum(wg, 0) / N"
    found = layernorm.judged(mutant(judge, "layernorm", old, "c2 = tl.sum(wg.to(tl.bfloat16).to(tl.float32), 0) / N"))
    assert (found.outcome, found.status) == (Outcome.KILLED, Status.PRECISION_DOWNGRADE)


def test_what_rounds_as_before_is_equivalent_to_the_bit(judge, layernorm):
    old = "c2 = tl.sum(wg, 0) / N"
    found = layernorm.judged(mutant(judge, "layernorm", old, "c2 = tl.sum(wg.to(tl.float32), 0) / N"))
    assert found.outcome is Outcome.EQUIVALENT
    assert "same bits" in found.reason


@pytest.mark.parametrize(
    ("factor", "outcome"), [("1.00000024", Outcome.ROUNDING), ("1.000004", Outcome.KILLED)], ids=["2 ulps", "33 ulps"]
)
def test_what_the_exact_rule_lets_by_is_held_to_the_native_one(judge, layernorm, factor, outcome):
    # Half of the last term of a series is wrong by so little; only the native rule tells what float32 could show.
    wrong = next(mutator for mutator in MUTATORS if not mutator.rounds)
    source = judge.source("layernorm", ("- c2) * rstd", f"- c2) * rstd * {factor}"))
    found = layernorm.judged(Mutant(wrong, 62, "rstd", f"rstd * {factor}", source))
    assert found.outcome is outcome, found
    assert found.status is (Status.PRECISION_DOWNGRADE if outcome is Outcome.KILLED else Status.GREEN)


def test_narrow_sums_are_made_on_ir_too_and_die(layernorm):
    found = [result for result in layernorm.judged_all([], count=1) if "bfloat16" in result.mutator]
    assert found
    assert {(result.kind, result.outcome) for result in found} == {(Kind.IR, Outcome.KILLED)}


def test_the_coarsest_product_is_read_off_the_ir():
    module = import_module(Path(__file__).parents[1] / "gate/pairs/matmul_bias.py", "matmul_bias_of_the_test")
    a, b, bias = torch.randn(4, 8), torch.randn(8, 4), torch.randn(4)
    modules = [launch.module for launch in execute(module.forward, (a, b, bias)).launches]
    assert coarsest_product(modules) == 10, "float32 products are tf32 by default"
