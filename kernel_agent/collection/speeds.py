"""Measured speeds of pairs as data: `datasets/results/<gpu>.jsonl`, one line per pair, GPU and entry of BENCH."""

from __future__ import annotations

import enum
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from pydantic import Field, ValidationError

from kernel_agent.errors import InputError
from kernel_agent.record import Record


class SpeedStatus(str, enum.Enum):
    """How a measurement went. Only MEASURED has times."""

    MEASURED = "measured"
    RED = "red"
    """The native tier refuses the gradients of the real kernels."""
    FAILED = "failed"
    OUT_OF_MEMORY = "out of memory"
    TIMED_OUT = "timed out"
    CRASHED = "crashed"


class PairSpeed(Record):
    """One backward on one GPU at one entry of BENCH. Times are microseconds, medians of one backward alone."""

    slug: str
    family: str
    hash: str = Field(description="content hash of the pair file that was measured")
    device: str = Field(description="name of the GPU")
    entry: str = Field(description="label of the entry, such as `M=8192 N=4096 dtype=bfloat16`; empty: of all")
    status: SpeedStatus
    message: str = Field(default="", description="why it is not measured, or what to know of the times")
    backward_us: float | None = None
    spread: float | None = Field(default=None, description="interquartile range over the median")
    bound_us: float | None = Field(
        default=None, description="least time of launches and torch functions, by the cost counter"
    )
    compiled_us: float | None = Field(default=None, description="torch.compile of `reference`, backward alone")
    eager_us: float | None = Field(default=None, description="eager autograd of `reference`, backward alone")
    of_bound: float | None = Field(default=None, description="least time over time; 1 where nothing could be faster")
    to_compiled: float | None = Field(default=None, description="time of torch.compile over time; above 1 is faster")
    to_eager: float | None = None
    gb_s: float | None = Field(default=None, description="different bytes of its launches over time")
    tflops: float | None = Field(
        default=None, description="operations of its products over time; None without products"
    )
    atomics: int | None = Field(default=None, description="elements updated atomically")
    saved_bytes: int | None = Field(default=None, description="of saved tensors that have not the form of an input")
    worst: float | None = Field(default=None, description="largest error in the native tier over what is allowed")
    seconds: float | None = Field(
        default=None, description="wall seconds that proof, timing and baselines took together, waits included"
    )
    versions: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """The record as it stands in the file."""
        return json.dumps(self.model_dump(mode="json", exclude_none=True), sort_keys=True)


class SpeedBook:
    """One file of measurements, which grows a line at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[PairSpeed]:
        """All lines in order. A last one that was cut off while it was written is passed over.

        Raises `InputError` with the line for anything else that is no measurement.
        """
        if not self.path.is_file():
            return []
        text = self.path.read_text(encoding="utf-8")
        lines = text.splitlines()
        found = []
        for number, line in enumerate(lines, start=1):
            try:
                found.append(PairSpeed.model_validate_json(line))
            except ValidationError:
                if number == len(lines) and not text.endswith("\n"):
                    break
                remedy = "Delete the line; it is measured again."
                raise InputError("this is no measurement", path=self.path, line=number, remedy=remedy) from None
        return found

    def known(self, device: str) -> set[tuple[str, str]]:
        """Slug and content hash of what was measured, or tried, on a GPU."""
        return {(speed.slug, speed.hash) for speed in self.read() if speed.device == device}

    def append(self, speeds: Sequence[PairSpeed]) -> None:
        """Add lines; they are on disk when this returns."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(speed.line + "\n" for speed in speeds))
            file.flush()
            os.fsync(file.fileno())

    def tidy(self) -> None:
        """Sort the lines, and keep of each pair, GPU and entry the last one, of its last text only."""
        speeds = self.read()
        texts = {(speed.slug, speed.device): speed.hash for speed in speeds}
        last = {(s.family, s.slug, s.device, s.entry): s for s in speeds if texts[s.slug, s.device] == s.hash}
        written = self.path.with_suffix(".writing")
        written.write_text("".join(last[key].line + "\n" for key in sorted(last)), encoding="utf-8")
        os.replace(written, self.path)


def spread_out(files: Iterable[Path]) -> list[Path]:
    """Pair files in the order in which they are measured: families in turn, so that a short sitting sees them all."""
    by_family: dict[str, list[Path]] = {}
    for path in sorted(files):
        by_family.setdefault(path.parent.name, []).append(path)
    return [
        path
        for _, _, path in sorted(
            (turn, family, path) for family in by_family for turn, path in enumerate(by_family[family])
        )
    ]
