"""A replayed run takes its steps and sees the pairs of the recorded one, so that asks meet the replies they had."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kernel_agent.agent.events import Entry, PairsRetrieved
from kernel_agent.bench.records import Basis
from kernel_agent.config import RunConfig

DECISIVE: dict[str, Any] = {
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

    ledger = recording / "trace.jsonl"
    recorded = _recorded(ledger)
    taken = {name: recorded.get(name, before) for name, before in DECISIVE.items()}
    if not has_gpu() and _was_measured(ledger):
        taken["tune_variants"] = 0
    missing = {name: value for name, value in taken.items() if name not in config.model_fields_set}
    return RunConfig.model_validate({**config.model_dump(), **missing})


def _was_measured(ledger: Path) -> bool:
    """Whether the recorded run had a GPU to time on."""
    if not ledger.is_file():
        return False
    with ledger.open(encoding="utf-8") as file:
        return any('"event":"measured"' in line and f'"basis":"{Basis.MEASURED.value}"' in line for line in file)


def _recorded(ledger: Path) -> dict[str, Any]:
    """The configuration of a ledger's first event; empty where there is none, as replies alone can be replayed."""
    if not ledger.is_file():
        return {}
    with ledger.open(encoding="utf-8") as file:
        first = file.readline()
    try:
        found = json.loads(first)["event"]["config"]
    except (ValueError, KeyError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}


def pairs_as_recorded(recording: Path) -> PairsRetrieved | None:
    """What the recorded run retrieved: its plan speaks of these pairs. None where its ledger holds none."""
    ledger = recording / "trace.jsonl"
    if not ledger.is_file():
        return None
    with ledger.open(encoding="utf-8") as file:
        for line in file:
            if '"pairs_retrieved"' not in line:
                continue
            event = Entry.model_validate_json(line).event
            if isinstance(event, PairsRetrieved):
                return event
    return None
