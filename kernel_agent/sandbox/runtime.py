"""The part of us that runs inside the child, around the entry: walls up, job in, entry called, last word sent.

Only the frame FINISHED, sent after the entry returned, counts as success; an exit code never does.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from pydantic import BaseModel, ConfigDict

from kernel_agent.sandbox import environment, linux
from kernel_agent.sandbox.call import Call
from kernel_agent.sandbox.confinement import confine
from kernel_agent.sandbox.frames import Budget, FrameKind, FrameReader, encode
from kernel_agent.sandbox.job import ChildError, Limits, Protection, TracebackLine

_TRUSTED_BUDGET = 1 << 62
_FRAMES_KEPT = 48


class LaunchRequest(BaseModel):
    """What the server needs to know to start one child. The job itself travels over the child's own channel."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    label: str
    entry: str
    scratch: Path
    readable: tuple[Path, ...]
    search_path: tuple[str, ...]
    limits: Limits


def run_child(
    request: LaunchRequest, channel: socket.socket, out: int, err: int, walls: tuple[Protection, ...]
) -> NoReturn:
    """Become the child, behind `walls` already: never returns, never raises."""
    status = 1
    try:
        os.setsid()
        linux.name_process("ka-child")
        _take_streams(out, err)
        _enter_scratch(request.scratch)
        sys.path[:] = request.search_path
        sys.argv[:] = [request.label or request.entry]
        protections = walls + confine(request.scratch, request.readable, request.limits)
        hello = {"protections": [wall.model_dump() for wall in protections]}
        _send(channel, FrameKind.HELLO, hello)
        job = FrameReader(Budget(_TRUSTED_BUDGET, _TRUSTED_BUDGET)).receive(channel)
        call = Call(job.record, job.tensors, request.scratch, request.label, channel)
        me = os.getpid()
        kind, record = _run_entry(request.entry, call)
        if os.getpid() != me:  # the entry forked, and this is the fork: it has nothing to say
            os._exit(1)
        call._write(kind, record, {})
        status = 0 if kind is FrameKind.FINISHED else 1
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # a wall or the channel broke; the parent reads this in the tail of stderr
        traceback.print_exc()
    finally:
        os._exit(status)


def _take_streams(out: int, err: int) -> None:
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.close(out)
    os.close(err)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.enable(file=2)


def _enter_scratch(scratch: Path) -> None:
    os.environ.update(environment.in_scratch(scratch))
    (scratch / "tmp").mkdir()
    tempfile.tempdir = None
    os.chdir(scratch)


def _run_entry(entry: str, call: Call) -> tuple[FrameKind, dict[str, Any]]:
    """Call the entry; the last word on it and its record."""
    module, _, name = entry.partition(":")
    try:
        function: Callable[[Call], None] = getattr(importlib.import_module(module), name)
        function(call)
    except BaseException as error:  # SystemExit and KeyboardInterrupt too: leaving is not returning
        return FrameKind.RAISED, describe(error).model_dump()
    return FrameKind.FINISHED, {}


def _send(channel: socket.socket, kind: FrameKind, record: Mapping[str, Any]) -> None:
    for buffer in encode(kind, record, {}):
        channel.sendall(buffer)


def describe(error: BaseException) -> ChildError:
    """The exception as a record: bounded in every part, and without our own frames above the entry."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    try:
        message = str(error)
    except Exception as broken:  # a hostile or faulty __str__
        message = f"(its message cannot be printed: {type(broken).__name__})"
    lines = [
        TracebackLine(
            file=frame.filename[:4096],
            line=frame.lineno or 0,
            function=frame.name[:1024],
            text=(frame.line or "")[:4096],
        )
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename != __file__ and not frame.filename.startswith("<frozen importlib")
    ]
    if isinstance(error, SyntaxError):
        lines.append(
            TracebackLine(
                file=(error.filename or "")[:4096],
                line=error.lineno or 0,
                function="",
                text=(error.text or "").strip()[:4096],
            )
        )
    if len(lines) > _FRAMES_KEPT:
        lines = [*lines[: _FRAMES_KEPT // 2], *lines[-_FRAMES_KEPT // 2 :]]
    return ChildError(type=name[:1024], message=message[:65536], traceback=tuple(lines))
