"""`judge`: everything that is asked of one pair of the dataset beside its text: the gate, dtypes, sm_90."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kernel_agent.collection.compiling import compiled_kernels
from kernel_agent.collection.kernelfacts import KernelFacts
from kernel_agent.collection.verdicts import RULE, PairVerdict, one_digit
from kernel_agent.errors import InputError
from kernel_agent.gate import GateOptions, Status, Verdict, check
from kernel_agent.gate.rule import VERSION
from kernel_agent.machine import installed_versions
from kernel_agent.oracle import Truths, describe
from kernel_agent.pairs.meta import PairMeta, read_meta
from kernel_agent.pairs.spec import KernelSpec, content_hash
from kernel_agent.pairs.sweep import smallest
from kernel_agent.pairs.userfile import read_file
from kernel_agent.sandbox import Sandbox
from kernel_agent.sandbox.supervisor import PRELOAD

RULES = f"{VERSION}.{RULE}"
"""What verdicts are recorded under."""
CHILDREN = ("kernel_agent.collection.compile_child", *PRELOAD)
"""Preloaded where many pairs are judged: each child would import them again."""
QUICK = GateOptions(seeds=(0,), odd_sizes=0, max_cases=2)
"""One shape, a random and a strided cotangent."""
PASSING = frozenset({Status.TIMED_OUT, Status.OUT_OF_MEMORY, Status.TOO_MANY_PROCESSES})
"""What may be another machine's, or another hour's, to answer otherwise: such a verdict is not recorded."""


def judge(path: Path, sandbox: Sandbox, *, quick: bool = False) -> PairVerdict:
    """Judge a pair file: the exact tier with all kinds of cotangents, and the compile for sm_90 at BENCH.

    `quick`: the smallest entry of SWEEP with a random and a strided cotangent, and no compile; never to be recorded.
    Raises `InputError`, `TruthError` and `EnvironmentProblem` where the gate has nothing to judge by.
    """
    facts = read_file(path)
    if not facts.is_pair:
        remedy = "A pair file has META and three marked sections (docs/pair-format.md)."
        raise InputError("this is no pair file", path=path, remedy=remedy)
    meta = read_meta(facts.source)
    spec = describe(facts, sandbox)
    if quick:
        spec = spec.model_copy(update={"sweep": (smallest(spec.sweep),)})
        verdict = check(spec, facts.source, sandbox, QUICK)
        return _verdict(path, facts.source, verdict, (), ())
    verdict = check(spec, facts.source, sandbox, truths=Truths(spec, sandbox))
    kernels = compiled_kernels(facts, sandbox) if verdict.green and facts.bench else ()
    problems = (*dtype_problems(spec, meta), *score_problems(verdict, meta), *compile_problems(kernels, meta))
    return _verdict(path, facts.source, verdict, kernels, problems)


def _verdict(
    path: Path, source: str, verdict: Verdict, kernels: tuple[KernelFacts, ...], problems: tuple[str, ...]
) -> PairVerdict:
    versions = installed_versions()
    return PairVerdict(
        slug=path.stem,
        hash=content_hash(source),
        rule=RULES,
        status=verdict.status,
        message="" if verdict.green else verdict.message,
        right=sum(case.status is Status.GREEN for case in verdict.cases),
        planned=verdict.cases_planned,
        worst={name: one_digit(ratio) for name, ratio in worst_ratios(verdict).items()},
        kernels=kernels,
        problems=problems,
        torch=versions.torch,
        triton=versions.triton,
    )


def worst_ratios(verdict: Verdict) -> dict[str, float]:
    """By gradient: the largest error over what is allowed, of all cases."""
    found: dict[str, float] = {}
    for case in verdict.cases:
        for score in case.grads:
            found[score.grad] = max(found.get(score.grad, 0.0), score.ratio)
    return found


def dtype_problems(spec: KernelSpec, meta: PairMeta) -> tuple[str, ...]:
    """Dtypes that META names and no entry of SWEEP runs, as the arguments were seen."""
    seen = {dtype for fact in spec.inputs for dtype in (fact.dtype, *fact.dtypes)}
    lacking = [dtype for dtype in meta.dtypes if dtype not in seen]
    return (f"no entry of SWEEP runs {', '.join(lacking)}, which META['dtypes'] names",) if lacking else ()


def score_problems(verdict: Verdict, meta: PairMeta) -> tuple[str, ...]:
    """Gradients that a green verdict never looked at."""
    scored = worst_ratios(verdict)
    lacking = [name for name in meta.grads if name not in scored]
    return (f"no case looked at the gradient of {', '.join(lacking)}",) if verdict.green and lacking else ()


def compile_problems(kernels: Sequence[KernelFacts], meta: PairMeta) -> tuple[str, ...]:
    """Kernels that sm_90 cannot run at the sizes of BENCH, and spills without a stated reason."""
    broken = [f"{k.part} kernel {k.kernel} on sm_90: {k.problem}" for k in kernels if k.problem]
    spilling = [f"{k.kernel} ({k.spills} bytes)" for k in kernels if k.spills]
    if spilling and not meta.spills:
        broken.append(f"spills on sm_90 at the sizes of BENCH without META['spills'] saying why: {', '.join(spilling)}")
    return tuple(broken)
