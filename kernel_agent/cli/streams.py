"""The two streams of the command line: results on stdout, everything about the way there on stderr."""

from __future__ import annotations

from functools import cache

from rich.console import Console
from rich.text import Text

from kernel_agent.errors import KernelAgentError


@cache
def out() -> Console:
    """Results: tables, traces, records."""
    return Console(highlight=False)


@cache
def err() -> Console:
    """Progress, notices and errors."""
    return Console(stderr=True, highlight=False)


def show_error(error: KernelAgentError) -> None:
    """One message: what happened in red, what to do instead below it."""
    head, _, remedy = str(error).partition("\n")
    err().print(Text("error: ", style="bold red") + Text(head), soft_wrap=True)
    if remedy.strip():
        err().print(Text(remedy.rstrip()), soft_wrap=True)
