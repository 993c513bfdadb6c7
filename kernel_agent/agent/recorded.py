"""A replayed run takes its steps and sees the pairs of the recorded one, so that asks meet the replies they had."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kernel_agent.agent.events import Entry, PairsRetrieved
from kernel_agent.bench.records import Basis
from kernel_agent.config import RunConfig

DECISIVE: dict[str, Any] = {
    "draft": None,
    "reflect": False,
    "candidates": 1,
    "tune_variants": 0,
    "max_iters": RunConfig.model_fields["max_iters"].default,
    "patience": RunConfig.model_fields["patience"].default,
    "min_rel_impr": RunConfig.model_fields["min_rel_impr"].default,
}
"""Fields that decide which ask comes next, with what they were in runs of versions that did not know them."""


def as_recorded(config: RunConfig, recording: Path) -> RunConfig:
    """`config` with the decisive fields of a recorded run's first event, except those that were given to `config`.

    Launch parameters that were swept by the clock are not swept by a model of it: the best might be others, and the
    replies after the sweep change the code as it was.
    """
    from kernel_agent.bench.gpu import has_gpu  # imports torch

    recorded = _configuration(recording)
    taken = {name: recorded.get(name, before) for name, before in DECISIVE.items()}
    if not has_gpu() and _was_measured(recording):
        taken["tune_variants"] = 0
    missing = {name: value for name, value in taken.items() if name not in config.model_fields_set}
    return RunConfig.model_validate({**config.model_dump(), **missing})


def pairs_as_recorded(recording: Path) -> PairsRetrieved | None:
    """What the recorded run retrieved: its plan speaks of these pairs. None where its ledger holds none."""
    for line in _lines(recording):
        if '"pairs_retrieved"' in line:
            event = Entry.model_validate_json(line).event
            if isinstance(event, PairsRetrieved):
                return event
    return None


def _was_measured(recording: Path) -> bool:
    """Whether the recorded run had a GPU to time on."""
    basis = f'"basis":"{Basis.MEASURED.value}"'
    return any('"event":"measured"' in line and basis in line for line in _lines(recording))


def _configuration(recording: Path) -> dict[str, Any]:
    """The configuration of a ledger's first event; empty where there is none."""
    try:
        found = json.loads(next(_lines(recording), ""))["event"]["config"]
    except (ValueError, KeyError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}


def _lines(recording: Path) -> Iterator[str]:
    """The lines of a ledger, which may be of an older version; none where there is no ledger, as replies alone can be
    replayed."""
    ledger = recording / "trace.jsonl"
    if ledger.is_file():
        with ledger.open(encoding="utf-8") as file:
            yield from file
