"""Sizes in words of SWEEP's dims are worked out, and nothing else is."""

from __future__ import annotations

import pytest

from kernel_agent.agent.sizes import BadSize, size_of

DIMS = {"B": 2, "T": 130, "dtype": "float16", "causal": True}


@pytest.mark.parametrize(
    ("size", "value"),
    [(7, 7), ("B", 2), ("B*T", 260), ("(T - 2) // B + 1", 65), ("cdiv(T, 64)", 3), ("0", 0)],
)
def test_a_size_is_worked_out(size: int | str, value: int) -> None:
    assert size_of(size, DIMS) == value


@pytest.mark.parametrize(
    ("size", "why"),
    [
        ("K", "no dim of SWEEP (B, T)"),
        ("dtype", "no dim of SWEEP"),
        ("causal", "no dim of SWEEP"),
        ("B-T", "no size"),
        (-1, "no size"),
        ("T//0", "divides by zero"),
        ("cdiv(T, B-B)", "divides by zero"),
        ("T**99999999", "more than dims"),
        ("1.5", "more than dims"),
        ("len([1])", "more than dims"),
        ("T*" * 60 + "T", "no size"),
        ("", "no size"),
        ("(" * 10_000 + "T", "no size"),
    ],
)
def test_what_is_no_size_is_refused(size: int | str, why: str) -> None:
    with pytest.raises(BadSize) as refused:
        size_of(size, DIMS)
    assert why in str(refused.value)
