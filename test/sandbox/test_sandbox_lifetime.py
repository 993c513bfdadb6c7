"""Who ends whom: cancelling, closing, Ctrl-C, a dying parent, a dying server. Real processes, real signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from sandbox_jobs import PATHS, alive, below, job, run_watched, wait_until_gone

from kernel_agent.sandbox import Ending, Limits, Message, Report, Sandbox, SandboxError

LONG = Limits(wall_s=120)


def test_a_process_starts_in_under_a_third_of_a_second_after_the_first(sandbox: Sandbox) -> None:
    sandbox.run(job("say_nothing"))
    took = []
    for _ in range(5):
        start = time.monotonic()
        sandbox.run(job("say_nothing"))
        took.append(time.monotonic() - start)
    assert min(took) < 0.3


def test_every_job_has_a_fresh_process(sandbox: Sandbox) -> None:
    pids = [set(run_watched(sandbox, job("outlive")).pids) for _ in range(3)]
    assert not pids[0] & pids[1]
    assert not pids[1] & pids[2]


def test_two_jobs_run_at_the_same_time(sandbox: Sandbox) -> None:
    sandbox.run(job("say_nothing"))
    reports: list[Report] = []
    limits = Limits(wall_s=1)
    threads = [threading.Thread(target=lambda: reports.append(sandbox.run(job("sleep", limits)))) for _ in range(2)]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [report.ending for report in reports] == [Ending.TIMED_OUT] * 2
    assert time.monotonic() - start < 1.9, "they waited for each other"


def test_another_thread_can_cancel_a_job(sandbox: Sandbox) -> None:
    cancelled = threading.Event()
    pids: set[int] = set()

    def cancel(message: Message) -> None:
        pids.update(below(sandbox))
        cancelled.set()

    report = sandbox.run(job("outlive_and_loop", LONG), cancel, cancelled=cancelled)
    assert report.ending is Ending.CANCELLED
    assert len(pids) > 2
    assert wait_until_gone(list(pids)) == []


def test_closing_the_sandbox_ends_jobs_and_server() -> None:
    sandbox = Sandbox(preload=("torch",))
    running, reports = threading.Event(), list[Report]()
    thread = threading.Thread(target=lambda: reports.append(sandbox.run(job("loop", LONG), lambda _: running.set())))
    thread.start()
    assert running.wait(60)
    server = sandbox.server_pid
    assert server is not None
    pids = [server, *below(sandbox)]
    sandbox.close()
    thread.join()
    assert reports[0].ending is Ending.CANCELLED
    assert len(pids) > 2
    assert wait_until_gone(pids) == []
    with pytest.raises(SandboxError, match="closed"):
        sandbox.run(job("say_nothing"))


def test_an_exception_in_on_message_ends_the_job_and_is_passed_on(sandbox: Sandbox) -> None:
    pids: list[int] = []

    def fail(message: Message) -> None:
        pids.extend(below(sandbox))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        sandbox.run(job("loop", LONG), fail)
    assert pids
    assert wait_until_gone(pids) == []


def test_a_killed_server_is_replaced_for_the_next_job(sandbox: Sandbox) -> None:
    sandbox.run(job("say_nothing"))
    server = sandbox.server_pid
    assert server is not None
    os.kill(server, signal.SIGKILL)
    assert sandbox.run(job("say_nothing")).finished
    assert sandbox.server_pid != server


def test_a_killed_warden_takes_the_whole_job_with_it(sandbox: Sandbox) -> None:
    # The orphan in its own session falls to the server, which knows that it has no business being there.
    pids: list[int] = []
    messages: list[Message] = []

    def kill_warden(message: Message) -> None:
        messages.append(message)
        if len(messages) == 2:
            pids.extend(below(sandbox))
            os.kill(pids[0], signal.SIGKILL)

    report = sandbox.run(job("outlive_and_loop", LONG), kill_warden)
    assert report.ending is Ending.EXITED
    assert wait_until_gone(pids) == []


def test_an_import_error_of_the_server_is_told_in_its_words() -> None:
    with (
        Sandbox(preload=("no_such_module_at_all",)) as sandbox,
        pytest.raises(SandboxError, match="no_such_module_at_all"),
    ):
        sandbox.run(job("say_nothing"))


SCRIPT = """
import sys
sys.path[:0] = {paths!r}
from sandbox_jobs import below, job
from kernel_agent.sandbox import Limits, Sandbox

def main():
    with Sandbox(preload=("torch",)) as sandbox:
        def tell(message):
            print(sandbox.server_pid, *below(sandbox), flush=True)
        try:
            sandbox.run(job("outlive_and_loop", Limits(wall_s=120)), tell)
        except KeyboardInterrupt:
            server = sandbox.server_pid
            print("again", sandbox.run(job("say_nothing")).finished, sandbox.server_pid == server, flush=True)

main()
"""


@pytest.fixture
def parent() -> Iterator[subprocess.Popen[str]]:
    """A program, in a process group of its own, whose job loops and has a grandchild in a session of its own."""
    program = SCRIPT.format(paths=PATHS)
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        yield process
        process.kill()


def started(parent: subprocess.Popen[str]) -> list[int]:
    """Process ids of the server and of all below it, once grandchild and child run."""
    assert parent.stdout is not None
    lines = [parent.stdout.readline().split() for _ in range(2)]
    return sorted({int(word) for line in lines for word in line})


def test_a_parent_killed_without_warning_takes_everything_with_it(parent: subprocess.Popen[str]) -> None:
    pids = started(parent)
    assert len(alive(pids)) >= 4, "server, warden, child and grandchild at least"
    parent.kill()
    assert wait_until_gone(pids) == []


def test_ctrl_c_ends_the_job_and_not_the_server(parent: subprocess.Popen[str]) -> None:
    pids = started(parent)
    os.killpg(parent.pid, signal.SIGINT)
    assert parent.stdout is not None
    assert parent.stdout.readline().split() == ["again", "True", "True"]
    assert parent.wait(30) == 0
    assert wait_until_gone(pids) == []


def test_a_warm_server_is_the_one_that_serves_the_first_job() -> None:
    # A second server would be started, and the first left behind, if warming were forgotten.
    with Sandbox(preload=("kernel_agent.sandbox",)) as sandbox:
        sandbox.warm()
        server = sandbox.server_pid
        assert server is not None
        assert sandbox.run(job("say_nothing")).finished
        assert sandbox.server_pid == server


def test_closing_does_not_wait_for_a_server_that_still_imports() -> None:
    sandbox = Sandbox()
    sandbox.warm()
    server = sandbox.server_pid
    sandbox.close()
    assert server is not None
    assert alive([server]) == []


def test_a_parent_that_only_starts_the_server_imports_no_torch() -> None:
    # Its own imports, of seconds, then run beside those of the server.
    code = "import sys, kernel_agent.sandbox; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
