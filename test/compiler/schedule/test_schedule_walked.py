"""An addition to the element of each lane's column that a label names is done by the loop that walks the columns."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from schedule_kernels import add_to, block_of, made

from kernel_agent.compiler.schedule.forms import Launch
from kernel_agent.compiler.schedule.gather import Gathered
from kernel_agent.compiler.schedule.walked import walked
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.evaluate import evaluate
from kernel_agent.compiler.ssa.value import Kernel, Op, Value

LANES, PIXELS, CLASSES, IGNORED = 4, 7, 5, -100


def columns(
    *,
    unroll: int = 1,
    stop: str = "C",
    label_first: bool = True,
    fewer_pixels: bool = False,
    unlike: bool = False,
    ends: bool = False,
) -> Kernel:
    """Each lane adds 5 to the class of its column that LABELS names, but for ignored ones, and X to all classes.
    `fewer_pixels`: the loop leaves out lanes; `unlike`: the last step of a trip adds 1 instead; `ends`: programs may
    end between."""

    def build(b: Builder, x: Value, labels: Value, dx: Value, *numbers: Value) -> None:
        classes, pixels, fewer, none = numbers
        s = block_of(b, b.program_id(0), LANES, "BLOCK")
        inside = b.compare("lt", s, pixels)
        label = b.load(labels, s, inside, none)

        def named() -> None:
            kept = b.logical_and(inside, b.compare("ne", label, none))
            five = b.whole(b.const(5.0, "f32"), (LANES,))
            add_to(b, dx, b.add(s, b.mul(label, pixels)), five, kept)

        def trip(first: Value, _: Sequence[Value]) -> list[Value]:
            for step in range(unroll):
                c = b.add(first, b.const(step))
                mask = b.logical_and(b.compare("lt", s, fewer) if fewer_pixels else inside, b.compare("lt", c, classes))
                at = b.add(s, b.mul(c, pixels))
                value = b.load(x, at, mask, b.const(0.0, "f32"))
                value = b.whole(b.const(1.0, "f32"), (LANES,)) if unlike and step else value
                add_to(b, dx, at, value, mask)
            return []

        def walk() -> None:
            b.loop((b.const(0), classes if stop == "C" else fewer, b.const(unroll)), [], trip)

        first, last = (named, walk) if label_first else (walk, named)
        first()
        if ends:
            b.add_op(Op(Code.LEAVE_IF, (b.compare("ge", b.program_id(0), fewer),), ()))
        last()

    return made("X:*f32 LABELS:*i32 dX:*f32 C S fewer none", build, BLOCK=LANES)


def joined(kernel: Kernel) -> Kernel:
    return walked(Gathered(kernel), Launch.like_forward(1)).kernel


def additions(kernel: Kernel) -> int:
    return sum(op.code is Code.ATOMIC_ADD for op in kernel.ops)


def gradient(kernel: Kernel, labels: Sequence[int]) -> torch.Tensor:
    dx = torch.zeros(CLASSES, PIXELS, dtype=torch.float64)
    x = torch.arange(1.0, 1 + dx.numel(), dtype=torch.float64).view_as(dx)
    given = {"X": x, "LABELS": torch.tensor(labels, dtype=torch.int32), "dX": dx, "C": CLASSES, "S": PIXELS}
    given |= {"fewer": 3, "none": IGNORED}
    evaluate(kernel, (-(-PIXELS // LANES),), {value.name: given[value.name] for value in kernel.arguments})
    return dx


@pytest.mark.parametrize("label_first", [True, False])
@pytest.mark.parametrize("unroll", [1, 2, 3])
def test_the_trip_of_the_labels_class_adds_both(unroll: int, label_first: bool) -> None:
    # With several steps in a trip only single steps are known to reach each class once.
    plain = columns(unroll=unroll, label_first=label_first)
    assert additions(plain) == 1 + unroll
    assert additions(joined(plain)) == 1
    labels = [0, 4, IGNORED, 2, 2, 3, 1]
    torch.testing.assert_close(gradient(joined(plain), labels), gradient(plain, labels))


@pytest.mark.parametrize("label", [-1, CLASSES])
def test_a_label_that_is_no_class_makes_its_column_nan_and_no_other(label: int) -> None:
    # No trip has it: left out, it would be missing from another pixel's gradient without a word.
    missing = gradient(joined(columns(unroll=2)), [0, label, 1, 2, 3, IGNORED, 4]).isnan()
    assert missing[:, 1].all()
    assert missing.sum() == CLASSES


@pytest.mark.parametrize(
    "kernel",
    [
        pytest.param(columns(stop="fewer"), id="classes that the loop does not reach"),
        pytest.param(columns(unroll=2, stop="fewer"), id="classes that steps of trips do not reach"),
        pytest.param(columns(fewer_pixels=True), id="lanes that the loop leaves out"),
        pytest.param(columns(unroll=2, unlike=True), id="steps of a trip that add something else"),
        pytest.param(columns(ends=True), id="programs that end between"),
    ],
)
def test_additions_stay_apart_where_the_loop_may_not_do_what_the_label_asks(kernel: Kernel) -> None:
    assert additions(joined(kernel)) == additions(kernel)
