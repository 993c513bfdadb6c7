"""The main job as the terminal sees it: configuration from options, progress on stderr, the result on stdout."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import typer
from rich.text import Text

from kernel_agent.agent.events import Outcome
from kernel_agent.agent.observer import Observer, Unwatched
from kernel_agent.agent.orchestrator import FinishedRun
from kernel_agent.agent.runfolder import RunFolder
from kernel_agent.agent.runs import Changes, first_prompt
from kernel_agent.agent.runs import resume as go_on
from kernel_agent.agent.runs import run as run_job
from kernel_agent.cli.streams import err
from kernel_agent.config import RunConfig
from kernel_agent.errors import ExitCode
from kernel_agent.report.record import final_record
from kernel_agent.report.table import final_table
from kernel_agent.report.terminal import TerminalProgress


@dataclass(frozen=True)
class View:
    """How much of a run is shown, and in what form."""

    as_json: bool = False
    """One final record on stdout instead of the trace."""
    verbose: bool = False
    """Streamed text and every case on stderr."""
    quiet: bool = False
    """Nothing but errors on stderr."""

    def observer(self) -> AbstractContextManager[Observer]:
        """Who is told of the run while it happens."""
        return nullcontext(Unwatched()) if self.quiet else TerminalProgress(err(), verbose=self.verbose)


def start(config: RunConfig, view: View) -> None:
    """Run the main job and end with its exit code."""
    with view.observer() as observer:
        finished = run_job(config, observer)
    _show(finished, view)


def resume(folder: RunFolder, view: View, changes: Changes) -> None:
    """Go on with a run and end with its exit code."""
    with view.observer() as observer:
        finished = go_on(folder.path, observer, changes)
    _show(finished, view)


def dry_run(config: RunConfig) -> None:
    """The first prompt on stdout; its size and cost on stderr."""
    prompt = first_prompt(config)
    print(prompt.conversation.system)
    for turn in prompt.conversation.turns:
        print(f"\n{turn.text}")
    missing = "unknown price" if prompt.hosted else "no price"
    cost = missing if prompt.cost_usd is None else f"about ${prompt.cost_usd:.4f}"
    for notice in prompt.notices:
        err().print(Text(notice, style="yellow"), soft_wrap=True)
    line = (
        f"{prompt.choice.backend.value} ({prompt.model}), because {prompt.choice.why}: "
        f"about {prompt.input_tokens:,} tokens in and {prompt.output_tokens:,} out, {cost}; nothing was asked"
    )
    err().print(Text(line), soft_wrap=True)


def _show(finished: FinishedRun, view: View) -> None:
    if view.as_json:
        print(final_record(finished).model_dump_json(indent=2))
    else:
        print(finished.folder.trace.read_text(encoding="utf-8"), end="")
    if not view.quiet:
        # A trace on the same terminal can be long: the table comes last, where the eye is.
        err().print(final_table(finished), soft_wrap=True)
    raise typer.Exit(int(ExitCode.OK if finished.outcome is Outcome.DELIVERED else ExitCode.RED))
