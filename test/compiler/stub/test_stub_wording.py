"""What the backward asks and computes on the host is written as a person writes it, and means the same."""

from __future__ import annotations

import ast

import pytest

from kernel_agent.compiler.stub.wording import plain_quotients


class triton:
    """What the texts below call."""

    @staticmethod
    def cdiv(x: int, y: int) -> int:
        return (x + y - 1) // y


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("max(-(-T // CHUNK), 0)", "max(triton.cdiv(T, CHUNK), 0)"),
        ("B * C * T // T // C", "B"),
        ("B * C * T // (B * C)", "B * C * T // (B * C)"),
        ("B * C * T % C == 0", "0 == 0"),
        ("B * (C + T) // (C + T) % T", "B % T"),
        ("(B + C) // C", "(B + C) // C"),
        ("T // T", "T // T"),
        ("-(T // CHUNK)", "-(T // CHUNK)"),
    ],
)
def test_quotients_are_plain_and_mean_the_same(text: str, shown: str) -> None:
    # a factor that is taken out of a sum, or a sign that is lost, is another number
    found = plain_quotients(text)
    assert found == ast.unparse(ast.parse(shown, mode="eval").body)
    for sizes in ({"B": 3, "C": 5, "T": 7, "CHUNK": 4}, {"B": 2, "C": 9, "T": 16, "CHUNK": 4}):
        assert eval(found, {"triton": triton, **sizes}) == eval(text, {"triton": triton, **sizes})
