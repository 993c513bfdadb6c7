"""A right gradient may take any side at a kink of the forward; everywhere else, and of many elements, it may not."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernel_agent.bench.honest import HonestError, tile_rms
from kernel_agent.bench.kinks import MOVE, at_kinks, moves, remarks
from kernel_agent.bench.kinks_child import moved_gradients
from kernel_agent.bench.native import judge_native
from kernel_agent.bench.native_truth import Inputs, NativeGradient, NativeTruth
from kernel_agent.bench.native_truth_child import truth_of
from kernel_agent.data import pairs_root
from kernel_agent.gate import Status
from kernel_agent.gate.judge import Problem
from kernel_agent.ir import ExecOptions, Numerics, execute, standin
from kernel_agent.oracle.child import Stub
from kernel_agent.pairs.arguments import build_arguments
from kernel_agent.pairs.load import load_truth
from kernel_agent.pairs.observe import observe
from kernel_agent.pairs.spec import ShapeEntry
from kernel_agent.pairs.sweep import smallest
from kernel_agent.pairs.userfile import read_file

BCE = pairs_root() / "loss_ce" / "bce_logits_posweight.py"
KINK = (1, 3)


@dataclass(frozen=True)
class AtZero:
    """Binary cross-entropy with one logit at exactly zero, where its |x| has a kink, and what its own kernels give."""

    truth: NativeTruth
    given: dict[str, Tensor]
    moved: list[dict[str, Tensor]]
    names: tuple[str, ...]

    def judged(self, given: dict[str, Tensor], kinks: dict[str, Tensor]) -> Problem | None:
        """What the rule of the native tier says."""
        tensors = {str(place): given[name] for place, name in enumerate(self.names)}
        return judge_native(("tensor",) * len(self.names), tensors, self.truth, None, self.names, kinks)[0]

    @property
    def kinks(self) -> dict[str, Tensor]:
        """As the rig finds them."""
        found = {
            grad.name: at_kinks(grad.truth, [grads[grad.name] for grads in self.moved]) for grad in self.truth.grads
        }
        return {name: where for name, where in found.items() if where is not None}


@pytest.fixture(scope="module")
def at_zero() -> AtZero:
    facts = read_file(BCE)
    spec = observe(facts)
    with tempfile.TemporaryDirectory() as folder, standin():
        module = load_truth(facts, Path(folder), source=facts.source)
        stub = Stub(spec, module, module.forward)
        entry = smallest(spec.sweep)
        arguments = build_arguments(module, entry, device="cpu", seed=0)
        arguments.args[0][KINK] = 0.0
        truth = truth_of(stub, arguments, None, 0, None)
        moved = [moved_gradients(stub, arguments, truth.cotangents, 0, sign) for sign in (1, -1)]
        faithful = ExecOptions(sanitize=False, numerics=Numerics.FAITHFUL)
        saved = execute(module.forward, arguments.args, arguments.kwargs, options=faithful).result[1]
        result = execute(module.backward, (tuple(saved), *truth.cotangents), options=faithful).result
    dtypes = {grad.name: grad.dtype for grad in truth.grads}
    given = {
        name: grad.detach().as_subclass(Tensor).to(dtypes[name]) for name, grad in zip(spec.grads, result, strict=True)
    }
    native = NativeTruth(
        entry.label,
        Inputs(entry, {}, [], None, {}),
        tuple(NativeGradient(g.name, g.truth, g.dtype, g.scale, g.honest) for g in truth.grads),
    )
    return AtZero(native, given, moved, spec.grads)


def test_a_right_gradient_with_another_convention_at_one_kink_passes(at_zero: AtZero):
    problem = at_zero.judged(at_zero.given, {})
    assert problem is not None, "autograd gives |x| no slope at 0, the kernel the mean of both sides"
    assert problem.grad == "logits"
    (where,) = [found for name, found in at_zero.kinks.items() if name == "logits"]
    assert where.nonzero().tolist() == [list(KINK)]
    assert at_zero.judged(at_zero.given, at_zero.kinks) is None


def test_the_same_wrong_value_away_from_a_kink_stays_red(at_zero: AtZero):
    truth = next(grad for grad in at_zero.truth.grads if grad.name == "logits").truth
    wrong = {name: grad.clone() for name, grad in at_zero.given.items()}
    wrong["logits"][2, 2] += (at_zero.given["logits"] - truth)[KINK].to(wrong["logits"].dtype)
    problem = at_zero.judged(wrong, at_zero.kinks)
    assert problem is not None
    assert problem.grad == "logits"


def test_a_wrong_row_through_a_kink_stays_red(at_zero: AtZero):
    wrong = {name: grad.clone() for name, grad in at_zero.given.items()}
    wrong["logits"][KINK[0]] = 0.0
    problem = at_zero.judged(wrong, at_zero.kinks)
    assert problem is not None
    assert problem.status in (Status.WRONG_GRADIENT, Status.PRECISION_DOWNGRADE)


def test_no_element_of_a_smooth_gradient_is_left_out(at_zero: AtZero):
    assert "pos_weight" not in at_zero.kinks, "the loss is smooth in the weight, and nearly so in all other logits"


def test_few_jumps_are_kinks_and_many_are_a_mistake_of_somebody():
    truth = torch.ones(1000, 1000, dtype=torch.float64)
    moved = truth.clone()
    moved.view(-1)[:10] = 2.0
    found = at_kinks(truth, [truth, moved])
    assert found is not None
    assert int(found.sum()) == 10
    moved.view(-1)[:11] = 2.0
    assert at_kinks(truth, [truth, moved]) is None, "more than one in a hundred thousand"
    assert at_kinks(truth, [truth * (1 + 2.0**-13)]) is None, "a slope is no jump"
    assert at_kinks(truth, []) is None


def test_one_element_may_be_left_out_of_a_small_gradient_and_two_may_not():
    truth = torch.ones(4, dtype=torch.float64)
    assert at_kinks(truth, [torch.tensor([1.0, 5.0, 1.0, 1.0], dtype=torch.float64)]) is not None
    assert at_kinks(truth, [torch.tensor([1.0, 5.0, 5.0, 1.0], dtype=torch.float64)]) is None


def test_what_is_not_finite_at_a_kink_may_be_left_out():
    truth = torch.ones(64, dtype=torch.float64)
    moved = truth.clone()
    moved[7] = torch.inf
    kinks = {"x": at_kinks(truth, [moved])}
    given = truth.float()
    given[7] = torch.nan
    honest = HonestError(torch.zeros_like(tile_rms(truth)), 1e-7, 1e-7)
    entry = ShapeEntry(dims={"N": 64})
    native = NativeTruth(
        "N=64", Inputs(entry, {}, [], None, {}), (NativeGradient("x", truth, torch.float32, 1.0, honest),)
    )
    before, _ = judge_native(("tensor",), {"0": given}, native, None, ("x",))
    assert before is not None
    assert before.status is Status.NOT_FINITE
    assert judge_native(("tensor",), {"0": given}, native, None, ("x",), kinks)[0] is None  # type: ignore[arg-type]


def test_a_zero_is_moved_to_both_sides_and_by_less_than_anything_is_rounded_by():
    x = torch.tensor([0.0, 1.0, -3.0, torch.inf])
    step = moves(x, torch.Generator().manual_seed(0))
    size = float((10 / 4) ** 0.5)
    assert step[:3].abs().tolist() == pytest.approx([MOVE * size, MOVE * size, MOVE * 3.0])
    assert step[3] == 0.0
    signs = moves(torch.ones(1000), torch.Generator().manual_seed(0)).sign()
    assert 300 < int((signs > 0).sum()) < 700


def test_what_was_left_out_is_told():
    found = torch.zeros(10, dtype=torch.bool)
    found[3] = True
    (said,) = remarks("N=10", {"x": found})
    assert said == "N=10: 1 of 10 elements of the gradient of `x` are left out: the forward has a kink there"
