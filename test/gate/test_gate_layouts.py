"""Cotangents that lie in memory as real programs leave them, and backwards that look at some of their strides alone."""

from __future__ import annotations

import pytest

from kernel_agent.gate import GateOptions, Status

SPECIAL = GateOptions(seeds=(0,), odd_sizes=0, values=())
CALL = "_rmsnorm_bwd[(M,)](g, x, w, rstd, dx, dw, g.stride(0), g.stride(1), N, BLOCK=triton.next_power_of_2(N))"
CONTIGUOUS = CALL.replace("g.stride(0), g.stride(1)", "N, 1")


def unless(dense: str, call: str) -> tuple[str, str]:
    """Copies a cotangent that is not `dense`."""
    return CALL, f"g = g if {dense} else g.contiguous()\n    {call}"


@pytest.mark.parametrize(
    ("dense", "kind"),
    [("g.stride(1) == 1 and g.stride(0)", "apart"), ("g.stride(1) == 1 and g.stride(0) <= N", "expanded-rows")],
    ids=["what_was_split", "what_was_summed"],
)
def test_rows_whose_elements_lie_side_by_side_are_not_taken_for_contiguous(judge, dense, kind):
    # Of random, strided, transposed and expanded cotangents, only the first has such rows, and they follow each other.
    verdict = judge("rmsnorm", unless(dense, CONTIGUOUS), options=SPECIAL)
    assert verdict.status is Status.OUT_OF_BOUNDS, verdict.message
    red = [case.case for case in verdict.cases if case.status is not Status.GREEN]
    assert [name.partition("cotangent=")[2] for name in red] == [kind], red


def test_who_copies_what_it_cannot_take_and_goes_by_the_strides_of_rows_is_green(judge):
    verdict = judge("rmsnorm", unless("g.stride(1) == 1", CALL), options=SPECIAL)
    assert verdict.green, verdict.message
