"""Print what a run's first code starts from under each `--draft`: what is proven before any ask, and what asks cost.

Run: python bench/drafts.py [FORWARD ...] > bench/drafts.txt

For every forward of the arm `reflection` in `bench/agent_runs`, or those that are named: the forward is derived and
proven as a run with `--draft compiler` does it, and the first ask of every arm is made as that run would send it. Asks
and tokens until something is proven are 0 where the derived backward is green; under `rag` they are those of the
recorded run of that arm, a plan and code written by a language model without running it. No model is asked here, so
nothing is said of whether a model beats what was derived.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from agent import ROOT, RunFigures, figures

from kernel_agent.agent import prompts
from kernel_agent.agent.brief import make_brief
from kernel_agent.agent.observer import Unwatched
from kernel_agent.agent.snapshots import render
from kernel_agent.agent.workshop import open_tools
from kernel_agent.config import RunConfig
from kernel_agent.pairs.userfile import read_file

ARM = "reflection"


@dataclass(frozen=True)
class Start:
    """How a run of one forward starts."""

    forward: str
    schedules: str
    """Of the derived backward; empty where none is proven."""
    reason: str
    """Why none is."""
    compiler: int
    """Estimated tokens of the first ask: it shows the derived backward, or is that of `rag` where there is none."""
    rag: int
    """Of the ask for a plan, with the adjoint."""
    adjoint: int
    """Tokens of the adjoint in it."""
    recorded: RunFigures
    """The recorded run without a derived backward."""


def start(folder: Path) -> Start:
    """Derive the forward of a recorded run, and make the first ask of each arm."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / f"{folder.name}.py"
        shutil.copy(folder / "source.py", file)
        config = RunConfig(file=file, device="cpu")
        with open_tools(config) as tools:
            assert tools.analyse is not None
            assert tools.derive is not None
            spec = tools.describe(read_file(file))
            pairs = tuple(pair for pair in tools.retrieve(spec).pairs if pair.chosen)
            facts = tools.analyse(spec)
            derived = tools.derive(spec, True, Unwatched().on_case)
    event = derived.event
    brief = make_brief(spec, pairs, freeze_forward=False, max_asks=config.max_iters, facts=facts, derived=event)
    bare = make_brief(spec, pairs, freeze_forward=False, max_asks=config.max_iters, facts=facts)
    plan = prompts.plan(brief)
    first = plan
    if derived.candidate is not None:
        code = render(derived.candidate)
        first = prompts.beat(brief, code, event, None, config.min_rel_impr, config.max_iters)
    return Start(
        folder.name,
        ", ".join(event.schedules),
        event.reason,
        first.tokens,
        plan.tokens,
        plan.tokens - prompts.plan(bare).tokens,
        figures(folder, ARM),
    )


def line(one: Start) -> str:
    """A forward."""
    known, asks, tokens = bool(one.schedules), one.recorded.asks_to_green, one.recorded.tokens_to_green
    return (
        f"{one.forward:<20} {one.schedules or '-':<14} {one.compiler:>14,} {one.rag:>8,} "
        f"{one.adjoint:>8,} {0 if known else asks or '-':>14} {asks or '-':>4} "
        f"{0 if known else tokens:>16,} {tokens:>8,}"
    )


def totals(starts: list[Start]) -> str:
    """What they come to."""
    median = statistics.median
    refused = [f"{one.forward}: not derived: {one.reason}" for one in starts if not one.schedules]
    return "\n".join(
        [
            *refused,
            f"compiler: {sum(bool(one.schedules) for one in starts)} of {len(starts)} proven before any ask; the first "
            f"ask has {median(one.compiler for one in starts):,.0f} tokens in the median",
            f"rag: proven after {median(one.recorded.asks_to_green or 0 for one in starts):g} asks and "
            f"{median(one.recorded.tokens_to_green for one in starts):,.0f} tokens in the median; the first ask has "
            f"{median(one.rag for one in starts):,.0f}, "
            f"{median(one.adjoint for one in starts):,.0f} of them the adjoint",
        ]
    )


def main(names: list[str]) -> None:
    """Print a line as each forward is done."""
    folders = sorted(path.parent for path in (ROOT / ARM).glob("*/trace.jsonl"))
    print(f"{'':<35} {'first ask':>23} {'':>8} {'asks to proven':>19} {'tokens to proven':>25}")
    print(
        f"{'forward':<20} {'derived':<14} {'compiler':>14} {'rag':>8} {'adjoint':>8} {'compiler':>14} "
        f"{'rag':>4} {'compiler':>16} {'rag':>8}"
    )
    starts = []
    for folder in folders:
        if not names or folder.name in names:
            starts.append(start(folder))
            print(line(starts[-1]), flush=True)
    print(f"\n{totals(starts)}")


if __name__ == "__main__":
    main(sys.argv[1:])
