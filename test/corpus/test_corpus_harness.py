"""The corpus has power: a wrong kernel, a wrong reference, a rounded number or a bad access does not pass."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

import kernel_agent
from corpus import corpus_columns, corpus_elementwise, corpus_matmul, corpus_rows, corpus_scans
from corpus.case import EXACT, WITH_LITERAL, Case, Outcome, error, run
from kernel_agent.ir import FindingKind


def named(cases: list[Case], name: str) -> Case:
    """One case of a theme."""
    return next(case for case in cases if case.name == name)


def outputs_agree(case: Case, outcome: Outcome) -> bool:
    """What `test_corpus` asserts of outputs."""
    pairs = zip(outcome.outputs, outcome.expected_outputs, strict=True)
    return all(error(got, want) <= case.tolerance for got, want in pairs)


def wrong_gradients(case: Case, outcome: Outcome) -> list[int]:
    """Positions of arguments whose gradient `test_corpus` would reject."""
    wanted = outcome.expected_gradients
    return [place for place in wanted if not error(outcome.gradients[place], wanted[place]) <= case.tolerance]


@triton.jit
def _row_mean(X, Y, N, LOSE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    x = tl.load(X + row * N + c, mask=c < N - LOSE, other=0.0)
    tl.store(Y + row, tl.sum(x * x, 0) / N)


def row_mean(x: Tensor) -> Tensor:
    y = torch.empty(x.shape[0], device=x.device)
    _row_mean[(x.shape[0],)](x, y, x.shape[1], LOSE=0, BLOCK=16)
    return y


def row_mean_without_last_column(x: Tensor) -> Tensor:
    y = torch.empty(x.shape[0], device=x.device)
    _row_mean[(x.shape[0],)](x, y, x.shape[1], LOSE=1, BLOCK=16)
    return y


MEAN = Case("row_mean", row_mean, lambda: (torch.randn(4, 13),), lambda x: (x * x).mean(1))


def test_right_kernel_passes():
    outcome = run(MEAN)
    assert outputs_agree(MEAN, outcome)
    assert wrong_gradients(MEAN, outcome) == []


def test_kernel_that_loses_a_column_has_wrong_outputs_and_gradients():
    case = replace(MEAN, stub=row_mean_without_last_column)
    outcome = run(case)
    assert not outputs_agree(case, outcome)
    assert wrong_gradients(case, outcome) == [0]


def test_reference_with_a_right_value_and_a_wrong_slope_fails_on_that_gradient_alone():
    # the statistics are detached: outputs stay equal, only the gradient of x notices
    def detached(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, var = x.detach().mean(-1, keepdim=True), x.detach().var(-1, unbiased=False, keepdim=True)
        right = (F.layer_norm(x, x.shape[-1:], w, b), x.mean(-1), (x.var(-1, unbiased=False) + 1e-5).rsqrt())
        return (x - mean) * (var + 1e-5).rsqrt() * w + b, *right[1:]

    case = replace(named(corpus_rows.CASES, "layernorm_one_pass"), reference=detached)
    outcome = run(case)
    assert outputs_agree(case, outcome)
    assert wrong_gradients(case, outcome) == [0]


def test_swapped_gradients_are_noticed_where_shapes_agree():
    case = replace(MEAN, stub=torch.mul, make_args=lambda: (torch.randn(5), torch.randn(5)), reference=torch.mul)
    outcome = run(case)
    assert wrong_gradients(case, outcome) == []
    swapped = replace(outcome, gradients={0: outcome.gradients[1], 1: outcome.gradients[0]})
    assert wrong_gradients(case, swapped) == [0, 1]


def test_rounding_to_float32_is_rejected_at_the_exact_bar_and_accepted_at_the_lower_one():
    # power of 1e-10: an executor that computed in float32 would pass the bar for literals, and only that one
    want = torch.randn(1000, dtype=torch.float64)
    assert EXACT < error(want.float().double(), want) < WITH_LITERAL


def test_reference_in_float32_is_rejected():
    case = replace(MEAN, reference=lambda x: (x.float() * x.float()).mean(1).double())
    assert not outputs_agree(case, run(case))


@pytest.mark.parametrize(
    ("got", "want"),
    [
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 2.0])),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, float("nan")])),
        (torch.tensor([1.0, float("inf")]), torch.tensor([1.0, -float("inf")])),
        (torch.tensor([1.0, float("inf")]), torch.tensor([1.0, float("nan")])),
        (torch.tensor([1.0]), torch.tensor([1.0, 1.0])),
        (torch.tensor([1e-30]), torch.tensor([0.0])),
        (torch.tensor([3]), torch.tensor([4])),
    ],
    ids=["nan got", "nan wanted", "sign of inf", "inf for nan", "shape", "not zero", "integer"],
)
def test_what_is_not_a_number_or_not_of_one_shape_is_never_close(got: Tensor, want: Tensor):
    assert error(got, want) == float("inf")


@triton.jit
def _reads_past_its_row(X, Y, N, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    x = tl.load(X + tl.program_id(0) * N + c)
    tl.store(Y + tl.program_id(0), tl.sum(tl.where(c < N, x * x, 0.0), 0) / N)


def reads_past_its_row(x: Tensor) -> Tensor:
    y = torch.empty(x.shape[0], device=x.device)
    _reads_past_its_row[(x.shape[0],)](x, y, x.shape[1], BLOCK=16)
    return y


@triton.jit
def _adds_without_atomics(X, OUT, N, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    x = tl.load(X + tl.program_id(0) * N + c, mask=c < N, other=0.0)
    tl.store(OUT + c, tl.load(OUT + c, mask=c < N, other=0.0) + x, mask=c < N)


def adds_without_atomics(x: Tensor) -> Tensor:
    out = torch.zeros(x.shape[1], device=x.device)
    _adds_without_atomics[(x.shape[0],)](x, out, x.shape[1], BLOCK=16)
    return out


@pytest.mark.parametrize(
    ("stub", "kind"),
    [(reads_past_its_row, FindingKind.OUT_OF_BOUNDS), (adds_without_atomics, FindingKind.RACE)],
)
def test_broken_kernels_have_findings(stub, kind):
    case = replace(MEAN, stub=stub, wrt=())
    assert kind in {finding.kind for finding in run(case).findings}


def test_lowered_precision_of_arguments_reaches_kernel_and_reference_alike():
    case = replace(MEAN, dtype=torch.bfloat16)
    (x,) = case.args()
    assert x.dtype == torch.bfloat16
    assert torch.equal(x, MEAN.args()[0].bfloat16())
    # the executor must not round further, nor forget that the input was rounded
    assert outputs_agree(case, run(case))
    assert error(run(case).outputs[0], run(MEAN).outputs[0]) > EXACT


LIBRARY = [
    named(corpus_rows.CASES, "softmax_persistent"),
    named(corpus_columns.CASES, "column_sum_atomic"),
    named(corpus_columns.CASES, "batchnorm_partials_in_place"),
    named(corpus_matmul.CASES, "matmul_split_k"),
    named(corpus_scans.CASES, "gated_recurrence_chunks"),
    named(corpus_elementwise.CASES, "dropout_replayed"),
]


@pytest.mark.parametrize("case", LIBRARY, ids=[case.name for case in LIBRARY])
def test_library_gives_the_same_outputs_and_gradients_by_name(case: Case):
    args = case.args()
    outcome = run(case)
    got = kernel_agent.outputs(case.stub, *args)
    for place, (ours, want) in enumerate(zip(_tensors(got), outcome.expected_outputs, strict=True)):
        assert error(ours, want) <= case.tolerance, f"output {place} of {case.name}"
    generator = torch.Generator().manual_seed(1)
    cotangents = [
        torch.randn(want.shape, generator=generator, dtype=torch.float64) for want in outcome.expected_outputs
    ]
    found = kernel_agent.gradients(case.stub, *args, cotangents=cotangents)
    assert len(found) == len(outcome.expected_gradients)
    for (name, ours), want in zip(found.items(), outcome.expected_gradients.values(), strict=True):
        assert error(ours, want) <= case.tolerance, f"gradient of {name} of {case.name}"


def _tensors(result: object) -> list[Tensor]:
    return list(result) if isinstance(result, tuple) else [result]
