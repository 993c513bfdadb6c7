"""Print how many asks and tokens runs of the agent took to a green verdict, and what the tool itself added in time.

Run: python bench/agent.py [FOLDER OF RUNS] > bench/agent.txt

Every run lies in `bench/agent_runs/<arm>/<forward>/` as its ledger and its replies, and can be replayed:

    kernel-agent --file-path FORWARD --backend replay --replay bench/agent_runs/<arm>/<forward>

An arm is a way of asking. Every draft of the arms `no-retrieval`, `retrieval` and `reflection` was green, so that
no red verdict could be compared there. The first reply of a `planted` run is therefore a proven draft with one slip
put in on purpose, without its prose; the model wrote the repair. Arms that end in `+max-diff` go on from the same
red draft with `--no-diagnosis`, so that the two differ in what the verdict says and in nothing else. Replies were
written by a language model through `--backend manual` without running code; there is one run per arm and forward,
which is a small sample.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from kernel_agent.agent import events as ev
from kernel_agent.agent.events import Entry, PhaseName
from kernel_agent.agent.ledger import read_ledger
from kernel_agent.models.tokens import estimate_tokens

ROOT = Path(__file__).parent / "agent_runs"


@dataclass(frozen=True)
class RunFigures:
    """What one ledger tells."""

    arm: str
    forward: str
    asks_to_green: int | None
    """Asks of phase 2 up to the first green verdict, plans and retries included; None when there was none."""
    asks: int
    """Asks of the whole run."""
    tokens_to_green: int
    """Estimated tokens of prompts and replies up to there."""
    first_prompt: int
    """Estimated tokens of the first prompt."""
    cacheable: float
    """Share of the prompts from the second ask on that is the first ask's system text and opening."""
    overhead_s: float
    """Longest time between a reply and the next ask that is neither the gate's nor a measurement's."""


def figures(folder: Path, arm: str) -> RunFigures:
    """The figures of one run folder."""
    entries = read_ledger(folder / "trace.jsonl").entries
    asked = [entry.event for entry in entries if isinstance(entry.event, ev.Asked)]
    replied = {entry.event.number: entry.event for entry in entries if isinstance(entry.event, ev.Replied)}
    green = next((e.event.number for e in entries if isinstance(e.event, ev.Judged) and e.event.verdict.green), None)
    backward = [ask for ask in asked if ask.phase is PhaseName.BACKWARD]
    until = [ask for ask in backward if green is None or ask.number <= green]
    spent = sum(ask.estimated_input for ask in until)
    spent += sum(estimate_tokens(replied[ask.number].reply.text) for ask in until if ask.number in replied)
    return RunFigures(
        arm=arm,
        forward=folder.name,
        asks_to_green=None if green is None else len(until),
        asks=len(asked),
        tokens_to_green=spent,
        first_prompt=asked[0].estimated_input,
        cacheable=_cacheable(asked),
        overhead_s=_overhead(entries),
    )


def _cacheable(asked: Sequence[ev.Asked]) -> float:
    """An ask that repeats system text and opening of the one before leaves them out of the ledger."""
    prefix = estimate_tokens(asked[0].system or "") + estimate_tokens(asked[0].opening or "")
    later = [ask for ask in asked[1:] if ask.system is None and ask.opening is None]
    total = sum(ask.estimated_input for ask in asked[1:])
    return prefix * len(later) / total if total else 1.0


def _overhead(entries: Iterable[Entry]) -> float:
    """From each reply to the next ask, less the seconds of verdicts in between."""
    worst, since, counted = 0.0, None, 0.0
    for entry in entries:
        event = entry.event
        if isinstance(event, ev.Replied):
            since, counted = _time(entry), 0.0
        elif isinstance(event, ev.Judged):
            counted += event.verdict.seconds if event.same_as is None else 0.0
        elif isinstance(event, (ev.Measured, ev.Resumed, ev.Interrupted)):
            since = None  # kernels were timed, or nobody was there
        elif isinstance(event, ev.Asked) and since is not None:
            worst, since = max(worst, _time(entry) - since - counted), None
    return worst


def _time(entry: Entry) -> float:
    return datetime.fromisoformat(entry.at.replace("Z", "+00:00")).timestamp()


def table(runs: Sequence[RunFigures]) -> str:
    """One line per run, then one per arm."""
    width = max(len(run.arm) for run in runs)
    head = f"{'arm':<{width}}  {'forward':<22} {'asks to green':>13} {'tokens to green':>15} {'first prompt':>12}"
    lines = [f"{head} {'prefix':>6} {'overhead s':>10}"]
    for run in runs:
        green = "-" if run.asks_to_green is None else str(run.asks_to_green)
        lines.append(
            f"{run.arm:<{width}}  {run.forward:<22} {green:>13} {run.tokens_to_green:>15,} {run.first_prompt:>12,} "
            f"{run.cacheable:>6.0%} {run.overhead_s:>10.1f}"
        )
    lines.append("")
    for arm in dict.fromkeys(run.arm for run in runs):
        mine = [run for run in runs if run.arm == arm]
        greens = [run.asks_to_green for run in mine if run.asks_to_green is not None]
        median = f"{statistics.median(greens):g}" if greens else "-"
        tokens = statistics.median(run.tokens_to_green for run in mine)
        lines.append(
            f"{arm}: {len(greens)} of {len(mine)} green, {median} asks in the median, {tokens:,.0f} tokens to green "
            f"in the median, at most {max(run.overhead_s for run in mine):.1f} s between a reply and the next ask"
        )
    return "\n".join(lines)


def main(root: Path) -> None:
    """Print the table of all runs below `root`."""
    folders = sorted(path.parent for path in root.glob("*/*/trace.jsonl"))
    if not folders:
        sys.exit(f"{root} holds no run")
    print(table([figures(folder, folder.parent.name) for folder in folders]))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
