"""Launches that sum products start with tiles that registers and shared memory have room for."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kernel_agent.compiler.derive import drafts
from kernel_agent.compiler.stub.products import SHARED, Fitting, fitting
from kernel_agent.oracle import describe
from kernel_agent.pairs.userfile import read_file
from kernel_agent.sandbox import Sandbox

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("width", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("accumulators", [1, 2])
def test_accumulators_and_scores_of_attention_leave_registers_for_addresses(accumulators: int, width: int) -> None:
    # two accumulators of 128 by 64 and scores of 128 by 128 would be 512 registers of each of 128 threads
    found = fitting(width, accumulators, 2, 2)
    assert found is not None
    held = accumulators * found.owned * width + 2 * found.owned * found.walked
    assert held // (32 * found.warps) <= 200
    assert 2 * width * (2 * found.owned + 2 * found.stages * found.walked) <= SHARED[found.warps]


@pytest.mark.parametrize(("width", "stages"), [(64, 3), (128, 2)])
def test_kernels_with_two_accumulators_are_two_on_a_processor(width: int, stages: int) -> None:
    # 128 rows to a program of 4 warps would walk by 32, of 8 warps be alone there: both took longer on an H200
    found = fitting(width, 2, 2, 2)
    assert found == Fitting(owned=64, walked=64, warps=4, stages=stages)
    assert 2 * 2 * width * (2 * found.owned + 2 * found.stages * found.walked) <= 216 << 10


def test_one_accumulator_is_of_more_rows() -> None:
    # the kernel of dq loads two tiles a trip whatever it owns
    assert [fitting(width, 1, 2, 2) for width in (64, 128)] == [Fitting(128, 64, 4, 3), Fitting(128, 64, 8, 3)]


def test_operands_in_registers_take_room_there_and_none_in_shared_memory() -> None:
    # 128 rows would be 256 registers of each thread, or walk by 32; 64 rows of 128 columns leave room for two programs.
    assert [fitting(width, 1, 2, 2, 2) for width in (64, 128)] == [Fitting(64, 64, 4, 3)] * 2


def test_rows_that_no_tile_has_room_for_are_refused() -> None:
    assert fitting(4096, 1, 2, 2) is None


def test_a_product_owns_square_tiles_and_a_bias_narrow_ones(sandbox: Sandbox) -> None:
    # the forward's walk, 128 // element_size, is an extent of both gradients: taken over, dW had tiles of 64 by 128
    spec = describe(read_file(ROOT / "datasets/kernel_pairs/matmul/matmul_bias_gelu.py"), sandbox)
    (first, *_), _ = drafts(spec, sandbox, most=1)
    text = first.candidate.backward
    assert "= 128 // x.element_size(), 128, 128, 8, 3" in text, "dW walks over rows"
    assert "= 128, 128 // weight.element_size(), 128, 8, 3" in text, "dX walks over columns"
    # one program for every 128 columns would be 32 programs, each of which walks over all rows
    assert "BLOCK_M_DBIAS, BLOCK_N_DBIAS, num_warps_dbias, num_stages_dbias = 256, 32, 8, 3" in text, "dBias"


def test_kernels_of_a_product_have_names_without_numbers(sandbox: Sandbox) -> None:
    # Masks were mask_1 and mask_2, loops went over program_0 to num_programs_0: what they belong to has a name, and so
    # have the tiles and options of the second launch, which were BLOCK_M_2 and num_warps_2.
    source = read_file(ROOT / "datasets" / "kernel_pairs" / "matmul" / "matmul_nt.py")
    (draft,), _ = drafts(describe(source, sandbox), sandbox, most=1)
    kernels, _, backward = draft.candidate.backward.partition("def backward(")
    numbered = set(re.findall(r"\b[a-z]\w*_\d+\b", kernels))
    assert len(numbered) <= 1, numbered
    assert not re.findall(r"\b(?:BLOCK|num|programs|WHOLE|row)\w*_\d*\b", backward)
    assert "num_blocks_m" in kernels


@pytest.mark.parametrize(("size", "stages"), [(2, 3), (4, 2)], ids=["16 bits", "32 bits"])
def test_a_walk_over_wide_tiles_has_as_many_under_way_as_there_is_room_for(
    size: int, stages: int, sandbox: Sandbox
) -> None:
    # dW walks by the 128 rows that the forward owned: with the forward's three stages a launch in float32 asked an
    # H200 for 240 KiB of shared memory and failed.
    spec = describe(read_file(ROOT / "datasets/kernel_pairs/matmul/matmul_bias_relu_mask.py"), sandbox)
    (first, *_), _ = drafts(spec, sandbox, most=1)
    known: dict[str, Any] = {
        "x": SimpleNamespace(element_size=lambda: size),
        "BLOCK_K_DW": 128 // size,
        "BLOCK_N_DW": 128,
    }
    for name in ("stage_bytes_dw", "num_stages_dw"):
        (text,) = re.findall(rf"^ +{name} = (.+)$", first.candidate.backward, re.MULTILINE)
        known[name] = eval(text, dict(known))
    assert known["stage_bytes_dw"] == (128 * 128 // size + 128 * 128) * size
    assert known["num_stages_dw"] == stages
    assert stages * known["stage_bytes_dw"] <= 227 << 10


def test_a_step_over_half_as_many_bytes_as_a_tile_has_elements_is_counted(sandbox: Sandbox) -> None:
    # A byte holds two weights, so that trips load tiles of TILE_K // 2: such a formula was taken for a parameter, which
    # nothing gives, and all schedules with products of their own were lost.
    spec = describe(read_file(ROOT / "datasets/kernel_pairs/quant/nf4_lookup_linear.py"), sandbox)
    (first, *_), refused = drafts(spec, sandbox, most=1)
    assert (first.schedule, refused) == ("rows", [])
    (text,) = re.findall(r"^    stage_bytes = (\(.+?^    \))", first.candidate.backward, re.MULTILINE | re.DOTALL)
    known = {"TILE_M": 128, "TILE_N": 64, "codes": SimpleNamespace(element_size=lambda: 1)}
    assert eval(text, dict(known)) == 128 * 64 + 4 * 64 * (64 // 2)


def test_kernels_with_whole_rows_own_fewer_of_them_than_the_forward(sandbox: Sandbox) -> None:
    # 128 rows of 512 columns are 256 registers of each of 256 threads, and two such tiles more shared memory than there
    # is: launches that kept the forward's tiles could not run.
    source = read_file(ROOT / "datasets" / "kernel_pairs" / "loss_linear_fused" / "linear_ce_lse_recompute.py")
    (draft, *_), _ = drafts(describe(source, sandbox), sandbox, most=1)
    text = draft.candidate.backward
    assert "ALL_H = max(" in text
    assert "BLOCK_T_DX, BLOCK_V_DX, num_warps_dx, num_stages_dx = min(BLOCK_T, 64), min(BLOCK_V, 16), 8, 3" in text
    assert "BLOCK_T_DW, BLOCK_V_DW, num_warps_dw, num_stages_dw = min(BLOCK_T, 16), min(BLOCK_V, 64), 8, 3" in text
    assert "_linear_ce_bwd_dX[(triton.cdiv(T, BLOCK_T_DX),)]" in text
