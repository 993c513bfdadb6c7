"""`OnGpu`: variants of a backward, timed on this machine's GPU in a child."""

from __future__ import annotations

import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

from kernel_agent.bench.launches import KernelSeen
from kernel_agent.bench.rig import Rig
from kernel_agent.compiler.tuning.trial import KernelTrial, Trial, Tried
from kernel_agent.pairs.sections import split_sections
from kernel_agent.pairs.spec import Candidate, ShapeEntry
from kernel_agent.sandbox import Job, Message

MOST_WORKERS = 24
"""Processes that compile."""
COMPILING = 0.6
"""Share of a batch's seconds for compiling."""
GRACE_S = 10.0
"""For a batch to end by itself when its time is over; then it is ended, and what it has told counts."""

OnLine = Callable[[str], None]
"""Told what a batch took."""


class OnGpu:
    """Times batches of variants that share a forward."""

    def __init__(
        self,
        pair: str,
        entries: Sequence[ShapeEntry],
        rig: Rig,
        seconds: float,
        on_line: OnLine = lambda _: None,
        *,
        until: float = math.inf,
    ) -> None:
        """`pair`: the whole file of the backward as it is; `seconds`: of one batch, compiling and timing together, from
        when the first variant is under way; `until`: by `time.monotonic`, when all batches are to be over."""
        self.until = until
        self.on_line = on_line
        self.sections = split_sections(pair)
        self.entries = tuple(entries)
        self.rig = rig
        self.seconds = seconds

    def __call__(self, variants: Sequence[Candidate]) -> Tried:
        """See `trial.Judge`. A child that dies leaves what it has not told without times."""
        left = max(1.0, self.until - time.monotonic())
        seconds, limits = min(self.seconds, left), self.rig.options.limits
        limits = replace(limits, wall_s=min(limits.wall_s, left + GRACE_S))
        texts = [replace(self.sections, backward=variant.backward).join() for variant in variants]
        payload = {
            "device": self.rig.options.device,
            "host_bytes": self.rig.options.limits.memory_bytes,
            "flush_bytes": self.rig.flush_bytes,
            "variants": texts,
            "entries": [entry.model_dump(mode="json") for entry in self.entries],
            "seed": self.rig.options.seed,
            "workers": min(MOST_WORKERS, max(1, len(os.sched_getaffinity(0)) - 1)),
            "compile_s": COMPILING * seconds,
            "time_s": (1 - COMPILING) * seconds,
        }
        job = Job("kernel_agent.compiler.tuning.child:trials", payload, {}, limits, "variants on the GPU")
        report = self.rig.sandbox.run(job)
        for message in report.messages:
            if "note" in message.record:
                self.on_line(message.record["note"])
            if "seconds" in message.record:
                took = ", ".join(f"{phase} {seconds:.0f} s" for phase, seconds in message.record["seconds"].items())
                self.on_line(f"{len(texts)} variants: {took}")
        return heard(report.messages, len(texts), [entry.label for entry in self.entries], report.message)


def heard(messages: Sequence[Message], count: int, labels: Sequence[str], ending: str) -> Tried:
    """What the child told, by variant; `ending`: what became of the child, for variants that it told nothing of."""
    kernels: dict[int, dict[str, tuple[KernelTrial, ...]]] = defaultdict(dict)
    totals: dict[int, dict[str, float]] = defaultdict(dict)
    problems: dict[int, str] = {}
    sizes: dict[str, dict[str, int]] = {}
    for message in messages:
        record = message.record
        if "variant" not in record:
            continue
        number, label = record["variant"], labels[record["entry"]]
        if "sizes" in record:
            sizes[label] = record["sizes"]
        if "problem" in record:
            problems.setdefault(number, record["problem"])
            continue
        totals[number][label] = record["us"]
        kernels[number][label] = _together([KernelSeen.model_validate(form) for form in record["kernels"]])
    trials = []
    for number in range(count):
        missing = len(totals[number]) < len(labels)
        problem = problems.get(number, f"the child ended: {ending}" if missing else "")
        trials.append(Trial(kernels[number], totals[number], problem))
    return Tried(trials, sizes)


def _together(seen: Sequence[KernelSeen]) -> tuple[KernelTrial, ...]:
    """One row per kernel."""
    rows = []
    for name in dict.fromkeys(one.name for one in seen):
        mine = [one for one in seen if one.name == name]
        rows.append(
            KernelTrial(
                name,
                sum(one.microseconds for one in mine),
                max(one.spills or 0 for one in mine),
                max(one.shared_bytes or 0 for one in mine),
                max(one.registers or 0 for one in mine),
            )
        )
    return tuple(rows)
