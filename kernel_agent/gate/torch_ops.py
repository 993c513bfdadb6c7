"""Which torch functions a candidate may call outside its kernels.

Allocation, views, copies, fills, reductions of partial buffers and index arithmetic are free. What computes must be
declared in META["torch_ops"], and only functions that the user's own stub performs, or their adjoints, can be declared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from kernel_agent.gate.answer import Called
from kernel_agent.pairs.adjoints import declarable, plain_name

_FREE = frozenset({"ALLOCATION", "VIEW", "COPY", "FILL", "REDUCTION", "INDEX"})
_NEVER = frozenset({"grad", "backward", "requires_grad_", "numpy"})
"""Ways to have gradients made by someone else; no kernel needs them, whatever class they are in."""


def foreign_calls(calls: Iterable[Called], declared: Collection[str], stub_ops: Collection[str]) -> tuple[str, ...]:
    """Names of computing torch functions that the candidate called and must not, sorted.

    `declared` is META["torch_ops"], `stub_ops` what the user's stub calls itself; all are compared by `plain_name`.
    """
    allowed = {plain_name(name) for name in declared} & declarable(stub_ops)
    foreign = {
        call.name
        for call in calls
        if call.name in _NEVER or (call.kind not in _FREE and plain_name(call.name) not in allowed)
    }
    return tuple(sorted(foreign))
