"""The same on shipped pairs, whose forwards loop, scan and scale: the mistake is named in words of their forward."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_agent.data import pairs_root
from kernel_agent.gate import GateOptions, check
from kernel_agent.gate.diagnosis.records import Fault
from kernel_agent.oracle import describe
from kernel_agent.pairs.userfile import read_file

FEW = GateOptions(odd_sizes=0, max_cases=6)

NAMED = {
    # The sum of an online softmax is carried by a loop: its name and line are those after it.
    "attention_without_delta": (
        *("attention/fa2_causal", "- delta[:, None])", "- 0.0 * delta[:, None])", "q", Fault.MISSING_TERM),
        "`norm` in line 55",
    ),
    "rmsnorm_without_its_radial_part": (
        *("norm_row/rmsnorm_row", "dunit - unit * radial", "dunit", "x", Fault.MISSING_TERM),
        "`inv_rms` in line",
    ),
    "a_gate_whose_sigmoid_is_a_constant": (
        *("glu/swiglu_separate", "(s + silu * (1.0 - s))", "s", "gate", Fault.MISSING_TERM),
        "is missing",
    ),
    # Where the only block is skipped the whole term is missing: true, but the loop's bound is what to mend.
    "a_loop_over_features_that_ends_one_block_early": (
        *(
            "jagged_segment/csr_spmm",
            "range(0, F, BLOCK_F):\n            f = begin",
            "range(0, F - BLOCK_F, BLOCK_F):\n            f = begin",
        ),
        *("values", Fault.LAST_BLOCK_SKIPPED),
        "the loop took one step more",
    ),
    "cross_entropy_times_two": (
        *("loss_ce/ce_row", "tl.store(out, g * tl.where", "tl.store(out, 2.0 * g * tl.where", "logits", Fault.SCALE),
        "twice the truth",
    ),
}


@pytest.mark.parametrize(("pair", "old", "new", "grad", "fault", "words"), NAMED.values(), ids=NAMED)
def test_a_mistake_in_a_shipped_backward_is_named(sandbox, pair, old, new, grad, fault, words):
    path = pairs_root() / f"{pair}.py"
    source = path.read_text()
    assert source.count(old) == 1
    verdict = check(describe(read_file(path), sandbox), source.replace(old, new), sandbox, FEW)
    assert not verdict.diagnosis.notes
    found = {one.grad: one for one in verdict.diagnosis.what}
    assert found[grad].fault is fault, found[grad].statement
    assert words in found[grad].statement


def _judged_at(sandbox, folder, pair, entry, right, wrong):
    """The verdict on a shipped pair with one slip in its backward, at one entry alone."""
    head, backward = (pairs_root() / f"{pair}.py").read_text().split("# --- backward ---")
    assert backward.count(right) == 1
    sweep = f"\n\nSWEEP = ({entry!r},)\n"
    path = folder / f"{Path(pair).name}.py"
    path.write_text(f"{head}# --- backward ---{backward}{sweep}")
    mutant = f"{head}# --- backward ---{backward.replace(right, wrong)}{sweep}"
    verdict = check(describe(read_file(path), sandbox), mutant, sandbox, FEW)
    assert not verdict.green
    return verdict


def test_an_offset_of_one_is_not_taken_for_a_lane_beyond_the_end(sandbox, tmp_path):
    # In a single column t and q are both log 1, so that the slip adds exactly one everywhere; that M = 13 leaves one
    # lane in blocks of two has nothing to do with it.
    slip = ("g * p * (t - q + 1.0)", "((g * p) + (t - q + 1.0))")
    entry = {"M": 13, "N": 1, "log_target": True}
    verdict = _judged_at(sandbox, tmp_path, "loss_other/kl_div_batchmean", entry, *slip)
    assert all(found.fault is not Fault.UNMASKED_TAIL for found in verdict.diagnosis.what), verdict.diagnosis.what


def test_no_line_is_blamed_by_a_gradient_that_is_zero_by_algebra(sandbox, tmp_path):
    # The softmax of one element is constant. Many changes make its gradient zero; the loop that sums is the mistake.
    slip = ("range(0, N, BLOCK,", "range(0, N - BLOCK + 1, BLOCK,")
    verdict = _judged_at(sandbox, tmp_path, "softmax/softmax_online", {"M": 5, "N": 1}, *slip)
    assert verdict.diagnosis.suspect is None, verdict.diagnosis.suspect
    assert all(found.fault is not Fault.FACTOR for found in verdict.diagnosis.what), verdict.diagnosis.what
