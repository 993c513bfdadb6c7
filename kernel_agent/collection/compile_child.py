"""What runs in the child that compiles a pair's kernels for sm_90 at the sizes of BENCH. The pair's code runs here."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

from kernel_agent.bench.compiled import CompiledKernel, compile_build
from kernel_agent.ir import standin
from kernel_agent.ir.cost.ghost import NeedsValues
from kernel_agent.ir.cost.launched import Launched, launched_by, walked_launches
from kernel_agent.oracle.child import answered
from kernel_agent.oracle.cost_child import part_counts, shapes_of
from kernel_agent.pairs.arguments import build_arguments
from kernel_agent.pairs.load import load_truth
from kernel_agent.pairs.spec import FileFacts, ShapeEntry

if TYPE_CHECKING:
    from kernel_agent.sandbox import Call


def compiled(call: Call) -> None:
    """Payload: `facts` of a pair file, whose BENCH is compiled.

    Sends one message per part, kernel and specialisation: `part`, `entry`, and the `CompiledKernel` as `kernel`.
    """
    with answered(call):
        facts = FileFacts.model_validate(call.payload["facts"])
        module = load_truth(facts, call.scratch, source=facts.source)
        known: dict[str, CompiledKernel] = {}
        sent: set[tuple[str, str]] = set()
        for entry in facts.bench:
            for part, launched in launches_at(module, facts, entry).items():
                for launch in launched.launches:
                    key = launch.build.key
                    if (part, key) in sent:
                        continue
                    sent.add((part, key))
                    if key not in known:
                        known[key] = compile_build(launch.build)
                    call.send({"part": part, "entry": entry.label, "kernel": known[key].model_dump(mode="json")})


def launches_at(module: ModuleType, facts: FileFacts, entry: ShapeEntry) -> dict[str, Launched]:
    """The launches of forward and backward at an entry, executed as little as possible.

    Raises `NeedsValues` where the file's torch code asks for floats that kernels compute.
    """
    try:
        return part_counts(module, facts, shapes_of(module, entry), launched_by)
    except NeedsValues:
        pass
    with standin():
        arguments = build_arguments(module, entry, device="cpu", seed=0)
    try:
        return part_counts(module, facts, arguments, launched_by)
    except NeedsValues:
        return part_counts(module, facts, arguments, walked_launches)
