"""`prepared`: a forward as it should be differentiated: what it stored is at hand, and softmaxes have their gauge."""

from __future__ import annotations

from kernel_agent.compiler.saved.gauge import use_gauge
from kernel_agent.compiler.saved.outputs import Saved, use_saved
from kernel_agent.compiler.saved.prefetch import without_prefetch
from kernel_agent.compiler.saved.quotients import use_quotients
from kernel_agent.compiler.saved.remainder import with_last_trips
from kernel_agent.compiler.saved.softmax import settle_maxima
from kernel_agent.compiler.ssa.value import Kernel


def prepared(kernel: Kernel, written: frozenset[str]) -> Saved:
    """A kernel with the same derivative that spares its backward work.

    `written`: arguments whose cotangents are given, as for `differentiate`. Reads of what the forward wrote are right
    only if nobody writes there before the backward.
    """
    divided = use_quotients(with_last_trips(without_prefetch(kernel)), written)
    turned = use_gauge(divided.kernel, written)
    settled = settle_maxima(turned.kernel, written)
    found = use_saved(settled.kernel)
    steps = (divided, turned, settled, found)
    read = frozenset().union(*(step.read for step in steps))
    return Saved(found.kernel, read, tuple(dict.fromkeys(remark for step in steps for remark in step.remarks)))
