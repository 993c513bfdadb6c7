"""What numbers of a launch are called: in the kernel as if it were the only one, in the backward after the gradients.

Two launches that both choose a `BLOCK_M` each give their kernel a `BLOCK_M`; the backward knows them as `BLOCK_M_DQ`
and `BLOCK_M_DK_DV`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.value import Kernel, Op, is_setting

_MOST = 2
"""Gradients that a name lists."""


def named_after(name: str, gradients: Sequence[str]) -> str:
    """`BLOCK_M_DK_DV`, `num_warps_dk_dv` of a launch that computes `dK` and `dV`; of more than two gradients the first
    alone."""
    stems = [re.sub(r"_?(ptrs?|pointer|desc|descriptor)$", "", name).lower() for name in gradients]
    role = "_".join(stems if len(stems) <= _MOST else stems[:1])
    if not role:
        return name
    return f"{name}_{role.upper() if name.isupper() else role}"


def own_keywords(kernel: Kernel) -> dict[str, str]:
    """Settings of a plan with an underscore behind them, since another kernel of the plan has one of that name -> what
    this kernel can call them."""
    taken = {value.name for value in kernel.arguments} | set(kernel.constants)
    asked = {op.attributes["symbol"] for op in kernel.ops if op.code is Code.CONST and is_setting(op.result)}
    found = {name: name.rstrip("_") for name in kernel.constants if name in asked and name.endswith("_")}
    return {name: keyword for name, keyword in found.items() if keyword not in taken}


def with_keywords(kernel: Kernel, keywords: Mapping[str, str]) -> Kernel:
    """The kernel with its settings called otherwise."""
    return _Renaming(kernel, keywords).copy() if keywords else kernel


class _Renaming(Copier):
    def __init__(self, source: Kernel, keywords: Mapping[str, str]) -> None:
        super().__init__(source)
        self.keywords = keywords
        own = self.b.kernel
        own.constants = {keywords.get(name, name): value for name, value in own.constants.items()}

    def pure(self, op: Op) -> None:
        """A setting."""
        if op.code is Code.CONST and is_setting(op.result) and op.attributes["symbol"] in self.keywords:
            keyword = self.keywords[op.attributes["symbol"]]
            self[op.result] = self.b.setting(keyword, value=op.attributes["value"])
            return
        super().pure(op)
