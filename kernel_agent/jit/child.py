"""What runs in the child that follows a derived pair: the ways that its forward takes at the stand-ins.

The parent imports this module for nothing but its entry's name.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kernel_agent.compiler.stub.trace import trace
from kernel_agent.ir import import_module, standin
from kernel_agent.jit.ways import noted, watch, way_of
from kernel_agent.oracle.child import answered
from kernel_agent.pairs.arguments import build_arguments
from kernel_agent.pairs.spec import KernelSpec

if TYPE_CHECKING:
    from kernel_agent.sandbox import Call


def ways(call: Call) -> None:
    """Payload: `spec`, `pair`. Sends the way of the pair's forward at every entry of SWEEP; kernels do not run."""
    with answered(call), standin():
        spec = KernelSpec.model_validate(call.payload["spec"])
        path = Path(call.scratch) / f"{spec.facts.stem}_pair.py"
        path.write_text(call.payload["pair"], encoding="utf-8")
        module = import_module(path, f"kernel_agent_ways_{spec.facts.hash8}")
        watch(module, call.payload["pair"])
        for entry in spec.sweep:
            built = build_arguments(module, entry, device="cpu", seed=0)
            with noted() as notes:
                trace(module.forward, built.args, built.kwargs, path)
            call.send({"way": list(way_of(notes))})
