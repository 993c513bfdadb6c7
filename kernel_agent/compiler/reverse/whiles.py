"""The adjoint of a WHILE: its trips are counted and what it carries is put on tapes; a FOR goes back over them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.reverse.cotangents import Cotangents
from kernel_agent.compiler.ssa.value import Op

if TYPE_CHECKING:
    from kernel_agent.compiler.reverse.reversal import Reversal


def reverse_while(r: Reversal, op: Op, cotangents: Cotangents) -> None:
    """Refused so far."""
    if any(cotangents.get(result) is not None for result in op.results) or any(map(r.sinks, op.blocks)):
        raise CannotDerive("a while loop has no derivative rule yet", remedy="write it as a for loop with bounds")
