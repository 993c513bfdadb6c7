"""Median and spread of repeated times."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """What repeated calls took."""

    median_us: float
    spread: float
    """Interquartile range over the median."""
    repeats: int


def timing_of(times: Sequence[float]) -> Timing:
    """Median and spread of microseconds. Raises `ValueError` for no times, or some that are no positive numbers."""
    if not times or not all(isinstance(t, (int, float)) and math.isfinite(t) and t > 0 for t in times):
        raise ValueError("these are no times")
    median = statistics.median(times)
    if len(times) < 2:
        return Timing(float(median), 0.0, len(times))
    first, _, third = statistics.quantiles(times, n=4, method="inclusive")
    return Timing(float(median), (third - first) / median, len(times))
