"""From one call of a stub to a proven pair for all calls of its form: written small, derived, judged, followed."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kernel_agent.compiler.derive import derive, drafts
from kernel_agent.compiler.derived import Derived
from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.deliver.package import render_operator
from kernel_agent.errors import InputError, KernelAgentError
from kernel_agent.gate.cases import forward_findings
from kernel_agent.gate.options import GateOptions
from kernel_agent.jit.callform import CallForm
from kernel_agent.jit.errors import CannotTrain
from kernel_agent.jit.sizes import TRIED
from kernel_agent.jit.slices import Slice
from kernel_agent.jit.standins import check_section
from kernel_agent.jit.ways import Way
from kernel_agent.oracle import Truths, describe
from kernel_agent.oracle.job import run_truth
from kernel_agent.oracle.records import TruthError
from kernel_agent.pairs.spec import KernelSpec
from kernel_agent.pairs.userfile import read_source
from kernel_agent.sandbox import Sandbox

LOG = logging.getLogger("kernel_agent.jit")
PROOF = GateOptions(seeds=(0, 1), max_elements=1 << 16, max_volume=1 << 22, odd_sizes=3, max_cases=24)
"""How thoroughly a pair is proven at the first call: all kinds of cotangents, odd sizes beside the stand-ins."""
PROVEN_WAYS = "PROVEN_WAYS"
"""Name of the constant in a kept pair that holds the ways it was proven for."""

_LINE = re.compile(r"\bline (\d+)")

Progress = Callable[[str], None]
"""Told in a few words what is being done."""


@dataclass(frozen=True)
class Wanted:
    """What a pair is derived for."""

    sliced: Slice
    stub: Callable[..., Any]
    form: CallForm
    arguments: Mapping[str, Any]
    nondiff_outputs: tuple[int, ...]
    way: Way | None = None
    """The way that stand-ins have to take; None: the one they take."""
    schedules: tuple[str, ...] = ()

    @property
    def decorator(self) -> str:
        """The mark of the stub in the file."""
        nondiff = f", nondiff_outputs={self.nondiff_outputs!r}" if self.nondiff_outputs else ""
        return f"@autodiff(inputs_require_grad={self.form.grads!r}{nondiff})"

    def place(self, line: int) -> tuple[str, int] | None:
        """File and line of the user's for a line of the file."""
        return self.sliced.place(line, self.decorator)

    @property
    def forward(self) -> str:
        """The file without its check section."""
        return self.sliced.text(self.decorator)


def derived_for(wanted: Wanted, sandbox: Sandbox, progress: Progress) -> Derived:
    """A proven pair, as an operator file that names its ways. Raises `CannotTrain` where none can be had."""
    start = time.perf_counter()
    refused: list[KernelAgentError] = []
    for spec, truths in _small_calls(wanted, sandbox, refused):
        progress(f"deriving a backward of {wanted.sliced.stub}")
        try:
            if wanted.way is not None and wanted.way not in _ways(
                spec, drafts(spec, sandbox, typical=False)[0][0].pair, sandbox
            ):
                label = spec.sweep[0].label
                refused.append(CannotTrain(f"{label} takes another way through the stub than the call"))
                continue
            derived = _judged(wanted, spec, truths, sandbox)
        except CannotDerive as error:
            raise told(wanted, error) from error
        text = render_operator(spec, derived.draft.candidate)
        text = text.rstrip("\n") + f"\n\n{PROVEN_WAYS} = {_ways(spec, text, sandbox)!r}\n"
        seconds = time.perf_counter() - start
        return replace(derived, draft=replace(derived.draft, pair=text), seconds=seconds)
    messages = list(dict.fromkeys(error.message for error in refused))
    if len(messages) == 1 and isinstance(refused[0], InputError) and not isinstance(refused[0], CannotTrain):
        raise told(wanted, refused[0]) from refused[0]  # sizes are not what is wrong
    listed = "; ".join(messages)
    raise CannotTrain(
        f"no small call like this one of `{wanted.sliced.stub}` can be made to prove a backward with: {listed}",
        remedy="Call it at a small size first, or write SWEEP and make_args beside it and run kernel-agent derive.",
    )


def _judged(wanted: Wanted, spec: KernelSpec, truths: Truths, sandbox: Sandbox) -> Derived:
    """The best pair that the gate accepts, of those that no repeated index of a later call stops. Where the stub
    branches, odd sizes may go another way, for which it is not meant: then it is judged by the stand-ins alone."""
    try:
        return derive(spec, sandbox, schedules=wanted.schedules, options=PROOF, truths=truths, typical=False)
    except CannotDerive:
        if not wanted.sliced.branches:
            raise
        options = replace(PROOF, odd_sizes=0)
        return derive(spec, sandbox, schedules=wanted.schedules, options=options, truths=truths, typical=False)


def _small_calls(
    wanted: Wanted, sandbox: Sandbox, refused: list[KernelAgentError]
) -> Iterator[tuple[KernelSpec, Truths]]:
    """Specs of the stub at stand-ins that it accepts and computes soundly, the smallest first; what it refuses is
    noted."""
    seen: set[str] = set()
    for shrinking in TRIED:
        section = check_section(wanted.stub, wanted.arguments, shrinking)
        if section is None or section in seen:
            continue
        seen.add(section)
        path = Path(f"{wanted.sliced.stub}.py")
        try:
            spec = describe(read_source(f"{wanted.forward}\n\n{section}", path), sandbox)
            truths = Truths(spec, sandbox)
            findings = forward_findings(truths, PROOF)
        except (InputError, TruthError) as error:
            refused.append(error)
            LOG.debug("stand-ins %s: %s", shrinking, error)
            continue
        if findings:
            refused.append(CannotTrain(findings[0]))
            continue
        yield spec, truths


def _ways(spec: KernelSpec, pair: str, sandbox: Sandbox) -> tuple[Way, ...]:
    payload = {"spec": spec.model_dump(mode="json"), "pair": pair}
    messages = run_truth(sandbox, "child:ways", spec.facts, payload, room="jit")
    return tuple(dict.fromkeys(tuple(message.record["way"]) for message in messages))


def told(wanted: Wanted, error: InputError) -> CannotTrain:
    """Why nothing was derived, with the lines of the user's own files."""
    stands = [int(line) for line in _LINE.findall(error.message)]
    first = error.line or next(iter(stands), None)
    place = wanted.place(first) if first else None

    def renumbered(match: re.Match[str]) -> str:
        found = wanted.place(int(match[1]))
        return f"line {found[1]}" if found else match[0]

    return CannotTrain(
        f"no backward of `{wanted.sliced.stub}` can be derived: {_LINE.sub(renumbered, error.message)}",
        remedy=error.remedy,
        path=Path(place[0]) if place else None,
        line=place[1] if place else None,
    )
