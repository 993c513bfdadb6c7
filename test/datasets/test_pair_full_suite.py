"""The full suite and the compile for sm_90, for every pair without a record and a twentieth that changes weekly."""

from __future__ import annotations

import datetime
import hashlib
from pathlib import Path

import pytest

from kernel_agent.collection.proof import RULES, judge
from kernel_agent.collection.verdicts import Standing, VerdictBook
from kernel_agent.data import pairs_root
from kernel_agent.sandbox import Sandbox

PARTS = 20
"""In so many weeks about two of three recorded pairs are judged again."""
YEAR, WEEK, _ = datetime.datetime.now(datetime.timezone.utc).isocalendar()


def due(path: Path) -> str:
    """Why a pair is judged in full here; empty where it is not."""
    book = VerdictBook.beside(path)
    if book is not None and book.standing(path, RULES)[0] is Standing.NONE:
        return "unrecorded"
    chosen = hashlib.sha256(f"{YEAR} {WEEK} {path.stem}".encode()).digest()
    return f"{YEAR}-W{WEEK:02d}" if int.from_bytes(chosen[:8], "big") % PARTS == 0 else ""


REASONS = {path: due(path) for path in sorted(pairs_root().glob("*/*.py"))}
DUE = [pytest.param(path, id=f"{path.parent.name}-{path.stem}-{why}") for path, why in REASONS.items() if why]


@pytest.mark.parametrize("path", DUE)
def test_pair_passes_all_that_dataset_check_asks(path: Path, pair_sandbox: Sandbox):
    verdict = judge(path, pair_sandbox)
    assert verdict.green, f"{verdict.status.value}: {verdict.message} {'; '.join(verdict.problems)}"
