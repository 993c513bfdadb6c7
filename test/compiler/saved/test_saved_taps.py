"""What unrolled steps chose gets its gradient by the index that they stored, where that tells what it was."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl
from saved_checks import Forward, empty, kernel_from, ran, same_gradients, seeded

from kernel_agent.compiler.saved.prepare import prepared
from kernel_agent.compiler.saved.taps import use_taps

ROWS, N, TAPS = 2, 21, 5


@triton.jit
def window(
    x_ptr, y_ptr, index_ptr, n, START: tl.constexpr, FIRST: tl.constexpr, KIND: tl.constexpr, TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    col = tl.arange(0, BLOCK)
    mask = col < n
    best = tl.full((BLOCK,), START, tl.float32)
    held = tl.full((BLOCK,), FIRST, tl.int32)
    for tap in tl.static_range(TAPS):
        x = tl.load(x_ptr + row * (n + TAPS) + col + tap, mask=mask, other=-float("inf"))
        if KIND == "least":
            better = x < best
            best = tl.minimum(x, best)
        elif KIND == "other":
            better = x > 0.5
            best = tl.where(better, x, best)
        elif KIND == "mixed":
            better = x < best
            best = tl.maximum(best, x)
        else:
            better = x > best
            best = tl.where(better, x, best)
        held = tl.where(better, tap // 2 if KIND == "pairs" else tap * 100 if KIND == "far" else tap, held)
    tl.store(y_ptr + row * n + col, best, mask=mask)
    tl.store(index_ptr + row * n + col, held.to(tl.int8), mask=mask)


def _window(kind: str = "", start: float = -math.inf, first: int = 0) -> Forward:
    types = {"x_ptr": "*fp32", "y_ptr": "*fp32", "index_ptr": "*i8", "n": "i32"}
    kernel = kernel_from(window, types, START=start, FIRST=first, KIND=kind, TAPS=TAPS, BLOCK=32)
    index = torch.zeros(ROWS, N, dtype=torch.int8)
    given = {"x_ptr": seeded(ROWS, N + TAPS), "y_ptr": empty(ROWS, N), "index_ptr": index, "n": N}
    return ran(kernel, (ROWS,), given, ["x_ptr"], ["y_ptr"])


@pytest.mark.parametrize(
    "forward",
    [_window(), _window("least", math.inf), _window("other", start=-7.0, first=-1), _window(start=0.25, first=-1)],
    ids=["largest", "least", "any condition", "above a number"],
)
def test_what_steps_chose_gets_its_gradient_by_its_stored_index(forward: Forward) -> None:
    # Searched again, every window would load all its taps.
    backward = forward.backward(prepared(forward.kernel, frozenset(forward.written)).kernel)
    same_gradients(backward, forward.backward(forward.kernel))
    assert backward.loads("x_ptr") == 0
    assert backward.loads("index_ptr") == ROWS * N


@pytest.mark.parametrize(
    "forward",
    [_window("pairs"), _window("far"), _window("mixed"), _window(start=0.25, first=1), _window("other", first=1)],
    ids=["taps share an index", "8 bits hold no 400", "the other comparison", "below a number", "beyond none"],
)
def test_an_index_that_does_not_tell_the_tap_is_not_used(forward: Forward) -> None:
    assert use_taps(forward.kernel).kernel is forward.kernel


@pytest.mark.parametrize("forward", [_window(start=0.25), _window("other")], ids=["a number", "a condition"])
def test_what_no_index_tells_from_the_first_tap_is_asked_of_that_alone(forward: Forward) -> None:
    # Index 0 is that of the start, too, which gets nothing: x[col] is compared once more, and no other tap.
    backward = forward.backward(prepared(forward.kernel, frozenset(forward.written)).kernel)
    same_gradients(backward, forward.backward(forward.kernel))
    assert backward.loads("x_ptr") == ROWS * N
