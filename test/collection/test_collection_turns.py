"""Who times is alone on the GPU, wherever the others are; few compute exact gradients at a time."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernel_agent.collection.turns import Turns
from kernel_agent.collection.worker import Task
from kernel_agent.collection.workers import Done, Workers

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


def test_who_needs_all_memory_waits_for_every_proof_and_keeps_others_out(tmp_path: Path):
    first, greedy, late = (Turns(tmp_path, proofs=2) for _ in range(3))
    has_all, entered = threading.Event(), threading.Event()
    leave = threading.Event()

    def take_all() -> None:
        with greedy.all_proofs():
            has_all.set()
            leave.wait(10)

    def prove() -> None:
        with late.proof():
            entered.set()

    taker, prover = threading.Thread(target=take_all), threading.Thread(target=prove)
    with first.proof():
        taker.start()
        assert not has_all.wait(0.3)
    assert has_all.wait(10)
    prover.start()
    assert not entered.wait(0.3)
    leave.set()
    assert entered.wait(10)
    taker.join()
    prover.join()
