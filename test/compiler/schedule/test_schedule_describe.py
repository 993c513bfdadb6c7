"""Loops that compute between products load their tiles by tensor descriptors, if a constexpr says that they may."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import schedule_forwards
import torch
from schedule_kernels import made, matrix
from schedule_plans import Made, from_source, plans_of, run

from kernel_agent.compiler.emit import triton_source
from kernel_agent.compiler.schedule.describe import FITS, NAME, described, fits
from kernel_agent.compiler.schedule.forms import Launch
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.evaluate import evaluate
from kernel_agent.compiler.ssa.value import Kernel, Op, Value, walk
from kernel_agent.compiler.ssa.verify import verify
from kernel_agent.compiler.stub.lines import TILES

D, BM, BN = 16, 32, 16
ARGUMENTS = "Q:*f16 K:*f16 dOut:*f32 rows cols stride unit start"
N, WIDTH = 40, 16
BOTH = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


@functools.cache
def attention(causal: bool) -> Made:
    pointers = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "o_ptr", "lse_ptr"), "*fp32")
    types = {**pointers, "n": "i32", "m": "i32", "scale": "fp32"}
    kernel = from_source(schedule_forwards.attention, types, D=D, BM=BM, BN=BN, CAUSAL=causal, LAST_FIRST=False)
    return plans_of(kernel, "q_ptr k_ptr v_ptr", "o_ptr", 2, spare=True)


def say(kernel: Kernel, value: bool) -> None:
    """What the constexpr is when the kernel is evaluated."""
    for op in kernel.ops:
        if op.code is Code.CONST and op.attributes.get("symbol") == NAME:
            op.attributes["value"] = value


@BOTH
def test_both_ways_to_load_give_the_same_gradients(causal: bool) -> None:
    # 40 rows and 72 keys: the last tiles are cut, and what a descriptor reads beyond the last row must be zero.
    plan = attention(causal)["split"]
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, rows, D, dtype=torch.float64) for rows in (40, 72, 72))
    scores = 0.25 * (q @ k.mT)
    if causal:
        scores = scores.masked_fill(torch.ones(40, 72, dtype=torch.bool).triu(33), float("-inf"))
    given: dict[str, Any] = {"q_ptr": q, "k_ptr": k, "v_ptr": v, "n": 40, "m": 72, "scale": 0.25}
    given |= {"o_ptr": scores.softmax(-1) @ v, "lse_ptr": scores.logsumexp(-1)}
    cotangent = torch.randn(2, 40, D, dtype=torch.float64)
    found = []
    for by_descriptors in (True, False):
        for step in plan.steps:
            say(step.kernel, by_descriptors)
        found.append(run(plan, given, {"o_ptr": cotangent}, (2, 2))[0])
    assert found[0].keys() == {"q_ptr", "k_ptr", "v_ptr"}
    for name, gradient in found[0].items():
        torch.testing.assert_close(gradient, found[1][name])


def test_a_descriptor_is_made_once_and_its_tiles_are_loaded_by_row_and_column() -> None:
    text = triton_source(attention(False)["split"].steps[-1].kernel).text
    made_once, loop = text.split("    for ")
    assert made_once.count("_tiles = tl.make_tensor_descriptor(") == 2
    assert "tl.make_tensor_descriptor(" not in loop
    assert f"        if {NAME}:\n" in loop
    assert loop.count(".load([row_start, 0])") == 2


def test_a_launch_is_asked_for_the_strides_of_all_that_is_loaded() -> None:
    text = attention(True)["split"].settings[NAME]
    asked: list[tuple[object, ...]] = []
    tensors = {name: name for name in ("q_ptr", "k_ptr", "v_ptr", "do")}
    eval(text, {FITS: lambda *matrices: asked.extend(matrices), "m": 7, "n": 5, "D": D, **tensors})
    # Heads of keys are 7 rows of D elements apart, those of queries 5; D itself is even whatever is passed.
    heads = {"k_ptr": 7, "v_ptr": 7, "q_ptr": 5, "do": 5}
    assert asked == [(name, (), (rows * D,)) for name, rows in heads.items()]


# --- what is no tile of a matrix


def scores(
    b: Builder,
    q: Value,
    k: Value,
    out: Value,
    rows: Value,
    cols: Value,
    stride: Value,
    unit: Value,
    start: Value,
    *,
    other: float = 0.0,
    skewed: bool = False,
    between: bool = True,
    heads: bool = False,
) -> None:
    """out += exp(k q') q over tiles of rows of q, or with `between` unset out += k' q alone. `heads`: each trip has a
    matrix of its own."""
    lanes, dims = b.arange(0, 16, "B", name="lanes"), b.arange(0, 16, "B", name="dims")
    own = b.load(k, matrix(b, lanes, stride, dims, b.const(1)))

    def body(index: Value, carries: list[Value]) -> list[Value]:
        at = b.add(index, lanes)
        inside = b.compare("lt", b.expand(b.add(at, dims) if skewed else at, 1), rows)
        mask = b.logical_and(inside, b.compare("lt", b.expand(dims, 0), cols))
        begin = b.mul(index, start) if heads else start
        tile = b.load(q, b.add(begin, matrix(b, at, stride, dims, unit)), mask, b.const(other, "f16"), "tile")
        if not between:
            return [b.add(carries[0], b.dot(own, tile))]
        weights = b.cast(b.unary(Code.EXP, b.dot(own, b.trans(tile, (1, 0)))), "f16")
        return [b.add(carries[0], b.dot(weights, tile))]

    bounds = (b.const(0), rows, b.const(16, symbol="B"))
    (total,) = b.loop(bounds, [b.whole(b.const(0.0, "f32"), (16, 16))], body, index_name="first", names=["total"])
    b.store(out, matrix(b, lanes, b.const(16, symbol="B"), dims, b.const(1)), total)


def kernel(**choices: Any) -> Kernel:
    return made(ARGUMENTS, functools.partial(scores, **choices), B=16)


def blocks_in_loops(one: Kernel) -> list[Op]:
    """Loads by descriptors."""
    return [
        op for loop in one.ops if loop.code is Code.FOR for op in walk(loop.blocks[0]) if op.code is Code.LOAD_BLOCK
    ]


def test_rows_and_columns_beyond_the_matrix_are_zero() -> None:
    # 40 rows are two tiles and a half, of 16 columns 13 belong to the matrix: the rest of memory holds other numbers.
    plain, found = kernel(), described(kernel(), Launch.like_forward(1))
    assert found is not None
    verify(found.kernel)
    assert len(blocks_in_loops(found.kernel)) == 1
    torch.manual_seed(0)
    q, k = torch.randn(64, 16, dtype=torch.float64), torch.randn(16, 16, dtype=torch.float64)
    totals = []
    for one in (plain, found.kernel):
        total = torch.zeros(16, 16, dtype=torch.float64)
        numbers = {"rows": N, "cols": 13, "stride": WIDTH, "unit": 1, "start": 0}
        evaluate(one, (1,), {"Q": q, "K": k, "dOut": total, **numbers})
        totals.append(total)
    torch.testing.assert_close(*totals)


def test_strides_and_starts_of_a_matrix_are_asked_for() -> None:
    # A stride along rows must be 1, and every row must begin at a multiple of 16 bytes.
    found = described(kernel(), Launch.like_forward(1))
    assert found is not None
    assert fits([found]) == f"{FITS}((Q, (unit,), (start, stride)))"


@pytest.mark.parametrize(
    "choices",
    [{"other": 1.0}, {"skewed": True}, {"between": False}, {"heads": True}],
    ids=["not zero outside", "an edge that is no row", "nothing between products", "a matrix for each trip"],
)
def test_other_loads_are_left_to_pointers(choices: dict[str, Any]) -> None:
    # A descriptor gives zero outside and has straight edges; where products alone are summed, nothing is in their way.
    # One that every trip makes anew is a loop that Triton 3.6 does not compile for sm_90.
    assert described(kernel(**choices), Launch.like_forward(1)) is None


# --- what the backward asks


def answer(step: int = 64, unit: int = 1, dtype: torch.dtype = torch.float16, capability: int = 9) -> tuple[bool, int]:
    """Of the function in the backward, and how often it provided memory."""
    provided: list[Any] = []
    cuda = SimpleNamespace(get_device_capability=lambda _: (capability, 0))
    scope: dict[str, Any] = {
        "torch": SimpleNamespace(cuda=cuda, empty=torch.empty, int8=torch.int8),
        "triton": SimpleNamespace(set_allocator=provided.append),
    }
    exec(TILES, scope)
    return scope[FITS]((torch.zeros(64, dtype=dtype), (unit,), (step, 128))), len(provided)


def test_aligned_rows_of_16_bits_can_be_loaded_and_get_memory() -> None:
    assert answer() == (True, 1)


@pytest.mark.parametrize(
    "given",
    [{"step": 65}, {"unit": 2}, {"dtype": torch.float32}, {"capability": 8}],
    ids=["rows at odd places", "gaps between elements", "32 bits", "before Hopper"],
)
def test_anything_else_is_loaded_by_pointers(given: dict[str, Any]) -> None:
    # A descriptor of a row at an odd place would load from elsewhere, or end the context.
    assert answer(**given) == (False, 0)
