"""Where the shipped pairs, the index and the recorded runs lie: in the package of a wheel, at the top of a checkout."""

from __future__ import annotations

import os
from pathlib import Path

from kernel_agent.errors import EnvironmentProblem

OWN_STATE = "own.json"
"""What makes a folder one of own pairs; the pairs lie in `kernel_pairs` beside it."""

OWN_INDEX = "kernel_pairs/index"
"""Where the index over own pairs lies, in their folder."""

_PACKAGED = Path(__file__).resolve().parent
_CHECKOUT = _PACKAGED.parent.parent


def _root(packaged: str, checkout: str) -> Path:
    for candidate in (_PACKAGED / packaged, _CHECKOUT / checkout):
        if candidate.is_dir():
            return candidate
    raise EnvironmentProblem(
        f"the folder {packaged} that ships with kernel-agent is missing",
        remedy="reinstall the package: pip install --force-reinstall kernel-agent",
    )


def pairs_root() -> Path:
    """The dataset of proven pairs: `<family>/<slug>.py`."""
    return _root("kernel_pairs", "datasets/kernel_pairs")


def logs_root() -> Path:
    """Recorded runs that can be replayed."""
    return _root("logs", "LOGS")


def own_root() -> Path:
    """The user's own pairs, where no other folder is named: in the user's folder for data (XDG base directories)."""
    data = os.environ.get("XDG_DATA_HOME", "")
    home = Path(data) if os.path.isabs(data) else Path.home() / ".local" / "share"
    return home / "kernel-agent"


def is_own(pairs: Path) -> bool:
    """Whether a folder of pairs is that of a folder of own pairs."""
    return (pairs.parent / OWN_STATE).is_file()


def index_path() -> Path:
    """The ready retrieval index over `pairs_root()`."""
    return pairs_root() / "index"
