"""Who times is alone on the GPU, wherever the others are; few compute exact gradients at a time."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kernel_agent.collection.turns import Turns, waited
from kernel_agent.collection.worker import Task
from kernel_agent.collection.workers import Done, Workers

HOLDER = Path(__file__).with_name("memory_holder.py")
BUSY = """
import sys, time
from pathlib import Path
from kernel_agent.collection.turns import Turns
folder = Path(sys.argv[1])
turns = Turns(folder)
count = 0
while True:
    count += 1
    (folder / "count.new").write_text(str(count))
    (folder / "count.new").rename(folder / "count")
    time.sleep(0.005)
"""


def count(folder: Path) -> int:
    return int((folder / "count").read_text())


def goes_on(folder: Path) -> bool:
    """Whether the busy process counts on, given time."""
    before, end = count(folder), time.monotonic() + 20
    while count(folder) == before and time.monotonic() < end:
        time.sleep(0.01)
    return count(folder) > before


@pytest.fixture
def busy(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that never asks anybody before it works."""
    with subprocess.Popen([sys.executable, "-c", BUSY, str(tmp_path)]) as process:
        while not (tmp_path / "count").exists():
            time.sleep(0.01)
        yield process
        process.kill()


def test_nobody_works_while_another_times_and_all_go_on_afterwards(busy: subprocess.Popen[bytes], tmp_path: Path):
    # A process that compiles runs what it has compiled when it likes: only a stopped one disturbs no clock.
    assert goes_on(tmp_path)
    with Turns(tmp_path).alone():
        before = count(tmp_path)
        time.sleep(0.3)
        assert count(tmp_path) == before
    assert goes_on(tmp_path)


def test_a_process_that_has_ended_is_no_obstacle(busy: subprocess.Popen[bytes], tmp_path: Path):
    busy.kill()
    busy.wait()
    with Turns(tmp_path).alone():
        pass


def test_two_do_not_time_at_once(tmp_path: Path):
    first, second = Turns(tmp_path), Turns(tmp_path)
    entered = threading.Event()

    def time_something() -> None:
        with second.alone():
            entered.set()

    thread = threading.Thread(target=time_something)
    with first.alone():
        thread.start()
        assert not entered.wait(0.3)
    assert entered.wait(10)
    thread.join()


def test_those_who_were_stopped_by_a_process_that_died_are_woken(tmp_path: Path):
    # Two workers; the pair of the one that times kills it. Left stopped, the other would hang to the sitting's end.
    worker = (sys.executable, str(Path(__file__).with_name("dying_timer.py")), str(tmp_path))
    tasks = [Task(path=tmp_path / "counts.py"), Task(path=tmp_path / "dies.py")]
    with Workers(worker, jobs=2, limit_s=60) as workers:
        done = {event.task.path.stem: event for event in workers.run(tasks) if isinstance(event, Done)}
    assert not done["dies"].line
    assert done["counts"].line
    assert not done["counts"].timed_out


def test_only_so_many_prove_at_a_time(tmp_path: Path):
    # Exact gradients of a whole GPU's worth of processes together need more memory than the GPU has.
    first, second, third = (Turns(tmp_path, proofs=2) for _ in range(3))
    entered = threading.Event()

    def prove() -> None:
        with third.proof():
            entered.set()

    with first.proof():
        with second.proof():
            thread = threading.Thread(target=prove)
            thread.start()
            assert not entered.wait(0.3)
        assert entered.wait(10)
    thread.join()


@pytest.fixture
def holds(tmp_path: Path) -> Iterator[Callable[[str, str], subprocess.Popen[bytes]]]:
    """Start processes that hold `some` memory or `all` of it; they are ended with the test."""
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str, kind: str) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([sys.executable, str(HOLDER), str(tmp_path), name, kind]))
        assert soon(tmp_path / f"{name}.asks")
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def soon(path: Path, seconds: float = 20.0) -> bool:
    """Whether a file appears in time."""
    end = time.monotonic() + seconds
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.005)
    return path.exists()


