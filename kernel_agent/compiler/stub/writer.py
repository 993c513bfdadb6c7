"""`Writer`: what writes the backward of a stub, as those know it that write a part: a loop, what trips hand on, what is
left of a cotangent.

The parts are made by it and call it back, so that it cannot be imported where they stand.
"""

from __future__ import annotations

from typing import Protocol

from kernel_agent.compiler.stub.body import Body
from kernel_agent.compiler.stub.cotangents import Cotangents
from kernel_agent.compiler.stub.flow import Flow
from kernel_agent.compiler.stub.names import Names
from kernel_agent.compiler.stub.references import References
from kernel_agent.compiler.stub.source import StubSource
from kernel_agent.compiler.stub.wording import Launched


class Writer(Protocol):
    """What every part asks it for; some ask for more."""

    source: StubSource
    body: Body
    names: Names
    flow: Flow
    references: References
    cotangents: Cotangents
    launches: dict[int, Launched]
    """By position."""
