"""What programs compute once in a loop lies in memory for the owners that need it."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
import schedule_forwards
import torch
from schedule_kernels import add_to, made
from schedule_plans import Made, agree, atomics, from_source, plans_of, run

from kernel_agent.compiler.schedule.forms import Launch
from kernel_agent.compiler.schedule.share import shared
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Kernel, Value

D, BM, BN = 16, 32, 16


@functools.cache
def weighted_means() -> Made:
    pointers = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "o_ptr"), "*fp32")
    kernel = from_source(schedule_forwards.weighted_means, {**pointers, "n": "i32"}, D=D, BM=BM, BN=BN)
    return plans_of(kernel, "q_ptr k_ptr v_ptr", "o_ptr", 2, spare=True)


@pytest.mark.parametrize("n", [64, 40])
def test_sums_that_nothing_stores_reach_owners_in_rows_of_their_programs(n: int) -> None:
    # No address of the forward has the rows of `norm`: without memory of their own, keys and values had no owner.
    torch.manual_seed(0)
    q, k, v = leaves = [torch.randn(2, n, D, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    weights = 1.0 / ((q @ k.mT) ** 2 + 1.0)
    o, do = weights / weights.sum(-1, keepdim=True) @ v, torch.randn(2, n, D, dtype=torch.float64)
    names = ("q_ptr", "k_ptr", "v_ptr")
    expected = dict(zip(names, torch.autograd.grad(o, leaves, do), strict=True))
    given = dict(zip(names, (leaf.detach() for leaf in leaves), strict=True))
    given |= {"o_ptr": o.detach(), "n": n}
    found, counts = run(weighted_means()["split"], given, {"o_ptr": do}, (-(-n // BM), 2))
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-6)
    assert all(counts[-1].owned(name) for name in ("dk", "dv"))


def test_owners_load_sums_rather_than_loop_for_them() -> None:
    plan = weighted_means()["split"]
    assert atomics(plan) == []
    owner = plan.steps[-1].kernel
    assert {op.blocks[0].arguments[0].name for op in owner.ops if op.code is Code.FOR} == {"program_0"}


def test_programs_counted_from_the_end_own_their_rows_on_the_grid_of_the_forward() -> None:
    # Their addresses fall where numbers of programs rise, which no proof of strides takes.
    plan = weighted_means()["owned"]
    assert set(atomics(plan)) == {"dk", "dv"}
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(2, 40, D, dtype=torch.float64) for _ in range(4))
    weights = 1.0 / ((q @ k.mT) ** 2 + 1.0)
    given = {"q_ptr": q, "k_ptr": k, "v_ptr": v, "n": 40, "o_ptr": weights / weights.sum(-1, keepdim=True) @ v}
    agree(weighted_means(), given, {"o_ptr": do}, (2, 2))


def rounded_sums(*, both: bool) -> Kernel:
    """Each program sums columns, and adds the sums, rounded, to all rows of dY; with `both`, times the unrounded."""

    def build(b: Builder, x: Value, w: Value, dy: Value, n: Value) -> None:
        cols = b.add(b.mul(b.program_id(0), b.const(BN, "i32", "BN")), b.arange(0, BN, "BN"))

        def add(row: Value, carried: Sequence[Value]) -> Sequence[Value]:
            return [b.add(carried[0], b.load(x, b.add(b.mul(row, n), cols)))]

        (total,) = b.loop((b.const(0), n, b.const(1)), [b.whole(b.const(0.0, "f32"), (BN,))], add)
        rounded = b.cast(total, "bf16")

        def body(row: Value, _: Sequence[Value]) -> Sequence[Value]:
            scaled = b.cast(b.mul(rounded, b.load(w, row)), "f32")
            add_to(b, dy, b.add(b.mul(row, n), cols), b.mul(scaled, total) if both else scaled)
            return []

        b.loop((b.const(0), n, b.const(1)), [], body)

    return made("X:*f32 W:*bf16 dY:*f32 n", build, BN=BN)


@pytest.mark.parametrize(("both", "element"), [(False, "bf16"), (True, "f32")])
def test_what_is_used_rounded_alone_is_kept_rounded(both: bool, element: str) -> None:
    # In float32 it takes twice the memory, which every owner reads; where both are used, one of them is enough.
    kept = shared(rounded_sums(both=both), Launch.like_forward(1))
    assert [one.buffer.element for one in kept] == [element]


def two_of_one_name(named: str) -> Kernel:
    """Each program computes two tiles, which have one name or none, and adds products of both to all rows of dY."""

    def build(b: Builder, x: Value, dy: Value, n: Value) -> None:
        cols = b.add(b.mul(b.program_id(0), b.const(BN, "i32", "BN")), b.arange(0, BN, "BN"))
        tile, other = b.load(x, cols), b.load(x, b.add(cols, n))
        kept = [b.add(b.unary(Code.EXP, tile), other), b.sub(b.unary(Code.EXP, tile), other)]
        for one in kept:
            one.name = named

        def body(row: Value, _: Sequence[Value]) -> Sequence[Value]:
            for one in kept:
                add_to(b, dy, b.add(b.mul(row, n), cols), one)
            return []

        b.loop((b.const(0), n, b.const(1)), [], body)

    return made("X:*f32 dY:*f32 n", build, BN=BN)


@pytest.mark.parametrize(
    ("named", "kept"),
    [
        pytest.param("d_norm", ["saved_d_norm", "saved_d_norm_2"], id="one name"),
        pytest.param("", ["saved_difference", "saved_total"], id="no name"),
    ],
)
def test_what_is_kept_has_a_name_that_tells_it_apart(named: str, kept: list[str]) -> None:
    # They were `saved_d_norm_` and `saved_tile_`, and where those begin `saved_tile__start`.
    found = shared(two_of_one_name(named), Launch.like_forward(1))
    assert sorted(one.buffer.name for one in found) == kept


def test_a_name_that_the_forward_has_is_not_taken() -> None:
    kernel = two_of_one_name("d_norm")
    kernel.arguments.append(Value("*f32", (), "saved_d_norm"))
    found = shared(kernel, Launch.like_forward(1))
    assert sorted(one.buffer.name for one in found) == ["saved_d_norm_2", "saved_d_norm_3"]
