"""One page with all pairs: filters, a search box, forward beside backward. It stands by itself and loads nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from kernel_agent.collection.catalogue import row_of
from kernel_agent.pairs.meta import read_meta
from kernel_agent.pairs.sections import split_sections
from kernel_agent.pairs.spec import content_hash
from kernel_agent.record import Record
from rag.speeds import FOLDER, read_speeds

TEMPLATE = Path(__file__).with_name("page.html")
PLACE = "@@PAIRS@@"


class PageRow(Record):
    """What the page knows of one pair."""

    family: str
    slug: str
    sentence: str
    techniques: tuple[str, ...]
    dtypes: tuple[str, ...]
    speed: str = Field(description="measured percent of the cost counter's bound, in words; empty when unmeasured")
    standing: str = Field(description="empty for a shipped pair")
    forward: str
    backward: str


def page_rows(files: Sequence[Path], standings: dict[Path, str] | None = None) -> list[PageRow]:
    """Rows of pair files; speeds are read from the folder `results` beside each folder of pairs."""
    speeds = {root: read_speeds(root.parent / FOLDER) for root in {path.parent.parent for path in files}}
    found = []
    for path in files:
        source = path.read_text(encoding="utf-8")
        row, meta, sections = row_of(path), read_meta(source), split_sections(source)
        found.append(
            PageRow(
                family=row.family,
                slug=row.slug,
                sentence=row.sentence,
                techniques=row.techniques,
                dtypes=meta.dtypes,
                speed=speeds[path.parent.parent].words(path.stem, content_hash(source)),
                standing=(standings or {}).get(path, ""),
                forward=sections.forward.strip(),
                backward=sections.backward.strip(),
            )
        )
    return found


def page(rows: Sequence[PageRow]) -> str:
    """The page. Nothing in a pair's text can end the block that holds the data."""
    data = json.dumps([row.model_dump(mode="json") for row in rows], ensure_ascii=False)
    return TEMPLATE.read_text(encoding="utf-8").replace(PLACE, data.replace("<", "\\u003c"))
