"""The forwards that the agent was measured on, and a user's might look like: each is described, and told in facts."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_agent.oracle import analyse_spec, describe
from kernel_agent.pairs.userfile import read_file
from kernel_agent.sandbox import Sandbox

FORWARDS = sorted((Path(__file__).parents[2] / "bench" / "agent_forwards").glob("*.py"))


@pytest.mark.parametrize("path", FORWARDS, ids=lambda path: path.stem)
def test_a_forward_is_described_and_told(sandbox: Sandbox, path: Path) -> None:
    # What cannot be followed becomes a note, so that a run goes on without its facts: here that would go unseen.
    spec = describe(read_file(path), sandbox)
    facts = analyse_spec(spec, sandbox)
    assert facts.notes == ()
    assert facts.launches
    assert {sentence.partition(":")[0] for sentence in facts.crossing} == set(spec.grads)
    assert facts.derivative is not None
    results = {line.partition(" = ")[0] for line in facts.derivative.lines}
    assert {f"d{grad}" for grad in spec.grads} <= results or any("more lines" in one for one in facts.derivative.lines)
