"""Where the shipped pairs, the index and the recorded runs lie: in the package of a wheel, at the top of a checkout."""

from __future__ import annotations

from pathlib import Path

from kernel_agent.errors import EnvironmentProblem

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


def index_path() -> Path:
    """The ready retrieval index over `pairs_root()`."""
    return pairs_root() / "index"
