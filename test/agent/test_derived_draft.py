"""The derived backward in a run: the first proven candidate, what a model is asked to beat, and what is delivered."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripted import BACKWARD, PAIR, SWAPPED, Script, config, reply_text, verdict_of

from kernel_agent.agent import events as ev
from kernel_agent.agent.ledger import read_ledger
from kernel_agent.agent.runs import first_prompt, resume, run
from kernel_agent.agent.tools import DerivedDraft, OnCase
from kernel_agent.config import Backend, Draft
from kernel_agent.errors import ExitCode
from kernel_agent.gate.verdict import Status, Verdict
from kernel_agent.models.compiler import NothingDerived
from kernel_agent.pairs.assemble import assemble
from kernel_agent.pairs.spec import Candidate, KernelSpec
from kernel_agent.report.trace import render_trace

DERIVED = BACKWARD.replace("product_bwd_kernel", "derived_kernel")
BETTER = BACKWARD.replace("BLOCK=32", "BLOCK=64").replace("32)", "64)")
ADJOINT = "def product_kernel_adjoint(X, W, dY, dX, dW):\n    ...\n"


class Compiler:
    """Stands in for the room that derives."""

    def __init__(self, backward: str | None = DERIVED, reason: str = "") -> None:
        self.backward, self.reason = backward, reason
        self.proofs: list[bool] = []

    def __call__(self, spec: KernelSpec, prove: bool, on_case: OnCase) -> DerivedDraft:
        self.proofs.append(prove)
        if self.backward is None:
            return DerivedDraft(ev.Derived(reason=self.reason, remedy="Write it out."))
        if not prove:
            return DerivedDraft(ev.Derived(adjoint=ADJOINT))
        candidate = Candidate(backward=self.backward)
        verdict = verdict_of(assemble(spec, candidate))
        event = ev.Derived(
            digest=candidate.digest,
            schedules=("owned",),
            verdict=verdict,
            adjoint=ADJOINT,
        )
        return DerivedDraft(event, candidate)


def scripted(*replies: str, compiler: Compiler | None = None, **changes: object) -> Script:
    return Script(*replies, derive=compiler or Compiler(), **changes)


def test_a_model_is_asked_once_to_beat_what_is_proven_and_the_faster_goes_on(tmp_path: Path) -> None:
    script = scripted(reply_text(BETTER), times={"BLOCK=64": 50.0, "derived_kernel": 90.0})
    script.rooms["modelled_cost"] = script._measure
    finished = run(config(tmp_path, draft=Draft.COMPILER, max_iters=1), tools=script.tools, model=script.model)
    asked = script.asked[0].turns
    assert "Beat the derived backward" in asked[-1].text
    assert "derived_kernel" in asked[1].text, "the draft is shown whole"
    assert "90" in asked[-1].text, "its time is a fact of the ask"
    assert ADJOINT in asked[0].text
    assert finished.outcome is ev.Outcome.DELIVERED
    assert finished.state.best is not None
    assert finished.state.best.number == 1, "the reply is better"


def test_a_wrong_reply_leaves_the_derived_backward_delivered(tmp_path: Path) -> None:
    # Without a derived draft this run would end red: its only reply is wrong.
    script = scripted(reply_text(SWAPPED))
    finished = run(config(tmp_path, draft=Draft.COMPILER, max_iters=1), tools=script.tools, model=script.model)
    assert finished.outcome is ev.Outcome.DELIVERED
    assert "derived_kernel" in next(finished.folder.product.glob("*_backward.py")).read_text()
    assert finished.state.best is not None
    assert finished.state.best.number == 0


def test_without_a_derived_draft_pairs_are_drafted_after_as_ever_and_the_refusal_is_told(tmp_path: Path) -> None:
    refusing = Compiler(None, "a launch stands in a loop (line 7)")
    script = scripted(reply_text(BACKWARD), compiler=refusing)
    finished = run(config(tmp_path, draft=Draft.COMPILER, max_iters=1), tools=script.tools, model=script.model)
    assert finished.outcome is ev.Outcome.DELIVERED
    assert "a launch stands in a loop (line 7)" in script.asked[0].turns[0].text
    assert "Now the code" in script.asked[0].turns[-1].text


def test_with_rag_the_compiler_only_tells_the_adjoint(tmp_path: Path) -> None:
    compiler = Compiler()
    script = scripted(reply_text(BACKWARD), compiler=compiler)
    run(config(tmp_path, draft=Draft.RAG, max_iters=1), tools=script.tools, model=script.model)
    assert compiler.proofs == [False], "a proof costs seconds and is not wanted"
    assert ADJOINT in script.asked[0].turns[0].text
    assert "derived_kernel" not in str(script.asked[0])


def test_with_none_nothing_is_derived_and_no_pair_is_followed(tmp_path: Path) -> None:
    compiler = Compiler()
    script = scripted(reply_text(BACKWARD), compiler=compiler)
    run(config(tmp_path, draft=Draft.NONE, max_iters=1), tools=script.tools, model=script.model)
    assert compiler.proofs == []
    assert "after none of the pairs" in script.asked[0].turns[-1].text
    assert PAIR.slug in script.asked[0].turns[0].text, "pairs are shown whatever is followed"


def test_the_compiler_alone_delivers_without_an_ask_and_its_trace_says_why_so(tmp_path: Path) -> None:
    script = scripted()
    finished = run(config(tmp_path, backend=Backend.COMPILER), tools=script.tools, model=script.model)
    assert finished.outcome is ev.Outcome.DELIVERED
    assert script.asked == []
    trace = finished.folder.trace.read_text()
    assert "Backwards are written by compiler: " in trace, "it is no model with a name"
    assert "Derived, schedule owned: GREEN" in trace
    assert trace == render_trace(read_ledger(finished.folder.ledger).entries)


def test_the_compiler_alone_ends_red_with_the_reason_where_it_derives_nothing(tmp_path: Path) -> None:
    script = scripted(compiler=Compiler(None, "a launch stands in a loop (line 7)"))
    with pytest.raises(NothingDerived, match="stands in a loop") as refused:
        run(config(tmp_path, backend=Backend.COMPILER), tools=script.tools, model=script.model)
    assert refused.value.exit_code is ExitCode.RED
    assert refused.value.remedy.startswith("Write it out."), "what to do was lost on the way, and a model advised"
    assert "--backend" in refused.value.remedy


def test_a_run_that_goes_on_does_not_derive_again(tmp_path: Path) -> None:
    compiler = Compiler()
    script = scripted(reply_text(BETTER), compiler=compiler)
    finished = run(config(tmp_path, draft=Draft.COMPILER, max_iters=1), tools=script.tools, model=script.model)
    again = resume(finished.folder.path, tools=script.tools, model=script.model)
    assert compiler.proofs == [True]
    assert again.state.derived == finished.state.derived


def test_a_reply_that_repeats_the_derived_backward_is_not_judged_again(tmp_path: Path) -> None:
    script = scripted(reply_text(DERIVED))
    finished = run(config(tmp_path, draft=Draft.COMPILER, max_iters=1), tools=script.tools, model=script.model)
    assert script.checked == 0
    assert finished.state.rounds[0].outcome == "the same code as was derived"


def test_the_dry_run_shows_the_ask_that_a_run_would_send(tmp_path: Path) -> None:
    script = scripted()
    prompt = first_prompt(config(tmp_path, draft=Draft.COMPILER), tools=script.tools)
    assert "Beat the derived backward" in prompt.conversation.turns[-1].text


def test_on_a_gpu_real_kernels_are_judged_before_a_model_is_shown_times(tmp_path: Path) -> None:
    # A time of kernels that are wrong there would be what the model is asked to beat.
    def confirm(spec: KernelSpec, source: str, exact: Verdict, on_case: OnCase) -> Verdict:
        red = {"status": Status.WRONG_GRADIENT, "tier": "native", "grad": "x"}
        return exact.model_copy(update=red if "derived_kernel" in source else {"tier": "exact and native"})

    script = scripted(reply_text(BETTER), confirm=confirm)
    finished = run(config(tmp_path, draft=Draft.COMPILER, max_iters=1), tools=script.tools, model=script.model)
    assert "Beat the derived backward" not in script.asked[0].turns[-1].text
    assert finished.outcome is ev.Outcome.DELIVERED
    assert finished.state.best is not None
    assert finished.state.best.number == 1
