"""Whose turn it is this week: judging every pair in every run would take as long as all other tests together."""

from __future__ import annotations

import datetime
import hashlib
from pathlib import Path

from kernel_agent.collection.proof import RULES
from kernel_agent.collection.verdicts import Standing, VerdictBook
from kernel_agent.data import pairs_root

PAIRS = sorted(pairs_root().glob("*/*.py"))
QUICK_WEEKS, FULL_WEEKS = 6, 60
"""In so many weeks every recorded pair is judged once at its smallest shape, and once by the full suite."""


def this_week() -> int:
    """Weeks go on over the end of a year."""
    return datetime.datetime.now(datetime.timezone.utc).toordinal() // 7


def has_turn(path: Path, weeks: int, week: int) -> bool:
    """By the pair's name: what is added beside it does not change its turn."""
    number = int.from_bytes(hashlib.sha256(path.stem.encode()).digest()[:8], "big")
    return number % weeks == week % weeks


WEEK = this_week()


def due(path: Path) -> str:
    """Why a pair is judged in full here; empty where it is not."""
    book = VerdictBook.beside(path)
    if book is not None and book.standing(path, RULES)[0] is Standing.NONE:
        return "unrecorded"
    return f"week-{WEEK}" if has_turn(path, FULL_WEEKS, WEEK) else ""


FULL = {path: why for path in PAIRS if (why := due(path))}
"""Pairs that the full suite judges here, and why."""
QUICK = [path for path in PAIRS if has_turn(path, QUICK_WEEKS, WEEK) and path not in FULL]
"""Pairs that are judged at their smallest shape here; the full suite holds it, too."""
