"""Print the figures that README.md shows, from the records in this folder: python bench/readme_figures.py

Nothing is measured here: `backward_speed.py`, `kernel-agent dataset bench` and `mutants.py` made the records.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mutants import read
from pair_speeds import ROOT as DATASETS
from pair_speeds import pairs_of

from kernel_agent.collection.speeds import SpeedBook
from kernel_agent.gate.mutants.records import Outcome

HERE = Path(__file__).resolve().parent
SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@dataclass(frozen=True)
class Bar:
    """One derived backward beside what it is compared with."""

    label: str
    """Backward, columns or head dimension, dtype."""
    us: float
    to_compiled: float
    """Times as fast as torch.compile of the reference."""
    to_flash: float | None
    """Times as fast as FlashAttention-2, where both compute the same."""
    to_cudnn: float | None
    """Times as fast as cuDNN."""

    @property
    def drawn(self) -> float:
        """Against the strongest rival that everybody has: FlashAttention-2 for attention, else torch.compile."""
        return self.to_compiled if self.to_flash is None else self.to_flash


def label(row: dict[str, Any]) -> str:
    """Short name of a measured shape."""
    sizes = dict(part.split("=") for part in row["entry"].split())
    width = next(f"D{sizes[key]}" if key == "D" else sizes[key] for key in ("hidden", "V", "D", "N") if key in sizes)
    causal = " causal" if sizes.get("causal") == "True" else ""
    return f"{row['case'].replace('_', ' ')} {width}{causal} {SHORT[sizes.get('dtype', 'float32')]}"


def bars(rows: list[dict[str, Any]]) -> list[Bar]:
    """What was proven and timed."""
    green = [row for row in rows if row["status"] == "GREEN"]

    def times(row: dict[str, Any], key: str) -> float | None:
        return row[key] / row["us"] if row.get(key) else None

    return [
        Bar(label(row), row["us"], row["compiled_us"] / row["us"], times(row, "flash_us"), times(row, "cudnn_us"))
        for row in green
    ]


def chart(found: list[Bar]) -> Iterator[str]:
    """A picture as text, which code hosts draw."""
    names = ", ".join(f'"{bar.label}"' for bar in found)
    top = max(bar.drawn for bar in found)
    yield "```mermaid"
    yield "xychart-beta horizontal"
    yield '    title "Derived backwards: times as fast as torch.compile (attention: as FlashAttention-2)"'
    yield f"    x-axis [{names}]"
    yield f"    y-axis 0 --> {top + 0.1:.1f}"
    yield f"    bar [{', '.join(f'{bar.drawn:.2f}' for bar in found)}]"
    yield "```"


def section() -> Iterator[str]:
    """The lines of README.md between its marks."""
    speed = json.loads((HERE / "backward_speed.json").read_text(encoding="utf-8"))
    found = bars(speed["rows"])
    yield from chart(found)
    yield ""
    yield f"| derived backward on one {speed['device']} | us | beside torch.compile | FlashAttention-2 | cuDNN |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    for bar in found:
        others = (f"{ratio:.2f}x" if ratio else "" for ratio in (bar.to_flash, bar.to_cudnn))
        yield f"| {bar.label} | {bar.us:,.0f} | {bar.to_compiled:.2f}x | {' | '.join(others)} |"
    yield ""
    pairs = pairs_of(SpeedBook(DATASETS / "results" / "h200.jsonl").read())
    ratios = [pair.to_compiled for pair in pairs if pair.to_compiled is not None]
    faster = sum(ratio >= 1.0 for ratio in ratios) / len(ratios)
    yield (
        f"- {len(pairs)} hand-written pairs timed there: {faster:.0%} at least as fast as torch.compile, "
        f"{statistics.median(ratios):.2f}x in the median."
    )
    fates = Counter(result.outcome for report in read(HERE / "mutants.jsonl") for result in report.results)
    yield (
        f"- {sum(fates.values()):,} wrong backwards of the pairs given to the gate: {fates[Outcome.KILLED]:,} refused, "
        f"{fates[Outcome.SURVIVED]} passed; the others compute the same, or cannot run."
    )


if __name__ == "__main__":
    print(*section(), sep="\n")
