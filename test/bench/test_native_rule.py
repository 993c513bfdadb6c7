"""The rule of the native tier, on kernels in faithful arithmetic: what the device computes, without a device.

Honest backwards of several kinds and dtypes pass; the same backwards with one narrower cast or sum do not.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch

from kernel_agent.bench.faithful_call import FaithfulCall, FaithfulVerdict
from kernel_agent.bench.honest import HonestError, honest_error, tile_rms
from kernel_agent.bench.launches import TF32_BITS
from kernel_agent.bench.native_rule import compare_native, half_ulp, honest_bits
from kernel_agent.bench.native_truth_child import truth_of
from kernel_agent.gate import Status
from kernel_agent.ir import standin
from kernel_agent.oracle.child import Stub
from kernel_agent.pairs.arguments import build_arguments
from kernel_agent.pairs.load import load_truth
from kernel_agent.pairs.observe import observe
from kernel_agent.pairs.sweep import smallest
from kernel_agent.pairs.userfile import read_file

ROOT = Path(__file__).resolve().parents[2]
LAYERNORM = ROOT / "test/gate/pairs/layernorm.py"
ATTENTION = ROOT / "datasets/kernel_pairs/attention/fa2_causal.py"
MATMUL = ROOT / "test/gate/pairs/matmul_bias.py"


def judged(path: Path, dot_bits: int | None, *changes: tuple[str, str]) -> FaithfulVerdict:
    """Run a pair's own kernels, or changed ones, in faithful arithmetic, and apply the rule to their gradients."""
    facts = read_file(path)
    changed = facts.source
    for old, new in changes:
        assert changed.count(old) == 1, old
        changed = changed.replace(old, new)
    with tempfile.TemporaryDirectory() as folder, standin():
        module = load_truth(facts, Path(folder), source=facts.source)
        stub = Stub(observe(facts), module, module.forward)
        entry = smallest(stub.spec.sweep)
        arguments = build_arguments(module, entry, device="cpu", seed=0)
        call = FaithfulCall(stub, entry, arguments, truth_of(stub, arguments, None, 0, dot_bits), dot_bits)
        return call.judge(load_truth(facts, Path(folder), source=changed))


@pytest.mark.parametrize(
    ("path", "dot_bits"), [(LAYERNORM, None), (MATMUL, TF32_BITS), (ATTENTION, 8)], ids=["fp32", "tf32", "bf16"]
)
def test_honest_kernels_pass(path: Path, dot_bits: int | None):
    seen = judged(path, dot_bits)
    assert seen.problem is None, seen.problem
    assert all(score.passed for score in seen.scores)


def test_a_cast_to_bfloat16_inside_of_a_float32_kernel_is_a_downgrade():
    old = "xh = tl.where(m, (x - mean) * rstd, 0.0)"
    seen = judged(LAYERNORM, None, (old, f"{old}.to(tl.bfloat16).to(tl.float32)"))
    assert seen.problem is not None
    assert seen.problem.status is Status.PRECISION_DOWNGRADE
    assert seen.ratio("x") > 100
    assert seen.ratio("weight") > 100
    assert seen.ratio("bias") <= 1


def test_sums_in_float16_are_a_downgrade():
    old = "dw = torch.zeros(N, device=x.device, dtype=torch.float32)"
    seen = judged(LAYERNORM, None, (old, old.replace("float32", "float16")))
    assert seen.problem is not None
    assert seen.problem.status is Status.PRECISION_DOWNGRADE
    assert seen.ratio("weight") > 100
    assert seen.ratio("x") <= 1


def test_products_coarser_than_the_forward_are_a_downgrade():
    # the forward's products are said to be exact float32 here; the backward's are tf32
    seen = judged(MATMUL, 24)
    assert seen.problem is not None
    assert seen.problem.status is Status.PRECISION_DOWNGRADE
    assert seen.ratio("x") > 10


def test_a_wrong_term_is_no_downgrade():
    seen = judged(LAYERNORM, None, ("(wg - xh * c1 - c2) * rstd", "(wg - xh * c1) * rstd"))
    assert seen.problem is not None
    assert seen.problem.status is Status.WRONG_GRADIENT
    assert seen.problem.grad == "x"


HONEST = HonestError(torch.full((1, 1), 1e-7, dtype=torch.float64), 1e-7, 4e-7)


