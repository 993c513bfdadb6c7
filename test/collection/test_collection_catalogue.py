"""The list of pairs and the page follow from the pairs' own texts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kernel_agent.collection.catalogue import LEAST_COVERED, Row, catalogue, covered, read_catalogue, row_of
from kernel_agent.collection.page import PageRow, page, page_rows
from kernel_agent.data import pairs_root
from kernel_agent.errors import InputError
from kernel_agent.pairs.spec import content_hash
from kernel_agent.pairs.techniques import TECHNIQUES
from rag import load_index

INDEX = Path(__file__).parents[2] / "datasets" / "INDEX.md"
RENEW = "kernel-agent dataset page --markdown datasets/INDEX.md"


@pytest.fixture(scope="module")
def listed() -> list[Row]:
    """What datasets/INDEX.md lists."""
    return read_catalogue(INDEX.read_text(encoding="utf-8"), INDEX)


def test_the_committed_index_is_what_its_own_lines_make(listed: list[Row]) -> None:
    # Counts by hand, or a merge that left two lines of one pair, would show here.
    assert INDEX.read_text(encoding="utf-8") == catalogue(listed), RENEW
    assert len({row.slug for row in listed}) == len(listed), RENEW


def test_the_committed_index_is_as_new_as_the_retrieval_index(listed: list[Row]) -> None:
    # Pairs land one by one, both indexes are made again together: what the one knows, the other lists as it is.
    entries = {entry.slug: entry for entry in load_index().entries}
    assert entries.keys() <= {row.slug for row in listed}, RENEW
    for row in listed:
        path = pairs_root() / row.family / f"{row.slug}.py"
        indexed = entries[row.slug].hash if row.slug in entries else ""
        if path.is_file() and content_hash(path.read_text(encoding="utf-8")) == indexed:
            assert row_of(path) == row, f"{row.slug}: {RENEW}"


def test_the_whole_collection_covers_every_technique_as_planned(listed: list[Row]) -> None:
    if len(listed) < 500:
        pytest.skip(f"the collection has {len(listed)} of 500 pairs")
    counts = covered(listed)
    assert {c.name: counts[c.name] for c in LEAST_COVERED if counts[c.name] < c.planned} == {}


def test_the_plan_speaks_of_techniques_that_there_are() -> None:
    assert {tag for one in LEAST_COVERED for tag in one.tags} <= set(TECHNIQUES)


def test_a_pair_counts_once_for_a_line_of_which_it_has_two_tags() -> None:
    counts = covered([Row("f", "one", "One.", ("in-place", "grad-in-forward"))])
    assert counts["in place, or computed by the forward"] == 1


def test_a_catalogue_reads_back_as_it_was_written() -> None:
    rows = [
        Row("softmax", "two", "A | B, of (M, N).", ("recompute",)),
        Row("glu", "one", "One.", ("atomics", "varlen")),
    ]
    assert read_catalogue(catalogue(rows), INDEX) == sorted(rows, key=lambda row: row.family)


def test_another_file_is_no_index_of_pairs(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no index of pairs"):
        read_catalogue("# Something else\n", tmp_path / "README.md")


@pytest.fixture
def some() -> list[PageRow]:
    """Rows of a few shipped pairs."""
    return page_rows(sorted((pairs_root() / "softmax").glob("*.py"))[:3])


def test_the_page_holds_every_pair_with_both_of_its_halves(some: list[PageRow]) -> None:
    data = page(some).partition('type="application/json">')[2].partition("</script>")[0]
    read = json.loads(data)
    assert [row["slug"] for row in read] == [row.slug for row in some]
    assert all("def forward" in row["forward"] and "def backward" in row["backward"] for row in read)


def test_the_page_loads_nothing_from_elsewhere(some: list[PageRow]) -> None:
    text = page(some)
    assert "src=" not in text
    assert "href=" not in text


def test_no_text_of_a_pair_ends_the_page_s_data(some: list[PageRow]) -> None:
    evil = some[0].model_copy(update={"forward": 'x = "</script><script>alert(1)</script>"'})
    data = page([evil]).partition('type="application/json">')[2].partition("</script>")[0]
    assert json.loads(data)[0]["forward"] == evil.forward


def test_listing_pairs_loads_no_torch() -> None:
    # `dataset list` and `dataset page` read texts: seconds of imports would be all that they do.
    needs = "import kernel_agent.collection.own, kernel_agent.collection.page, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", needs], check=False).returncode == 0


def test_own_pairs_say_so_on_the_page() -> None:
    path = sorted((pairs_root() / "softmax").glob("*.py"))[0]
    (row,) = page_rows([path], {path: "own, unverified"})
    assert "own, unverified" in page([row])
