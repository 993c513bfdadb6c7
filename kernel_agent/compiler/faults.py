"""`unproven`: why no derived backward of a forward is right, for whoever can mend it: its author, if it is at fault.

A derived backward goes by the forward's addresses and masks: where these leave a tensor, or two programs store to one
element, every schedule's backward is red, and none of them says why.
"""

from __future__ import annotations

import contextlib

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.errors import KernelAgentError
from kernel_agent.ir.sanitizer.findings import FindingKind
from kernel_agent.ir.sanitizer.sanitizer_report import said
from kernel_agent.oracle.sanitizing import SanitizedPart, sanitize_file
from kernel_agent.pairs.spec import FileFacts
from kernel_agent.sandbox import Limits, Sandbox

SHOWN_BY = "kernel-agent sanitize shows all that is wrong with the forward"
"""What to try next, for whoever is told of one fault."""
LIMITS = Limits(wall_s=60.0)
"""Of the child that looks for faults: what it found by then counts."""

_MENDED = {
    FindingKind.OUT_OF_BOUNDS: "Mask the access, or allocate what it reaches",
    FindingKind.WILD_POINTER: "Give the launch the tensor that the pointer leads to",
    FindingKind.WRAPPED_OFFSET: "Compute the offset in int64",
    FindingKind.RACE: "Let one program store each element, or add with tl.atomic_add, and read it in another launch",
    FindingKind.DUPLICATE_LANES: "Let each lane store to an element of its own",
    FindingKind.UNINITIALIZED_READ: "Store before it is read, or allocate with torch.zeros",
    FindingKind.ASSERTION: "Correct the assertion, or make_args",
    FindingKind.FALSE_PROMISE: "Take the promise back, or make it true",
}
"""What to do about a fault, the gravest first. Outputs with holes are none: what is stored of them has a gradient."""

_NARROW = "Input shapes should have M"
"""How Triton refuses a product of narrow tiles. The forward may have such as the columns of a product; its derivative
sums over them."""
_UNEQUAL = "infinite or NaN on one side only"
"""How the gate refuses gradients at a size at which the forward may divide by zero, as a spread of one sample does."""


def unproven(reason: str, facts: FileFacts, sandbox: Sandbox, kind: type[CannotDerive] = CannotDerive) -> CannotDerive:
    """The error for `reason`, why none of the derived backwards of a file is right; of `kind` where that is no fault of
    the forward."""
    parts = [part for part in _parts(facts, sandbox) if part.part == "forward"]
    for fault, remedy in _MENDED.items():
        found = [(finding, part.label) for part in parts for finding in part.report.of(fault)]
        if found:
            finding, label = found[0]
            what = f"{fault}: {said(finding)}; at {label}"
            return CannotDerive(
                f"no derived backward is right, and the forward itself is at fault: {what}",
                remedy=f"{remedy}. {SHOWN_BY}.",
                path=facts.path,
            )
    remedy = "Please report this forward; until then have a model write the backward."
    if _NARROW in reason:
        remedy = (
            "At a size that the gate tries, what the backward sums a product over is fewer than 16, as the columns "
            "of a tile `min(BLOCK, V)` are. Give such tiles `max(16, ...)` and a mask, or have the stub refuse it."
        )
    elif _UNEQUAL in reason:
        remedy = (
            "Where the forward itself is not finite at a size that the gate tries, as a variance of one sample, have "
            "make_args refuse that size: `raise ValueError`. Else please report this forward."
        )
    return kind(reason, remedy=remedy, path=facts.path)


def _parts(facts: FileFacts, sandbox: Sandbox) -> list[SanitizedPart]:
    """What the sanitizer says of the file, as far as it comes: the reason that is known is told in any case."""
    parts: list[SanitizedPart] = []
    with contextlib.suppress(KernelAgentError):
        sanitize_file(facts, sandbox, lambda part, _: parts.append(part), limits=LIMITS)
    return parts
