"""Inputs beyond those that `make_args` gives: other distributions, and a seed that nobody can know beforehand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from kernel_agent.gate import GateOptions, Status, check
from kernel_agent.gate.cases import make_plan
from kernel_agent.gate.options import STANDARD
from kernel_agent.oracle import Truths, describe
from kernel_agent.oracle.truth import DRAWN_FROM
from kernel_agent.oracle.values import other_number, plain_random, redistribute, without_constants
from kernel_agent.pairs.userfile import read_file
from kernel_agent.pairs.values import EXTREME, Values

PAIRS = Path(__file__).parent / "pairs"
WITHOUT_CAP = ("tl.where(inside, g * a, 0.0)", "g * a")
OTHERS = tuple(v for v in Values if v not in {Values.AS_MADE, Values.SPACED, Values.NUMBERS, *EXTREME})


def on_values(*values):
    return GateOptions(seeds=(0,), odd_sizes=0, max_cases=30, values=values)


@pytest.fixture(autouse=True)
def one_seed(judge, monkeypatch):
    """The seed of other values, the same for every run of these tests: what they reach must not be luck."""
    monkeypatch.setattr(judge.truths("capped"), "drawn_seed", DRAWN_FROM + 17)


def test_a_forgotten_cap_is_green_where_no_input_reaches_it(judge):
    # What the next test has power by: without other values this mutant passes every shape, seed and cotangent.
    assert judge("capped", WITHOUT_CAP, options=on_values(Values.AS_MADE)).green


@pytest.mark.parametrize("values", OTHERS)
def test_a_forgotten_cap_is_wrong_on_every_other_distribution(judge, values):
    verdict = judge("capped", WITHOUT_CAP, options=on_values(values))
    assert verdict.status is Status.WRONG_GRADIENT
    assert verdict.grad == "x"
    assert f"values={values.value}" in str(verdict.case)


def test_an_honest_backward_is_green_on_all_of_them_by_name(judge):
    verdict = judge("capped")
    assert verdict.green, verdict.message
    names = " ".join(case.case for case in verdict.cases)
    assert all(f"values={values.value}" in names for values in OTHERS)


def test_a_backward_made_for_the_known_seeds_is_wrong_at_the_drawn_one(judge):
    # Recognises both chosen seeds by the first element of x; all inputs but those of the drawn seed are known ones.
    known = [float(torch.randn(400, generator=torch.Generator().manual_seed(seed))[0]) for seed in STANDARD.seeds]
    seen = " | ".join(f"(tl.abs(tl.load(X) - {value!r}) < 1e-4)" for value in known)
    change = ("g * a, 0.0)", f"g * a * tl.where({seen}, 1.0, 2.0), 0.0)")
    fooled = judge("capped", change, options=GateOptions(odd_sizes=0, values=()))
    assert fooled.green, "the chosen seeds do not see it"
    verdict = judge("capped", change, options=GateOptions(odd_sizes=0, values=(Values.AS_MADE,)))
    assert verdict.status is Status.WRONG_GRADIENT
    named = re.search(r"seed=([0-9]+) ", str(verdict.case))
    assert named is not None
    assert int(named[1]) >= DRAWN_FROM
    assert verdict.suite is not None
    assert int(named[1]) in verdict.suite.drawn, "so that the case can be asked again"
    assert judge.truths("capped").drawn_seed != int(named[1]), "who reads the verdict may write the next candidate"


SCALED = """import torch
import triton
import triton.language as tl

META = dict(
    slug="scaled", family="activation", op="scaled", schema=1, techniques=(), saves=("scale: float",), grads=("x",),
    dtypes=("float32",), license="Apache-2.0", origin="original",
)


