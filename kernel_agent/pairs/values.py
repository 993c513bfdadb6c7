"""`Values`: the name of a distribution that inputs are given, apart from the tensors, so that options can say it."""

from __future__ import annotations

import enum


class Values(str, enum.Enum):
    """How the values of an argument are distributed."""

    AS_MADE = "as-made"
    SHIFTED = "shifted"
    """Moved by three standard deviations."""
    SCALED = "scaled"
    """Four times as large."""
    HEAVY_TAILED = "heavy-tailed"
    """The third power of each, in units of the standard deviation: kurtosis of 46 where it was 3."""
    SPACED = "spaced"
    """As made, and rows that stand apart in memory, as those of a part of a wider tensor do."""
    NUMBERS = "other-numbers"
    """Every float that is no tensor three quarters of what it is, every seed another, and every tensor of one number
    alone numbers around it; other tensors as made."""
    ZEROS = "zeros"
    """Every eighth element zero, and every fourth row."""
    LARGE = "large"
    """A thousand times as large: the exponential of most overflows, also in float64."""


EXTREME = frozenset({Values.ZEROS, Values.LARGE})
"""Values at which a gradient may be one of several, and nothing is asked of it but that it is finite."""
