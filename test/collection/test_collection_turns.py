"""Who times is alone on the GPU; those who prepare are not kept from one another."""

from __future__ import annotations

import threading
from pathlib import Path

from kernel_agent.collection.turns import Turns


def test_preparing_goes_side_by_side_and_timing_waits_for_all_of_it(tmp_path: Path):
    first, second, timer = Turns(tmp_path), Turns(tmp_path), Turns(tmp_path)
    alone = threading.Event()

    def time_something() -> None:
        with timer.alone():
            alone.set()

    with first.beside(), second.beside():  # would hang if one kept the other out
        thread = threading.Thread(target=time_something)
        thread.start()
        assert not alone.wait(0.3)
    assert alone.wait(10)
    thread.join()


def test_nobody_prepares_while_another_times(tmp_path: Path):
    first, second = Turns(tmp_path), Turns(tmp_path)
    entered = threading.Event()

    def prepare() -> None:
        with second.beside():
            entered.set()

    with first.alone():
        thread = threading.Thread(target=prepare)
        thread.start()
        assert not entered.wait(0.3)
    assert entered.wait(10)
    thread.join()


def test_proofs_that_never_stop_leave_a_shift_to_those_who_time(tmp_path: Path):
    # Without shifts a GPU that is always proving something would never be free for a clock.
    provers, timer = [Turns(tmp_path, proofs=3, shift_s=0.2) for _ in range(3)], Turns(tmp_path, shift_s=0.2)
    stop, timed = threading.Event(), threading.Event()

    def prove_on_and_on(turns: Turns) -> None:
        while not stop.is_set():
            with turns.beside():
                stop.wait(0.05)

    def time_something() -> None:
        with timer.alone():
            timed.set()

    threads = [threading.Thread(target=prove_on_and_on, args=(turns,)) for turns in provers]
    threads.append(threading.Thread(target=time_something))
    for thread in threads:
        thread.start()
    assert timed.wait(10)
    stop.set()
    for thread in threads:
        thread.join()


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
