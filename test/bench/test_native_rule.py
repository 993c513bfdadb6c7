"""The rule of the native tier, on kernels in faithful arithmetic: what the device computes, without a device.

Honest backwards of several kinds and dtypes pass; the same backwards with one narrower cast or sum do not.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from kernel_agent.bench.honest import HonestError, NarrowArithmetic, cut, honest_error, tile_rms
from kernel_agent.bench.launches import TF32_BITS
from kernel_agent.bench.native import judge_native
from kernel_agent.bench.native_rule import compare_native, half_ulp
from kernel_agent.bench.native_truth import Inputs, NativeGradient, NativeTruth
from kernel_agent.bench.native_truth_child import Gradient, truth_of
from kernel_agent.gate import GradientScore, Status
from kernel_agent.gate.judge import Problem
from kernel_agent.ir import ExecOptions, Numerics, execute, standin
from kernel_agent.oracle.child import Stub
from kernel_agent.pairs.arguments import build_arguments
from kernel_agent.pairs.load import load_truth
from kernel_agent.pairs.observe import observe
from kernel_agent.pairs.sweep import read_sweep, smallest
from kernel_agent.pairs.userfile import read_file

ROOT = Path(__file__).resolve().parents[2]
LAYERNORM = ROOT / "test/gate/pairs/layernorm.py"
ATTENTION = ROOT / "datasets/kernel_pairs/attention/fa2_causal.py"
MATMUL = ROOT / "test/gate/pairs/matmul_bias.py"
SOFTMAX = ROOT / "examples/softmax.py"


@dataclass(frozen=True)
class Judged:
    """What the rule says of one call."""

    problem: Problem | None
    scores: tuple[GradientScore, ...]

    def ratio(self, grad: str) -> float:
        """Worst error over the allowed one."""
        return next(score.ratio for score in self.scores if score.grad == grad)


def judged(path: Path, dot_bits: int | None, *changes: tuple[str, str]) -> Judged:
    """Run a pair's own kernels, or changed ones, in faithful arithmetic, and apply the rule to their gradients."""
    facts = read_file(path)
    spec = observe(facts)
    changed = facts.source
    for old, new in changes:
        assert changed.count(old) == 1, old
        changed = changed.replace(old, new)
    with tempfile.TemporaryDirectory() as folder, standin():
        module = load_truth(facts, Path(folder), source=facts.source)
        stub = Stub(spec, module, module.forward)
        entry = smallest(spec.sweep)
        arguments = build_arguments(module, entry, device="cpu", seed=0)
        truth = truth_of(stub, arguments, None, 0, dot_bits)
        faithful = ExecOptions(sanitize=False, numerics=Numerics.FAITHFUL)
        saved = execute(module.forward, arguments.args, arguments.kwargs, options=faithful).result[1]
        candidate = load_truth(facts, Path(folder), source=changed)
        result = execute(candidate.backward, (tuple(saved), *truth.cotangents), options=faithful).result
    grads = result if isinstance(result, (tuple, list)) else (result,)
    tensors = {
        f"{again}{place}": grad.detach().as_subclass(torch.Tensor).to(wanted.dtype)
        for again in ("", "again.")
        for place, grad in enumerate(grads)
        for wanted in truth.grads
        if wanted.name == spec.grads[place]
    }
    native = NativeTruth(
        entry.label,
        Inputs(entry, {}, [], dot_bits, {}),
        tuple(NativeGradient(g.name, g.truth, g.dtype, g.scale, g.honest) for g in truth.grads),
        notes=truth.notes,
    )
    return Judged(*judge_native(("tensor",) * len(grads), tensors, native, dot_bits, spec.grads))


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