# --- forward ---
@triton.jit
def _scaled(X, Y, scale, n, step, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(Y + i, tl.load(X + i * step, mask=i < n) * scale, mask=i < n)


def forward(x, scale, causal=True):
    y = torch.empty_like(x)
    _scaled[(triton.cdiv(x.numel(), 64),)](x, y, scale, x.numel(), 1, BLOCK=64)
    return y, (scale,)


# --- backward ---
def backward(saved, g):
    dx = torch.empty(g.shape, dtype=g.dtype, device=g.device)
    _scaled[(triton.cdiv(g.numel(), 64),)](g, dx, FACTOR, g.numel(), g.stride(0), BLOCK=64)
    return dx


# --- check ---
SWEEP = (dict(n=100), dict(n=130))


def make_args(n, device="cpu", seed=0):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(device), 0.125
"""
"""A forward with a number beside its tensor, for which `make_args` has one value."""


def test_a_number_in_the_text_of_a_backward_in_place_of_the_calls_is_wrong(tmp_path, sandbox):
    # Every shape, seed and cotangent has the same scale; only another one tells the text from the call.
    path = tmp_path / "scaled.py"
    path.write_text(SCALED.replace("FACTOR", "saved[0]"))
    spec = describe(read_file(path), sandbox)
    options, truths = on_values(Values.NUMBERS), Truths(spec, sandbox)
    honest = check(spec, spec.facts.source, sandbox, options, truths=truths)
    assert honest.green, honest.message
    assert any("values=other-numbers" in case.case for case in honest.cases)
    hard_coded = SCALED.replace("FACTOR", "0.125")
    assert check(spec, hard_coded, sandbox, on_values(), truths=truths).green, "no other case sees it"
    verdict = check(spec, hard_coded, sandbox, options, truths=truths, diagnose=False)
    assert verdict.status is Status.WRONG_GRADIENT, verdict.message
    assert "values=other-numbers" in str(verdict.case)


ONES = ("torch.rand(N, generator=g) + 0.5, torch.randn(N, generator=g)", "torch.ones(N), torch.zeros(N)")
"""Weights and biases as layers begin with."""


def test_a_weight_that_is_one_everywhere_is_not_left_out(judge, tmp_path):
    # Ones as a weight are what a user writes down first, and a factor of one is in no gradient.
    path = tmp_path / "layernorm.py"
    path.write_text(judge.source("layernorm").replace(*ONES))
    spec = describe(read_file(path), judge.sandbox)
    truths, options = Truths(spec, judge.sandbox), on_values(Values.NUMBERS)
    honest = check(spec, spec.facts.source, judge.sandbox, options, truths=truths)
    assert honest.green, honest.message
    wrong = spec.facts.source.replace("wg = g * w", "wg = g")
    usual = on_values(*OTHERS, Values.AS_MADE, Values.SPACED)
    assert check(spec, wrong, judge.sandbox, usual, truths=truths).green, "no other case sees it"
    verdict = check(spec, wrong, judge.sandbox, options, truths=truths, diagnose=False)
    assert verdict.status is Status.WRONG_GRADIENT, verdict.message
    assert verdict.grad == "x"


def test_a_number_that_fills_a_tensor_becomes_numbers_around_it():
    ones, zeros, one, mask = torch.ones(64), torch.zeros(4, 8), torch.tensor([0.07]), torch.ones(9, dtype=torch.bool)
    normal = _normal(8, 40)
    before = normal.clone()
    assert without_constants([ones, zeros, one, mask, normal, torch.ones(1).expand(9)], seed=3) == 3
    assert 0.75 <= float(ones.min()) < float(ones.max()) <= 1.25, "a scale stays one"
    assert 0 < float(zeros.abs().max()) <= 0.25
    assert 0 < abs(float(one) - 0.07) <= 0.07 / 4
    assert bool(mask.all())
    assert torch.equal(normal, before)


def test_other_numbers_stay_what_they_are_for():
    assert 0 < other_number(0.9) < 1, "a probability"
    assert other_number(-5.0) == -3.75
    assert [other_number(value) for value in (0.0, 7, True, "mean")] == [0.0, 7, True, "mean"]
    assert other_number(float("-inf")) == float("-inf")


def test_a_whole_number_is_another_one_only_where_its_name_says_seed():
    # A size, a stride or a window that changes alone is another call; a seed is free.
    assert other_number(42, "seed") != 42
    assert int(other_number(torch.tensor([42]), "philox_seed")) != 42
    kept = {"heads": 8, "ignore_index": -100, "seeded": True, "": 42}
    assert {name: other_number(value, name) for name, value in kept.items()} == kept


def test_no_two_checks_draw_the_same_seed(judge):
    spec = judge.spec("capped")
    assert len({Truths(spec, judge.sandbox).drawn_seed for _ in range(20)}) == 20


def test_the_candidate_cannot_read_its_case_from_the_name_of_its_process(judge):
    # The name held the first case, seed included: enough to answer by case instead of by input.
    change = ("    x, a = saved\n", "    import sys\n    x, a = saved\n    assert 'seed' not in ' '.join(sys.argv)\n")
    verdict = judge("capped", change, options=on_values())
    assert verdict.status is Status.UNEXPLAINED, "it may not ask"
    assert "it asks for sys.argv" in verdict.message, "and is told nothing: what it asserts held"


def test_values_at_which_the_forward_is_not_finite_are_left_out_with_the_reason(judge, tmp_path):
    # The root of one minus a square is real for what `make_args` gives, and not for what is moved away.
    text = judge.source("capped").replace("capped * tl.load(A", "tl.sqrt(1.0 - x * x) + 0.0 * tl.load(A")
    text = text.replace("return tuple(torch.randn(N, generator=g)", "return tuple(torch.rand(N, generator=g).sub(0.5)")
    path = tmp_path / "capped.py"
    path.write_text(text)
    truths = Truths(describe(read_file(path), judge.sandbox), judge.sandbox)
    plan = make_plan(truths, STANDARD, accepts_needs=True)
    (note,) = [note for note in plan.notes if "not finite" in note]
    assert "shifted" in note
    assert not any(case.point.values is Values.SHIFTED for shape in plan.shapes for case in shape.cases)


STEPS = ("capped = tl.minimum(tl.maximum(x, -5.0), 5.0)", "capped = x + tl.floor(x * 1e7) * (tl.abs(x) > 5.5) * 1e-7")


def test_a_red_case_is_no_verdict_where_differences_do_not_confirm_the_truth(judge, tmp_path):
    # The forward has steps finer than any difference, beyond 5.5: the truth says slope 1 there, the values say 2.
    path = tmp_path / "capped.py"
    text = judge.source("capped", ("inside = (x > -5.0) & (x < 5.0)", "inside = x < 5.5"))
    path.write_text(text.replace(*STEPS).replace("g * tl.minimum(tl.maximum(x, -5.0), 5.0)", "g * x"))
    spec = describe(read_file(path), judge.sandbox)
    verdict = check(spec, spec.facts.source, judge.sandbox, on_values(*OTHERS))
    assert verdict.green, verdict.message
    assert any("do not confirm the truth" in note for note in verdict.notes), verdict.notes


def _on_rows_apart(judge, tmp_path, forward=True, backward=True):
    """The verdict on rows squared, whose forward and backward take rows apart, or none."""
    text = (PAIRS / "squares.py").read_text()
    if not forward:
        text = text.replace("X + row * stride_x + c, mask=m)  # forward", "X + row * N + c, mask=m)")
    if not backward:
        text = text.replace("X + row * stride_x + c, mask=m)  # backward", "X + row * N + c, mask=m)")
    path = tmp_path / "squares.py"
    path.write_text(text)
    spec = describe(read_file(path), judge.sandbox)
    return check(spec, text, judge.sandbox, on_values(Values.AS_MADE, Values.SPACED), diagnose=False)


def test_a_backward_that_takes_a_saved_input_for_contiguous_is_refused_where_the_forward_does_not(judge, tmp_path):
    # Everything that make_args gives is contiguous: rows of a part of a wider tensor are the one case that shows it.
    verdict = _on_rows_apart(judge, tmp_path, backward=False)
    assert verdict.status is Status.OUT_OF_BOUNDS, verdict.message
    assert "values=spaced" in str(verdict.case)


def test_a_backward_that_takes_rows_apart_as_its_forward_does_is_green_there(judge, tmp_path):
    verdict = _on_rows_apart(judge, tmp_path)
    assert verdict.green, verdict.message
    assert any("values=spaced" in case.case for case in verdict.cases)


def test_rows_apart_are_not_asked_of_a_forward_that_takes_none(judge, tmp_path):
    verdict = _on_rows_apart(judge, tmp_path, forward=False, backward=False)
    assert verdict.green, verdict.message
    assert any("rows without gaps alone" in note for note in verdict.notes), verdict.notes


def _normal(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    ("argument", "plain"),
    [
        (_normal(8, 40), True),
        (_normal(8, 40).half(), True),
        (_normal(8, 40).T, True),
        (torch.softmax(_normal(8, 40), -1), False),
        (_normal(8, 40).exp(), False),
        (1 + 0.1 * _normal(40), False),
        (torch.nn.functional.normalize(_normal(8, 40), dim=-1), False),
        (_normal(8, 40).round(), False),
        (_normal(40, 40).tril(), False),
        (_normal(8, 1).expand(8, 40), False),
        (_normal(3), False),
    ],
)
def test_only_plain_random_numbers_are_changed(argument, plain):
    # Probabilities, scales, directions, counts, triangles: other values would break what they mean.
    assert plain_random(argument) is plain


def test_one_memory_given_twice_is_changed_once():
    x = _normal(8, 40)
    before = x.clone()
    assert redistribute([x, x.view(8, 40)], Values.SCALED) == 1
    assert torch.equal(x, 4 * before)


def test_each_of_few_gradients_is_asked_for_alone(judge):
    # Right when every gradient is needed, and for every second one of three: wrong where `b` alone is.
    alone = "    alone = needs == (False, False, True)\n    dx, da, db = torch.empty"
    change = ("    dx, da, db = torch.empty", alone)
    verdict = judge("capped", change, ("](grad_y, x, a", "](x if alone else grad_y, x, a"), options=on_values())
    assert verdict.status is Status.WRONG_GRADIENT
    assert verdict.case == "N=400 seed=0 needs=(False, False, True)"


def test_all_but_the_first_gradient_are_asked_for_as_in_a_first_layer(judge):
    # Right for all, for every second one and for each alone: nothing before a first layer needs a gradient.
    first = "    first = needs == (False, True, True)\n    dx, da, db = torch.empty"
    change = ("    dx, da, db = torch.empty", first)
    verdict = judge("capped", change, ("](grad_y, x, a", "](x if first else grad_y, x, a"), options=on_values())
    assert verdict.status is Status.WRONG_GRADIENT
    assert verdict.case == "N=400 seed=0 needs=(False, True, True)"