def test_who_needs_all_memory_waits_for_all_who_hold_some_and_keeps_others_out(holds, tmp_path: Path):
    holds("one", "some")
    holds("two", "some")
    assert soon(tmp_path / "one.has")
    assert soon(tmp_path / "two.has"), "some memory is held beside others"
    holds("greedy", "all")
    (tmp_path / "one.leave").touch()
    assert soon(tmp_path / "one.left")
    assert not soon(tmp_path / "greedy.has", 0.3), "the other one still holds some"
    (tmp_path / "two.leave").touch()
    assert soon(tmp_path / "greedy.has")
    holds("late", "some")
    assert not soon(tmp_path / "late.has", 0.3), "all memory is taken"
    (tmp_path / "greedy.leave").touch()
    assert soon(tmp_path / "late.has")


def test_who_waits_for_all_memory_comes_before_those_who_ask_for_some_later(holds, tmp_path: Path):
    # With a shared lock alone, a sitting whose workers always hold some would never let anybody have all.
    holds("one", "some")
    assert soon(tmp_path / "one.has")
    holds("greedy", "all")
    time.sleep(0.1)  # it has asked, and waits
    holds("late", "some")
    assert not soon(tmp_path / "late.has", 0.3)
    (tmp_path / "one.leave").touch()
    assert soon(tmp_path / "greedy.has")
    assert not (tmp_path / "late.has").exists()


def test_two_who_need_all_memory_have_it_one_after_the_other(holds, tmp_path: Path):
    # Neither holds anything while it waits, so they cannot wait for each other.
    holds("one", "some")
    assert soon(tmp_path / "one.has")
    holds("first", "all")
    time.sleep(0.1)
    holds("second", "all")
    (tmp_path / "one.leave").touch()
    assert soon(tmp_path / "first.has")
    assert not soon(tmp_path / "second.has", 0.3)
    (tmp_path / "first.leave").touch()
    assert soon(tmp_path / "second.has")


def test_the_memory_of_a_process_that_died_is_free(holds, tmp_path: Path):
    killed = holds("one", "some")
    assert soon(tmp_path / "one.has")
    holds("greedy", "all")
    killed.kill()
    assert soon(tmp_path / "greedy.has")


def test_who_has_all_memory_can_time_although_the_others_wait(holds, tmp_path: Path):
    # Its clock stops the one that waits in the door; that one must come through when it goes on.
    turns = Turns(tmp_path)
    with turns.all_memory():
        holds("late", "some")
        with turns.alone():
            assert not (tmp_path / "late.has").exists()
    assert soon(tmp_path / "late.has")


def test_time_that_others_took_is_no_ones_own(holds, tmp_path: Path):
    # One pair waits until all memory is free, all others behind it: a limit in seconds would end each of them.
    with Turns(tmp_path).some_memory():
        greedy = holds("greedy", "all")
        time.sleep(0.3)
        assert 0.2 < waited(tmp_path, greedy.pid) < 5.0, "it counts while it lasts"
    assert soon(tmp_path / "greedy.has")
    first = waited(tmp_path, greedy.pid)
    time.sleep(0.2)
    assert waited(tmp_path, greedy.pid) == first, "having is not waiting"


def test_a_worker_is_not_ended_while_it_waits_for_others(tmp_path: Path):
    worker = (sys.executable, str(Path(__file__).with_name("waiting_worker.py")), str(tmp_path))
    tasks = [Task(path=tmp_path / "waits.py"), Task(path=tmp_path / "works.py")]
    thread = threading.Timer(6.0, (tmp_path / "free").touch)
    thread.start()
    with Workers(worker, jobs=2, limit_s=4.0, waited=lambda pid: waited(tmp_path, pid)) as workers:
        done = {event.task.path.stem: event for event in workers.run(tasks) if isinstance(event, Done)}
    thread.join()
    assert done["waits"].line, "it waited longer than its limit, and worked less"
    assert done["works"].timed_out, "it worked longer than its limit"
