"""What a timed child may say, and what the parent makes of it: nothing it says makes a backward faster than it is."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
import torch

from kernel_agent.bench.hearing import Ear, NotMeasured, Probes, believed
from kernel_agent.sandbox import Ending, Message, Report

FINISHED = Report(Ending.FINISHED, "the entry returned")
TRUTH = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
PROBES = Probes((torch.tensor([4, 0, 7]),), TRUTH, 0.0)
TIMES = [20.0, 21.0, 19.0, 20.0, 20.0]


def say(ear: Ear, record: dict[str, Any], **tensors: torch.Tensor) -> None:
    ear.hear(Message(record, tensors))


def told(
    *,
    times: list[float] = TIMES,
    probes: torch.Tensor | None = None,
    host_us: float = 30.0,
    hidden_us: float = 0.0,
    really_s: float = 0.0,
    calls: int = 1000,
) -> Ear:
    """Everything a child says of one entry, while `really_s` seconds pass for the parent over `calls` calls."""
    ear = Ear()
    record = {"entry": 0, "times": times[1:], "late": 1, "flushes": 1, "host_us": host_us, "hidden_us": hidden_us}
    say(ear, record, probes=TRUTH.expand(len(times), 3).clone() if probes is None else probes)
    say(ear, {"entry": 0, "begin": calls})
    time.sleep(really_s)
    say(ear, {"entry": 0, "end": calls})
    say(ear, {"entry": 0, "kernels": [{"name": "k", "microseconds": 19.0}]})
    return ear


def test_an_honest_child_is_believed():
    heard = believed(told(), FINISHED, 0, "n=7", PROBES)
    assert heard.timing.median_us == 20.0
    assert heard.note == ""


def test_the_parents_clock_counts_where_far_more_time_passes_than_the_child_says():
    heard = believed(told(really_s=0.1, calls=100), FINISHED, 0, "n=7", PROBES)
    assert heard.timing.median_us >= 1000
    assert "outside of its process" in heard.note


def test_time_that_the_host_needs_to_launch_is_not_the_devices():
    # 200 us a call on the host, 20 us on the device: slow to launch, yet nothing is hidden
    heard = believed(told(host_us=200.0, really_s=0.02, calls=100), FINISHED, 0, "n=7", PROBES)
    assert heard.timing.median_us == 20.0


def test_a_child_cannot_explain_any_time_away_with_a_slow_host():
    heard = believed(told(host_us=1e9, really_s=0.2, calls=100), FINISHED, 0, "n=7", PROBES)
    assert heard.timing.median_us >= 2000


def test_the_quickest_series_counts_so_that_a_busy_machine_accuses_nobody():
    ear = told(really_s=0.1, calls=100)
    say(ear, {"entry": 0, "begin": 100})
    say(ear, {"entry": 0, "end": 100})
    assert believed(ear, FINISHED, 0, "n=7", PROBES).timing.median_us == 20.0


def test_work_on_other_streams_is_added():
    heard = believed(told(hidden_us=75.0), FINISHED, 0, "n=7", PROBES)
    assert heard.timing.median_us == 95.0
    assert "streams" in heard.note


@pytest.mark.parametrize(
    "probes",
    [
        TRUTH.expand(5, 3) * torch.tensor([[1.0], [1.0], [-1.0], [1.0], [1.0]]),
        torch.zeros(5, 3),
        torch.full((5, 3), math.nan),
    ],
    ids=["remembered", "never computed", "not finite"],
)
def test_answers_that_are_wrong_in_one_repetition_are_refused(probes: torch.Tensor):
    with pytest.raises(NotMeasured, match="other gradients"):
        believed(told(probes=probes.to(torch.float64)), FINISHED, 0, "n=7", PROBES)


def test_without_a_truth_repetitions_must_agree_with_each_other():
    unknown = Probes(PROBES.places, None, 0.0)
    assert believed(told(), FINISHED, 0, "n=7", unknown).timing.median_us == 20.0
    flipped = TRUTH.expand(5, 3) * torch.tensor([[1.0], [1.0], [-1.0], [1.0], [1.0]])
    with pytest.raises(NotMeasured, match="other gradients"):
        believed(told(probes=flipped), FINISHED, 0, "n=7", unknown)


def test_fewer_answers_than_times_are_refused():
    with pytest.raises(NotMeasured, match="does not show"):
        believed(told(probes=TRUTH.expand(4, 3)), FINISHED, 0, "n=7", PROBES)


def test_times_that_are_none_are_refused():
    with pytest.raises(NotMeasured, match="no times"):
        believed(told(times=[0.0] * 5), FINISHED, 0, "n=7", PROBES)


def test_a_child_that_dies_leaves_no_time():
    with pytest.raises(NotMeasured, match="killed by signal 11"):
        believed(Ear(), Report(Ending.SIGNALLED, "killed by signal 11"), 0, "n=7", PROBES)


@pytest.mark.parametrize(
    "record",
    [
        {"entry": 0, "times": "fast"},
        {"entry": 0, "end": 5},
        {"entry": 0, "begin": "now"},
        {"entry": 0, "kernels": [{"name": "k"}]},
        {"entry": 0, "times": [1.0], "late": 0, "flushes": 1, "host_us": 1.0, "hidden_us": 0.0},
        {},
    ],
    ids=["no numbers", "an end without a beginning", "no count", "half a kernel", "no gradients", "nothing"],
)
def test_what_our_child_never_says_is_nonsense(record: dict[str, Any]):
    ear = Ear()
    say(ear, record)
    assert ear.nonsense
