"""Every kernel of the corpus: its outputs and gradients equal the reference's, and the sanitizer has nothing to say."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

import kernel_agent
from corpus.case import EXACT, Case, Outcome, error, run
from kernel_agent.ir import ExecOptions

THEMES = sorted(path.stem for path in Path(__file__).parent.glob("corpus_*.py"))
CASES: list[Case] = [case for theme in THEMES for case in importlib.import_module(f"corpus.{theme}").CASES]


@pytest.fixture(params=CASES, ids=[case.name for case in CASES], scope="module")
def case(request: pytest.FixtureRequest) -> Case:
    """One kernel; tests of one kernel follow one another, so that it runs once."""
    torch.set_num_threads(1)
    return request.param


@pytest.fixture(scope="module")
def outcome(case: Case) -> Outcome:
    """What the kernel and its reference gave."""
    return run(case)


def test_forward_equals_its_reference(case: Case, outcome: Outcome):
    assert len(outcome.outputs) == len(outcome.expected_outputs)
    for place, (got, want) in enumerate(zip(outcome.outputs, outcome.expected_outputs, strict=True)):
        assert error(got, want) <= case.tolerance, f"output {place} of {case.name}"


def test_gradient_of_every_floating_input_equals_autograd_of_its_reference(case: Case, outcome: Outcome):
    for place, want in outcome.expected_gradients.items():
        assert error(outcome.gradients[place], want) <= case.tolerance, f"gradient of argument {place} of {case.name}"


def test_sanitizer_finds_nothing(case: Case, outcome: Outcome):
    assert outcome.findings == ()
    # asked for by itself it looks for offsets that wrap too
    assert kernel_agent.sanitize(case.stub, *case.args()).findings == ()


def test_nothing_changes_where_memory_is_so_tight_that_the_backward_computes_everything_again(case: Case):
    # chunks of programs and segments of loops are replayed from the right contents of memory, or gradients differ
    again = run(case, options=ExecOptions(memory=1 << 12))
    for place, (got, want) in enumerate(zip(again.outputs, again.expected_outputs, strict=True)):
        assert error(got, want) <= case.tolerance, f"output {place} of {case.name}"
    for place, want in again.expected_gradients.items():
        assert error(again.gradients[place], want) <= case.tolerance, f"gradient of argument {place} of {case.name}"
    assert again.findings == ()


def test_lower_bar_is_claimed_only_where_a_literal_needs_it(case: Case, outcome: Outcome):
    pairs = [*zip(outcome.outputs, outcome.expected_outputs, strict=True)]
    pairs += [(outcome.gradients[place], want) for place, want in outcome.expected_gradients.items()]
    if case.literal:
        assert max(error(got, want) for got, want in pairs) > EXACT, f"{case.name} meets the higher bar"


def test_corpus_holds_at_least_eighty_kernels_each_under_its_own_name():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    assert len({case.stub for case in CASES}) >= 80
