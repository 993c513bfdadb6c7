"""Which torch functions a candidate may call outside its kernels.

Allocation, views, copies, fills, reductions of partial buffers and index arithmetic are free. What computes must be
declared in META["torch_ops"], and only functions that the user's own stub performs, or their adjoints, can be declared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from kernel_agent.gate.answer import Called

_FREE = frozenset({"ALLOCATION", "VIEW", "COPY", "FILL", "REDUCTION", "INDEX"})
_NEVER = frozenset({"grad", "backward", "requires_grad_", "numpy"})
"""Ways to have gradients made by someone else; no kernel needs them, whatever class they are in."""
_PRODUCTS = (
    "matmul",
    "mm",
    "bmm",
    "mv",
    "dot",
    "addmm",
    "baddbmm",
    "addbmm",
    "einsum",
    "linear",
    "__matmul__",
    "__rmatmul__",
)
_SUMS = (
    "add",
    "sub",
    "add_",
    "sub_",
    "neg",
    "neg_",
    "__add__",
    "__radd__",
    "__iadd__",
    "__sub__",
    "__rsub__",
    "__isub__",
)
_FACTORS = (
    "mul",
    "mul_",
    "div",
    "div_",
    "true_divide",
    "__mul__",
    "__rmul__",
    "__imul__",
    "__truediv__",
    "__itruediv__",
)
_SCANS = ("cumsum", "cumsum_", "flip")
_SCATTERS = ("index_add", "index_add_", "index_copy", "index_copy_", "scatter_add", "scatter_add_", "embedding")
_FAMILIES = (_PRODUCTS, _SUMS, _FACTORS, _SCANS, _SCATTERS)
"""Closed under adjoints: the adjoint of a product is a product, of a sum a sum or a sign, of a gather a scatter."""


def foreign_calls(calls: Iterable[Called], declared: Collection[str], stub_ops: Collection[str]) -> tuple[str, ...]:
    """Names of computing torch functions that the candidate called and must not, sorted.

    `declared` is META["torch_ops"], `stub_ops` what the user's stub calls itself.
    """
    permitted = {name for name in declared if name in stub_ops or _adjoint_of(name, stub_ops)}
    foreign = {
        call.name for call in calls if call.name in _NEVER or (call.kind not in _FREE and call.name not in permitted)
    }
    return tuple(sorted(foreign))


def _adjoint_of(name: str, stub_ops: Collection[str]) -> bool:
    return any(name in family and any(op in family for op in stub_ops) for family in _FAMILIES)
