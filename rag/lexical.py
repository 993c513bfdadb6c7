"""Cosines of a query's counts with those of every entry, over weights that count rare features more. Numpy alone."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from rag.counts import Counts, Floats, key_of


class CosineIndex:
    """Counts weighted by (1 + log count) * rarity, every row scaled to unit length."""

    def __init__(self, counts: Counts) -> None:
        self.counts = counts
        self._rarity = np.log((1.0 + counts.size) / (1.0 + counts.frequency)) + 1.0
        weights = (1.0 + np.log(counts.values)) * np.repeat(self._rarity, counts.frequency)
        squares = np.bincount(counts.rows, weights=weights * weights, minlength=counts.size)
        lengths = np.sqrt(np.where(squares > 0, squares, 1.0))
        self._weights: npt.NDArray[np.float32] = (weights / lengths[counts.rows]).astype(np.float32)

    def __contains__(self, feature: str) -> bool:
        return bool(self.counts.find([key_of(feature)])[0] >= 0)

    def frequency(self, feature: str) -> int:
        """In how many entries the feature occurs."""
        at = int(self.counts.find([key_of(feature)])[0])
        return 0 if at < 0 else int(self.counts.starts[at + 1] - self.counts.starts[at])

    def rarity(self, feature: str) -> float:
        """Smoothed inverse document frequency, log((1 + n) / (1 + df)) + 1; at its largest for one never seen."""
        return math.log((1 + self.counts.size) / (1 + self.frequency(feature))) + 1

    def strongest(self, features: Mapping[str, int], row: int, most: int) -> tuple[str, ...]:
        """The features that a query and a row share and that add most to their cosine, best first."""
        added: list[tuple[float, str]] = []
        for feature, count in features.items():
            at = int(self.counts.find([key_of(feature)])[0]) if count > 0 else -1
            if at < 0:
                continue
            start, end = int(self.counts.starts[at]), int(self.counts.starts[at + 1])
            place = start + int(np.searchsorted(self.counts.rows[start:end], row))
            if place < end and self.counts.rows[place] == row:
                added.append((float(self._weights[place]) * (1.0 + math.log(count)) * float(self._rarity[at]), feature))
        return tuple(feature for _, feature in sorted(added, key=lambda one: (-one[0], one[1]))[:most])

    def cosines(self, features: Mapping[str, int]) -> Floats:
        """Cosine of a query with every row: float64 [n], in [0, 1]. What no row has keeps its share of the length."""
        result = np.zeros(self.counts.size)
        present = {feature: count for feature, count in features.items() if count > 0}
        if not present:
            return result
        at = self.counts.find(key_of(feature) for feature in present)
        never = math.log(1 + self.counts.size) + 1
        rarity = np.where(at >= 0, np.append(self._rarity, never)[at], never)
        weights = (1.0 + np.log(np.fromiter(present.values(), dtype=np.float64))) * rarity
        weights /= math.sqrt(float(weights @ weights))
        for position, weight in zip(at, weights, strict=True):
            if position >= 0:
                stretch = slice(self.counts.starts[position], self.counts.starts[position + 1])
                result[self.counts.rows[stretch]] += weight * self._weights[stretch]
        return result
