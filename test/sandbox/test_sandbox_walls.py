"""What a child may not do, tried from inside one. Each test fails if the wall it names is taken away."""

from __future__ import annotations

import ctypes
import os
import platform
import socket
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
from sandbox_jobs import Run, job

from kernel_agent.sandbox import Limits, Protection, Sandbox, landlock, why_reachable
from kernel_agent.sandbox.protection import protections

PROTECTIONS = protections()
needs_landlock = pytest.mark.skipif(landlock.abi() == 0, reason="this kernel has no Landlock")
needs_seccomp = pytest.mark.skipif(
    not any(wall.name == "seccomp" and wall.active for wall in PROTECTIONS), reason="this machine has no libseccomp"
)
needs_namespace = pytest.mark.skipif(
    not any(wall.name == "network namespace" and wall.active for wall in PROTECTIONS),
    reason="this machine permits no network namespace",
)


def stands(name: str) -> bool:
    return any(wall.name == name and wall.active for wall in PROTECTIONS)


needs_processes = pytest.mark.skipif(
    not stands("process namespace"), reason="this machine permits no namespace of processes"
)
needs_mounts = pytest.mark.skipif(not stands("mount namespace"), reason="this machine permits no namespace of mounts")


def attempt(run: Run, what: str, limits: Limits | None = None, **details: object) -> dict[str, str]:
    """What came of one attempt: {"done": ...} or {"refused": name of the exception}."""
    report = run("outcome", limits, attempt=what, **details)
    assert report.finished, report
    return report.messages[0].record


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A file of ours that no child was allowed to see."""
    path = tmp_path / "truth.json"
    path.write_text("the answer")
    return path


@needs_landlock
@pytest.mark.parametrize("what", ["write", "delete", "truncate", "link", "read"])
def test_a_file_outside_scratch_is_out_of_reach(run: Run, outside: Path, what: str) -> None:
    assert "refused" in attempt(run, what, path=str(outside))
    assert outside.read_text() == "the answer"


@needs_landlock
def test_a_new_file_outside_scratch_is_refused(run: Run, tmp_path: Path) -> None:
    assert "refused" in attempt(run, "write", path=str(tmp_path / "new"))
    assert list(tmp_path.iterdir()) == []


@needs_landlock
@pytest.mark.parametrize("folder", ["/tmp", "/dev/shm", "/root", "/etc"])
def test_folders_with_the_data_of_others_cannot_be_listed(run: Run, folder: str) -> None:
    # Another job's scratch folder, and with it the truth, lies below the first two.
    assert "refused" in attempt(run, "list", path=folder)


@needs_landlock
def test_a_folder_that_nothing_lets_children_read_is_known_for_it(run: Run, outside: Path) -> None:
    assert why_reachable(outside.parent, PROTECTIONS) == ""
    assert "refused" in attempt(run, "read", path=str(outside)), "and it is out of reach indeed"


def test_a_folder_that_children_may_read_is_known_for_it(run: Run) -> None:
    inside = Path(os.__file__).parent
    assert why_reachable(inside, PROTECTIONS) != ""
    assert "done" in attempt(run, "read", path=str(inside / "os.py"))
    assert why_reachable(Path("/"), PROTECTIONS) != "", "it holds what children may read"


def test_without_landlock_every_folder_is_reachable(tmp_path: Path) -> None:
    walls = [Protection(name="Landlock", active=False, detail="none")]
    assert "no Landlock" in why_reachable(tmp_path, walls)


@needs_landlock
def test_a_readable_path_can_be_read_and_not_written(sandbox: Sandbox, outside: Path) -> None:
    allowed = job("outcome", attempt="read", path=str(outside))
    report = sandbox.run(type(allowed)(**{**vars(allowed), "readable": (*allowed.readable, outside)}))
    assert report.messages[0].record == {"done": "the answer"}
    written = job("outcome", attempt="write", path=str(outside))
    report = sandbox.run(type(written)(**{**vars(written), "readable": (*written.readable, outside)}))
    assert "refused" in report.messages[0].record


def test_the_scratch_folder_can_be_written_and_is_gone_afterwards(run: Run) -> None:
    assert "done" in attempt(run, "scratch")
    report = run("describe_process")
    assert report.messages[0].record["home"] == report.messages[0].record["scratch"]
    assert not Path(report.messages[0].record["scratch"]).exists()


def test_temporary_files_land_in_scratch(run: Run) -> None:
    assert "kernel-agent-" in attempt(run, "temporary")["done"]


def test_a_scratch_folder_that_resists_deletion_is_deleted(run: Run) -> None:
    report = run("deep_scratch")
    assert report.finished
    assert not Path(report.messages[0].record["scratch"]).exists()


def test_files_left_behind_are_counted_and_their_names_can_be_printed(sandbox: Sandbox) -> None:
    # Links are not followed: a child could have millions of files counted, and names of others shown.
    report = sandbox.run(replace(job("leave_files"), own_files=("mine",)))
    assert report.left_files.count == 3
    assert report.left_files.names == ("\\x1b[2Jname", "folder/inner/file", "link")


def test_folders_too_deep_to_enter_are_counted_once_and_removed(run: Run) -> None:
    report = run("deep_scratch")
    assert 1 <= report.left_files.count <= 2
    assert not Path(report.messages[0].record["scratch"]).exists()


def test_a_file_cannot_grow_past_its_limit(run: Run) -> None:
    assert "refused" in attempt(run, "big file", Limits(wall_s=30, file_bytes=1 << 20), bytes=2 << 20)


def test_the_c_compiler_runs(run: Run) -> None:
    # Triton builds its launchers with it: a wall that stops it would stop every native check.
    assert attempt(run, "compile") == {"done": "compiled\n"}


def test_no_key_is_found_in_any_environment(run: Run, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    # The key is in the environment of this very process: /proc/<parent>/environ must be closed as well.
    secret = os.environ.get("PATH", "").split(":")[0]
    monkeypatch.setenv("OPENAI_API_KEY", "sk-must-not-leak")
    monkeypatch.setenv("HTTPS_PROXY", "http://user:password-must-not-leak@proxy")
    with Sandbox(preload=("torch",)) as fresh:
        report = fresh.run(job("outcome", attempt="environments"))
    found = report.messages[0].record["done"]
    assert secret in found, "the search itself works"
    assert "must-not-leak" not in found


def test_the_environment_this_process_was_started_with_is_closed(run: Run) -> None:
    found = attempt(run, "environments")["done"]
    ours = Path(f"/proc/{os.getpid()}/environ").read_bytes().decode(errors="replace")
    assert ours not in found


@needs_namespace
def test_a_connection_to_this_machine_is_refused(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert "refused" in attempt(run, "connect", port=server.getsockname()[1])


@needs_namespace
def test_a_datagram_to_the_world_is_refused(run: Run) -> None:
    # Landlock's network rules know TCP only; this is what the namespace is for.
    assert "refused" in attempt(run, "udp")


@needs_namespace
def test_an_abstract_socket_of_this_machine_is_refused(run: Run) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"\0kernel-agent-test-{os.getpid()}")
        server.listen()
        assert "refused" in attempt(run, "abstract socket", address=f"@kernel-agent-test-{os.getpid()}")


@needs_seccomp
@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM], ids=["stream", "datagram"])
def test_a_socket_with_a_path_is_refused(sandbox: Sandbox, tmp_path: Path, kind: socket.SocketKind) -> None:
    # Landlock lets a child connect to docker.sock and an ssh-agent, and a network namespace does not separate them.
    path = tmp_path / "agent.sock"
    with socket.socket(socket.AF_UNIX, kind) as server:
        server.bind(str(path))
        what = "path socket" if kind is socket.SOCK_STREAM else "path datagram"
        if kind is socket.SOCK_STREAM:
            server.listen()
        asked = job("outcome", attempt=what, path=str(path))
        report = sandbox.run(replace(asked, readable=(*asked.readable, tmp_path)))
    assert report.messages[0].record == {"refused": "PermissionError"}


CALLS = {
    "ptrace": (101, [0, 0, 0, 0]),
    "process_vm_readv": (310, [1, 0, 0, 0, 0, 0]),
    "keyctl": (250, [0, -1, 0, 0, 0]),
    "io_uring_setup": (425, [4, 0]),
    "userfaultfd": (323, [1]),
    "perf_event_open": (298, [0, 0, -1, -1, 0]),
    "bpf": (321, [0, 0, 0]),
    "unshare": (272, [0]),
    "clone of a user namespace": (56, [0x10000000, 0, 0, 0, 0]),
}
"""Numbers of x86-64 with arguments to which the kernel itself would answer otherwise."""


@needs_seccomp
@pytest.mark.skipif(platform.machine() != "x86_64", reason="calls are named by their x86-64 numbers")
@pytest.mark.parametrize("name", CALLS)
def test_a_system_call_that_nothing_honest_needs_is_refused(run: Run, name: str) -> None:
    number, arguments = CALLS[name]
    assert attempt(run, "system call", number=number, arguments=arguments) == {"done": "Operation not permitted"}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="calls are named by their x86-64 numbers")
def test_those_system_calls_are_not_refused_outside_of_a_child() -> None:
    # Otherwise the test above would pass without any filter.
    libc = ctypes.CDLL(None, use_errno=True)
    answers = {}
    for name in ("keyctl", "unshare"):  # the others would do something
        number, arguments = CALLS[name]
        done = libc.syscall(ctypes.c_long(number), *(ctypes.c_long(word) for word in arguments))
        answers[name] = done if done >= 0 else os.strerror(ctypes.get_errno())
    assert "Operation not permitted" not in answers.values(), answers


@pytest.mark.skipif(landlock.abi() < 6, reason="this kernel's Landlock does not scope signals")
def test_the_parent_cannot_be_signalled(run: Run) -> None:
    assert "refused" in attempt(run, "signal", pid=os.getpid())


@needs_processes
def test_other_processes_are_neither_seen_nor_reached(run: Run) -> None:
    # Names and command lines of a user's programs stand in /proc; its own first process has number 1.
    assert attempt(run, "list numbers", path="/proc")["done"] == "[1, 2]"
    assert "refused" in attempt(run, "signal", pid=os.getpid())


@needs_mounts
@pytest.mark.parametrize("folder", ["/home", "/root", "/tmp", "/dev/shm"])
def test_folders_of_users_are_empty_but_for_what_is_needed(folder: str, tmp_path: Path) -> None:
    # Without Landlock this is what keeps other jobs' scratch folders and the user's files from being read or changed.
    (tmp_path / "truth").write_text("the answer")
    with tempfile.TemporaryDirectory(prefix="kernel-agent-") as scratch:
        seen = in_mounts_alone(
            Path(scratch),
            f"""
            import os
            print(os.path.exists({str(tmp_path / "truth")!r}), os.path.isdir({scratch!r}))
            open(os.path.join({scratch!r}, "own"), "w").close()
            for place in ({folder!r}, "/usr", "/etc"):
                try:
                    open(os.path.join(place, "new"), "w").close()
                except OSError as error:
                    print(error.strerror)
        """,
        )
    assert seen.splitlines() == ["False True", *["Read-only file system"] * 3]
    assert not Path(folder, "new").exists()


def in_mounts_alone(scratch: Path, program: str) -> str:
    """What a program prints behind the mounts, with no other wall."""
    head = f"""
