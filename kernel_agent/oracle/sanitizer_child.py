"""What the sanitizer says of a file at every entry of its SWEEP, in a child: the user's code runs, backward included.

The parent imports this module for nothing but its entry's name. One message per entry and part goes back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from pydantic import TypeAdapter
from torch import Tensor

from kernel_agent.errors import InputError
from kernel_agent.ir import declared_dtype, standin
from kernel_agent.ir.capture.images import declare, held_dtype
from kernel_agent.ir.cost.ghost_images import META, GhostCapture
from kernel_agent.ir.launch import LaunchOptions, launch
from kernel_agent.ir.sanitizer.sanitize_call import sanitize_and_keep
from kernel_agent.ir.sanitizer.sanitizer_report import SanitizerReport, Stop
from kernel_agent.ir.sanitizer.wrap_look import WrapLook, look_for_wraps
from kernel_agent.oracle.child import answered
from kernel_agent.oracle.fit import Fit, fit_entry
from kernel_agent.pairs.arguments import Arguments, build_arguments
from kernel_agent.pairs.load import load_truth
from kernel_agent.pairs.observe import sweep_node
from kernel_agent.pairs.spec import FileFacts, ShapeEntry
from kernel_agent.pairs.sweep import read_sweep

if TYPE_CHECKING:
    from kernel_agent.sandbox import Call

Function = Callable[..., Any]


def sanitized(call: Call) -> None:
    """Payload: `facts`, `max_elements`, `max_volume`, `seed`.

    Sends the number of entries, then one message per entry and part with a `SanitizerReport` in JSON.
    """
    form = TypeAdapter(SanitizerReport)
    with answered(call):
        facts = FileFacts.model_validate(call.payload["facts"])
        module = load_truth(facts, call.scratch, source=facts.source)
        sweep = read_sweep(module.SWEEP, facts.path, sweep_node(facts))
        call.send({"entries": len(sweep)})
        for place, entry in enumerate(sweep):
            fit = _fit(module, entry, call.payload)
            for part, report in _parts(module, facts, fit, call.payload["seed"]):
                call.send(
                    {
                        "place": place,
                        "label": entry.label,
                        "required": entry.required,
                        "run_at": fit.entry.label,
                        "part": part,
                        "report": form.dump_python(report, mode="json"),
                    }
                )


def _fit(module: ModuleType, entry: ShapeEntry, limits: dict[str, Any]) -> Fit:
    def build(smaller: ShapeEntry) -> Arguments:
        return build_arguments(module, smaller, device="cpu", seed=limits["seed"])

    with standin():
        return fit_entry(entry, build, max_elements=limits["max_elements"], max_volume=limits["max_volume"])


def _parts(module: ModuleType, facts: FileFacts, fit: Fit, seed: int) -> Iterator[tuple[str, SanitizerReport]]:
    """Reports of the forward and, in a pair, of its backward with random cotangents."""
    stub: Function = getattr(module, facts.stub)
    try:
        with standin():
            built = build_arguments(module, fit.entry, device="cpu", seed=seed)
    except InputError as error:
        yield (
            "forward",
            SanitizerReport(facts.stub, stop=Stop(error.message, str(facts.path), error.line, error.remedy)),
        )
        return
    kept = sanitize_and_keep(stub, built.args, built.kwargs)
    looks = _looks(module, facts, fit) if fit.shrunk else {}
    yield "forward", _with_look(kept.report, looks.get("forward"), fit)
    if not (facts.is_pair and hasattr(module, "backward")) or kept.report.stop is not None:
        return
    if not (isinstance(kept.result, tuple) and len(kept.result) == 2):
        return
    outputs, saved = kept.result
    generator = torch.Generator().manual_seed(seed)
    cotangents = [_cotangent(output, generator) for output in _several(outputs)]
    report = sanitize_and_keep(module.backward, (saved, *cotangents), {}).report
    yield "backward", _with_look(report, looks.get("backward"), fit)


def _looks(module: ModuleType, facts: FileFacts, fit: Fit) -> dict[str, WrapLook]:
    """Looks at the entry as it was asked for, without memory: offsets wrap at real sizes only.

    make_args is told of a GPU, whose tensors have no contents here.
    """
    capture = GhostCapture(options=LaunchOptions(sanitize=False), runner=launch)
    try:
        with standin(), capture.running():
            built = build_arguments(module, fit.asked, device="cuda", seed=0)
    except Exception:  # make_args is the user's code and may need values: then the real sizes stay unjudged
        return {}
    if any(isinstance(value, Tensor) and not value.is_meta and capture.is_unknown(value) for value in built.args):
        return {}
    forward = look_for_wraps(getattr(module, facts.stub), built.args, built.kwargs)
    found = {"forward": forward}
    if facts.is_pair and hasattr(module, "backward") and isinstance(forward.result, tuple) and not forward.reason:
        outputs, saved = forward.result
        cotangents = [_cotangent(output, None) for output in _several(outputs)]
        found["backward"] = look_for_wraps(module.backward, (saved, *cotangents))
    return found


def _with_look(report: SanitizerReport, look: WrapLook | None, fit: Fit) -> SanitizerReport:
    """The report of a shrunk entry with what a look at the entry itself found."""
    if not fit.shrunk:
        return report
    if look is None:
        note = f"32-bit offsets were not judged at {fit.asked.label} itself: make_args needs values there"
        return replace(report, notes=(*report.notes, note))
    known = {(finding.kind, finding.line, finding.buffer) for finding in report.findings}
    more = tuple(f for f in look.findings if (f.kind, f.line, f.buffer) not in known)
    return replace(report, findings=report.findings + more)


def _several(outputs: Any) -> Sequence[Any]:
    return outputs if isinstance(outputs, (tuple, list)) else (outputs,)


def _cotangent(output: Any, generator: torch.Generator | None) -> Tensor | None:
    """A cotangent of an output: random, or without contents where there is no generator."""
    if not isinstance(output, Tensor) or not declared_dtype(output).is_floating_point:
        return None
    dtype = declared_dtype(output)
    if generator is None:
        return declare(torch.empty(output.shape, dtype=held_dtype(dtype), device=META), dtype)
    return torch.randn(output.shape, generator=generator).to(dtype)
