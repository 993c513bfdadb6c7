"""`open_index`: what a run searches: the pairs that ship with the package, and the user's own beside them."""

from __future__ import annotations

from pathlib import Path

from kernel_agent.data import OWN_INDEX, OWN_STATE, own_root
from rag.index import MANIFEST, Index, IndexProblem, join_indexes
from rag.storage import load_index


def open_index(path: Path | None = None) -> Index:
    """The shipped index joined with that of the user's own pairs, where there are any.

    `path`: another folder of own pairs, or the folder of one index, which is then searched alone. Raises `IndexProblem`
    for an index that cannot be used.
    """
    if path is not None and not (path / OWN_STATE).is_file():
        return load_index(path)
    own = own_root() if path is None else path
    if not (own / OWN_INDEX / MANIFEST).is_file():
        return load_index()
    try:
        mine = load_index(own / OWN_INDEX)
    except IndexProblem as error:
        remedy = f"kernel-agent dataset reindex{'' if path is None else f' --index {path}'}"
        raise IndexProblem(error.message, remedy=f"make it again: {remedy}") from error
    return join_indexes(load_index(), mine)
