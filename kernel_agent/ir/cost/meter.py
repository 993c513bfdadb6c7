"""What a machine tells whoever counts its work: the blocks it runs and the memory it touches."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kernel_agent.ir.memory import Buffer
    from kernel_agent.ir.program import Block, Op
    from kernel_agent.ir.sanitizer.lanes import Lanes
    from kernel_agent.ir.values import Active


class Access(str, enum.Enum):
    """How memory is touched."""

    READ = "READ"
    WRITE = "WRITE"
    ATOMIC = "ATOMIC"


class Meter(Protocol):
    """Counts one launch. A machine without a meter calls nothing."""

    def block(self, block: Block, active: Active) -> None:
        """Programs begin a block of a function, loop or branch; regions of reductions are not told."""

    def access(self, kind: Access, op: Op, buffer: Buffer, lanes: Lanes) -> None:
        """Programs touch a buffer. `lanes` holds the lanes inside of the buffer that their mask lets through."""
