"""What a backward would raise is known when the forward has run; which way that took, too."""

from __future__ import annotations

import types

import pytest
import torch

from kernel_agent.jit.conditions import Objection, conditions_of
from kernel_agent.jit.ways import noted, watch, way_of

PAIR = """
# --- forward ---
def helper(n):
    return 64 if n > 10 else 32


def forward(x, act):
    if x.dim() == 1:
        x = x[None]
    for _ in range(2):
        y = helper(x.shape[-1])
    return y, (x, act)


# --- backward ---
def backward(saved, grad_y):
    x, act = saved
    M, N = x.shape
    unused = grad_y.contiguous()
    if not (x.stride(0) >= N):
        raise ValueError("rows of dX lie apart only if x.stride(0) >= N")
    if grad_y.stride() != x.stride():
        raise ValueError("asked of a cotangent")
    dx = torch.zeros_like(x)
    if act == "a":
        launched.append(M)
        return dx
    if act == "b":
        return dx
    raise NotImplementedError("this backward was derived for other configurations of the forward")


# --- check ---
SWEEP = []
"""


@pytest.fixture
def module():
    made = types.ModuleType("pair")
    made.__file__ = "pair.py"
    exec(compile(PAIR, "pair.py", "exec"), vars(made))
    made.launched = []
    made.torch = torch
    return made


def test_facts_that_hold_raise_no_objection(module):
    conditions = conditions_of(module, PAIR)
    assert conditions((torch.zeros(3, 4), "a")) is None
    assert conditions((torch.zeros(3, 4), "b")) is None
    assert module.launched == [], "nothing of the backward but its checks may run"


def test_a_fact_that_does_not_hold_is_told_from_another_configuration(module):
    conditions = conditions_of(module, PAIR)
    fact = conditions((torch.zeros(1, 4).expand(3, 4), "a"))
    other = conditions((torch.zeros(3, 4), "c"))
    assert fact is not None
    assert other is not None
    assert (fact.why, other.why) == (Objection.FACT, Objection.CONFIGURATION)
    assert "x.stride(0) >= N" in fact.words


def test_calls_that_branch_alike_have_one_way(module):
    watch(module, PAIR)
    ways = []
    for shape in ((3, 4), (30, 5), (4,), (3, 40)):
        with noted() as notes:
            module.forward(torch.zeros(shape), "a")
        ways.append(way_of(notes))
    assert ways[0] == ways[1]
    assert len(set(ways)) == 3


def test_a_watched_forward_returns_what_it_returned(module):
    before = module.forward(torch.ones(4), "a")
    watch(module, PAIR)
    after = module.forward(torch.ones(4), "a")
    assert after[0] == before[0]
    assert torch.equal(after[1][0], before[1][0])
