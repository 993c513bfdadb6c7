"""Measured speed of pairs: how close their backwards come to the cost counter's bound, from files beside the pairs.

A file `*.jsonl` in the folder `results` next to the folder of pairs holds one measurement a line. Without such files
nothing is known of any speed, and nothing is said.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

FOLDER = "results"
"""Beside the folder of pairs."""

MEASURED = "measured"
"""Status of a line with times."""

SMALLEST_US = 3.0
"""Shapes with a bound below this tell of the start of kernels, not of how well they are written."""


class Measured(BaseModel):
    """One line: one backward on one device at one entry of its SWEEP. Further fields are passed over."""

    model_config = ConfigDict(frozen=True)

    slug: str
    hash: str = Field(description="content hash of the pair file that was measured")
    device: str = Field(description="name of the GPU")
    entry: str = Field(description="label of the SWEEP entry, such as `M=17 N=100`")
    backward_us: float = Field(gt=0, allow_inf_nan=False, description="median time of one backward, microseconds")
    bound_us: float = Field(gt=0, allow_inf_nan=False, description="the cost counter's lower bound, microseconds")

    @property
    def percent_of_bound(self) -> float:
        """100 where nothing could be faster."""
        return 100.0 * self.bound_us / self.backward_us


@dataclass(frozen=True)
class Speeds:
    """All that was measured, and what could not be read."""

    measured: Mapping[tuple[str, str], tuple[Measured, ...]]
    """By slug and content hash of the pair, in the order of files and lines."""
    notice: str = ""
    """One line when a file holds something else than measurements."""

    def words(self, slug: str, content_hash: str) -> str:
        """`58 to 71 % of the bound on NVIDIA H200 (3 shapes)`, by device; empty when this text was never measured."""
        by_device: dict[str, list[Measured]] = defaultdict(list)
        for line in self.measured.get((slug, content_hash), ()):
            if line.bound_us >= SMALLEST_US:
                by_device[line.device].append(line)
        return "; ".join(_words(device, lines) for device, lines in sorted(by_device.items()))

    def share(self, slug: str, content_hash: str) -> float:
        """Median share of the bound over shapes and devices, in [0, 1]; 0 when this text was never measured."""
        lines = self.measured.get((slug, content_hash), ())
        shares = [line.percent_of_bound / 100.0 for line in lines if line.bound_us >= SMALLEST_US]
        return min(1.0, statistics.median(shares)) if shares else 0.0


def read_speeds(folder: Path) -> Speeds:
    """Read every `*.jsonl` of a folder, which need not exist. A line that is no measurement is told, not used."""
    found: dict[tuple[str, str], list[Measured]] = defaultdict(list)
    strange: list[str] = []
    for path in sorted(folder.glob("*.jsonl")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if not line.strip():
                continue
            try:
                measured = _measured(line)
            except ValidationError:
                strange.append(f"{path.name} line {number}")
                continue
            if measured is not None:
                found[measured.slug, measured.hash].append(measured)
    notice = f"no measurement of a pair: {strange[0]} of {folder} ({len(strange)} such lines)" if strange else ""
    return Speeds({key: tuple(lines) for key, lines in found.items()}, notice)


class _Told(BaseModel):
    """How a measurement went."""

    status: str = Field(default="", description="`measured`, or why there is no time; empty in lines that do not say")
    bound_us: float | None = None


def _measured(line: str) -> Measured | None:
    """The measurement of a line; None for one that says it has no time, or no bound to compare with.

    Raises `ValidationError` for anything else.
    """
    told = _Told.model_validate_json(line)
    if told.status and (told.status != MEASURED or told.bound_us is None):
        return None
    return Measured.model_validate_json(line)


def _words(device: str, lines: list[Measured]) -> str:
    latest = {line.entry: line.percent_of_bound for line in lines}  # a shape measured again counts as of its last time
    low, high = round(min(latest.values())), round(max(latest.values()))
    percent = f"{low}" if low == high else f"{low} to {high}"
    shapes = "1 shape" if len(latest) == 1 else f"{len(latest)} shapes"
    return f"{percent} % of the bound on {device} ({shapes})"
