"""Locked-down child processes for code that nobody vouches for. `docs/threat-model.md` says what they stop."""

from kernel_agent.sandbox.call import Call
from kernel_agent.sandbox.job import (
    ChildError,
    Ending,
    Job,
    Limits,
    Message,
    Protection,
    Report,
    SandboxError,
    TracebackLine,
)
from kernel_agent.sandbox.left_files import LeftFiles
from kernel_agent.sandbox.protection import missing_walls
from kernel_agent.sandbox.reach import why_reachable
from kernel_agent.sandbox.supervisor import Sandbox

__all__ = [
    "Call",
    "ChildError",
    "Ending",
    "Job",
    "LeftFiles",
    "Limits",
    "Message",
    "Protection",
    "Report",
    "Sandbox",
    "SandboxError",
    "TracebackLine",
    "missing_walls",
    "why_reachable",
]
