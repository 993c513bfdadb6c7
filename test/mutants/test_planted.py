"""The diagnosis names what was planted: a small slice of `bench/diagnosis.py`, whose mutants these are."""

from __future__ import annotations

import ast

import pytest
from diagnosis import diagnosed_as
from planted import plant

from kernel_agent.gate.diagnosis.records import Fault

SLICE = (
    ("softmax", Fault.MISSING_TERM, "g - tl.sum(g * y, 0)"),
    ("softmax", Fault.SIGN, "y * (g - tl.sum(g * y, 0))"),
    ("softmax", Fault.TRANSPOSED, "dx"),
    ("softmax", Fault.STRIDES_IGNORED, "grad_out.stride(1)"),
    ("layernorm", Fault.DOUBLED_TERM, "wg - xh * c1 - c2"),
    ("layernorm", Fault.STALE_STATISTIC, "row"),
    ("two_outputs", Fault.OUTPUT_IGNORED, "saved"),
    ("matmul_bias", Fault.LAST_BLOCK_SKIPPED, "M"),
)


def _mutants(judge, pair):
    return plant(judge.source(pair))


@pytest.mark.parametrize(("pair", "fault", "old"), SLICE, ids=lambda part: getattr(part, "value", part))
def test_a_planted_mistake_is_named(judge, pair, fault, old):
    mutant = next(m for m in _mutants(judge, pair) if m.fault is fault and m.old == old)
    verdict = judge.check_source(pair, mutant.source, diagnose=True)
    said = diagnosed_as(pair, mutant, verdict)
    assert said.outcome == "right", f"{mutant.name}\n{verdict.message}\n{said.named} {said.notes}"


def test_a_mistake_that_no_class_is_gets_no_name(judge):
    # A sum in place of a product: whatever is fitted to its residual must not be said.
    mutants = [m for m in _mutants(judge, "layernorm") if m.fault is None]
    verdict = judge.check_source("layernorm", mutants[0].source, diagnose=True)
    assert diagnosed_as("layernorm", mutants[0], verdict).outcome == "silent"


@pytest.mark.parametrize("pair", ["softmax", "layernorm", "matmul_bias", "two_outputs"])
def test_every_planted_mistake_changes_one_place_and_keeps_the_lines(judge, pair):
    source = judge.source(pair)
    mutants = _mutants(judge, pair)
    assert len({m.source for m in mutants}) == len(mutants)
    for mutant in mutants:
        ast.parse(mutant.source)
        assert len(mutant.source.splitlines()) == len(source.splitlines()), mutant.name
        differing = [
            number
            for number, (old, new) in enumerate(zip(source.splitlines(), mutant.source.splitlines(), strict=True), 1)
            if old != new
        ]
        assert differing == [mutant.line], mutant.name
