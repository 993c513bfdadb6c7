"""The gate is tried on what is wrong: once in phase 1, once on what is delivered; a killed run does not do it twice."""

from __future__ import annotations

from pathlib import Path

from scripted import BACKWARD, Script, config, reply_text

from kernel_agent.agent.gatetried import GateTried
from kernel_agent.agent.orchestrator import FinishedRun
from kernel_agent.agent.runs import read_run, resume, run
from kernel_agent.agent.tools import OnMutant
from kernel_agent.gate.mutants.records import MutantResult, MutationTally, Outcome
from kernel_agent.gate.verdict import Status
from kernel_agent.pairs.spec import KernelSpec

SURVIVOR = MutantResult(
    mutator="wrong sign",
    mutant="line 3: a -> -a",
    outcome=Outcome.SURVIVED,
    status=Status.GREEN,
    case="N=1, gradient of x",
)


class Gate:
    """Counts how often it is tried; the second mutant of a backward survives."""

    def __init__(self) -> None:
        self.gradients = 0
        self.sources: list[str] = []

    def try_gradients(self, spec: KernelSpec) -> GateTried:
        self.gradients += 1
        return GateTried(tally=MutationTally(killed=20, survived=0, equivalent=0, rounding=0, invalid=0))

    def try_backward(self, spec: KernelSpec, source: str, on_mutant: OnMutant) -> GateTried:
        self.sources.append(source)
        on_mutant(SURVIVOR, 1, 2)
        tally = MutationTally(killed=1, survived=1, equivalent=0, rounding=0, invalid=0, survivors=(SURVIVOR,))
        return GateTried(tally=tally)


def finished(tmp_path: Path, gate: Gate, *replies: str, **changes: object) -> FinishedRun:
    script = Script(*replies, try_gradients=gate.try_gradients, try_backward=gate.try_backward)
    changed = {"mutant_seconds": 5.0, "max_iters": len(replies), **changes}
    return run(config(tmp_path, **changed), tools=script.tools, model=script.model)


def test_the_mutants_are_those_of_what_is_delivered(tmp_path: Path) -> None:
    gate = Gate()
    ended = finished(tmp_path, gate, reply_text(BACKWARD))
    assert gate.gradients == 1
    (source,) = gate.sources
    assert "product_bwd_kernel" in source
    assert ended.state.best is not None
    assert [event.digest for event in ended.state.tried] == [None, ended.state.best.digest]


def test_a_survivor_is_named_in_the_trace_with_its_case(tmp_path: Path) -> None:
    # It shows a hole in the gate for this very operation: a number alone would hide it.
    trace = finished(tmp_path, Gate(), reply_text(BACKWARD)).folder.trace.read_text()
    assert "The gate before wrong gradients: 20 of 20 killed" in trace
    assert "1 of 2 killed" in trace
    assert "let by: wrong sign, line 3: a -> -a, which differs at N=1, gradient of x" in trace


def test_nothing_is_tried_where_no_seconds_are_given(tmp_path: Path) -> None:
    gate = Gate()
    assert finished(tmp_path, gate, reply_text(BACKWARD), mutant_seconds=0.0).state.tried == ()
    assert (gate.gradients, gate.sources) == (0, [])


def test_a_run_without_a_proven_backward_has_no_mutants(tmp_path: Path) -> None:
    gate = Gate()
    finished(tmp_path, gate, "I have no code.")
    assert gate.sources == []


def test_what_was_tried_is_not_tried_again_when_the_run_goes_on(tmp_path: Path) -> None:
    gate = Gate()
    path = finished(tmp_path, gate, reply_text(BACKWARD)).folder.path
    ledger = path / "trace.jsonl"
    lines = ledger.read_text().splitlines(keepends=True)
    before = next(i for i, line in enumerate(lines) if '"event":"delivered"' in line)
    ledger.write_text("".join(lines[:before]))  # killed before it delivered
    script = Script(reply_text(BACKWARD), try_gradients=gate.try_gradients, try_backward=gate.try_backward)
    resume(path, tools=script.tools, model=script.model)
    assert (gate.gradients, len(gate.sources)) == (1, 1)
    assert len(read_run(path).state.tried) == 2
