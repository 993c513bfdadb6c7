"""Every failure a user can cause or meet, as an exception that says what happened and what to do instead.

The command line turns these into one message and an exit code; nothing else may end a run with a traceback.
"""

from __future__ import annotations

import enum
from pathlib import Path


class ExitCode(enum.IntEnum):
    """What the process tells its caller. `docs/architecture.md` lists the same table."""

    OK = 0
    RED = 1
    BAD_INPUT = 2
    ENVIRONMENT = 3
    WAITING = 4
    INTERRUPTED = 130


class KernelAgentError(Exception):
    """Base of all our errors: a message, a remedy, and the exit code it ends the process with."""

    exit_code = ExitCode.RED
    run: Path | None = None
    """Folder of the run that this stopped, which can be resumed; None when there is none."""

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}\n  {self.remedy}" if self.remedy else self.message


class InputError(KernelAgentError):
    """The user's file or arguments are wrong. Carries the place, so that an editor can jump to it."""

    exit_code = ExitCode.BAD_INPUT

    def __init__(self, message: str, *, remedy: str = "", path: Path | None = None, line: int | None = None) -> None:
        super().__init__(message, remedy=remedy)
        self.path = path
        self.line = line

    def __str__(self) -> str:
        place = "" if self.path is None else f"{self.path}:" + (f"{self.line}:" if self.line else "") + " "
        return place + super().__str__()


class EnvironmentProblem(KernelAgentError):
    """This machine lacks something the task needs: a key, a library, a supported platform."""

    exit_code = ExitCode.ENVIRONMENT


class WaitingForReply(KernelAgentError):
    """A manual reply is not there yet and the caller asked not to wait for it."""

    exit_code = ExitCode.WAITING


class PausedRun(KernelAgentError):
    """Phase 2 is over and phase 3 was to wait, for a machine with a GPU or for a look at the backward."""

    exit_code = ExitCode.WAITING


class InterruptedRun(KernelAgentError):
    """The person at the keyboard stopped a run. Its ledger is on disk; the remedy is the command to go on with it."""

    exit_code = ExitCode.INTERRUPTED


class InternalError(KernelAgentError):
    """A defect of this tool: an exception that nobody meant to raise. It is the cause of this one."""

    @classmethod
    def of(cls, error: BaseException) -> InternalError:
        """One line for an unexpected exception."""
        said = " ".join(str(error).split())
        what = f"{type(error).__name__}: {said}" if said else type(error).__name__
        return cls(f"internal error: {what}", remedy="please report it with this run's trace")


def file_problem(error: OSError) -> EnvironmentProblem:
    """What a failed call of the operating system means to the person at the keyboard."""
    place = f"{error.filename}: " if error.filename else ""
    return EnvironmentProblem(f"{place}{error.strerror or error}", remedy="check the path and its permissions")