@dataclass(frozen=True)
class Weights:
    """Softmax of rows in some of which one weight is almost the whole sum, and what its gradient is held against."""

    y: torch.Tensor
    """Exact."""
    dy: torch.Tensor
    grad: Gradient

    def ratio(self, y: torch.Tensor) -> float:
        """Of the gradient that float32 arithmetic makes of stored weights, as torch does."""
        y, dy = y.float(), self.dy.float()
        dx = (dy - (dy * y).sum(1, keepdim=True)) * y
        grad = self.grad
        return compare_native(dx, grad.truth, grad.honest, grad.scale, torch.float32, 24).ratio


@pytest.fixture(scope="module")
def weights() -> Weights:
    facts = read_file(SOFTMAX)
    with tempfile.TemporaryDirectory() as folder, standin():
        module = load_truth(facts, Path(folder), source=facts.source)
        stub = Stub(observe(facts), module, module.softmax)
        (entry,) = read_sweep(({"M": 512, "N": 1024},), SOFTMAX)
        arguments = build_arguments(module, entry, device="cpu", seed=0)
        truth = truth_of(stub, arguments, None, 0, None)
    (dy,) = truth.cotangents
    assert dy is not None
    return Weights(torch.softmax(arguments.args[0].double(), 1), dy, truth.grads[0])


def test_weights_that_are_rounded_once_are_honest_where_one_is_almost_the_whole_sum(weights: Weights):
    # dy - sum(dy * y) is the difference of two like numbers there: held to one computation that was right by luck, even
    # exact weights, rounded to float32, are red, and so is the gradient that torch computes from them.
    assert weights.ratio(weights.y) < 0.8


def test_weights_with_five_bits_less_are_a_downgrade(weights: Weights):
    noise = torch.rand(weights.y.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert weights.ratio(weights.y * (1 + 2.0**-18 * (2 * noise - 1))) > 3


def test_drawn_functions_are_off_by_no_more_than_the_hardware_and_exact_where_that_is():
    values = torch.linspace(-3.0, 3.0, 1001, dtype=torch.float64)
    exact = torch.exp2(values)

    def drawn(seed: int) -> torch.Tensor:
        with NarrowArithmetic(None, narrow=True, draw=seed):
            return torch.exp2(values)

    first = drawn(0)
    assert torch.equal(first, drawn(0))
    assert not torch.equal(first, drawn(1))
    missed = (first / exact - 1).abs()
    assert 2.0**-23 < float(missed.max()) <= 2.0**-22 + 2.0**-24
    whole = values == values.round()
    assert torch.equal(first[whole], exact[whole]), "powers of two need no approximation"


def test_drawn_errors_need_no_generator_of_the_device():
    # Inside of the executor a generator of the GPU is one of the CPU: all float32 entries were left unproven there.
    with NarrowArithmetic(None, narrow=True, draw=0):
        found = torch.exp2(torch.empty(3, 4, dtype=torch.float64, device="meta"))
    assert found.shape == (3, 4)


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


def test_cutting_keeps_the_asked_bits_at_any_exponent():
    values = torch.tensor([1.0 + 2.0**-8, 1.0 + 2.0**-7, 3e-30, float("inf"), 0.0], dtype=torch.float32)
    kept = cut(values, 8)
    assert kept[0] == 1.0, "to even"
    assert kept[1] == 1.0 + 2.0**-7
    assert abs(kept[2] / 3e-30 - 1) < 2.0**-8, "no underflow"
    assert kept[3].isinf()
    assert torch.equal(cut(values, 24), values)


def test_half_an_ulp_is_that_of_the_dtype():
    assert half_ulp(torch.tensor(1.5, dtype=torch.float64), torch.bfloat16) == 2.0**-8
    assert half_ulp(torch.tensor(0.0, dtype=torch.float64), torch.float16) == 2.0**-25


def test_storage_rounding_alone_is_honest():
    truth = torch.randn(40, 70, dtype=torch.float64)
    seen = honest_error(truth, truth, torch.bfloat16)
    assert 1e-3 < seen.relative < 3e-3
    assert seen.tiles.shape == (3, 2)
