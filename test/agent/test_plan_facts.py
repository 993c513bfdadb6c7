"""What a plan is held against comes from the forward's own kernels: the sentences of the facts are understood here."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_agent.agent.planchecks import stays_in_one_program, sums_across
from kernel_agent.oracle import describe
from kernel_agent.oracle.analyse import analyse_spec
from kernel_agent.pairs.userfile import read_file
from kernel_agent.sandbox import Sandbox

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize(
    ("name", "crossing", "local"),
    [
        ("layernorm", {"weight": "over M (axis 0)", "bias": "over M (axis 0)"}, {"x"}),
        ("matmul", {"a": "over N", "b": "over M"}, set()),
        ("softmax", {}, {"x"}),
    ],
)
def test_gradients_that_sum_over_programs_are_known_from_the_facts(
    sandbox: Sandbox, name: str, crossing: dict[str, str], local: set[str]
) -> None:
    # With other words in the facts, every plain store would be let through and nothing would be red.
    facts = analyse_spec(describe(read_file(EXAMPLES / f"{name}.py"), sandbox), sandbox)
    for grad, over in crossing.items():
        assert over in sums_across(facts, grad), f"d{grad} sums"
        assert not stays_in_one_program(facts, grad)
    for grad in local:
        assert sums_across(facts, grad) == ""
        assert stays_in_one_program(facts, grad), f"d{grad}"
