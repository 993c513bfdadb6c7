"""Print what the recorded runs of LOGS/ came to, from their ledgers alone: LOGS/README.md is this text.

Run: python bench/logs.py > LOGS/README.md

`python bench/logs.py --certificates` writes the certificates again in the format of today, from what the ledgers hold:
the verdicts of then, their sources, times and versions. Nothing is judged; that is what `kernel-agent recheck` does.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

from kernel_agent.agent import events as ev
from kernel_agent.agent.delivery import provenance_of
from kernel_agent.agent.events import Entry, PhaseName, PromptName
from kernel_agent.agent.gatetried import tally_of
from kernel_agent.agent.ledger import read_ledger
from kernel_agent.agent.snapshots import Snapshots
from kernel_agent.agent.speedwords import microseconds, ratio
from kernel_agent.agent.state import RunState, fold
from kernel_agent.bench.records import Measurement
from kernel_agent.certificate.issue import issue
from kernel_agent.certificate.record import Certificate
from kernel_agent.deliver.package import render_operator
from kernel_agent.models.tokens import estimate_tokens
from kernel_agent.oracle import describe
from kernel_agent.pairs.assemble import assemble
from kernel_agent.pairs.userfile import read_source
from kernel_agent.sandbox import Sandbox

ROOT = Path(__file__).parents[1] / "LOGS"
HEAD = """\
# Recorded runs

Each folder is the run folder of one real run through all three phases: the ledger (`trace.jsonl`), the same for
reading (`trace.md`), every prompt as it was sent (`asks/`), every reply as it was received (`replies/`), every
candidate (`snapshots/`), the forward (`source.py`) and the certificate of what was delivered. The replies were
written by a language model through the `manual` backend, which answers from the text of the ask alone and runs no
code. Phases 1 and 2 ran on a machine without a GPU; the run folder was then moved to one with an {gpu}
and resumed there, as in [docs/remote-gpu.md](../docs/remote-gpu.md): the proven backward was judged again on real
kernels, measured, tuned by a sweep except where the last section says otherwise, and the model was asked once to make
it faster. {count} forwards, one run each, one such ask each: a small sample.

This page is printed from the ledgers by `python bench/logs.py`; no number in it is typed.

Read a run with `kernel-agent trace LOGS/layernorm`; send its replies through the real gate again with

    kernel-agent --file-path examples/layernorm.py --backend replay --replay LOGS/layernorm

and judge what one delivered again, on this machine and with the gate of today, with

    kernel-agent recheck LOGS/layernorm/certificate.json
"""


@dataclass(frozen=True)
class Run:
    """One recorded run."""

    name: str
    entries: tuple[Entry, ...]
    state: RunState

    @property
    def measured(self) -> tuple[Measurement, Measurement]:
        """Of the first proven backward and of the delivered one."""
        assert self.state.best is not None
        last = self.state.measured(self.state.best.digest)
        assert last is not None
        return self.state.measurements[0][1], last


def runs() -> list[Run]:
    """All runs, by name."""
    found = []
    for folder in sorted(ROOT.iterdir()):
        if folder.is_dir():
            entries = tuple(read_ledger(folder / "trace.jsonl").entries)
            found.append(Run(folder.name, entries, fold(entries)))
    return found


def certificate(run: Run, sandbox: Sandbox) -> Certificate:
    """The certificate of what a run delivered, issued when it was: the forward alone is run, to describe its inputs."""
    state, best = run.state, run.state.best
    assert best is not None
    assert state.spec is not None
    recorded = state.spec.facts
    spec = describe(read_source(recorded.source, Path(recorded.path.name)), sandbox)
    candidate = Snapshots(ROOT / run.name / "snapshots").get(best.digest)
    operator = render_operator(spec, candidate)
    verdict = best.verdict.model_copy(update={"machine": best.verdict.machine or state.machine})
    made = issue(
        spec,
        assemble(spec, candidate),
        verdict,
        file=f"{spec.facts.stem}_backward.py",
        delivered=operator.encode(),
        mutants=tally_of(state.tried, best.digest),
        provenance=provenance_of(state),
    )
    delivered = next(entry.at for entry in reversed(run.entries) if isinstance(entry.event, ev.Delivered))
    return made.model_copy(update={"issued": delivered})


def main() -> None:
    """Print the page, or write the certificates."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--certificates", action="store_true", help="write them instead")
    if parser.parse_args().certificates:
        with Sandbox() as sandbox:
            for run in runs():
                text = certificate(run, sandbox).model_dump_json(indent=2) + "\n"
                (ROOT / run.name / "certificate.json").write_text(text, encoding="utf-8")
    else:
        page()


