"""`derive`: from a forward to a proven pair, without a model: the best schedule whose backward the gate accepts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from kernel_agent.compiler.comparison import compared, has_real_sizes
from kernel_agent.compiler.derived import Derived, Draft, DraftCost
from kernel_agent.compiler.errors import OTHER_CONFIGURATIONS, CannotDerive, NotThisTime
from kernel_agent.compiler.faults import unproven
from kernel_agent.errors import InputError, KernelAgentError
from kernel_agent.gate import check, foresee
from kernel_agent.gate.cases import make_plan
from kernel_agent.gate.options import STANDARD, GateOptions
from kernel_agent.gate.verdict import CaseResult, Status, Verdict
from kernel_agent.oracle import Truths
from kernel_agent.oracle.job import run_truth
from kernel_agent.oracle.records import TruthTooLarge
from kernel_agent.pairs.assemble import assemble
from kernel_agent.pairs.spec import Candidate, KernelSpec
from kernel_agent.pairs.values import Values
from kernel_agent.sandbox import Limits, Message, Sandbox

LIMITS = Limits(wall_s=300.0)
"""Of the child that follows the stub and writes the pair."""

_FOR_WANT = frozenset((Status.TIMED_OUT, Status.OUT_OF_MEMORY, Status.TOO_MANY_PROCESSES))
"""Verdicts that say nothing of the pair."""

OnCase = Callable[[CaseResult, int, int], None]
"""See `gate.check`."""


def drafts(
    spec: KernelSpec,
    sandbox: Sandbox,
    schedules: Sequence[str] = (),
    *,
    most: int | None = None,
    known: Sequence[str] = (),
    typical: bool = True,
    adjoint: bool = False,
) -> tuple[list[Draft], list[str]]:
    """The pairs that can be written, the best first, and why schedules that are not among them are not.

    `schedules`: those to try, in order; all by default. `most`: the pairs that are enough, behind which no schedule is
    tried. `known`: digests of candidates that are not written again. `typical`, `adjoint`: see `derive`. Raises
    `CannotDerive` where there is none at all, `NotThisTime` where a defect, or too little time or memory, is why.
    """
    if spec.custom_gradient:
        raise CannotDerive(
            "the file has a `surrogate`: its gradient is not that of its kernels",
            remedy="Remove `surrogate`, or have a model write the backward.",
            path=spec.facts.path,
        )
    shown = spec.model_dump(mode="json")
    asked = {"schedules": list(schedules), "most": most, "known": list(known)}
    asked |= {"typical": typical, "adjoint": adjoint}
    written: list[Draft] = []
    refused: list[str] = []
    first: CannotDerive | None = None
    for message in _messages(spec, sandbox, {"spec": shown, **asked}):
        record = message.record
        if "refused" in record:
            refused.append(f"{record['schedule']}: {record['refused']}".removeprefix(": "))
            kind = NotThisTime if record["defect"] else CannotDerive
            first = kind(record["refused"], remedy=record["remedy"], path=spec.facts.path, line=record["line"])
            continue
        candidate = Candidate(
            forward=record["forward"], backward=record["backward"], torch_ops=tuple(record["torch_ops"])
        )
        written.append(
            Draft(
                record["schedule"],
                candidate,
                assemble(spec, candidate),
                tuple(record["schedules"]),
                tuple(record["remarks"]),
                record["seconds"],
                record["adjoint"],
            )
        )
    if not written and not known:
        raise first or CannotDerive("nothing was derived of this forward", path=spec.facts.path)
    return written, refused


def _messages(spec: KernelSpec, sandbox: Sandbox, payload: dict[str, Any]) -> tuple[Message, ...]:
    try:
        return run_truth(sandbox, "child:derived", spec.facts, payload, limits=LIMITS, room="compiler")
    except TruthTooLarge as error:
        raise NotThisTime(
            f"no backward was written within {LIMITS.wall_s:.0f} s and {LIMITS.memory_bytes >> 30} GiB",
            remedy="Give loops that are unrolled fewer steps, or have a model write the backward.",
            path=spec.facts.path,
        ) from error


def derive(
    spec: KernelSpec,
    sandbox: Sandbox,
    *,
    schedules: Sequence[str] = (),
    options: GateOptions = STANDARD,
    truths: Truths | None = None,
    on_case: OnCase | None = None,
    compare: bool = False,
    typical: bool = True,
    known: Sequence[str] = (),
    adjoint: bool = False,
) -> Derived:
    """Derive a backward and prove it; where the gate finds a schedule's pair red, the next one is taken.

    `schedules`: those to try, in order; all by default. `compare`: write and count every pair even where the file has
    no sizes of real work; the order stays as it is then, and the costs are told. `typical`: a backward may raise
    where programs share rows of a gradient, if those of SWEEP do not. `known`: digests of candidates that are not
    wanted. `adjoint`: print that of the kernels, too, for those who read it. Raises `CannotDerive` where no pair can
    be written or none is green: an unproven backward is never given out.
    """
    start = time.perf_counter()
    truths = truths or Truths(spec, sandbox)
    beside = ThreadPoolExecutor(1)
    foreseen = beside.submit(foresee, truths, options)  # what it raises, the gate raises again
    refused: dict[str, None] = {}
    red = list(known)
    judged: set[Status] = set()
    costs: tuple[DraftCost, ...] = ()
    compare = compare or has_real_sizes(spec)
    shown = spec
    beyond: dict[str, None] = {}
    try:
        while True:
            written, why_not = drafts(
                shown, sandbox, schedules, most=None if compare else 1, known=red, typical=typical, adjoint=adjoint
            )
            refused |= dict.fromkeys(why_not)
            if compare and not red and len(written) > 1:
                written, costs = compared(spec, written, sandbox)
            if not written:
                break
            wait([foreseen])
            for draft in written:
                verdict = _judged(spec, draft, sandbox, options, truths, on_case)
                said = f"{draft.schedule}: the gate says {verdict.status.value}: {verdict.message}"
                if verdict.green:
                    better = [one for one in beyond if not one.startswith(f"{draft.schedule}: ")]
                    return Derived(draft, verdict, (*refused, *better), time.perf_counter() - start, costs)
                red.append(draft.candidate.digest)
                if shown is spec and (OTHER_CONFIGURATIONS in verdict.message or _is_red_beyond_sweep(verdict)):
                    shown = _with_odd_sizes(spec, truths, options)
                    beyond[said] = None  # another pair for it, derived with these sizes, may be right
                    break
                refused[said] = None
                judged.add(verdict.status)
    finally:
        beside.shutdown(wait=False, cancel_futures=True)  # closing the sandbox ends what still runs
    reason = "no derived backward is proven: " + each_once({**refused, **beyond})
    if judged and judged <= _FOR_WANT:
        raise NotThisTime(
            reason,
            remedy="Give SWEEP smaller sizes, or derive it again where there is more time and memory.",
            path=spec.facts.path,
        )
    raise unproven(reason, spec.facts, sandbox, NotThisTime if judged & _FOR_WANT else CannotDerive)


def each_once(refused: Iterable[str]) -> str:
    """Refusals, `schedule: reason`, with one reason of several schedules said once, behind the names of all of them."""
    names: dict[str, list[str]] = {}
    for one in refused:
        schedule, colon, reason = one.partition(": ")
        known = bool(colon) and schedule.isidentifier()
        names.setdefault(reason if known else one, []).extend([schedule] if known else [])
    return "; ".join(": ".join(filter(None, (", ".join(some), reason))) for reason, some in names.items())


def _with_odd_sizes(spec: KernelSpec, truths: Truths, options: GateOptions) -> KernelSpec:
    """The spec as if SWEEP also listed the sizes that the gate adds: some need constexprs that SWEEP never shows.

    A pair that is not asked for single gradients leaves room for more of them.
    """
    swept = {entry.label for entry in spec.sweep}
    shapes = [one for needs in (True, False) for one in make_plan(truths, options, accepts_needs=needs).shapes]
    odd = {shape.entry.label: shape.entry for shape in shapes if shape.entry.label not in swept}
    return spec.model_copy(update={"sweep": (*spec.sweep, *odd.values())})


def _is_red_beyond_sweep(verdict: Verdict) -> bool:
    """Whether a pair is right at the entries of SWEEP, and wrong at a size that the gate adds: there the kernel may be
    another one, as where a loop makes several trips that makes a single one at all entries."""
    red = [case for case in verdict.cases if case.status is not Status.GREEN]
    beyond = all(case.values is Values.AS_MADE and not case.required and case.status not in _FOR_WANT for case in red)
    return bool(red) and beyond


def _judged(
    spec: KernelSpec, draft: Draft, sandbox: Sandbox, options: GateOptions, truths: Truths, on_case: OnCase | None
) -> Verdict:
    try:
        return check(spec, draft.pair, sandbox, options, on_case, truths=truths, diagnose=False)
    except InputError:
        raise
    except KernelAgentError as error:
        raise NotThisTime(f"the truth cannot be computed: {error.message}", remedy=error.remedy) from error
