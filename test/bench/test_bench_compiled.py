"""What ptxas says of a kernel, on a machine that need not have a GPU."""

import pytest
import triton
import triton.language as tl

from kernel_agent.bench.compiled import CompiledKernel, compile_build, resources
from kernel_agent.ir.capture.build import Build


@triton.jit
def product(A, B, C, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rows, cols, inner = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        a = tl.load(A + rows[:, None] * K + k + inner[None, :])
        b = tl.load(B + (k + inner)[:, None] * BN + cols[None, :])
        acc = tl.dot(a, b, acc)
    tl.atomic_add(C + rows[:, None] * BN + cols[None, :], acc)


@triton.jit
def product_again(A, B, C, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rows, cols, inner = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):  # the same under other names, on other lines
        left = tl.load(A + rows[:, None] * K + k + inner[None, :])
        right = tl.load(B + (k + inner)[:, None] * BN + cols[None, :])
        total = tl.dot(left, right, total)

    tl.atomic_add(C + rows[:, None] * BN + cols[None, :], total)


def compiled(kernel, block_m: int, **options: int) -> CompiledKernel:
    types = {"A": "*fp16", "B": "*fp16", "C": "*fp32", "K": "i32", **dict.fromkeys(("BM", "BN", "BK"), "constexpr")}
    return compile_build(Build(kernel, types, {(4,): block_m, (5,): 64, (6,): 32}, (0, 1, 2, 3), options))


def test_registers_shared_memory_and_atomics_are_read_off_the_cubin():
    found = compiled(product, 64)
    assert found.fits
    assert 16 < found.registers <= 255
    assert found.shared_bytes >= 2 * 64 * 32 * 2, "a tile of each operand lies in shared memory"
    assert found.atomics >= 1
    assert found.wgmma
    assert found.async_copies
    assert found.spills == 0


def test_a_tile_too_large_for_its_warps_spills():
    # 512 x 64 accumulators on 4 warps are 256 registers per thread for them alone.
    found = compiled(product, 512, num_warps=4, num_stages=1)
    assert found.registers == 255
    assert found.spill_stores > 0
    assert found.stack_bytes > 0


def test_small_tiles_do_not_use_warp_groups():
    found = compiled(product, 16)
    assert found.mma
    assert not found.wgmma


def test_too_many_stages_do_not_fit_shared_memory():
    found = compiled(product, 128, num_stages=24)
    assert not found.fits
    assert not found.problem


def test_what_triton_refuses_is_told_in_one_line():
    found = compiled(product, 48)
    assert "power of 2" in found.problem
    assert not found.fits


def test_names_and_lines_do_not_change_the_digest_of_the_code():
    assert compiled(product, 16).ptx == compiled(product_again, 16).ptx
    assert compiled(product, 16).ptx != compiled(product, 32).ptx


def test_a_log_without_registers_is_refused():
    with pytest.raises(ValueError, match="registers"):
        resources("ptxas info    : 0 bytes gmem")
