"""The line that does it is told only where one change there makes a gradient exact: a wrong line costs a whole ask."""

from __future__ import annotations

import pytest

from kernel_agent.gate import Status
from kernel_agent.gate.diagnosis.records import Fault


def _suspect(judge, pair, *changes):
    """The suspect of a mutant, and the text of the line it names."""
    source = judge.source(pair, *changes)
    verdict = judge.check_source(pair, source, diagnose=True)
    found = verdict.diagnosis.suspect
    assert not verdict.diagnosis.notes, verdict.diagnosis.notes
    return verdict, found, "" if found is None else source.splitlines()[found.line - 1]


def test_a_wrong_sign_is_found_at_its_line_and_named_by_the_operand(judge):
    _, found, line = _suspect(judge, "layernorm", ("* c1 - c2", "* c1 + c2"))
    assert "wg - xh * c1 + c2" in line
    assert found.statement.endswith("the gradient of x would be exact in all 3 cases tried if `c2` had the other sign")


def test_a_factor_is_found_in_one_term_of_several(judge):
    _, found, line = _suspect(judge, "layernorm", ("wg - xh * c1", "wg - 3.0 * (xh * c1)"))
    assert "3.0 * (xh * c1)" in line
    assert "`3.0 * (xh * c1)` were 0.333333 times as large" in found.statement


def test_a_loop_that_ends_too_early_is_found(judge):
    _, found, line = _suspect(judge, "matmul_bias", ("range(0, N, BN)", "range(0, N - BN + 1, BN)"))
    assert "range(0, N - BN + 1, BN)" in line
    assert "if the loop took one step more" in found.statement


@pytest.mark.parametrize(
    ("change", "how"),
    [
        (("rstd = tl.load(RSTD + row)", "rstd = tl.log(tl.load(RSTD + row) - 100.0)"), "takes the logarithm of 0"),
        (("c1 = tl.sum(xh * wg, 0) / N", "c1 = tl.sum(xh * wg, 0) / (N - N)"), "divides by 0"),
        (("wg = g * w", "wg = g * w * tl.exp(1e4 + w)"), "overflows"),
    ],
)
def test_the_line_at_which_nan_or_infinity_begins_is_found(judge, change, how):
    verdict, found, line = _suspect(judge, "layernorm", change)
    assert verdict.status is Status.NOT_FINITE
    assert change[1] in line
    assert how in found.statement


def test_nan_that_never_reaches_a_gradient_is_not_blamed(judge):
    # The first line makes NaN in lanes that `where` drops; only the second one is seen in a gradient.
    harmless = ("xh = tl.where(m, (x - mean) * rstd, 0.0)", "xh = tl.where(m, (x - mean) * rstd * (w / w), 0.0)")
    _, found, line = _suspect(judge, "layernorm", harmless, ("tl.sum(wg, 0) / N", "tl.sum(wg, 0) / (N - N)"))
    assert "tl.sum(wg, 0) / (N - N)" in line, found


def test_nothing_is_said_where_no_single_change_mends_the_gradient(judge):
    _, found, _ = _suspect(judge, "layernorm", ("wg - xh * c1 - c2", "wg * xh - xh * c1 - w"))
    assert found is None


def test_two_mistakes_in_one_gradient_have_no_single_line(judge):
    # Either change alone leaves the other mistake: the fit of a factor must not be taken for an explanation.
    _, found, _ = _suspect(judge, "layernorm", ("wg - xh * c1 - c2", "wg + xh * c1 - 2.0 * c2"))
    assert found is None


def test_a_statistic_of_another_row_is_found_at_its_load(judge):
    verdict, _, line = _suspect(judge, "layernorm", ("tl.load(RSTD + row)", "tl.load(RSTD)"))
    assert "tl.load(RSTD)" in line
    (named,) = [h for h in verdict.diagnosis.what if h.grad == "x"]
    assert named.fault is Fault.STALE_STATISTIC, named
    assert named.left_over <= 1e-6


def test_a_tail_that_reaches_a_sum_is_found(judge):
    # Only both together are wrong: either line mends it, so that none of them is the one.
    in_g = ("c * stride_n, mask=m, other=0.0)", "c * stride_n, mask=m, other=2.0)")
    in_y = ("row * N + c, mask=m, other=0.0)", "row * N + c, mask=m, other=1.0)")
    verdict, found, _ = _suspect(judge, "softmax", in_g, in_y)
    (named,) = verdict.diagnosis.what
    assert named.fault is Fault.UNMASKED_TAIL, named
    assert found is None


def test_a_factor_that_is_missing_inside_of_a_sum_is_found(judge):
    verdict, _, line = _suspect(judge, "softmax", ("tl.sum(g * y, 0)", "tl.sum(g, 0)"))
    (named,) = verdict.diagnosis.what
    assert named.fault is Fault.FACTOR, named
    assert "were multiplied by `y`" in named.statement
    assert "tl.sum(g, 0)" in line


def test_a_factor_that_may_come_in_at_several_lines_is_blamed_on_none_of_them(judge):
    # Twice the sum is twice what is stored: nothing tells whether the loop or the store does it.
    _, found, _ = _suspect(judge, "matmul_bias", ("acc += tl.dot(x, g)", "acc += 2.0 * tl.dot(x, g)"))
    assert found is None, found
