"""`fastest`: a pair's text with the block sizes, warps and stages that make its backward fastest on this GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kernel_agent.bench.measure import measure_source
from kernel_agent.bench.native import check_native
from kernel_agent.bench.rig import BenchOptions, Rig
from kernel_agent.bench.tune import tune
from kernel_agent.collection.in_process import InProcess
from kernel_agent.gate.verdict import Verdict
from kernel_agent.pairs.sections import split_sections
from kernel_agent.pairs.spec import Candidate, KernelSpec

SWEEP = BenchOptions(budget_s=0.08, baselines=False, bounds=False)
"""A variant is timed against the one before it, and against nothing else."""
LEAST_GAIN = 0.02
"""Less than this is not worth another text."""


@dataclass(frozen=True)
class Fastest:
    """What a sweep over one pair found."""

    source: str
    """The text of the pair; as it was where nothing is faster."""
    line: str
    """What was changed, and what it brought."""
    verdict: Verdict | None = None
    """Of the native tier, where the text is another."""


def fastest(source: str, at_bench: KernelSpec, sandbox: InProcess, rig: Rig, variants: int) -> Fastest:
    """Sweep over at most `variants` variants of a pair that is green on this GPU.

    `at_bench` is the spec of `source` at its BENCH, and `rig` holds its truths. What comes back is proven by the native
    tier; the exact tier has to see it yet.
    """
    timing = rig.with_options(SWEEP)
    whole = at_bench.facts.source

    def in_whole(candidate: Candidate) -> str:
        return replace(split_sections(whole), backward=candidate.backward).join()

    found = tune(
        at_bench,
        Candidate(backward=split_sections(source).backward),
        lambda candidate: check_native(at_bench, in_whole(candidate), sandbox, rig),
        lambda candidate: measure_source(at_bench, in_whole(candidate), sandbox, timing),
        variants,
        min_rel_impr=LEAST_GAIN,
    )
    if found.candidate is None:
        return Fastest(source, found.tuned.line)
    tuned = replace(split_sections(source), backward=found.candidate.backward).join()
    return Fastest(tuned, found.tuned.line, found.verdict)
