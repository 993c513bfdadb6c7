"""Times, plans, drafts, splices and sweeps as readers see them: never a time without its basis."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from kernel_agent.agent import events as ev
from kernel_agent.agent.events import Entry, PhaseName, PromptName
from kernel_agent.agent.runs import run
from kernel_agent.agent.speedwords import baseline_words, headline_time
from kernel_agent.bench.records import Tuned
from kernel_agent.gate.verdict import Status, Verdict
from kernel_agent.report.record import final_record
from kernel_agent.report.table import final_table
from kernel_agent.report.terminal import event_line
from kernel_agent.report.trace import render_trace

sys.path.insert(0, str(Path(__file__).parents[1] / "agent"))

from prompted import DIAGNOSED, FACTS, HITS, MEASURED, MODELLED, PLAN, PRICES
from scripted import BACKWARD, Script, config, reply_text

A, B, C = "a" * 64, "b" * 64, "c" * 64

ASK = ev.Asked(
    number=3, phase=PhaseName.BACKWARD, prompt=PromptName.DRAFT, digest="d", estimated_input=9000, anchor="scaled_copy"
)
RETRY = ASK.model_copy(update={"prompt": PromptName.EDIT_FAILED, "anchor": None, "free": True, "number": 4})
RED = Verdict(status=Status.WRONG_GRADIENT, message="dw is wrong", grad="w", diagnosis=DIAGNOSED)

TOLD = {
    ev.ForwardAnalysed(facts=FACTS): ("product_kernel", "dx: every element by one program"),
    ev.Planned(number=1, plan=PLAN, prices=PRICES): ("after scaled_copy", "dw: a block of elements; plain store"),
    ev.Planned(number=1, plan=None, problem="`gradients` lacks w."): ("refused", "`gradients` lacks w."),
    ev.TechniquesRetrieved(number=1, grads=("w",), hits=HITS): ("for dw", "column_sum (two-stage-partials)"),
    ev.TechniquesRetrieved(number=1, grads=("w",), hits=()): ("for dw: none",),
    ev.DraftsPlanned(anchors=("scaled_copy", None), line="2 of 3 drafts fit"): ("scaled_copy, no pair", "2 of 3"),
    ASK: ("draft after scaled_copy",),
    RETRY: ("edit_failed, not counted",),
    ev.EditFailed(number=4, line="edit 1: no such line"): ("reply 4 do not apply: edit 1",),
    ev.Locked(grads=("x",), digest=A): ("locked: dx",),
    ev.Spliced(number=4, digest=C, from_digests=(A, B), grads=(("x",), ("w",))): ("dx of `aaaa", "dw of `bbbb"),
    ev.Judged(number=4, digest=C, verdict=RED): ("dw: residual equals", "first suspect line: 51", "dw WRONG"),
    ev.Measured(digest=A, measurement=MEASURED): ("(measured, NVIDIA H100", "| N=100 | 1.25 ms |", "16 B"),
    ev.Measured(digest=A, measurement=MODELLED): ("modelled, not measured, H100 SXM",),
    ev.TunedEvent(digest=A, tuned=Tuned(tried=7, best=B, line="8 warps for 4 save 6 %", measurement=MEASURED)): (
        "7 variants",
        "8 warps for 4 save 6 %",
    ),
}


def traced(event: ev.Event) -> str:
    return render_trace([Entry(number=1, at="2026-01-02T03:04:05.000Z", event=event)])


@pytest.mark.parametrize(("event", "words"), TOLD.items(), ids=[type(event).__name__ for event in TOLD])
def test_the_trace_tells_what_an_event_holds(event: ev.Event, words: tuple[str, ...]) -> None:
    text = traced(event)
    for expected in words:
        assert expected in text


@pytest.mark.parametrize("event", TOLD, ids=[type(event).__name__ for event in TOLD])
def test_progress_shows_one_line_for_each(event: ev.Event) -> None:
    line = event_line(event)
    assert line is not None
    assert line.plain.strip()
    assert "\n" not in line.plain


def test_no_time_is_shown_without_its_basis() -> None:
    # A modelled time read as a measured one is the worst a report can do.
    assert "modelled, not measured" in headline_time(MODELLED)
    line = event_line(ev.Measured(digest=A, measurement=MODELLED))
    assert line is not None
    assert "modelled, not measured" in line.plain


def test_the_record_and_the_table_carry_the_time_of_what_is_delivered(tmp_path: Path) -> None:
    faster = reply_text(BACKWARD + "# faster\n")
    script = Script(reply_text(BACKWARD), faster, times={"# faster": 50.0, "": 100.0})
    finished = run(config(tmp_path, max_iters=2), tools=script.tools, model=script.model)
    record = final_record(finished)
    assert record.speed is not None
    assert (record.first_us, record.speed.geomean_us) == pytest.approx((100.0, 50.0))
    stream = io.StringIO()
    Console(file=stream, width=200, highlight=False).print(final_table(finished))
    assert "50.0 us per backward (modelled, not measured" in stream.getvalue()


def test_baselines_are_compared_only_where_every_shape_has_one() -> None:
    eager = "2.45x the speed of eager autograd"
    assert eager in baseline_words(MEASURED)
    half = MEASURED.model_copy(
        update={"shapes": (MEASURED.shapes[0].model_copy(update={"eager_us": None}), MEASURED.shapes[1])}
    )
    assert not any("eager" in words for words in baseline_words(half)), "the mean of some shapes is no mean"