def test_scaling_everything_changes_no_ratio():
    # an absolute tolerance anywhere would
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(16, 64, generator=generator, dtype=torch.float64)
    noise = truth + 3e-7 * torch.randn(16, 64, generator=generator, dtype=torch.float64)
    one = compare_native(noise.float(), truth, HONEST, 1.0, torch.float32, 24)
    for scale in (2.0**-40, 2.0**40):
        honest = HonestError(HONEST.tiles * scale, HONEST.relative, HONEST.largest * scale)
        other = compare_native((noise * scale).float(), truth * scale, honest, scale, torch.float32, 24)
        assert other.ratio == pytest.approx(one.ratio, rel=1e-6)


def test_one_element_far_off_is_seen_although_its_tile_is_large():
    truth = torch.ones(16, 64, dtype=torch.float64)
    given = truth.float()
    given[3, 5] += 4e-6
    assert not compare_native(given, truth, HONEST, 1.0, torch.float32, 24).passed


@pytest.mark.parametrize(
    ("shape", "place", "tile"),
    [
        ((3, 700, 1100), (2, 699, 1099), (2, 43, 17)),
        ((2, 3, 40, 70), (1, 2, 39, 69), (1, 2, 2, 1)),
        ((2500000,), (2499999,), (39062,)),
        ((5, 1), (4, 0), (0, 0)),
    ],
    ids=str,
)
def test_the_last_element_of_any_shape_is_looked_at(
    shape: tuple[int, ...], place: tuple[int, ...], tile: tuple[int, ...]
):
    # large gradients are compared slab by slab
    truth = torch.ones(shape, dtype=torch.float64)
    given = truth.float()
    honest = HonestError(torch.full_like(tile_rms(truth), 1e-7), 1e-7, 4e-7)
    assert compare_native(given, truth, honest, 1.0, torch.float32, 24).passed
    given[place] = 1.1
    seen = compare_native(given, truth, honest, 1.0, torch.float32, 24)
    assert not seen.passed
    assert seen.tile == tile
    given[place] = torch.nan
    seen = compare_native(given, truth, honest, 1.0, torch.float32, 24)
    assert seen.strange == 1
    assert seen.tile == tile


def test_nan_is_never_accepted_and_an_overflow_only_where_the_truth_overflows():
    truth = torch.ones(16, 64, dtype=torch.float64)
    truth[0, 0] = 1e6  # more than float16 holds
    given = truth.half()
    assert given[0, 0].isinf()
    honest = HonestError(torch.zeros(1, 1, dtype=torch.float64), 0.0, 0.0)
    assert compare_native(given, truth, honest, 1.0, torch.float16, 11).passed
    given[5, 60] = torch.nan
    broken = compare_native(given, truth, honest, 1.0, torch.float16, 11)
    assert not broken.passed
    assert broken.strange == 1


def test_half_an_ulp_is_that_of_the_dtype():
    assert half_ulp(torch.tensor(1.5, dtype=torch.float64), torch.bfloat16) == 2.0**-8
    assert half_ulp(torch.tensor(0.0, dtype=torch.float64), torch.float16) == 2.0**-25


def test_storage_rounding_alone_is_honest():
    truth = torch.randn(40, 70, dtype=torch.float64)
    seen = honest_error(truth, truth, torch.bfloat16)
    assert 1e-3 < seen.relative < 3e-3
    assert seen.tiles.shape == (3, 2)


@pytest.mark.parametrize("name", ["perceiver_latent_cross", "fa2_noncausal_d64"])
def test_honest_products_in_tf32_pass_where_few_of_them_make_a_tile(name: str):
    # draws that cut operands always alike, and that took what tf32 is off by for jumps, refused one at 1.98
    (path,) = (ROOT / "datasets/kernel_pairs").glob(f"*/{name}.py")
    seen = judged(path, TF32_BITS)
    assert seen.problem is None, seen.problem


def test_a_float32_gradient_beside_bfloat16_ones_is_held_to_the_arithmetic_of_the_call():
    # What it is made of is stored in bfloat16: held to float32, honest backwards were 3,630 times outside.
    assert honest_bits((torch.float32, torch.bfloat16), None) == 8
    assert honest_bits((torch.float32,), None) == 24
    assert honest_bits((torch.float32,), 11) == 11, "a product in tf32 is the forward's own"
