"""The model of a launch's time: what atomic updates add to it."""

from __future__ import annotations

import pytest

from kernel_agent.bench.compiled import CompiledKernel
from kernel_agent.bench.launch_facts import LaunchFacts
from kernel_agent.bench.launch_time import launch_time
from kernel_agent.ir.cost.devices import device_table

UPDATES = 2.22e8
"""Of `conv/deform_conv2d_sample` at its sizes of real work, whose backward takes 348 us on an H200."""


def facts(**changes: float) -> LaunchFacts:
    given = {"unique_bytes": 1e6, "reread_bytes": 0.0, "largest_bytes": 0.0, "sector_bytes": 1e6, **changes}
    return LaunchFacts(
        kernel="k", grid=(4096, 1, 1), programs=4096, work={}, blocks=(), bound_s=0.0, build="", **given
    )  # fmt: skip


def terms(given: LaunchFacts) -> dict[str, float]:
    return dict(launch_time(given, CompiledKernel(name="k"), device_table().find("H200")).terms)


def test_updates_take_no_less_than_the_fastest_that_were_measured() -> None:
    # At the rate of loads and stores of L2 the same updates would take 193 us, and at half of it less than any has.
    updates = terms(facts(atomic_bytes=1e6, atomic_sector_bytes=4 * UPDATES, atomic_updates=UPDATES))
    assert 330e-6 < updates["atomics"] < 348e-6


def test_updates_of_a_buffer_beyond_the_cache_read_it_and_those_within_do_not() -> None:
    small, large = 1e6, 1e9
    within = terms(facts(unique_bytes=small, atomic_bytes=small, atomic_sector_bytes=small))
    beyond = terms(facts(unique_bytes=large, atomic_bytes=large, atomic_sector_bytes=large))
    stored = terms(facts(unique_bytes=large))
    assert within["memory"] == pytest.approx(terms(facts(unique_bytes=small))["memory"])
    assert beyond["memory"] > 1.9 * stored["memory"]
