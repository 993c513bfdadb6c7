"""What owners of rows that an index names store, beside what the forward's programs add."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kernel_agent.compiler.plan import Inverse
from kernel_agent.compiler.schedule.accumulate import accumulated
from kernel_agent.compiler.schedule.heirs import Heirs
from kernel_agent.compiler.schedule.ownership import owned
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.evaluate import evaluate
from kernel_agent.compiler.ssa.prune import prune
from kernel_agent.compiler.ssa.value import Kernel
from kernel_agent.compiler.stub.lines import HELPERS


def stored_and_added(
    kernel: Kernel, found: Heirs, given: dict[str, Any], programs: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """What the owners of the rows of dX store to memory that held NaN, and what the forward's programs add."""
    stored = owned(prune(accumulated(found.kernel)), {"X": "dX"}, found.launch)
    assert {op.code for op in stored.kernel.ops if op.code in (Code.STORE, Code.ATOMIC_ADD)} == {Code.STORE}
    scope: dict[str, Any] = {**given, "torch": torch}
    exec("\n".join(HELPERS.values()), scope)
    dx = torch.full(given["X"].shape, float("nan"), dtype=torch.float64)
    scope |= ordered(found, scope)
    texts = {name: extent.text() for name, extent in found.launch.scalars.items()}
    run(stored.kernel, [extent.text() for extent in found.launch.grid], {**scope, "dX": dx, **told(texts, scope)})
    truth = torch.zeros_like(dx)
    others = {name: value.clone() for name, value in given.items() if name.startswith("d")}
    evaluate(kernel, programs, {**{v.name: scope.get(v.name) for v in kernel.arguments}, **others, "dX": truth})
    return dx, truth


def ordered(found: Heirs, scope: dict[str, Any]) -> dict[str, Any]:
    """What torch tells the owners of rows."""
    listing = found.listing
    if isinstance(listing, Inverse):
        places: Callable[..., tuple[Tensor, ...]] = scope["places_in_order"]
        numbers = [eval(text, scope) for text in (listing.programs, listing.count)]
        names = (listing.order, listing.begins, listing.known)
        return dict(zip(names, places(scope[listing.rows], scope[listing.bounds], *numbers), strict=True))
    scope |= {listing.rows.name: torch.zeros([eval(text, scope) for text in listing.rows.shape], dtype=torch.int32)}
    run(listing.step.kernel, listing.step.grid, {**scope, **told(listing.step.scalars, scope)})
    in_order: Callable[..., tuple[Tensor, Tensor]] = scope["rows_in_order"]
    order, begins = in_order(scope[listing.rows.name], eval(listing.count, scope))
    return {listing.order: order, listing.begins: begins}


def told(texts: Mapping[str, str], scope: Mapping[str, Any]) -> dict[str, int]:
    """Numbers by their expressions."""
    return {name: int(eval(text, dict(scope))) for name, text in texts.items()}


def run(kernel: Kernel, grid: Sequence[str], scope: Mapping[str, Any]) -> None:
    """A launch."""
    extents = [int(eval(text, dict(scope))) for text in grid]
    evaluate(kernel, extents, {value.name: scope[value.name] for value in kernel.arguments})
