"""What listing and checking do for own pairs: how each stands, which can be judged, what a verdict changes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kernel_agent.errors import InputError

if TYPE_CHECKING:
    from kernel_agent.collection.checking import Row


def own_standings(index: Path | None) -> dict[Path, str]:
    """Own pairs with whose they are, whether they are proven, and their licence."""
    from kernel_agent.collection.own import OwnPairs
    from kernel_agent.pairs.meta import read_meta
    from rag.query import licence_words

    own = OwnPairs(index)
    found: dict[Path, str] = {}
    state, books = own.state(), {}
    for path in own.files():
        family = path.parent.name
        if family not in books:
            books[family] = own.book.family(family)
        said = ["own", "proven" if own.verified(path, state, books[family]) else "unverified"]
        meta = read_meta(path.read_text(encoding="utf-8"))
        if meta.repository:
            said.append(licence_words(meta.license))
        found[path] = ", ".join(said)
    return found


def judgeable(index: Path | None) -> list[Path]:
    """Own pairs that have SWEEP and make_args. Raises `InputError` where there is none."""
    from kernel_agent.collection.own import OwnPairs
    from kernel_agent.pairs.syntax import assigned_values, defined_functions, parse

    found = []
    for path in OwnPairs(index).files():
        tree = parse(path.read_text(encoding="utf-8"), path)
        if assigned_values(tree, "SWEEP") and "make_args" in defined_functions(tree):
            found.append(path)
    if not found:
        remedy = "Add SWEEP and make_args to one (docs/own-pairs.md), or take a delivered pair: dataset add."
        raise InputError("none of your own pairs can be judged", remedy=remedy)
    return found


def settle(rows: Sequence[Row]) -> None:
    """Let retrieval know which own pairs are proven now."""
    from kernel_agent.collection.own import OwnPairs

    judged = [row.path for row in rows if row.verdict is not None and not row.problem]
    folders = {own.folder: own for path in judged if (own := OwnPairs.around(path)) is not None}
    for folder, own in folders.items():
        own.settle([path for path in judged if path.resolve().is_relative_to(folder.resolve())])
