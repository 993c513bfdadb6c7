"""A backward proven without a GPU meets its real kernels where the run goes on with one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from scripted import BACKWARD, Script, config, reply_text

from kernel_agent.agent import events as ev
from kernel_agent.agent.events import Outcome
from kernel_agent.agent.ledger import read_ledger
from kernel_agent.agent.runs import OpenTools, resume, run
from kernel_agent.agent.tools import OnCase, Tools
from kernel_agent.config import RunConfig
from kernel_agent.errors import PausedRun
from kernel_agent.gate.verdict import Status, Verdict
from kernel_agent.pairs.spec import KernelSpec

GOOD = reply_text(BACKWARD)
COARSE = reply_text(BACKWARD.replace("BLOCK=32", "BLOCK=64"))
"""Stands for a backward that is right by the exact tier and too coarse on a GPU."""


class Gpu:
    """The tools of a machine with a GPU, on which blocks of 64 are red; counts what it judges."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.judged = 0

    @property
    def tools(self) -> OpenTools:
        @contextmanager
        def opened(config: RunConfig, cache: Path | None = None) -> Iterator[Tools]:
            with self.script.tools(config, cache) as tools:
                yield replace(tools, confirm=self.confirm)

        return opened

    def confirm(self, spec: KernelSpec, source: str, exact: Verdict, on_case: OnCase) -> Verdict:
        self.judged += 1
        if "BLOCK=64)" in source:
            return exact.model_copy(update={"status": Status.WRONG_GRADIENT, "tier": "native", "grad": "x"})
        return exact.model_copy(update={"tier": "exact and native"})


def paused(script: Script, out: Path) -> Path:
    with pytest.raises(PausedRun) as stop:
        run(config(out, pause=True), tools=script.tools, model=script.model)
    assert stop.value.run is not None
    return stop.value.run


def test_what_was_proven_elsewhere_is_judged_on_the_gpu_before_it_is_delivered(tmp_path: Path) -> None:
    script = Script(GOOD)
    gpu = Gpu(script)
    finished = resume(paused(script, tmp_path), tools=gpu.tools, model=script.model)
    assert finished.outcome is Outcome.DELIVERED
    assert gpu.judged == 1
    assert finished.state.best is not None
    # The certificate is made from this verdict: without the check it would speak of the exact tier alone.
    assert finished.state.best.verdict.tier == "exact and native"


def test_what_is_red_on_the_gpu_opens_phase_two_again(tmp_path: Path) -> None:
    script = Script(COARSE, GOOD)
    gpu = Gpu(script)
    finished = resume(paused(script, tmp_path), tools=gpu.tools, model=script.model)
    assert finished.outcome is Outcome.DELIVERED
    assert len(finished.state.rounds) == 2
    last = finished.state.rounds[-1]
    # Were the first verdict kept, the coarse candidate would be delivered after one ask.
    assert finished.state.best is not None
    assert finished.state.best.digest == last.candidate


def test_a_candidate_is_not_judged_twice_on_one_gpu(tmp_path: Path) -> None:
    script = Script(GOOD)
    gpu = Gpu(script)
    finished = resume(paused(script, tmp_path), tools=gpu.tools, model=script.model)
    resume(finished.folder.path, tools=gpu.tools, model=script.model)
    assert gpu.judged == 1
    events = [entry.event for entry in read_ledger(finished.folder.ledger).entries]
    assert sum(isinstance(event, ev.Confirmed) for event in events) == 1
