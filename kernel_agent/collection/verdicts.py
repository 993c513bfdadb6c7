"""Recorded verdicts: what was proven about each pair, as data beside the pairs, one file per family.

`datasets/results/verdicts/<family>.jsonl` holds one sorted JSON object a line, sorted by slug. The same verdicts give
the same text, so that a rerun changes nothing and a diff shows what changed.
"""

from __future__ import annotations

import enum
import fcntl
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pydantic import Field, ValidationError

from kernel_agent.collection.kernelfacts import KernelFacts
from kernel_agent.collection.pairfiles import PAIRS, results_folder
from kernel_agent.errors import EnvironmentProblem, InputError
from kernel_agent.gate.verdict import Status
from kernel_agent.pairs.spec import content_hash
from kernel_agent.record import Record

FOLDER = "verdicts"
RULE = 1
"""Version of what `dataset check` asks beyond the gate; raised when recorded verdicts say too little."""


class PairVerdict(Record):
    """What a full check says of one pair."""

    slug: str
    hash: str = Field(description="content hash of the pair file")
    rule: str = Field(description="versions of the gate's rule and of this check's, as `1.1`")
    status: Status = Field(description="the gate's, in the exact tier")
    message: str = Field(default="", description="what is wrong, in one line; empty when the gate is green")
    right: int = Field(default=0, description="cases that agree with the exact gradients")
    planned: int = Field(default=0, description="cases of the plan")
    worst: dict[str, float] = Field(default={}, description="by gradient: error over what is allowed, one digit")
    kernels: tuple[KernelFacts, ...] = Field(default=(), description="as compiled for sm_90 at the sizes of BENCH")
    problems: tuple[str, ...] = Field(default=(), description="what is wrong beside the gate's verdict")
    torch: str = ""
    triton: str = ""

    @property
    def green(self) -> bool:
        """Accepted by the gate, at least one case run, and nothing wrong beside it."""
        return self.status is Status.GREEN and self.right > 0 and not self.problems

    @property
    def line(self) -> str:
        """The record as it stands in the file."""
        return json.dumps(self.model_dump(mode="json", exclude_defaults=True), sort_keys=True)


def one_digit(ratio: float) -> float:
    """A ratio to one significant digit: what is left of it on another machine."""
    return ratio if not math.isfinite(ratio) else float(f"{ratio:.0e}")


class Standing(str, enum.Enum):
    """How a pair file relates to what is recorded of it."""

    NONE = "not recorded"
    STALE = "recorded for another text or an older rule"
    CURRENT = "recorded"


class VerdictBook:
    """The recorded verdicts of one dataset."""

    def __init__(self, results: Path) -> None:
        self.folder = results / FOLDER

    @classmethod
    def beside(cls, pair: Path) -> VerdictBook | None:
        """The book of the dataset that a pair file belongs to; None for a file elsewhere."""
        results = results_folder(pair)
        return None if results is None else cls(results)

    def file(self, family: str) -> Path:
        """Where a family's verdicts are."""
        return self.folder / f"{family}.jsonl"

    def family(self, family: str) -> dict[str, PairVerdict]:
        """By slug: of several, as a merge leaves them, the one that speaks of the pair's text, else the last.

        Raises `InputError` with the line where the file holds something else.
        """
        path = self.file(family)
        if not path.is_file():
            return {}
        found: dict[str, PairVerdict] = {}
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            try:
                verdict = PairVerdict.model_validate_json(line)
            except ValidationError:
                remedy = "Delete the line, then run kernel-agent dataset check."
                raise InputError("this is no recorded verdict", path=path, line=number, remedy=remedy) from None
            known = found.get(verdict.slug)
            if known is None or known.hash != self._hash_of(family, verdict.slug):
                found[verdict.slug] = verdict
        return found

    def _hash_of(self, family: str, slug: str) -> str | None:
        """Of the text of a pair; None where it is gone."""
        pair = self.folder.parent.parent / PAIRS / family / f"{slug}.py"
        return content_hash(pair.read_text(encoding="utf-8")) if pair.is_file() else None

    def standing(self, pair: Path, rule: str) -> tuple[Standing, PairVerdict | None]:
        """Whether the verdict of a pair file is recorded, and the record."""
        known = self.family(pair.resolve().parent.name).get(pair.stem)
        if known is None:
            return Standing.NONE, None
        current = known.hash == content_hash(pair.read_text(encoding="utf-8")) and known.rule == rule
        return (Standing.CURRENT if current else Standing.STALE), known

    def record(self, pair: Path, verdict: PairVerdict) -> None:
        """Write a verdict into its family's file, and drop those of pairs that are gone.

        Raises `EnvironmentProblem` where nothing can be written.
        """
        self._write(pair.resolve().parent, {verdict.slug: verdict})

    def tidy(self, pair: Path) -> None:
        """Sort the file of a pair's family, and drop what is there twice or of pairs that are gone."""
        if self.file(pair.resolve().parent.name).is_file():
            self._write(pair.resolve().parent, {})

    def _write(self, family: Path, new: Mapping[str, PairVerdict]) -> None:
        try:
            with self._locked():
                known = {**self.family(family.name), **new}
                lines = [known[slug].line + "\n" for slug in sorted(known) if (family / f"{slug}.py").is_file()]
                text = "".join(lines)
                path = self.file(family.name)
                if not path.is_file() or path.read_text(encoding="utf-8") != text:
                    written = path.with_suffix(".writing")
                    written.write_text(text, encoding="utf-8")
                    os.replace(written, path)
        except OSError as error:
            raise EnvironmentProblem(
                f"cannot record a verdict in {self.folder}: {error.strerror or error}",
                remedy="Make the folder writable, or check with --no-record.",
            ) from error

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Several checks may run in one checkout."""
        self.folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)
