"""The pairs as a catalogue, from META and docstrings alone: rows, what techniques they cover, `datasets/INDEX.md`.

The text of the catalogue lists one pair a line and holds nothing but what follows from its lines, so that it can be
read back, checked, and merged line by line.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kernel_agent.errors import InputError
from kernel_agent.pairs.meta import read_meta
from kernel_agent.pairs.syntax import parse

HEADING = "# Index of the kernel pairs"


@dataclass(frozen=True)
class Covered:
    """A way to organise a backward, as the collection was planned."""

    name: str
    tags: tuple[str, ...]
    """Techniques of which a pair has at least one."""
    planned: int
    """Pairs that were planned to show it, of 500."""


LEAST_COVERED = (
    Covered("row-local: one program, one row or tile", ("row-local", "multi-row-tile", "elementwise"), 40),
    Covered("two-stage partial sums", ("two-stage-partials",), 52),
    Covered("atomics", ("atomics",), 30),
    Covered("persistent grid", ("persistent-grid",), 4),
    Covered("split-K, split rows, stream-K", ("split-k", "stream-k"), 14),
    Covered("loop swap, transposed grid", ("loop-swap", "owner-grid", "column-owner"), 14),
    Covered("recompute instead of save", ("recompute",), 60),
    Covered("saved statistics, lse or output", ("saved-statistics", "saved-lse", "saved-output"), 22),
    Covered("randomness or masks replayed, packed bits", ("rng-replay", "packed-bits"), 11),
    Covered("gather form, inverse map, sorted segments", ("gather-form", "inverse-map", "sorted-segments"), 22),
    Covered("reverse scan, checkpointed or chunked states", ("reverse-scan", "checkpointed-states", "chunked"), 54),
    Covered("chunked or tiled long axis", ("chunked", "two-pass"), 33),
    Covered("ragged bounds", ("varlen", "sorted-segments"), 35),
    Covered("head or broadcast reduction", ("head-reduction", "broadcast-reduction"), 24),
    Covered("fused into a product's prologue or epilogue", ("prologue-fusion", "epilogue-fusion"), 9),
    Covered("in place, or computed by the forward", ("in-place", "grad-in-forward"), 9),
    Covered("straight-through and custom gradients", ("straight-through",), 12),
    Covered("halo, neighbourhoods of a window", ("halo", "gather-form"), 47),
    Covered("masks and bounds that skip", ("masking", "causal-bounds"), 62),
)
"""The plan's table, with the tags of the closed list that stand for each of its lines."""


@dataclass(frozen=True)
class Row:
    """One pair."""

    family: str
    slug: str
    sentence: str
    """What its docstring says first."""
    techniques: tuple[str, ...]

    @property
    def line(self) -> str:
        """Its line in the catalogue."""
        link = f"[{self.slug}](kernel_pairs/{self.family}/{self.slug}.py)"
        return f"| {link} | {self.sentence.replace('|', chr(92) + '|')} | {', '.join(self.techniques)} |"


_LINE = re.compile(r"\| \[(\w+)\]\(kernel_pairs/(\w+)/\w+\.py\) \| (.*) \| (.*) \|")


def row_of(path: Path) -> Row:
    """The row of a pair file. Raises `InputError` where META cannot be read."""
    source = path.read_text(encoding="utf-8")
    said = ast.get_docstring(parse(source, path)) or ""
    sentence = " ".join(said.split("\n\n")[0].split())
    return Row(path.parent.name, path.stem, sentence, read_meta(source).techniques)


def covered(rows: Sequence[Row]) -> dict[str, int]:
    """How many pairs show each line of the plan's table."""
    return {one.name: sum(bool({*one.tags} & {*row.techniques}) for row in rows) for one in LEAST_COVERED}


def catalogue(rows: Sequence[Row]) -> str:
    """The text of `datasets/INDEX.md`."""
    rows = sorted(rows, key=lambda row: (row.family, row.slug))
    families = Counter(row.family for row in rows)
    parts = [
        HEADING,
        f"{len(rows)} pairs. `kernel-agent dataset page` makes a page of them with a search box, filters and the",
        "sources side by side; `kernel-agent dataset page --markdown datasets/INDEX.md` makes this file.",
        "",
        "| family | pairs |",
        "| --- | ---: |",
        *(f"| [{family}](#{family}) | {count} |" for family, count in sorted(families.items())),
        "",
        "| backward technique | planned of 500 | pairs | tags |",
        "| --- | ---: | ---: | --- |",
    ]
    counts = covered(rows)
    parts += [f"| {c.name} | {c.planned} | {counts[c.name]} | {', '.join(c.tags)} |" for c in LEAST_COVERED]
    for family in sorted(families):
        parts += ["", f"## {family}", "", "| pair | what it is | techniques |", "| --- | --- | --- |"]
        parts += [row.line for row in rows if row.family == family]
    return "\n".join([parts[0], "", *parts[1:]]) + "\n"


def read_catalogue(text: str, path: Path) -> list[Row]:
    """The rows that a catalogue lists. Raises `InputError` where it is none."""
    if not text.startswith(HEADING):
        raise InputError(
            "this is no index of pairs", path=path, remedy="kernel-agent dataset page --markdown makes one"
        )
    found = (_LINE.fullmatch(line) for line in text.splitlines())
    return [
        Row(match.group(2), match.group(1), match.group(3).replace("\\|", "|"), tuple(match.group(4).split(", ")))
        for match in found
        if match is not None
    ]
