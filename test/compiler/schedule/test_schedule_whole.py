"""Owners of sums walk over whole blocks of rows without masks, if a constexpr says that there are no others."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import schedule_forwards
import torch
from schedule_kernels import made, matrix
from schedule_plans import Made, from_source, plans_of, run

from kernel_agent.compiler.emit import triton_source
from kernel_agent.compiler.schedule.forms import Launch
from kernel_agent.compiler.schedule.whole import evened
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Kernel, Value
from kernel_agent.compiler.stub.wording import divisible

D, BM, BN = 16, 32, 16
BOTH = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


@functools.cache
def attention(causal: bool) -> Made:
    pointers = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "o_ptr", "lse_ptr"), "*fp32")
    types = {**pointers, "n": "i32", "m": "i32", "scale": "fp32"}
    kernel = from_source(schedule_forwards.attention, types, D=D, BM=BM, BN=BN, CAUSAL=causal, LAST_FIRST=False)
    return plans_of(kernel, "q_ptr k_ptr v_ptr", "o_ptr", 2, spare=True)


def say(kernel: Kernel, name: str, value: bool) -> None:
    """What a constexpr is when the kernel is evaluated."""
    for op in kernel.ops:
        if op.code is Code.CONST and op.attributes.get("symbol") == name:
            op.attributes["value"] = value


@BOTH
def test_whole_blocks_give_the_same_gradients_without_masks(causal: bool) -> None:
    # 64 rows are two blocks: the masks that are switched off hold in all lanes.
    plan = attention(causal)["split"]
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, rows, D, dtype=torch.float64) for rows in (64, 72, 72))
    scores = 0.25 * (q @ k.mT)
    if causal:
        scores = scores.masked_fill(torch.ones(64, 72, dtype=torch.bool).triu(9), float("-inf"))
    given: dict[str, Any] = {"q_ptr": q, "k_ptr": k, "v_ptr": v, "n": 64, "m": 72, "scale": 0.25}
    given |= {"o_ptr": scores.softmax(-1) @ v, "lse_ptr": scores.logsumexp(-1)}
    cotangent = torch.randn(2, 64, D, dtype=torch.float64)
    found = []
    for whole in (True, False):
        for step in plan.steps:
            say(step.kernel, "WHOLE", whole)
        found.append(run(plan, given, {"o_ptr": cotangent}, (2, 2))[0])
    for name, gradient in found[0].items():
        torch.testing.assert_close(gradient, found[1][name])


@BOTH
def test_the_constexpr_is_true_only_where_blocks_divide_the_rows(causal: bool) -> None:
    # One row beyond the last whole block, and a load without its mask would leave the tensor.
    text = attention(causal)["split"].settings["WHOLE"]
    holds = [eval(text, {"n": rows, "BM": BM, "grid0": -(-rows // BM)}) for rows in (32, 33, 63, 64, 96, 1)]
    assert holds == [True, False, False, True, True, False]


def test_the_mask_is_a_constant_for_whole_blocks() -> None:
    keys = attention(False)["split"].steps[-1].kernel
    text = triton_source(keys).text
    assert "        row_mask = (rows < n) | WHOLE\n" in text
    assert "mask=row_mask" in text


def sums(b: Builder, x: Value, out: Value, rows: Value, blocks: Value, *, first: int = 0, last: str = "blocks") -> None:
    """out += x' x over blocks of rows, from block `first` on."""
    lanes = b.arange(0, 16, "B", name="lanes")

    def body(index: Value, carries: list[Value]) -> list[Value]:
        at = b.add(b.mul(b.add(index, b.const(first)), b.const(16, symbol="B")), lanes)
        mask = b.compare("lt", b.expand(at, 1), rows)
        tile = b.load(x, matrix(b, at, b.const(16), lanes, b.const(1)), mask, b.const(0.0, "f32"), "tile")
        return [b.add(carries[0], b.dot(b.trans(tile, (1, 0)), tile))]

    stop = {"blocks": blocks, "least": b.elementwise(Code.MIN, (rows, blocks)), "loaded": b.load(x, b.const(0))}[last]
    stop = b.cast(stop, "i32")
    start = [b.whole(b.const(0.0, "f32"), (16, 16))]
    (total,) = b.loop((b.const(0), stop, b.const(1)), start, body, index_name="block", names=["total"])
    b.store(out, matrix(b, lanes, b.const(16), lanes, b.const(1)), total)


def condition(**choices: Any) -> str:
    kernel = made("X:*f32 dOut:*f32 rows blocks", functools.partial(sums, **choices), B=16)
    found = evened(kernel, Launch.like_forward(1), "WHOLE")
    return found.condition if found is not None else ""


def test_all_blocks_that_a_loop_may_come_to_must_be_whole() -> None:
    assert condition() == "B * blocks <= rows"
    assert condition(last="least") == "B * blocks <= rows", "the loop ends with the blocks, or before"


@pytest.mark.parametrize("choices", [{"first": 1}, {"last": "loaded"}], ids=["ahead by a block", "an end of memory"])
def test_blocks_that_are_not_counted_keep_their_masks(choices: dict[str, Any]) -> None:
    # A block ahead of the loop's last one, or a last one that nobody can ask for, may have rows that are not there.
    assert condition(**choices) == ""


def test_a_quotient_that_is_rounded_up_is_said_as_a_rest() -> None:
    assert divisible("triton.cdiv(T, BLOCK) * BLOCK <= T") == "T % BLOCK == 0"
    assert (
        divisible("blocks * BLOCK <= T and BLOCK * triton.cdiv(S, BLOCK) <= S")
        == "blocks * BLOCK <= T and S % BLOCK == 0"
    )
    assert divisible("triton.cdiv(T, 64) * BLOCK <= T") == "triton.cdiv(T, 64) * BLOCK <= T"
