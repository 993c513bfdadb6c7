"""Sparse counts of features for many entries, kept feature by feature: what words and structure are compared with.

A feature is known by a 32-bit hash of its text. So a row depends on its own entry alone: an entry can be added,
replaced or taken away without a common vocabulary, and the same entries give the same arrays in whatever order.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

MOST = 65535
"""Larger counts are stored as this one."""


def key_of(feature: str) -> int:
    """The number a feature goes by, in [0, 2^32). Two features may share one, about once in 10^5 features."""
    return zlib.crc32(feature.encode())


@dataclass(frozen=True)
class Counts:
    """How often each feature occurs in each row."""

    keys: npt.NDArray[np.uint32]
    """Keys of the features that occur, ascending: [f]."""
    starts: Ints
    """Where a feature's stretch of `rows` and `values` begins, and behind the last one its end: [f + 1]."""
    rows: npt.NDArray[np.int32]
    """Rows in which the feature occurs, ascending within a feature: [n]."""
    values: npt.NDArray[np.uint16]
    """How often: [n]."""
    size: int
    """Number of rows, empty ones included."""

    @classmethod
    def of(cls, documents: Sequence[Mapping[str, int]]) -> Counts:
        """Count the features of documents, one row each."""
        keys, rows, values = [], [], []
        for row, document in enumerate(documents):
            for feature, count in document.items():
                if count > 0:
                    keys.append(key_of(feature))
                    rows.append(row)
                    values.append(count)
        return cls._sorted(
            np.asarray(keys, dtype=np.uint32),
            np.asarray(rows, dtype=np.int32),
            np.asarray(values, dtype=np.int64),
            len(documents),
        )

    @classmethod
    def _sorted(
        cls, keys: npt.NDArray[np.uint32], rows: npt.NDArray[np.int32], values: npt.NDArray[np.int64], size: int
    ) -> Counts:
        order = np.lexsort((rows, keys))
        keys, rows, values = keys[order], rows[order], values[order]
        first = np.ones(len(keys), dtype=bool)  # of each (feature, row): two features of one key are added up
        first[1:] = (keys[1:] != keys[:-1]) | (rows[1:] != rows[:-1])
        summed = np.add.reduceat(values, np.flatnonzero(first)) if len(values) else values
        keys, rows = keys[first], rows[first]
        unique, starts = np.unique(keys, return_index=True)
        return cls(
            keys=unique,
            starts=np.append(starts, len(keys)).astype(np.int64),
            rows=rows,
            values=np.minimum(summed, MOST).astype(np.uint16),
            size=size,
        )

    @property
    def frequency(self) -> Ints:
        """In how many rows each feature occurs: [f]."""
        return np.diff(self.starts)

    def find(self, keys: Iterable[int]) -> Ints:
        """Position of each key in `keys`, -1 where it occurs in no row."""
        wanted = np.fromiter(keys, dtype=np.uint32)
        if not len(self.keys):
            return np.full(len(wanted), -1, dtype=np.int64)
        at = np.minimum(np.searchsorted(self.keys, wanted), len(self.keys) - 1)
        return np.where(self.keys[at] == wanted, at, -1).astype(np.int64)

    def take(self, rows: Sequence[int]) -> Counts:
        """The counts of some rows, which are numbered anew in the order given; none may stand twice."""
        new = np.full(self.size, -1, dtype=np.int32)
        new[np.asarray(rows, dtype=np.int64)] = np.arange(len(rows), dtype=np.int32)
        moved = new[self.rows]
        kept = moved >= 0
        keys = np.repeat(self.keys, self.frequency)[kept]
        return Counts._sorted(keys, moved[kept], self.values[kept].astype(np.int64), len(rows))

    def joined(self, other: Counts) -> Counts:
        """These rows, and behind them the rows of another."""
        return Counts._sorted(
            np.concatenate([np.repeat(self.keys, self.frequency), np.repeat(other.keys, other.frequency)]),
            np.concatenate([self.rows, (other.rows + self.size).astype(np.int32)]),
            np.concatenate([self.values, other.values]).astype(np.int64),
            self.size + other.size,
        )

    def arrays(self) -> dict[str, npt.NDArray[np.generic]]:
        """What a file keeps."""
        return {"keys": self.keys, "starts": self.starts, "rows": self.rows, "values": self.values}
