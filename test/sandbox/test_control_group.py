"""Control groups around children: where one may be made, what is set in it, and what the kernel says of its limits.

Folders stand for the file system of control groups where the machine delegates none; the last test needs a real one.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from sandbox_jobs import job

from kernel_agent.sandbox import Ending, Limits, Sandbox, control_group
from kernel_agent.sandbox.control_group import ControlGroup, Passed


def machine(folder: Path, own: str, *, root: str = "/", divided: str = "cpu memory pids") -> Path:
    """What `/proc/self` says where control groups lie in `folder`/groups, and the parent of the own one is divided."""
    place = folder / "groups" / own.strip("/")
    place.mkdir(parents=True)
    for where in (place, place.parent):
        (where / "cgroup.procs").write_text("")
        (where / "cgroup.subtree_control").write_text(divided if where == place.parent else "")
    proc = folder / "proc"
    proc.mkdir()
    (proc / "cgroup").write_text(f"1:name=systemd:/\n0::{root.rstrip('/')}{own}\n")
    (proc / "mountinfo").write_text(
        f"22 1 0:21 / /proc rw shared:5 - proc proc rw\n30 24 0:26 {root} {folder}/groups rw - cgroup2 cgroup2 rw\n"
    )
    return proc


def test_a_group_is_made_beside_the_own_one(tmp_path: Path) -> None:
    # Not inside of it: the kernel refuses to divide a group that holds processes.
    proc = machine(tmp_path, "/user.slice/terminal.scope")
    assert control_group.delegated(proc) == tmp_path / "groups" / "user.slice"


def test_a_mount_that_begins_further_down_is_read_from_there(tmp_path: Path) -> None:
    proc = machine(tmp_path, "/mine/leaf", root="/docker/1234")
    assert control_group.delegated(proc) == tmp_path / "groups" / "mine"


@pytest.mark.parametrize("divided", ["", "cpu pids", "memory"])
def test_a_place_without_both_controllers_is_none(tmp_path: Path, divided: str) -> None:
    # Limits that are written where nobody enforces them would be a wall on paper.
    proc = machine(tmp_path, "/user.slice/terminal.scope", divided=divided)
    with pytest.raises(OSError, match="no control group with memory and pids is delegated"):
        control_group.delegated(proc)


def test_a_machine_with_version_one_alone_has_none(tmp_path: Path) -> None:
    proc = machine(tmp_path, "/user.slice/terminal.scope")
    (proc / "mountinfo").write_text("30 24 0:26 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n")
    with pytest.raises(OSError, match="no control groups of version 2"):
        control_group.delegated(proc)


def test_a_group_holds_the_limits_of_its_job_before_anybody_enters(tmp_path: Path) -> None:
    group = control_group.made(Limits(memory_bytes=5 << 20, threads=7), tmp_path)
    written = {path.name: path.read_text() for path in group.path.iterdir()}
    assert written == {"memory.max": str(5 << 20), "memory.oom.group": "1", "pids.max": "7", "memory.swap.max": "0"}


def test_a_group_that_cannot_be_limited_is_taken_away_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path, *_: object, **__: object) -> int:
        raise PermissionError(path)

    monkeypatch.setattr(Path, "write_text", refused)
    with pytest.raises(PermissionError):
        control_group.made(Limits(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_the_kernel_enforced_is_read_from_its_counters(tmp_path: Path) -> None:
    group = ControlGroup(tmp_path)
    assert group.passed() == Passed(memory=False, tasks=False)
    (tmp_path / "memory.events").write_text("low 0\nmax 9\noom 1\noom_kill 0\n")  # reclaimed, and nobody was killed
    (tmp_path / "pids.events").write_text("max 0\n")
    assert group.passed() == Passed(memory=False, tasks=False)
    (tmp_path / "memory.events").write_text("low 0\nmax 9\noom 1\noom_kill 3\n")
    (tmp_path / "pids.events").write_text("max 1\n")
    assert group.passed() == Passed(memory=True, tasks=True)


def test_a_group_that_has_gone_ends_without_a_word(tmp_path: Path) -> None:
    ControlGroup(tmp_path / "gone").end()


@pytest.mark.skipif(not control_group.wall().active, reason="no control group is delegated here")
def test_memory_that_no_process_holds_counts_in_a_real_group() -> None:
    # Pages of an unmapped memfd are resident in no process: the polled limit is blind to them.
    with Sandbox() as sandbox:
        report = sandbox.run(job("fill_memory_nobody_holds", Limits(memory_bytes=256 << 20)))
    assert report.ending is Ending.OUT_OF_MEMORY