import os, sys
sys.path[:] = {sys.path!r}
from pathlib import Path
from kernel_agent.sandbox.namespaces import leave_mounts
wall = leave_mounts(Path({str(scratch)!r}), (), own_processes=False)
assert wall.active, wall
"""
    program = head + textwrap.dedent(program)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not done.stderr, done.stderr
    return done.stdout


def test_nothing_can_be_mounted(run: Run) -> None:
    assert "refused" in attempt(run, "mount")


def test_a_child_starts_clean(run: Run) -> None:
    facts = run("describe_process").messages[0].record
    assert facts["threads"] == 1
    assert facts["torch threads"] == 1
    assert facts["cuda"] is False, "the server initialised CUDA, which does not survive a fork"
    assert facts["driver"] is False, "the server woke Triton's driver"
    assert facts["leader"] is True
    assert not {"faiss", "tokenizers", "sentence_transformers"} & set(facts["modules"])


def test_a_child_inherits_only_its_streams_and_its_channel(run: Run) -> None:
    # The control socket of the warden or the server's own would be a way to speak for them.
    facts = run("describe_process").messages[0].record
    assert sum(link.startswith("socket:") for link in facts["fds"]) == 1
    assert sum(link.startswith("pipe:") for link in facts["fds"]) == 2


def test_protections_are_reported_as_a_child_has_them(run: Run) -> None:
    assert run("say_nothing").protections == PROTECTIONS


def test_forms_are_combined_in_a_child_without_torchs_compiler(run: Run) -> None:
    # torch imports it at the first elementwise function of tensors without contents: a second in each child.
    assert run("combine_forms").messages[0].record == {"shape": [3, 4], "compiler": False}
