"""A control group of its own for each child, where the machine delegates some: the kernel itself then holds it to its
memory and its number of tasks, between two polls of the warden, too.

Version 2 alone is used: there memory, shared memory and files in memory count together, whoever of the group asks for
them, CUDA's address space counts nothing, and root is bound like anybody else. A group is made beside the one that
this program is in, since one that holds processes cannot be divided: systemd gives every user who logs in to a desktop
such a place, `systemd-run --user --scope` makes one anywhere. Elsewhere the polled limits are all there is.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from kernel_agent.sandbox.job import Limits, Protection

NAME = "control group"
STOPS = "passing the limits of memory and tasks between two polls, 20 ms apart"
_NEEDED = frozenset({"memory", "pids"})
_PATIENCE_S = 0.5


@dataclass(frozen=True)
class Passed:
    """Which limits the kernel has enforced in a group."""

    memory: bool
    """It killed for want of memory."""
    tasks: bool
    """It refused a process or a thread."""


@dataclass(frozen=True)
class ControlGroup:
    """One group, for the processes of one job."""

    path: Path

    def enter(self) -> None:
        """Put the calling process and whatever it will start into the group. Raises `OSError`."""
        (self.path / "cgroup.procs").write_text("0", encoding="ascii")

    def passed(self) -> Passed:
        """What has become of the limits so far."""
        return Passed(
            _count(self.path / "memory.events", "oom_kill") > 0,
            _count(self.path / "pids.events", "max") > 0,
        )

    def end(self) -> None:
        """Kill what is left in the group and remove it. One that something stuck in the kernel holds stays, empty of
        everything else."""
        with contextlib.suppress(OSError):  # kernels before 5.14 have no such file: the warden has killed all by then
            (self.path / "cgroup.kill").write_text("1", encoding="ascii")
        give_up = time.monotonic() + _PATIENCE_S
        while time.monotonic() < give_up:
            try:
                self.path.rmdir()
                return
            except FileNotFoundError:
                return
            except OSError:  # its last process is on its way out
                time.sleep(0.005)


def made(limits: Limits, place: Path) -> ControlGroup:
    """A fresh group in `place`, with the limits set and nobody in it. Raises `OSError`."""
    group = ControlGroup(place / f"kernel-agent-{uuid.uuid4().hex}")
    group.path.mkdir()
    try:
        # Together, and none of it in swap: what is killed is the whole job, never one process of it.
        (group.path / "memory.max").write_text(str(limits.memory_bytes), encoding="ascii")
        (group.path / "memory.oom.group").write_text("1", encoding="ascii")
        (group.path / "pids.max").write_text(str(limits.threads), encoding="ascii")
        with contextlib.suppress(FileNotFoundError):  # kernels without swap
            (group.path / "memory.swap.max").write_text("0", encoding="ascii")
    except OSError:
        group.path.rmdir()
        raise
    return group


def begun(limits: Limits) -> ControlGroup | None:
    """A group for one job, or None where this machine gives none."""
    try:
        return made(limits, delegated())
    except OSError:
        return None


def wall() -> Protection:
    """Whether a child on this machine gets a group."""
    try:
        place = delegated()
        made(Limits(), place).end()
    except OSError as error:
        return Protection(name=NAME, active=False, detail=f"{error}; limits are polled", stops=STOPS)
    return Protection(name=NAME, active=True, detail=f"made in {place}", stops=STOPS)


def delegated(proc: Path = Path("/proc/self")) -> Path:
    """The folder of control groups that this process may divide. Raises `OSError` where there is none."""
    place = _own_group(proc)
    for folder in (place, place.parent):
        try:
            divided = set((folder / "cgroup.subtree_control").read_text(encoding="ascii").split())
        except OSError:  # above the mount
            continue
        if divided >= _NEEDED and all(os.access(path, os.W_OK) for path in (folder, folder / "cgroup.procs")):
            return folder
    raise OSError("no control group with memory and pids is delegated here")


def _own_group(proc: Path) -> Path:
    """The folder of the group that this process is in."""
    lines = (proc / "cgroup").read_text(encoding="utf-8").splitlines()
    own = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), None)
    for line in (proc / "mountinfo").read_text(encoding="utf-8").splitlines():
        fields, _, kind = line.partition(" - ")
        if own is not None and kind.startswith("cgroup2 "):
            root, mounted = fields.split()[3:5]
            below = PurePosixPath(own)
            if ".." not in below.parts and below.is_relative_to(root):
                return Path(mounted) / below.relative_to(root)
    raise OSError("no control groups of version 2 are mounted here")


def _count(path: Path, name: str) -> int:
    """A number in a file of names and numbers; zero where the group has no such file."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)
