"""What a refused gradient is judged by once more: further draws while it may be luck, and none else."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernel_agent.bench.honest import DRAWS, HonestError
from kernel_agent.bench.native import judge_native
from kernel_agent.bench.native_truth import Inputs, NativeGradient, NativeTruth
from kernel_agent.bench.second_look import ROUNDS, Looked, look
from kernel_agent.gate.judge import Judged
from kernel_agent.pairs.spec import ShapeEntry

EXACT = torch.ones(16, 64, dtype=torch.float64)
LUCKY = HonestError(torch.full((1, 1), 1e-8, dtype=torch.float64), 1e-8, 1e-8, 1e-8)


@dataclass
class Drawn:
    """Draws that are as lucky as the first ones up to a number, and off by 1e-5 from there on."""

    unlucky_from: int
    asked: list[range] = field(default_factory=list)

    def kinks(self) -> dict[str, Tensor]:
        """None."""
        return {}

    def with_draws(self, truth: NativeTruth, draws: range) -> NativeTruth:
        """Note the numbers, and tell what they are off by."""
        self.asked.append(draws)
        size = 1e-5 if self.unlucky_from in draws else 1e-8
        return truth.joined({"x": HonestError(torch.full((1, 1), size, dtype=torch.float64), size, size, size)})


def looked(error: float, draws: Drawn) -> Looked:
    """The judgement of a gradient that is off by so much everywhere."""
    truth = NativeTruth(
        "x", Inputs(ShapeEntry(dims={}), {}, [], None, {}), (NativeGradient("x", EXACT, torch.float32, 0.0, LUCKY),)
    )
    given = {"0": (EXACT + error).float()}

    def judge(truth: NativeTruth, kinks: object) -> Judged:
        return Judged(*judge_native(("tensor",), given, truth, None, ("x",)))

    return look(judge, truth, draws)


def test_a_gradient_in_a_tile_that_three_draws_were_right_in_by_luck_is_drawn_for_again_until_one_is_not():
    draws = Drawn(unlucky_from=DRAWS + 5)
    assert looked(2e-6, draws).judged.problem is None
    assert draws.asked == [range(3, 7), range(7, 15)]


def test_what_no_draw_is_off_by_stays_refused_after_all_of_them():
    draws = Drawn(unlucky_from=1000)
    assert looked(2e-6, draws).judged.problem is not None
    assert sum(len(numbers) for numbers in draws.asked) == sum(ROUNDS)


def test_a_green_gradient_and_one_far_off_cost_no_draw():
    for error in (1e-7, 1e-4):
        draws = Drawn(unlucky_from=DRAWS)
        assert (looked(error, draws).judged.problem is None) is (error == 1e-7)
        assert draws.asked == []
