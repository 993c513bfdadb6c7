"""The warden: one small process per job between the fork server and the child.

It adopts whatever the child leaves behind, polls memory and process counts (rlimits are void for root, and RLIMIT_AS
breaks CUDA), puts the child into a control group where it may, keeps the clock, and ends everything below it: when a
limit is passed, when the parent says so, and when the parent dies, which it notices because its control socket closes.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import os
import select
import shutil
import signal
import socket
import sys
import time
import traceback
import uuid
from pathlib import Path
from typing import NoReturn

from pydantic import BaseModel, ConfigDict

from kernel_agent.sandbox import control_group, linux, process_tree
from kernel_agent.sandbox.control_group import ControlGroup
from kernel_agent.sandbox.job import Limits
from kernel_agent.sandbox.namespaces import leave_mounts, leave_processes
from kernel_agent.sandbox.runtime import LaunchRequest, run_child

_POLL_S = 0.02


class Cut(str, enum.Enum):
    """Why the warden ended a child that had not ended by itself."""

    TIMED_OUT = "TIMED_OUT"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    TOO_MANY_PROCESSES = "TOO_MANY_PROCESSES"
    CANCELLED = "CANCELLED"


class Birth(BaseModel):
    """The warden's first word to the parent."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    warden: int
    child: int


class Aftermath(BaseModel):
    """The warden's last word to the parent, when nothing of the job is left."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cut: Cut | None
    exit_code: int | None
    signal: int | None
    seconds: float
    peak_bytes: int
    left_behind: int
    survivors: tuple[int, ...]


def run_warden(request: LaunchRequest, channel: socket.socket, control: socket.socket, out: int, err: int) -> NoReturn:
    """Become the warden: fork the child, watch it, bury it. Never returns, never raises."""
    status = 1
    try:
        linux.name_process("ka-warden")
        linux.adopt_orphans()
        warden = os.getpid()
        group = control_group.begun(request.limits)
        alone = leave_processes((channel.fileno(), control.fileno(), out, err))
        child = os.fork()
        if child == 0:
            linux.die_with_parent(signal.SIGKILL)
            if os.getppid() not in (warden, 0):  # 0: it is in another namespace
                os._exit(1)
            control.close()
            if group is not None:
                with contextlib.suppress(OSError):  # then the polled limits hold alone
                    group.enter()
            if alone.life is not None:
                os.close(alone.life)
            mounts = leave_mounts(request.scratch, request.readable, own_processes=alone.wall.active)
            run_child(request, channel, out, err, (alone.wall, mounts))
        channel.close()
        os.close(out)
        os.close(err)
        _tell(control, Birth(warden=warden, child=child))
        aftermath = _Watch(child, request.limits, control, alone.first, group).until_the_end()
        _tell(control, aftermath)
        if aftermath.cut is Cut.CANCELLED:
            remove_scratch(request.scratch)  # the parent may be dead; if it is not, it finds nothing left to do
        status = 0
    except BaseException:  # our own defect: nothing may survive it
        traceback.print_exc()
        process_tree.kill_descendants()
    finally:
        sys.stderr.flush()
        os._exit(status)


class _Watch:
    """Watches one child until it and everything it started has ended."""

    def __init__(
        self, child: int, limits: Limits, control: socket.socket, first: int | None, group: ControlGroup | None
    ) -> None:
        """`first` is the first process of the child's namespace, which is ours; `group` holds child and offspring."""
        self._child = child
        self._first = first
        self._group = group
        self._limits = limits
        self._control = control
        self._status: int | None = None
        self._peak = 0
        self._start = time.monotonic()

    def until_the_end(self) -> Aftermath:
        events = select.poll()
        events.register(self._control, select.POLLIN | select.POLLHUP)
        try:
            handle = os.pidfd_open(self._child)
            events.register(handle, select.POLLIN)
        except OSError:  # a sandboxed kernel without pidfds: its end is then noticed by polling alone
            pass
        cut = None
        while cut is None:
            ready = {number for number, _ in events.poll(_POLL_S * 1000)}
            self._reap()
            if self._status is not None:
                break
            cut = Cut.CANCELLED if self._control.fileno() in ready else self._limit_passed()
        cut = cut or self._enforced()
        left_behind = self._usage().processes if cut is None else 0
        survivors = process_tree.kill_descendants()
        if self._group is not None:
            self._group.end()
        return Aftermath(
            cut=cut,
            exit_code=os.WEXITSTATUS(self._status) if self._status is not None and os.WIFEXITED(self._status) else None,
            signal=os.WTERMSIG(self._status) if self._status is not None and os.WIFSIGNALED(self._status) else None,
            seconds=time.monotonic() - self._start,
            peak_bytes=self._peak,
            left_behind=left_behind,
            survivors=survivors,
        )

    def _usage(self) -> process_tree.Usage:
        """Of the child and all it started."""
        return process_tree.usage([pid for pid in process_tree.descendants(os.getpid()) if pid != self._first])

    def _reap(self) -> None:
        while self._status is None:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._child:
                self._status = status

    def _limit_passed(self) -> Cut | None:
        now = self._usage()
        self._peak = max(self._peak, now.memory_bytes)
        if now.processes > self._limits.processes or now.threads > self._limits.threads:
            return Cut.TOO_MANY_PROCESSES
        if now.memory_bytes > self._limits.memory_bytes:
            return Cut.OUT_OF_MEMORY
        if time.monotonic() - self._start > self._limits.wall_s:
            return Cut.TIMED_OUT
        return self._enforced()

    def _enforced(self) -> Cut | None:
        """The limit that the kernel held the group to before a poll saw it passed."""
        if self._group is None:
            return None
        passed = self._group.passed()
        if passed.memory:
            return Cut.OUT_OF_MEMORY
        return Cut.TOO_MANY_PROCESSES if passed.tasks else None


def _tell(control: socket.socket, record: BaseModel) -> None:
    try:
        control.sendall(record.model_dump_json().encode() + b"\n")
    except (BrokenPipeError, ConnectionResetError):
        return  # the parent is dead: nobody to tell, and the burial goes on


def remove_scratch(scratch: Path) -> None:
    """Delete a scratch folder whatever a child has made of it: unreadable folders, very deep nesting.

    Forks nothing, as a warden cannot once its namespace of processes has ended.
    """
    try:
        shutil.rmtree(scratch)
    except FileNotFoundError:
        return
    except (OSError, RecursionError):
        _flatten(scratch)
        shutil.rmtree(scratch)


def _flatten(top: Path) -> None:
    """Delete all files, and move folders up to `top` until none lies in another: no path grows long."""
    fresh = (str(top / f"{uuid.uuid4().hex}-{number}") for number in itertools.count())
    while folders := [entry.path for entry in os.scandir(top) if entry.is_dir(follow_symlinks=False)]:
        for folder in folders:
            os.chmod(folder, 0o700)
            for inner in os.scandir(folder):
                if inner.is_dir(follow_symlinks=False):
                    os.chmod(inner.path, 0o700)  # a folder that is moved is written to
                    os.rename(inner.path, next(fresh))
                else:
                    os.unlink(inner.path)
            os.rmdir(folder)
