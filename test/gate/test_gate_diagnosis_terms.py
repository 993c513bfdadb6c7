"""What a diagnosis says of planted mistakes: the mistake itself, in words of the forward, or nothing."""

from __future__ import annotations

import pytest

from kernel_agent.gate import Status
from kernel_agent.gate.diagnosis.records import Fault

NAMED = {
    "a_missing_term": (
        *("layernorm", ("wg - xh * c1 - c2", "wg - xh * c1"), "x", Fault.MISSING_TERM),
        "the term through `mean` in line 29",
    ),
    "a_wrong_sign": (
        *("layernorm", ("* c1 - c2", "* c1 + c2"), "x", Fault.TERM_SIGN),
        "the term through `mean` in line 29",
    ),
    "a_doubled_term": (
        *("layernorm", ("wg - xh * c1", "wg - 2 * xh * c1"), "x", Fault.DOUBLED_TERM),
        "the term through `rstd`",
    ),
    "statistics_as_constants": (
        *("layernorm", ("wg - xh * c1 - c2", "wg"), "x", Fault.MISSING_TERM),
        "`rstd` in line",
    ),
    "a_mean_over_the_block": (
        *("layernorm", ("tl.sum(wg, 0) / N", "tl.sum(wg, 0) / BLOCK"), "x", Fault.SCALE),
        "5/8 = M/8 or N/64",
    ),
    "a_missing_factor_of_every_row": (
        *("layernorm", ("- c2) * rstd, mask", "- c2), mask"), "x", Fault.FACTOR),
        "the factor `rstd` is missing",
    ),
    "a_missing_factor_inside": ("layernorm", ("wg = g * w", "wg = g"), "x", Fault.FACTOR, "the factor `w` is missing"),
    "the_input_in_place_of_the_normalised_one": (
        *("layernorm", ("g * xh, mask", "g * x, mask"), "weight", Fault.FACTOR),
        "`x` stands in place of",
    ),
    "a_common_factor": (
        *("layernorm", ("tl.atomic_add(DB + c, g,", "tl.atomic_add(DB + c, g / N,"), "bias", Fault.SCALE),
        "1/40 = 1/N times the truth",
    ),
    "exchanged_gradients": (
        *("layernorm", ("dw.to(weight.dtype), db.to(bias.dtype)", "db, dw"), "weight", Fault.EXCHANGED),
        "the gradient of `bias`",
    ),
    # The maximum that the forward subtracts adds nothing to a gradient, and must not stand in the way of the term.
    "a_softmax_without_its_sum": (
        *("softmax", ("(g - tl.sum(g * y, 0))", "g"), "x", Fault.MISSING_TERM),
        "the term through `e` in line 29",
    ),
    "a_lost_tail_of_a_loop": (
        *("matmul_bias", ("range(0, N, BN)", "range(0, N - BN + 1, BN)"), "x", Fault.LAST_BLOCK_SKIPPED),
        "the last 8 of dimension 1 of the cotangent of output `y`",
    ),
    "lanes_beyond_the_end_that_count": (
        *(
            "matmul_bias",
            (
                "(j[None, :] < N), other=0.0)\n        acc += tl.dot(x",
                "(j[None, :] < N), other=1.0)\n        acc += tl.dot(x",
            ),
        ),
        *("b", Fault.UNMASKED_TAIL, "12 lanes (M = 20 in blocks of 16)"),
    ),
    "one_half_of_a_softmax": (
        *("softmax", ("(g - tl.sum(g * y, 0))", "(-tl.sum(g * y, 0))"), "x", Fault.MISSING_TERM),
        "the term through `e` in line 29",
    ),
    "what_one_of_two_outputs_adds": (
        *("two_outputs", ("dp * tl.load(X + i, mask=m, other=0.0)", "0.0"), "y", Fault.MISSING_TERM),
        "the part that comes from output `p` is missing",
    ),
}


@pytest.mark.parametrize(("pair", "change", "grad", "fault", "words"), NAMED.values(), ids=NAMED)
def test_a_planted_mistake_is_named(judge, pair, change, grad, fault, words):
    verdict = judge(pair, change, diagnose=True)
    assert verdict.status is Status.WRONG_GRADIENT
    assert not verdict.diagnosis.notes
    (found,) = (one for one in verdict.diagnosis.what if one.grad == grad)
    assert found.fault is fault, found.statement
    assert words in found.statement
    assert found.left_over <= 1e-6
    assert found.statement in verdict.message


def test_a_statistic_of_another_row_is_told_with_its_line(judge):
    # No formula of the truth has this residual: the backward itself is looked at instead.
    verdict = judge("layernorm", ("tl.load(RSTD + row)", "tl.load(RSTD + 0 * row)"), diagnose=True)
    assert {found.fault for found in verdict.diagnosis.what} == {Fault.STALE_STATISTIC}
    assert "`rstd = tl.load(RSTD + 0 * row)`" in verdict.message


@pytest.mark.parametrize(
    ("pair", "change"),
    [
        ("layernorm", ("g * xh, mask", "g * xh * xh * tl.exp(x), mask")),
        ("softmax", ("y * (g", "tl.exp(y) * (g")),
    ],
    ids=["a_strange_factor", "another_function"],
)
def test_nothing_is_said_of_a_mistake_that_no_hypothesis_explains(judge, pair, change):
    # A bank that fits its factors to whatever it meets would name something here.
    verdict = judge(pair, change, diagnose=True)
    assert verdict.status is Status.WRONG_GRADIENT
    assert verdict.diagnosis.what == ()


def test_a_diagnosis_changes_nothing_but_words(judge):
    change = ("* c1 - c2", "* c1 + c2")
    plain, diagnosed = judge("layernorm", change), judge("layernorm", change, diagnose=True)
    same = ("status", "grad", "case", "tile", "ratio", "cases", "rank")
    assert [getattr(plain, name) for name in same] == [getattr(diagnosed, name) for name in same]
    assert plain.diagnosis is None


def test_a_green_verdict_has_no_diagnosis(judge):
    assert judge("softmax", diagnose=True).diagnosis is None