def page() -> None:
    """Print the page."""
    found = runs()
    print(HEAD.format(gpu=found[0].measured[1].device, count=len(found)))
    _overview(found)
    _times(found)
    _steps(found)


def _overview(found: list[Run]) -> None:
    print("## Overview\n")
    print("Tokens are estimated from the texts. Times are geometric means over the shapes of one backward alone.\n")
    print("| run | asks | drafts | tokens in | tokens out | first proven | delivered | x eager | x torch.compile |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for run in found:
        asked = [entry.event for entry in run.entries if isinstance(entry.event, ev.Asked)]
        replied = [entry.event for entry in run.entries if isinstance(entry.event, ev.Replied)]
        drafts = [ask for ask in asked if ask.phase is PhaseName.BACKWARD and ask.prompt is not PromptName.PLAN]
        first, last = run.measured
        print(
            f"| `{run.name}` | {len(asked)} | {len(drafts)} | {sum(ask.estimated_input for ask in asked):,} "
            f"| {sum(estimate_tokens(one.reply.text) for one in replied):,} | {microseconds(first.geomean_us)} "
            f"| {microseconds(last.geomean_us)} | {_times_of(last, 'eager_us')} | {_times_of(last, 'compiled_us')} |"
        )
    print()


def _times(found: list[Run]) -> None:
    print("## Every shape\n")
    print("| run | shape | first proven | delivered | of bound | x eager | x torch.compile |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for run in found:
        first, last = run.measured
        for before, after in zip(first.shapes, last.shapes, strict=True):
            bound = "-" if after.bound_us is None else f"{after.bound_us / after.median_us:.0%}"
            eager = "-" if after.eager_us is None else f"{after.eager_us / after.median_us:.2f}"
            compiled = "-" if after.compiled_us is None else f"{after.compiled_us / after.median_us:.2f}"
            times = f"{microseconds(before.median_us)} | {microseconds(after.median_us)}"
            print(f"| `{run.name}` | {after.label} | {times} | {bound} | {eager} | {compiled} |")
    print()


def _steps(found: list[Run]) -> None:
    print("## What was kept and what was rolled back\n")
    for run in found:
        print(f"- `{run.name}`: {_drafts(run)}{_tuning(run)}{_optimising(run)}")


def _drafts(run: Run) -> str:
    said = [
        f"ask {round_.number} {round_.verdict.status.value}"
        for round_ in run.state.rounds
        if round_.phase is PhaseName.BACKWARD and round_.verdict is not None
    ]
    return f"drafts: {', '.join(said)}. "


def _tuning(run: Run) -> str:
    if run.state.tuned is None:
        return "Not tuned: the run was resumed with `--tune-variants 0`. "
    return f"Tuning: {run.state.tuned.tuned.line}. "


def _optimising(run: Run) -> str:
    said = []
    for round_ in run.state.rounds:
        if round_.phase is PhaseName.OPTIMIZE and round_.reply is not None and round_.verdict is not None:
            change = re.search(r"^Change: (.+?)[.:;](?: |$)", round_.reply.text, re.MULTILINE)
            what = f' ("{change[1]}")' if change else ""
            fate = "kept" if round_.kept else "not kept"
            said.append(f"Ask {round_.number}{what}: {round_.verdict.status.value}, {fate}: {round_.outcome}.")
    return " ".join(said)


def _times_of(measurement: Measurement, baseline: str) -> str:
    value = ratio([(getattr(shape, baseline), shape.median_us) for shape in measurement.shapes])
    return "-" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    main()
