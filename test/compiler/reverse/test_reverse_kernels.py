"""Gradients of Triton kernels as people write them are those of autograd through the executor."""

from __future__ import annotations

import pytest
import reverse_kernels as k
import torch
from reverse_launches import agrees

from kernel_agent.compiler.ssa.code import Code


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_an_elementwise_kernel_with_masks_and_choices():
    arguments = {"x_ptr": random(37), "y_ptr": random(37, seed=1), "out_ptr": torch.zeros(37), "n": 37, "BLOCK": 16}
    agrees(k.gelu_gate, (3,), arguments, ["out_ptr"])


def test_softmax():
    agrees(k.softmax, (3,), {"x_ptr": random(3, 5), "y_ptr": torch.zeros(3, 5), "n": 5, "BLOCK": 8}, ["y_ptr"])


def test_layer_norm_in_three_loops():
    arguments = {"x_ptr": random(3, 11), "w_ptr": random(11, seed=1), "b_ptr": random(11, seed=2)}
    agrees(k.layer_norm, (3,), {**arguments, "y_ptr": torch.zeros(3, 11), "n": 11, "eps": 1e-5, "BLOCK": 4}, ["y_ptr"])


def test_rms_norm_with_persistent_rows():
    arguments = {"x_ptr": random(5, 6), "w_ptr": random(6, seed=1), "y_ptr": torch.zeros(5, 6), "rows": 5, "n": 6}
    agrees(k.rms_norm_rows, (2,), {**arguments, "eps": 1e-5, "BLOCK": 8}, ["y_ptr"])


def test_a_matrix_product_with_an_activation():
    arguments = {"a_ptr": random(20, 24), "b_ptr": random(24, 18, seed=1), "c_ptr": torch.zeros(20, 18)}
    arguments.update({"M": 20, "N": 18, "K": 24, "BM": 16, "BN": 16, "BK": 16})
    agrees(k.matmul_relu, (2, 2), arguments, ["c_ptr"])


def test_attention_with_an_online_softmax():
    for causal in (False, True):
        arguments = {"q_ptr": random(40, 16), "k_ptr": random(40, 16, seed=1), "v_ptr": random(40, 16, seed=2)}
        arguments.update({"o_ptr": torch.zeros(40, 16), "T": 40, "scale": 0.25, "CAUSAL": causal})
        agrees(k.attention, (3,), {**arguments, "BM": 16, "BN": 16, "D": 16}, ["o_ptr"])


def test_cross_entropy_with_ignored_rows():
    labels = torch.tensor([3, -100, 0, 10])
    arguments = {"x_ptr": random(4, 11), "label_ptr": labels, "loss_ptr": torch.zeros(4), "n": 11, "BLOCK": 4}
    agrees(k.cross_entropy, (4,), arguments, ["loss_ptr"])


def test_rotary_writes_two_halves():
    arguments = {"x_ptr": random(3, 10), "cos_ptr": random(3, 5, seed=1), "sin_ptr": random(3, 5, seed=2)}
    agrees(k.rotary, (3,), {**arguments, "y_ptr": torch.zeros(3, 10), "half": 5, "BLOCK": 8}, ["y_ptr"])


def test_a_recurrence_with_a_branch():
    arguments = {"x_ptr": random(5, 8), "a_ptr": random(8, seed=1), "y_ptr": torch.zeros(5, 8), "T": 5, "N": 8}
    agrees(k.recurrence_with_branch, (1,), arguments, ["y_ptr"])


def test_an_associative_scan():
    arguments = {"a_ptr": random(8, 4), "x_ptr": random(8, 4, seed=1), "h_ptr": torch.zeros(8, 4), "T": 8, "N": 4}
    agrees(k.linear_recurrence, (1,), arguments, ["h_ptr"])


def test_sums_by_atomics():
    arguments = {"x_ptr": random(20), "w_ptr": random(20, seed=1), "out_ptr": torch.zeros(1), "n": 20, "BLOCK": 8}
    agrees(k.split_k, (3,), arguments, ["out_ptr"])


