"""Owners of what programs share in parts: heads of a group, and loops that end where memory says."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import schedule_forwards
import torch
from schedule_plans import Made, atomics, from_source, plans_of, run

D, BM, BN, H = 16, 32, 16, 4


@functools.cache
def plans_for(name: str, numbers: str) -> Made:
    tensors = ("q_ptr", "k_ptr", "o_ptr")
    types = {**dict.fromkeys(tensors, "*fp32"), **dict.fromkeys(numbers.split(), "i32")}
    if name == "sums_up_to":
        types["most_ptr"] = "*i32"
    kernel = from_source(getattr(schedule_forwards, name), types, D=D, BM=BM, BN=BN)
    return plans_of(kernel, "q_ptr k_ptr", "o_ptr", 2)


def grouped(n: int, heads: int, group: int) -> tuple[dict[str, Any], torch.Tensor, dict[str, torch.Tensor]]:
    """What a launch of two batches is given, the cotangent of its output, and the gradients."""
    torch.manual_seed(0)
    q = torch.randn(2, n, heads, D, dtype=torch.float64, requires_grad=True)
    k = torch.randn(2, n, heads // group, D, dtype=torch.float64, requires_grad=True)
    own, there = q.transpose(1, 2), k.transpose(1, 2).repeat_interleave(group, 1)
    o, do = ((own @ there.mT).tril() @ there).transpose(1, 2), torch.randn_like(q)
    gradients = dict(zip(("q_ptr", "k_ptr"), torch.autograd.grad(o, (q, k), do), strict=True))
    given = {"q_ptr": q.detach(), "k_ptr": k.detach(), "o_ptr": o.detach(), "n": n, "H": heads, "GROUP": group}
    return given, do, gradients


@pytest.mark.parametrize(("n", "group"), [(64, 2), (40, 4), (40, 1)])
def test_heads_of_a_group_are_a_loop_of_the_owner_of_their_keys(n: int, group: int) -> None:
    # One program for every head of queries, as the forward has, would add to the keys of a group `group` times.
    plan = plans_for("grouped_sums", "n H GROUP")["split"]
    assert atomics(plan) == []
    given, do, expected = grouped(n, H, group)
    found, counts = run(plan, given, {"o_ptr": do}, (-(-n // BM), 2 * H))
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-6)
    assert counts[-1].owned("dk")


def test_rows_before_the_diagonal_are_not_visited_in_any_head_of_a_group() -> None:
    given, do, _ = grouped(64, H, 2)
    _, counts = run(plans_for("grouped_sums", "n H GROUP")["split"], given, {"o_ptr": do}, (2, 2 * H))
    # Row blocks 0 and 1 are read by the 2 and 4 owners of keys up to their diagonal.
    assert counts[-1].loaded["q_ptr"][0, ::BM, 0, 0].tolist() == [2, 4]


def test_heads_that_are_no_whole_groups_break_a_fact() -> None:
    # 6 heads in groups of 4: the last group would have members that do not exist.
    facts = [fact.expression for fact in plans_for("grouped_sums", "n H GROUP")["split"].facts]
    assert [all(eval(one, {"grid1": 12, "H": 6, "GROUP": size}) for one in facts if "%" in one) for size in (3, 4)] == [
        True,
        False,
    ]


@pytest.mark.parametrize("most", [(64, 40), (16, 0)])
def test_loops_that_end_where_memory_says_have_owners_up_to_the_furthest_end(most: tuple[int, int]) -> None:
    # Whole tiles and the rest are two loops over parts of one range; keys beyond both ends have no gradient.
    plan = plans_for("sums_up_to", "n")["split"]
    assert atomics(plan) == []
    torch.manual_seed(0)
    q, k = leaves = [torch.randn(2, 64, D, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    seen = k * (torch.arange(64)[:, None] < torch.tensor(most)[:, None, None])
    o, do = q @ seen.mT @ seen, torch.randn(2, 64, D, dtype=torch.float64)
    expected = dict(zip(("q_ptr", "k_ptr"), torch.autograd.grad(o, leaves, do), strict=True))
    given = {"q_ptr": q.detach(), "k_ptr": k.detach(), "o_ptr": o.detach(), "n": 64}
    given["most_ptr"] = torch.tensor(most, dtype=torch.int32)
    found, counts = run(plan, given, {"o_ptr": do}, (2, 2))
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name].nan_to_num(), gradient, rtol=1e-6, atol=1e-6)
    assert counts[-1].owned("dk")
