"""What owners of tiles store that trips pick, beside what the forward's programs add."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from sorted_rows import run, told
from torch import Tensor

from kernel_agent.compiler.schedule.ownership import owned
from kernel_agent.compiler.schedule.pickers import Pickers
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.evaluate import evaluate
from kernel_agent.compiler.ssa.prune import prune
from kernel_agent.compiler.ssa.value import Kernel
from kernel_agent.compiler.stub.lines import HELPERS


def listed(found: Pickers, given: dict[str, Any]) -> dict[str, Any]:
    """What launches in front of the owners write, and the numbers that these are given."""
    scope = dict(given)
    exec("\n".join(HELPERS.values()), scope)
    listing, counting = found.listing, found.listing.counting
    assert counting is not None
    for buffer, step in ((counting.counts, counting.step), (listing.rows, listing.step)):
        scope[buffer.name] = torch.zeros([eval(text, scope) for text in buffer.shape], dtype=torch.int32)
        run(step.kernel, step.grid, {**scope, **told(step.scalars, scope)})
        scope.setdefault(counting.most, max(1, int(scope[counting.counts.name].max())))
    in_order: Callable[..., tuple[Tensor, Tensor]] = scope["tiles_in_order"]
    order, begins = in_order(scope[listing.rows.name], eval(listing.count, scope))
    return {**scope, listing.order: order, listing.begins: begins}


def summed(kernel: Kernel, found: Pickers, given: dict[str, Any], programs: Sequence[int]) -> tuple[Tensor, Tensor]:
    """What owners store to memory of dX that held NaN, and what the forward's programs add."""
    stored = owned(prune(found.kernel), {"X": "dX"}, found.launch)
    assert [op.code for op in stored.kernel.ops if op.code in (Code.STORE, Code.ATOMIC_ADD)] == [Code.STORE]
    scope = listed(found, given)
    texts = {name: extent.text() for name, extent in found.launch.scalars.items()}
    dx = torch.full(given["X"].shape, float("nan"), dtype=torch.float64)
    run(stored.kernel, [extent.text() for extent in found.launch.grid], {**scope, **told(texts, scope), "dX": dx})
    truth = torch.zeros_like(dx)
    evaluate(kernel, programs, {**{v.name: given.get(v.name) for v in kernel.arguments}, "dX": truth})
    return dx, truth