def test_rows_looked_up_twice():
    arguments = {"index_ptr": torch.tensor([2, 0, 2]), "w_ptr": random(4, 8), "y_ptr": torch.zeros(3, 8), "D": 8}
    agrees(k.embedding, (3,), arguments, ["y_ptr"])


def test_a_maximum_with_its_index():
    x = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0], [0.0, -1.0, 0.0, 0.0, -2.0]])
    arguments = {"x_ptr": x, "y_ptr": torch.zeros(2), "i_ptr": torch.zeros(2, dtype=torch.int32), "n": 5, "BLOCK": 8}
    agrees(k.picked_maximum, (2,), arguments, ["y_ptr"])


def test_programs_that_return_early():
    agrees(k.early_return, (4,), {"x_ptr": random(20), "y_ptr": torch.zeros(20), "n": 20, "BLOCK": 8}, ["y_ptr"])


def test_a_while_loop():
    agrees(k.newton, (3,), {"x_ptr": random(20).abs() + 0.1, "y_ptr": torch.zeros(20), "n": 20, "BLOCK": 8}, ["y_ptr"])


def test_reductions_with_combines_of_their_own():
    x = random(3, 8)
    x[1, 2] = 0.0  # a division by the element would be no derivative here
    agrees(k.product_of_rows, (3,), {"x_ptr": x, "y_ptr": torch.zeros(3), "N": 8}, ["y_ptr"])
    arguments = {"x_ptr": random(4, 8), "y_ptr": torch.zeros(4), "M": 4, "N": 8}
    agrees(k.logsumexp_by_pairs, (1,), arguments, ["y_ptr"])
    agrees(k.variance_by_welford, (3,), {"x_ptr": random(3, 5), "y_ptr": torch.zeros(3), "n": 5, "N": 8}, ["y_ptr"])


@pytest.mark.parametrize(
    ("kind", "scans"),
    [("one sample", 0), ("means alone", 0), ("another sum of squares", 2), ("no squares of no numbers", 2)],
)
def test_merged_moments_have_their_closed_form_and_nothing_else_has_it(kind, scans):
    # Of what is nearly a merge, one closed form is a wrong gradient: the counts', the means' or the squares'.
    counts = 0.5 + random(2, 8, seed=2).abs()
    counts[1, 3] = 0.0
    if kind == "no squares of no numbers":
        counts = counts.round().int()  # at none, such squares have no derivative by the count
    arguments = {
        "n_ptr": counts,
        "m_ptr": random(2, 8),
        "s_ptr": random(2, 8, seed=1).abs(),
        "y_ptr": torch.zeros(2, 3),
    }
    adjoint = agrees(k.merged_samples, (2,), {**arguments, "N": 8, "KIND": kind}, ["y_ptr"])
    assert sum(op.code is Code.SCAN for op in adjoint.kernel.ops) == scans


def test_running_totals_with_combines_of_their_own():
    x = random(3, 8)
    x[1, 2] = 0.0
    for reverse in (False, True):
        arguments = {"x_ptr": x, "y_ptr": torch.zeros(3, 8), "N": 8, "REVERSE": reverse}
        agrees(k.running_products, (3,), arguments, ["y_ptr"])
    agrees(k.filled, (1,), {"x_ptr": random(8, 4), "y_ptr": torch.zeros(8, 4), "M": 8, "N": 4}, ["y_ptr"])


def test_running_totals_of_several_tiles_that_do_not_depend_on_each_other():
    arguments = {"a_ptr": random(8, 4), "x_ptr": random(8, 4, seed=1), "y_ptr": torch.zeros(8, 4), "T": 8, "N": 4}
    agrees(k.decays_and_states, (1,), arguments, ["y_ptr"])
    indices = torch.zeros(3, 8, dtype=torch.int32)
    arguments = {"x_ptr": random(3, 8), "y_ptr": torch.zeros(3, 8), "i_ptr": indices, "N": 8}
    agrees(k.running_maximum, (3,), arguments, ["y_ptr"])


def test_running_totals_that_depend_on_each_other():
    arguments = {"a_ptr": random(8), "x_ptr": random(8, seed=1), "y_ptr": torch.zeros(8), "N": 8}
    agrees(k.complex_recurrence, (1,), arguments, ["y_ptr"])
