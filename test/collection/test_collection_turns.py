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
