"""`settle`: numbers that fit, where no GPU is at hand to time them: every kernel compiled for sm_90.

A backward holds more than its forward, whose tiles it starts with. Where these spill, or take more shared memory than
there is, others are tried, and the one that the model of times likes best among those that fit is taken and proven.
"""

from __future__ import annotations

import time

from kernel_agent.compiler.tuning.by_model import ByModel
from kernel_agent.compiler.tuning.pins import pinned
from kernel_agent.compiler.tuning.search import search
from kernel_agent.compiler.tuning.space import space
from kernel_agent.compiler.tuning.trial import Trial
from kernel_agent.compiler.tuning.tune import (
    SECONDS,
    OnLine,
    Tuned,
    chosen_of,
    fixed_tiles,
    tuning_entries,
    with_backward,
)
from kernel_agent.gate.checking import check
from kernel_agent.oracle import Truths
from kernel_agent.pairs.assemble import candidate_from_pair
from kernel_agent.pairs.spec import KernelSpec
from kernel_agent.sandbox import Sandbox

VARIANTS = 8
"""Of the first batch: each is compiled anew, for seconds."""


def settle(
    spec: KernelSpec,
    pair: str,
    sandbox: Sandbox,
    *,
    seconds: float = SECONDS,
    proof_s: float = 0.0,
    on_line: OnLine = lambda _: None,
    truths: Truths | None = None,
) -> Tuned:
    """Keep the numbers of a pair that the gate accepts if its kernels fit sm_90 without spills, else find some that do.

    `seconds`: for all of it, of which the gate takes `proof_s`; the first look takes as long as it takes to compile
    every kernel once.
    """
    start = time.perf_counter()
    until = time.monotonic() + seconds - proof_s
    inside = space(candidate_from_pair(pair))
    judge = ByModel(spec, tuning_entries(spec), sandbox, until=until)
    on_line("compiling for sm_90")
    first = judge([inside.candidate]).trials[0]
    why = unfit(first)
    if not why:
        return Tuned(pair, False, "every kernel fits sm_90 without spills", 1, seconds=time.perf_counter() - start)
    if not inside.tunables:
        return Tuned(pair, False, f"{why}, and nothing in it can be chosen", 1)
    truths = truths or Truths(spec, sandbox)
    on_line(f"{why}: looking for smaller tiles")
    fixed = fixed_tiles(spec, pair, sandbox, truths, until=until)
    found = search(inside, judge, seconds=max(1.0, until - time.monotonic()), rounds=2, dropped=fixed, first=VARIANTS)
    chosen = chosen_of(inside, found)
    if all(not one.values for some in chosen for one in some):
        return Tuned(pair, False, f"{why}, and none of {found.tried} variants does better", found.tried)
    text = with_backward(pair, pinned(inside, chosen).backward)
    after = unfit(judge([candidate_from_pair(text)]).trials[0])
    verdict = check(spec, text, sandbox, truths=truths, diagnose=False)
    if not verdict.green or (after and not first.problem and after == why):
        return Tuned(pair, False, f"{why}, and none of {found.tried} variants does better", found.tried)
    line = f"{why} with the forward's numbers; {after or 'with others every kernel fits without spills'}"
    return Tuned(text, True, line, found.tried, verdict, found.problems, time.perf_counter() - start)


def unfit(trial: Trial) -> str:
    """Why a variant should not stay as it is; empty where it may."""
    if trial.problem:
        return trial.problem
    spilled = {one.name: one.spills for seen in trial.entries.values() for one in seen if one.spills}
    return ", ".join(f"{name} spills {count} bytes per thread" for name, count in spilled.items())
