"""`calls_of`: what launches of one kernel were given in the calls of a stub, as plans for it ask."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import triton

from kernel_agent.compiler.schedule.calls import Calls, Entry
from kernel_agent.compiler.stub.lines import HELPERS
from kernel_agent.compiler.stub.trace import LaunchSeen


def calls_of(
    launches: Iterable[LaunchSeen],
    *,
    typical: bool = True,
    entries: Sequence[Entry] = (),
    swept: Sequence[Entry] = (),
) -> Calls:
    """The names that facts of a plan may ask for, with what they were in each launch; the rest as in `Calls`."""
    helpers: dict[str, Any] = {"triton": triton}
    for text in HELPERS.values():
        exec(text, helpers)
    names = tuple({**helpers, **_grid(seen), **seen.values} for seen in launches)
    return Calls(names, typical, tuple(entries), tuple(swept))


def _grid(seen: LaunchSeen) -> dict[str, int]:
    return {f"grid{axis}": extent for axis, extent in enumerate((*seen.grid, 1, 1)[:3])}
