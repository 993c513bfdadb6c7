"""How a command ends that could not do its work: one message, an exit code, and on stdout what there is of a run."""

from __future__ import annotations

import shlex
import tempfile
import traceback
from pathlib import Path

from rich.text import Text

from kernel_agent.cli.streams import err
from kernel_agent.errors import InternalError, InterruptedRun, KernelAgentError, PausedRun, WaitingForReply

NORMAL = (WaitingForReply, PausedRun, InterruptedRun)
"""Ends that are nobody's error."""


def show_stop(error: KernelAgentError, *, as_json: bool = False, verbose: bool = False) -> int:
    """Show what happened and return the exit code. A run folder's trace, or the one record, goes to stdout."""
    if error.run is not None:
        _print_run(error, error.run, as_json=as_json)
    elif as_json:
        from kernel_agent.report.record import StoppedRecord

        record = StoppedRecord(error=_head(error), remedy=error.remedy, exit_code=int(error.exit_code))
        print(record.model_dump_json(indent=2))
    show_error(error)
    if isinstance(error, InternalError):
        _show_traceback(error, verbose=verbose)
    return int(error.exit_code)


def show_error(error: KernelAgentError) -> None:
    """What happened, what to do instead below it, and the line that goes on with the run."""
    mark = Text() if isinstance(error, NORMAL) else Text("error: ", style="bold red")
    err().print(mark + Text(_head(error)), soft_wrap=True)
    if error.remedy.strip():
        err().print(Text(f"  {error.remedy.strip()}"), soft_wrap=True)
    if error.run is not None and not isinstance(error, NORMAL):
        err().print(Text(f"  go on with the run: {_resume(error.run)}"), soft_wrap=True)


def _print_run(error: KernelAgentError, folder: Path, *, as_json: bool) -> None:
    from kernel_agent.agent.runs import read_run
    from kernel_agent.report.record import stopped_run_record

    run = read_run(folder)
    if as_json:
        print(stopped_run_record(run, error, resume=_resume(folder)).model_dump_json(indent=2))
    else:
        print(run.folder.trace.read_text(encoding="utf-8"), end="", flush=True)


def _show_traceback(error: InternalError, *, verbose: bool) -> None:
    """The cause on the terminal with `-v`, else in a file whose path is told."""
    text = "".join(traceback.format_exception(error.__cause__ or error))
    if verbose:
        err().print(Text(text.rstrip()), soft_wrap=True)
        return
    if error.run is not None:
        path = error.run / "internal-error.txt"
        path.write_text(text, encoding="utf-8")
    else:
        with tempfile.NamedTemporaryFile(
            "w", prefix="kernel-agent-", suffix=".txt", delete=False, encoding="utf-8"
        ) as file:
            file.write(text)
        path = Path(file.name)
    err().print(Text(f"  the traceback lies in {path}"), soft_wrap=True)


def _head(error: KernelAgentError) -> str:
    """The message with its place, without the remedy."""
    return str(error).partition("\n")[0] if error.remedy else str(error)


def _resume(folder: Path) -> str:
    return f"kernel-agent resume {shlex.quote(str(folder))}"
