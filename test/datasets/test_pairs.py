"""The dataset as a whole: one style, no two pairs alike, and every technique explained."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from kernel_agent.collection.likeness import near_duplicates
from kernel_agent.data import pairs_root
from kernel_agent.pairs.lint import lint
from kernel_agent.pairs.sections import split_sections
from kernel_agent.pairs.techniques import TECHNIQUES

ROOT = Path(__file__).resolve().parents[2]
PAIRS = sorted(pairs_root().glob("*/*.py"))

every_pair = pytest.mark.parametrize("path", PAIRS, ids=lambda path: f"{path.parent.name}-{path.stem}")


def test_dataset_has_at_least_thirty_pairs_over_fifteen_families():
    assert len(PAIRS) >= 30
    assert len({path.parent.name for path in PAIRS}) >= 15


def test_slugs_are_unique_across_families():
    # Retrieval, ledgers and results name a pair by its slug alone.
    repeated = [slug for slug, count in Counter(path.stem for path in PAIRS).items() if count > 1]
    assert not repeated


def test_no_package_shadows_the_library_of_the_same_name():
    # With an __init__.py, `import datasets` in the checkout would find this folder instead of the library.
    assert not list((ROOT / "datasets").rglob("__init__.py"))


def test_readme_explains_exactly_the_closed_list_of_techniques():
    rows = [line.split("|") for line in (ROOT / "datasets" / "README.md").read_text().splitlines()]
    explained = {row[1].strip(" `"): row[2].strip() for row in rows if len(row) == 4 and row[1].startswith(" `")}
    assert explained == TECHNIQUES


def test_no_two_pairs_are_near_duplicates():
    # A pair that repeats another teaches nothing and crowds it out of what retrieval shows.
    assert [str(twins) for twins in near_duplicates({path: path.read_text() for path in PAIRS})] == []


@every_pair
def test_pair_follows_the_rules_of_the_collection(path):
    assert [str(complaint) for complaint in lint(path)] == []
    sections = split_sections(path.read_text())
    assert "def forward(" in sections.forward
    assert "def backward(" in sections.backward
    assert "def reference(" in sections.check
    assert len(path.read_text().splitlines()) < 400
