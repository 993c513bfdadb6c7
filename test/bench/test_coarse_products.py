"""Products in tf32 round so much that what is zero or at a kink in exact arithmetic is neither in any honest kernel."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from kernel_agent.bench.draws import Draws
from kernel_agent.bench.faithful_call import FaithfulCall, FaithfulVerdict
from kernel_agent.bench.honest import HonestError
from kernel_agent.bench.native_rule import compare_native
from kernel_agent.gate import Status
from kernel_agent.ir import standin
from kernel_agent.oracle.child import Stub
from kernel_agent.pairs.arguments import build_arguments
from kernel_agent.pairs.load import load_truth
from kernel_agent.pairs.observe import observe
from kernel_agent.pairs.userfile import read_file

PAIRS = Path(__file__).resolve().parents[2] / "datasets/kernel_pairs"
COARSE_SCORES = "ds = p * (tl.dot(do.to(tl.float8e5).to(tl.float32), tl.trans(v)) - delta[:, None])"


@dataclass(frozen=True)
class Called:
    """One call of a pair's forward."""

    source: str
    folder: Path
    call: FaithfulCall

    def judged(self, old: str = "", new: str = "") -> FaithfulVerdict:
        """The pair's backward before the rule, with one change."""
        assert not old or self.source.count(old) == 1
        with standin():
            facts = self.call.stub.spec.facts
            folder = Path(tempfile.mkdtemp(dir=self.folder))
            return self.call.judge(load_truth(facts, folder, source=self.source.replace(old, new)))

    def drawn(self, number: int) -> dict[str, float]:
        """Relative errors of one draw of honest arithmetic."""
        exact = {grad.name: grad.truth for grad in self.call.truth.grads}
        draws = Draws(self.call.stub, self.call.arguments, self.call.truth.cotangents, exact, self.call.dot_bits)
        with standin():
            found = draws.gradients(number)
        return {name: float((found[name] - truth).norm() / truth.norm()) for name, truth in exact.items()}


def called(path: Path, entry: int, folder: Path) -> Called:
    """Compute the truth at one entry of SWEEP."""
    facts = read_file(path)
    with standin():
        module = load_truth(facts, folder, source=facts.source)
        stub = Stub(observe(facts), module, module.forward)
        chosen = stub.spec.sweep[entry]
        call = FaithfulCall.of(stub, chosen, build_arguments(module, chosen, device="cpu", seed=0))
    return Called(facts.source, folder, call)


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory) -> Called:
    """Attention whose first token sees one key, in tiles of one token: the exact gradient of its query is zero."""
    return called(PAIRS / "attention/fa_mqa_splitq.py", 0, tmp_path_factory.mktemp("causal"))


@pytest.fixture(scope="module")
def kinked(tmp_path_factory: pytest.TempPathFactory) -> Called:
    """Attention with `relu` of scores, some of which are so small that the rounding of a product changes their sign."""
    path = PAIRS / "attention_special/linear_bias_relu_attention.py"
    return called(path, 1, tmp_path_factory.mktemp("kinked"))


def test_a_row_that_is_zero_by_algebra_may_be_off_by_what_its_products_round(causal: Called):
    # Draws that differentiate the maximum of a softmax have exactly zero there: the honest backward was refused, 1.17.
    seen = causal.judged()
    assert seen.problem is None, seen.problem


def test_a_cotangent_cut_beyond_tf32_is_still_a_downgrade_there(causal: Called):
    seen = causal.judged("ds = p * (tl.dot(do, tl.trans(v)) - delta[:, None])", COARSE_SCORES)
    assert seen.problem is not None
    assert seen.problem.status is Status.PRECISION_DOWNGRADE
    assert seen.problem.grad == "q"


def test_a_score_may_stand_on_either_side_of_zero_where_its_product_rounds_it_there(kinked: Called):
    # What jumps did not count as honest: the gradients that the user's own rounded scores have were refused, 1.92.
    seen = kinked.judged()
    assert seen.problem is None, seen.problem


def test_room_for_what_jumps_is_no_room_for_a_coarser_gradient(kinked: Called):
    old = "dq * (scale / (m + 1)"
    seen = kinked.judged(old, old.replace("dq", "dq.to(tl.float8e5).to(tl.float32)"))
    assert seen.problem is not None
    assert seen.problem.status is Status.PRECISION_DOWNGRADE
    assert seen.ratio("q") > 5, "as much as at shapes where no score is near zero"


@pytest.mark.parametrize("number", [0, 1])
def test_maxima_are_held_only_where_they_shift(causal: Called, kinked: Called, number: int):
    # Every other draw holds maxima. `relu` is one that counts: without its derivative nothing would be left of `q`.
    for one in (causal, kinked):
        assert max(one.drawn(number).values()) < 0.1


@pytest.mark.parametrize(
    ("place", "error", "passed"), [(3, 1.9e-3, True), (3, 2.1e-3, False), (4, 1.9e-3, False)],
    ids=["twice the jump", "more", "its neighbour"],
)  # fmt: skip
def test_an_element_that_jumped_may_be_off_by_twice_its_jump(place: int, error: float, passed: bool):
    truth = torch.ones(16, 64, dtype=torch.float64)
    jumps = torch.zeros_like(truth)
    jumps[0, 3] = 1e-3
    honest = HonestError(torch.full((1, 1), 1e-6, dtype=torch.float64), 1e-6, 1e-6, 1e-6, jumps)
    given = truth.clone()
    given[0, place] += error
    assert compare_native(given, truth, honest, 0.0, torch.float32, 24).passed is passed
