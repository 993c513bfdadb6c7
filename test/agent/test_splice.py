"""Two backwards that are right in different gradients become one that is right in all."""

from __future__ import annotations

import ast

import pytest
from scripted import BACKWARD, SWAPPED

from kernel_agent.agent.splice import Piece, splice
from kernel_agent.pairs.spec import Candidate

OTHER = SWAPPED.replace("grad_y = grad_y.contiguous()", "grad_y = scaled(grad_y)").replace(
    "def backward", "def scaled(g):\n    return g.contiguous()\n\n\ndef backward"
)


def joined(first: str, second: str, *, forwards: tuple[str | None, str | None] = (None, None)) -> Candidate | None:
    pieces = [
        Piece(Candidate(backward=code, forward=forward), frozenset(grads))
        for code, forward, grads in zip((first, second), forwards, ({"x"}, {"w"}), strict=True)
    ]
    return splice(pieces[0], pieces[1], grads=("x", "w"), cotangents=("grad_y",))


def text_of(first: str, second: str) -> str:
    found = joined(first, second)
    assert found is not None
    ast.parse(found.backward)
    return found.backward


def namespace(code: str) -> dict[str, object]:
    """What a spliced section of plain Python defines."""
    found: dict[str, object] = {}
    exec(compile(code, "spliced", "exec"), found)
    return found


PLAIN = """\
SCALE = {scale}


def factor(value):
    return SCALE * value


def backward(saved, grad_y, needs=None):
    calls.append({scale})
    return factor(grad_y), factor(grad_y) + 1
"""


def test_each_gradient_comes_from_its_own_candidate_with_its_own_helpers() -> None:
    # Both define SCALE and factor, differently: without renaming, the second would change what the first computes.
    found = namespace("calls = []\n" + text_of(PLAIN.format(scale=2), PLAIN.format(scale=10)))
    assert found["backward"]((), 1.0) == (2.0, 11.0)  # type: ignore[operator]


def test_a_candidate_none_of_whose_gradients_is_needed_is_not_run() -> None:
    found = namespace("calls = []\n" + text_of(PLAIN.format(scale=2), PLAIN.format(scale=10)))
    assert found["backward"]((), 1.0, needs=(False, True)) == (None, 11.0)  # type: ignore[operator]
    assert found["calls"] == [10]


def test_what_both_define_alike_stands_there_once() -> None:
    text = text_of(PLAIN.format(scale=2), PLAIN.format(scale=2).replace("+ 1", "+ 2"))
    assert text.count("def factor") == 1
    assert text.count("SCALE = 2") == 1


def test_a_helper_that_reads_alike_but_uses_something_else_is_kept_twice() -> None:
    # `factor` has the same text in both; it means another SCALE in the second.
    assert text_of(PLAIN.format(scale=2), PLAIN.format(scale=3)).count("def factor") == 2


def test_a_kernel_of_the_same_name_is_renamed_where_it_is_defined_and_where_it_is_launched() -> None:
    text = text_of(BACKWARD, OTHER)
    assert text.count("def product_bwd_kernel(") == 1
    assert text.count("def product_bwd_kernel_2(") == 1
    assert text.count("product_bwd_kernel_2[(") == 1


def test_candidates_with_other_forwards_are_not_joined() -> None:
    forward = "def forward(x, w):\n    return x * w, (x, w, x)\n"
    assert joined(BACKWARD, OTHER, forwards=(None, forward)) is None
    assert joined(BACKWARD, OTHER, forwards=(forward, forward + "\n")) is not None


@pytest.mark.parametrize(
    "shadow",
    [
        "def factor(SCALE):\n    return SCALE\n",
        "def factor(value):\n    SCALE = 4\n    return SCALE\n",
        "from math import pi as SCALE\n\n\ndef factor(value):\n    return value\n",
        'def factor(value):\n    return f"{SCALE}"\n',
    ],
)
def test_a_name_that_cannot_be_changed_safely_is_not_changed_at_all(shadow: str) -> None:
    head, _, tail = PLAIN.format(scale=3).partition("def factor(value):\n    return SCALE * value\n")
    assert joined(PLAIN.format(scale=2), head + shadow + tail) is None
