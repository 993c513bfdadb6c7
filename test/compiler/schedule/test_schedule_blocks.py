"""Backwards have the block pointers and descriptors that the user wrote, where they are proved to say the same."""

from __future__ import annotations

import functools
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from schedule_plans import from_source, named_source, plans_of, run
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernel_agent.compiler.emit import triton_source
from kernel_agent.compiler.plan import BackwardPlan
from kernel_agent.compiler.schedule.blocks import in_blocks
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Kernel, Op, walk


@triton.jit
def pointed(A, B, G, C, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    p_a = tl.make_block_ptr(A, (M, K), (K, 1), (tl.program_id(0) * BM, 0), (BM, BK), (1, 0))
    p_b = tl.make_block_ptr(B, (K, N), (1, K), (0, tl.program_id(1) * BN), (BK, BN), (0, 1))
    p_g = tl.make_block_ptr(G, (M,), (1,), (tl.program_id(0) * BM,), (BM,), (0,))
    acc = tl.zeros((BM, BN), tl.float32)
    for _ in range(0, K, BK):
        acc = tl.dot(tl.load(p_a, boundary_check=(0, 1)), tl.load(p_b, boundary_check=(0, 1)), acc)
        p_a = tl.advance(p_a, (0, BK))
        p_b = tl.advance(p_b, (BK, 0))
    gate = tl.load(p_g, boundary_check=(0,))
    p_c = tl.make_block_ptr(C, (M, N), (N, 1), (tl.program_id(0) * BM, tl.program_id(1) * BN), (BM, BN), (1, 0))
    tl.store(p_c, acc * gate[:, None], boundary_check=(0, 1))


@triton.jit
def described(A, B, C, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    a_desc = tl.make_tensor_descriptor(A, [M, K], [K, 1], [BM, BK])
    b_desc = tl.make_tensor_descriptor(B, [K, N], [N, 1], [BK, BN])
    c_desc = tl.make_tensor_descriptor(C, [M, N], [N, 1], [BM, BN])
    m, n = tl.program_id(0) * BM, tl.program_id(1) * BN
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        acc = tl.dot(a_desc.load([m, k]), b_desc.load([k, n]), acc)
    c_desc.store([m, n], acc)


@triton.jit
def turned(A, B, C, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    a_desc = tl.make_tensor_descriptor(A, [M, K], [K, 1], [BM, BK])
    b_desc = tl.make_tensor_descriptor(B, [N, K], [M, 1], [BN, BK])
    c_desc = tl.make_tensor_descriptor(C, [M, N], [N, 1], [BM, BN])
    c_desc.store([0, 0], tl.dot(a_desc.load([0, 0]), b_desc.load([0, 0]).T))


@triton.jit
def with_one_border(X, Y, Z, M, N, PADDING: tl.constexpr, TWICE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    row = tl.program_id(0) * BM
    p_x = tl.make_block_ptr(X, (M, N), (N, 1), (row, 0), (BM, BN), (1, 0))
    x = tl.load(p_x, boundary_check=(0,), padding_option=PADDING)
    rows = row + tl.arange(0, BM)
    if TWICE:
        x += tl.load(X + rows[:, None] * N + tl.arange(0, BN)[None, :], mask=rows[:, None] < M, other=0.0)
    p_y = tl.make_block_ptr(Y, (M, N), (N, 1), (row, 0), (BM, BN), (1, 0))
    tl.store(Z + rows, tl.sum(tl.where((rows < M)[:, None], x * x, 0.0), 1), mask=rows < M)
    tl.store(p_y, tl.exp(x), boundary_check=(0,))


NUMBERS = dict.fromkeys("MNK", "i32")
TILES = {"BM": 32, "BN": 64, "BK": 16}


@functools.cache
def matmul(by_descriptors: bool) -> tuple[Kernel, BackwardPlan]:
    function, tensors = (described, "A B") if by_descriptors else (pointed, "A B G")
    types = dict.fromkeys([*tensors.split(), "C"], "*fp32")
    kernel = named_source(function, types | NUMBERS, **TILES)
    return kernel, plans_of(kernel, tensors, "C", 2)["split"]


@functools.cache
def bordered(padding: str, twice: bool) -> tuple[Kernel, BackwardPlan]:
    types = {**dict.fromkeys("XYZ", "*fp32"), "M": "i32", "N": "i32"}
    constants: dict[str, Any] = {"PADDING": padding, "TWICE": twice, "BM": 8, "BN": 16}
    kernel = from_source(with_one_border, types, **constants)
    return kernel, plans_of(kernel, "X", "Y Z", 1)["owned"]


def in_form(kernel: Kernel, plan: BackwardPlan) -> BackwardPlan:
    return replace(
        plan, steps=tuple(replace(step, kernel=in_blocks(step.kernel, kernel, plan).kernel) for step in plan.steps)
    )


def text_of(kernel: Kernel, plan: BackwardPlan) -> str:
    return "\n".join(triton_source(step.kernel).text for step in in_form(kernel, plan).steps)


def ops_of(plan: BackwardPlan, *codes: Code) -> list[Op]:
    return [op for step in plan.steps for op in walk(step.kernel.body) if op.code in codes]


@pytest.mark.parametrize("by_descriptors", [False, True], ids=["pointers", "descriptors"])
def test_what_is_moved_in_blocks_is_what_lanes_moved(by_descriptors: bool) -> None:
    # All tiles at the ends are cut: a border that is not asked about, or the wrong extent, reads or writes elsewhere,
    # and what nothing stores to is NaN.
    kernel, plan = matmul(by_descriptors)
    torch.manual_seed(0)
    M, N, K = 40, 72, 24
    a, b, g, d_c = (torch.randn(shape, dtype=torch.float64) for shape in ((M, K), (K, N), (M,), (M, N)))
    given: dict[str, Any] = {"A": a, "B": b, "M": M, "N": N, "K": K}
    if not by_descriptors:
        given |= {"B": b.T.contiguous(), "G": g}
    found, _ = run(in_form(kernel, plan), given, {"C": d_c}, (2, 2), **TILES)
    gate = torch.ones(M, dtype=torch.float64) if by_descriptors else g
    scaled = d_c * gate[:, None]
    torch.testing.assert_close(found["A"], scaled @ b.T)
    torch.testing.assert_close(found["B"], a.T @ scaled if by_descriptors else (a.T @ scaled).T)
    if not by_descriptors:
        torch.testing.assert_close(found["G"], (d_c * (a @ b)).sum(1))


def test_block_pointers_are_made_again_by_the_users_names() -> None:
    text = text_of(*matmul(False))
    assert "p_a = tl.make_block_ptr(A, (M, K), (K, 1), (" in text
    assert "p_b = tl.make_block_ptr(B, (K, N), (1, K), (" in text
    assert "(BK, BN), (0, 1))" in text
    assert "p_g = tl.make_block_ptr(G, (M,), (1,), (" in text
    assert "tl.store(p_da, " in text
    assert "tl.load(p_dc, " in text
    assert "tl.load(A +" not in text
    assert "tl.load(dC +" not in text


def test_descriptors_are_made_again_but_not_for_a_cotangent() -> None:
    # Nobody knows where a cotangent begins: a descriptor at an address that is no multiple of 16 bytes fails.
    text = text_of(*matmul(True))
    assert "b_desc = tl.make_tensor_descriptor(B, [K, N], [N, 1], [BK, BN])" in text
    assert "da_desc.store([" in text
    assert "db_desc.store([" in text
    assert "tl.load(dC +" in text
    assert "make_tensor_descriptor(dC" not in text


def test_a_descriptor_needs_rows_that_the_forward_has_one_for() -> None:
    # Of the backward's matrix of other rows nothing says that they begin at multiples of 16 bytes.
    # Here the rows of B are as far apart as the forward has them for no descriptor.
    _, plan = matmul(True)
    types = {**dict.fromkeys("ABC", "*fp32"), **NUMBERS}
    steps = [in_blocks(step.kernel, named_source(turned, types, **TILES), plan).kernel for step in plan.steps]
    found = {op.base.name for step in steps for op in step.ops if op.code is Code.DESCRIPTOR}
    assert found == {"A", "dA"}


def test_only_borders_that_the_forward_asks_about_are_asked_about() -> None:
    kernel, plan = bordered("zero", False)
    found = in_form(kernel, plan)
    accesses = ops_of(found, Code.LOAD_BLOCK, Code.STORE_BLOCK)
    assert accesses
    assert all(op.attributes["checked"] == (0,) for op in accesses)
    x, d_y, d_z = (torch.randn(*shape, dtype=torch.float64) for shape in ((20, 16), (20, 16), (20,)))
    given = {"X": x, "M": 20, "N": 16}
    gradients, _ = run(found, given, {"Y": d_y, "Z": d_z}, (3,), BM=8, BN=16)
    torch.testing.assert_close(gradients["X"], d_y * x.exp() + 2 * x * d_z[:, None])


def test_padding_that_is_not_zero_stays_with_a_mask() -> None:
    # A block pointer would have to be told; what is said here is zero.
    found = in_form(*bordered("nan", False))
    assert not [op for op in ops_of(found, Code.LOAD_BLOCK) if op.base.name == "X"]


def test_a_tensor_that_is_also_read_by_lanes_is_not_moved_in_blocks() -> None:
    found = in_form(*bordered("zero", True))
    assert not [op for op in ops_of(found, Code.LOAD_BLOCK, Code.STORE_BLOCK) if op.base.name in ("X", "dX")]


@pytest.mark.filterwarnings("ignore:tl.make_block_ptr is deprecated")
@pytest.mark.parametrize("whole", [False, True])
def test_borders_that_a_constexpr_spares_compile_either_way(whole: bool, tmp_path: Path) -> None:
    # Padding where no border is asked about lowers to a load with a padding and no mask, which no GPU compiles.
    kernel, plan = matmul(False)
    step = in_form(kernel, plan).steps[-1]
    source = triton_source(step.kernel)
    (spares,) = set(source.constexprs) - set(TILES)
    assert f'boundary_check=() if {spares} else (0,), padding_option="" if {spares} else "zero"' in source.text
    path = tmp_path / "kernel.py"
    path.write_text(source.module_text)
    function = runpy.run_path(str(path))[source.name]
    pointers = {value.name for value in step.kernel.arguments if value.is_pointer}
    types = {name: "*fp32" if name in pointers else "i32" for name in source.parameters}
    constants = {(source.parameters.index(name),): {**TILES, spares: whole}[name] for name in source.constexprs}
    made = ASTSource(function, {**types, **dict.fromkeys(source.constexprs, "constexpr")}, constants)
    assert triton.compile(made, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
