"""Turns an exception out of a user's code into one message with the line of the user's file, never a traceback."""

from __future__ import annotations

import traceback
from pathlib import Path
from types import ModuleType

from kernel_agent.errors import InputError, KernelAgentError


def blame(error: BaseException, module: ModuleType, what: str, remedy: str) -> KernelAgentError:
    """`InputError` that says what failed, why, and on which line of the module's file the error passed last.

    Our own errors are returned as they are: they carry their place and remedy already.
    """
    return blame_file(error, module_path(module), what, remedy)


def blame_file(error: BaseException, path: Path, what: str, remedy: str) -> KernelAgentError:
    """`blame` for a file whose module does not exist because importing it failed."""
    if isinstance(error, KernelAgentError):
        return error
    return InputError(f"{what}: {first_line(error)}", remedy=remedy, path=path, line=line_in(error, path))


def line_in(error: BaseException, path: Path) -> int | None:
    """The last line of a file that an exception came through, or None."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return error.lineno
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return lines[-1] if lines else None


def first_line(error: BaseException) -> str:
    """`ValueError: too large`: the error's type and the first line of its text."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def module_path(module: ModuleType) -> Path:
    """The file a module was imported from."""
    return Path(str(module.__file__))
