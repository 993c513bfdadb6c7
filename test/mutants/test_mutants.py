"""Proof that the gate has power: every mutant of a correct backward is rejected, for the reason it is wrong.

Each mutant is one mistake that people and models make. The honest twin is the same file without the change.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from kernel_agent.gate import Status


@dataclass(frozen=True)
class Mutant:
    name: str
    pair: str
    change: tuple[str, str]
    status: Status
    grad: str | None = None


MUTANTS = (
    Mutant("a_dropped_term", "layernorm", ("wg - xh * c1 - c2", "wg - xh * c1"), Status.WRONG_GRADIENT, "x"),
    Mutant("a_wrong_sign", "layernorm", ("* c1 - c2", "* c1 + c2"), Status.WRONG_GRADIENT, "x"),
    Mutant("a_missing_factor", "layernorm", ("- c2) * rstd, mask", "- c2), mask"), Status.WRONG_GRADIENT, "x"),
    Mutant(
        "a_mean_over_the_block", "layernorm", ("tl.sum(wg, 0) / N", "tl.sum(wg, 0) / BLOCK"), Status.WRONG_GRADIENT, "x"
    ),
    Mutant(
        "one_part_in_ten_thousand",
        "layernorm",
        ("g * xh, mask", "g * xh * 1.0001, mask"),
        Status.WRONG_GRADIENT,
        "weight",
    ),
    Mutant(
        "one_wrong_element_per_row", "layernorm", ("tl.where(m, (x", "tl.where(c < N - 1, (x"), Status.WRONG_GRADIENT
    ),
    Mutant(
        "a_tiny_constant_under_zero_cotangents",
        "layernorm",
        ("DB + c, g, mask", "DB + c, g + 1e-9, mask"),
        Status.WRONG_GRADIENT,
        "bias",
    ),
    Mutant(
        "a_clipped_gradient",  # only a huge cotangent reaches the clip
        "layernorm",
        ("g * xh, mask", "tl.minimum(tl.maximum(g * xh, -1000.0), 1000.0), mask"),
        Status.WRONG_GRADIENT,
        "weight",
    ),
    Mutant(
        "swapped_gradients",
        "layernorm",
        ("dw.to(weight.dtype), db.to(bias.dtype)", "db, dw"),
        Status.WRONG_GRADIENT,
        "weight",
    ),
    Mutant(
        "a_missing_atomic",
        "layernorm",
        ("tl.atomic_add(DB + c, g, mask=m)", "tl.store(DB + c, tl.load(DB + c, mask=m) + g, mask=m)"),
        Status.RACE,
    ),
    Mutant(
        "an_uninitialised_accumulator",
        "layernorm",
        ("torch.zeros(N, dev", "torch.empty(N, dev"),
        Status.UNINITIALIZED_READ,
    ),
    Mutant(
        "an_unmasked_load",
        "layernorm",
        ("X + row * N + c, mask=m, other=0.0)", "X + row * N + c)"),
        Status.OUT_OF_BOUNDS,
    ),
    Mutant("an_unmasked_store", "layernorm", ("- c2) * rstd, mask=m)", "- c2) * rstd)"), Status.OUT_OF_BOUNDS),
    Mutant("an_off_by_one_bound", "layernorm", ("m = c < N", "m = c <= N"), Status.OUT_OF_BOUNDS),
    Mutant("an_unwritten_column", "layernorm", ("m = c < N", "m = c < N - 1"), Status.NOT_FINITE, "x"),
    Mutant("an_unwritten_row", "layernorm", ("_ln_bwd[(M,)]", "_ln_bwd[(M - 1,)]"), Status.NOT_FINITE, "x"),
    Mutant("ignored_cotangent_strides", "layernorm", ("grad_out.contiguous()", "grad_out"), Status.OUT_OF_BOUNDS),
    Mutant("a_missing_gradient", "layernorm", (", db.to(bias.dtype)", ""), Status.WRONG_COUNT),
    Mutant("a_wrong_shape", "layernorm", ("db.to(bias.dtype)", "db[None]"), Status.WRONG_SHAPE, "bias"),
    Mutant("the_product_without_the_sum", "softmax", ("(g - tl.sum(g * y, 0))", "g"), Status.WRONG_GRADIENT, "x"),
    Mutant("assumed_unit_stride", "softmax", ("grad_out.stride(1), N", "1, N"), Status.OUT_OF_BOUNDS),
    Mutant(
        "a_float32_gradient_of_a_half_input",
        "softmax",
        ("empty_like(y)", "empty_like(y, dtype=torch.float32)"),
        Status.WRONG_DTYPE,
        "x",
    ),
    Mutant(
        "a_gradient_written_over_a_saved_tensor",
        "softmax",
        ("dx = torch.empty_like(y)", "dx = y"),
        Status.INPUT_MUTATED,
    ),
    Mutant("a_sum_over_the_wrong_axis", "matmul_bias", ("tl.sum(g, 0)", "tl.sum(g, 1)"), Status.WRONG_GRADIENT, "b"),
    Mutant(
        "a_lost_tail_of_the_loop",
        "matmul_bias",
        ("range(0, N, BN)", "range(0, N - BN + 1, BN)"),
        Status.WRONG_GRADIENT,
        "x",
    ),
    Mutant(
        "a_forgotten_bound_in_the_loop",
        "matmul_bias",
        ("mask=(i[None, :] < M) & (k[:, None] < K)", "mask=k[:, None] < K"),
        Status.OUT_OF_BOUNDS,
    ),
    Mutant(
        "a_missing_transpose",
        "matmul_bias",
        ("acc += tl.dot(x, g)", "acc += tl.dot(tl.trans(x), g)"),
        Status.WRONG_GRADIENT,
        "w",
    ),
    Mutant(
        "the_wrong_input",
        "two_outputs",
        ("dx += dp * tl.load(Y + i", "dx += dp * tl.load(X + i"),
        Status.WRONG_GRADIENT,
        "x",
    ),
    Mutant(
        "a_cotangent_that_must_not_be_none",
        "two_outputs",
        ("None if grad_p is None else grad_p.contiguous()", "grad_p.contiguous()"),
        Status.CRASHED,
    ),
    Mutant("an_unknown_name_in_a_kernel", "softmax", ("y * (g", "probs * (g"), Status.COMPILE_ERROR),
    Mutant("a_syntax_error", "softmax", ("    return dx", "    return dx)"), Status.COMPILE_ERROR),
)


@pytest.mark.parametrize("pair", ["layernorm", "softmax", "matmul_bias", "two_outputs"])
def test_the_honest_twin_is_green(judge, pair):
    # Without this, a gate that rejects everything would pass all tests below.
    verdict = judge(pair)
    assert verdict.green, verdict.message
    assert len(verdict.cases) == verdict.cases_planned


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.pair}-{mutant.name}")
def test_a_mutant_is_rejected_for_its_mistake(judge, mutant):
    verdict = judge(mutant.pair, mutant.change)
    assert verdict.status is mutant.status, f"{verdict.message}\n{verdict.details}"
    if mutant.grad is not None:
        assert verdict.grad == mutant.grad, verdict.message


def test_a_complex_gradient_is_rejected(judge):
    verdict = judge("softmax", ("    return dx", "    return torch.complex(dx, dx)"))
    assert verdict.status in (Status.WRONG_DTYPE, Status.TORCH_FALLBACK), verdict.message


def test_rounding_to_half_precision_is_beyond_the_exact_tier(judge):
    # The limit that docs/verification.md states: casts do not round here, so a lossy accumulator is not seen.
    assert judge("softmax", ("tl.sum(g * y, 0)", "tl.sum((g * y).to(tl.float16), 0)")).green
