"""Turns an exception out of a user's code into one message with the line of the user's file, never a traceback."""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from types import ModuleType

from kernel_agent.errors import InputError, KernelAgentError
from kernel_agent.ir import IRError


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


def refused_kernel(error: IRError, path: Path) -> InputError:
    """`blame` for a kernel that Triton refuses: the line of the kernel where it is of this file, else of the launch."""
    own = error.line is not None and Path(error.file).name == path.name
    line = error.line if own else line_in(error, path)
    return InputError(essence(error.message), remedy=error.remedy or "Correct the launch.", path=path, line=line)


def essence(message: str) -> str:
    """Triton's message without the source that it quotes, whose lines are counted from the kernel and not the file.

    >>> essence("Triton cannot compile kernel k (line 9): at 1:4:\\ndef k(X):\\n    ^\\nNameError('a is not defined')")
    'Triton cannot compile kernel k: a is not defined'
    """
    quoted = re.match(r"(.*?)(?: \(line \d+\))?: at \d+:\d+:\n.*\n[ \t]*\^[ \t]*(?:\n|$)", message, re.DOTALL)
    head, said = (quoted[1], message[quoted.end() :]) if quoted else ("", message)
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    first = lines[0] if lines else ""
    raised = re.fullmatch(r"\w+\((['\"])(.*)\1,?\)", first)
    return ": ".join(part for part in (head, raised[2] if raised else first) if part)


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
