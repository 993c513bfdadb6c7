"""Small numbers that the forward packed into words are read from these, where each has bits of its own."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from saved_checks import Forward, empty, kernel_from, ran, same_gradients, seeded

from kernel_agent.compiler.saved.fields import use_fields
from kernel_agent.compiler.saved.prepare import prepared
from kernel_agent.compiler.schedule.calls import Calls

ROWS, N, K = 2, 21, 5
PLACES = 8
"""Of a tile of a group."""
WORDS = 6


@triton.jit
def packed(
    x_ptr, y_ptr, words_ptr, n, k, words, STEP: tl.constexpr, KIND: tl.constexpr, PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    word = tl.arange(0, BLOCK)
    lane = tl.arange(0, 4)
    at = word[:, None] * 4 + lane[None, :]
    place = tl.arange(0, PLACES)[None, None, :]
    inside = (at[:, :, None] < n) & (place < k)
    x = tl.load(x_ptr + row * n * k + at[:, :, None] * k + place, mask=inside, other=-float("inf"))
    top = tl.argmax(x, 2)
    y = tl.sum(tl.where(place == top[:, :, None], x, 0.0), 2)
    kept = tl.where(at < n, top, 0) if KIND != "some" else tl.where(at < 7, top, 0)
    shift = lane + STEP if KIND == "meet" else STEP * lane
    tl.store(y_ptr + row * n + at, y, mask=at < n)
    tl.store(words_ptr + row * words + word, tl.sum(kept << shift[None, :], 1), mask=word < words)


def _packed(step: int = 4, kind: str = "") -> Forward:
    types = {"x_ptr": "*fp32", "y_ptr": "*fp32", "words_ptr": "*i32", "n": "i32", "k": "i32", "words": "i32"}
    kernel = kernel_from(packed, types, STEP=step, KIND=kind, PLACES=PLACES, BLOCK=16)
    words = torch.zeros(ROWS, WORDS, dtype=torch.int32)
    given = {"x_ptr": seeded(ROWS, N, K), "y_ptr": empty(ROWS, N), "words_ptr": words, "n": N, "k": K, "words": WORDS}
    return ran(kernel, (ROWS,), given, ["x_ptr"], ["y_ptr"])


def _calls(words: int = WORDS) -> Calls:
    return Calls(({"n": N, "k": K, "words": words, "PLACES": PLACES, "BLOCK": 16, "grid0": ROWS},))


@pytest.mark.parametrize("step", [3, 4, 8])
def test_places_are_read_from_the_bits_of_words(step: int) -> None:
    # Three bits tell eight places apart, and four times eight fill a word, whose sign is a bit of a place then.
    forward = _packed(step)
    saved = prepared(forward.kernel, frozenset(forward.written), calls=_calls())
    backward = forward.backward(saved.kernel)
    same_gradients(backward, forward.backward(forward.kernel))
    assert backward.loads("x_ptr") == 0
    assert "words_ptr" in saved.read


def test_that_there_are_words_for_all_numbers_is_a_fact() -> None:
    assert use_fields(_packed().kernel, _calls()).facts == ("4 * words >= n",)


def test_a_fact_that_fails_in_a_call_is_none() -> None:
    forward = _packed()
    assert use_fields(forward.kernel, _calls(words=WORDS - 1)).kernel is forward.kernel


def test_facts_that_no_call_shows_are_none() -> None:
    forward = _packed()
    assert use_fields(forward.kernel).kernel is forward.kernel


@pytest.mark.parametrize(
    ("step", "kind"),
    [(2, ""), (16, ""), (3, "meet"), (4, "some")],
    ids=["two bits hold no eight places", "four lanes have no room", "bits of lanes meet", "some are left out"],
)
def test_bits_that_do_not_hold_every_place_are_not_read(step: int, kind: str) -> None:
    forward = _packed(step, kind)
    assert use_fields(forward.kernel, _calls()).kernel is forward.kernel
