"""Every way a job can end, by real processes, each as its own typed ending and with nothing left behind."""

from __future__ import annotations

import signal
import time

import pytest
from sandbox_jobs import Run, job, run_watched, wait_until_gone

from kernel_agent.sandbox import Ending, Limits, Sandbox


def test_an_entry_that_returns_is_finished(run: Run) -> None:
    report = run("say_nothing")
    assert report.ending is Ending.FINISHED
    assert report.finished
    assert report.exit_code == 0


def test_an_infinite_loop_times_out(sandbox: Sandbox) -> None:
    start = time.monotonic()
    watched = run_watched(sandbox, job("loop", Limits(wall_s=0.5)))
    assert watched.report.ending is Ending.TIMED_OUT
    assert time.monotonic() - start < 10, "the clock of the warden, not that of the loop, ends the job"
    assert wait_until_gone(watched.pids) == []


def test_leaving_with_status_zero_is_not_success(run: Run) -> None:
    # Catches a supervisor that reads an exit code: the child claims success and leaves with 0.
    report = run("leave_with_status_zero")
    assert report.ending is Ending.EXITED
    assert report.exit_code == 0
    assert report.messages[0].record == {"claim": "all is well"}, "what it said before is kept"


def test_sys_exit_zero_is_an_exception_like_any_other(run: Run) -> None:
    report = run("exit_politely")
    assert report.ending is Ending.RAISED
    assert report.error is not None
    assert report.error.type == "SystemExit"


def test_a_segfault_is_a_signal_with_the_python_stack_on_stderr(run: Run) -> None:
    report = run("segfault")
    assert report.ending is Ending.SIGNALLED
    assert report.signal == signal.SIGSEGV
    assert "in segfault" in report.stderr_tail


def test_a_kill_is_a_signal(run: Run) -> None:
    report = run("kill_itself")
    assert report.ending is Ending.SIGNALLED
    assert "SIGKILL" in report.message


def test_allocating_ten_gigabytes_runs_out_of_memory(run: Run) -> None:
    report = run("allocate", Limits(wall_s=60, memory_bytes=1 << 30), mebibytes=10 << 10)
    assert report.ending is Ending.OUT_OF_MEMORY
    assert report.peak_bytes > 1 << 30
    assert report.peak_bytes < 3 << 30, "it was noticed long before ten gigabytes"


def test_an_exception_travels_with_its_traceback(run: Run) -> None:
    report = run("raise_value_error")
    assert report.ending is Ending.RAISED
    assert report.error is not None
    assert report.error.type == "ValueError"
    assert report.error.message == "tile of 48 does not divide N"
    assert [line.function for line in report.error.traceback] == ["raise_value_error", "inner"], (
        "our own frames are cut"
    )
    assert report.error.traceback[-1].file.endswith("sandbox_entries.py")
    assert "raise ValueError" in report.error.traceback[-1].text


def test_an_exception_that_cannot_be_printed_is_still_reported(run: Run) -> None:
    report = run("raise_unprintable")
    assert report.ending is Ending.RAISED
    assert "cannot be printed" in report.message


def test_endless_recursion_is_reported_with_a_bounded_traceback(run: Run) -> None:
    report = run("recurse")
    assert report.ending is Ending.RAISED
    assert report.error is not None
    assert report.error.type == "RecursionError"
    assert len(report.error.traceback) <= 64


def test_a_syntax_error_names_the_line_of_the_source(run: Run) -> None:
    report = run("import_broken_source")
    assert report.error is not None
    assert report.error.traceback[-1].file == "candidate.py"
    assert report.error.traceback[-1].line == 1


def test_a_missing_entry_is_an_exception(run: Run) -> None:
    report = run("no_such_entry")
    assert report.ending is Ending.RAISED
    assert report.error is not None
    assert report.error.type == "AttributeError"


@pytest.mark.parametrize(("entry", "ending"), [("outlive", Ending.FINISHED), ("outlive_and_loop", Ending.TIMED_OUT)])
def test_a_grandchild_in_its_own_session_does_not_outlive_the_job(sandbox: Sandbox, entry: str, ending: Ending) -> None:
    # Catches killing by process group: the grandchild left the group and its parent is gone.
    watched = run_watched(sandbox, job(entry, Limits(wall_s=1.5)))
    assert watched.report.ending is ending
    assert watched.report.left_behind == (1 if ending is Ending.FINISHED else 0), "our own processes do not count"
    assert wait_until_gone(watched.pids) == []


def test_a_fork_bomb_is_ended(run: Run) -> None:
    report = run("bomb", Limits(wall_s=20, processes=16))
    assert report.ending is Ending.TOO_MANY_PROCESSES
    assert report.survivors == ()


def test_too_many_threads_are_ended(run: Run) -> None:
    report = run("many_threads", Limits(wall_s=20, threads=20), threads=60)
    assert report.ending is Ending.TOO_MANY_PROCESSES


def test_a_fork_that_returns_from_the_entry_too_has_no_voice(run: Run) -> None:
    report = run("return_twice")
    assert report.ending is Ending.FINISHED


def test_huge_output_is_kept_to_its_tail(run: Run) -> None:
    report = run("shout", Limits(wall_s=30, text_bytes=1000), mebibytes=20)
    assert report.ending is Ending.FINISHED
    assert report.stdout_tail.endswith("last line\n")
    assert len(report.stdout_tail) < 1100
    assert set(report.stderr_tail.removeprefix("[...]")) == {"y"}
