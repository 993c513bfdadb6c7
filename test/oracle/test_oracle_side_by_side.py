"""Truth children at the same time: in order, ended when nobody waits, and with the same answers as one child."""

from __future__ import annotations

import threading

import pytest
import torch

from kernel_agent.errors import InputError
from kernel_agent.oracle import Point, Truths
from kernel_agent.oracle.side_by_side import side_by_side
from kernel_agent.pairs.spec import ShapeEntry


def test_both_work_at_the_same_time_and_answer_in_order():
    # Each waits for the other: one after the other, the first would wait for ever.
    meet = threading.Barrier(2, timeout=30)

    def work(share, _left):
        meet.wait()
        return share

    assert side_by_side(work, ["a", "b"]) == ["a", "b"]
    assert side_by_side(work, []) == []


def test_an_error_ends_what_others_still_do():
    # Else a file that is wrong at once would be told of after the minutes that another child may take.
    def work(share, left):
        if share == "wrong":
            raise InputError("no", remedy="yes")
        assert left.wait(30), "nobody waits for it any more"

    with pytest.raises(InputError):
        side_by_side(work, ["wrong", "long"])


def test_two_children_compute_the_forwards_that_one_would(judge):
    # Points are shared among children by entry: an answer kept under another point's key would be another forward.
    points = [Point(entry=ShapeEntry(dims={"M": m, "N": 9}), seed=seed) for seed in (0, 1) for m in (1, 2, 3, 4, 5)]
    spec = judge.spec("softmax")
    together = Truths(spec, judge.sandbox).forwards(points)
    alone = Truths(spec, judge.sandbox)
    for point, answer in zip(points, together, strict=True):
        (same,) = alone.forwards([point])
        assert answer.point == same.point == point
        assert all(torch.equal(a, b) for a, b in zip(answer.outputs, same.outputs, strict=True))
