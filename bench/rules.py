"""What rules let by: `python bench/rules.py` prints the table that `docs/verification.md` holds.

Wrong backwards of three small pairs (`kernel_agent.gate.mutants`, all that are made on source and that this gate does
not call equivalent) run under a cotangent of ones and under a random one; each rule sees the gradients they return.
Honest gradients are the exact ones as float32 and bfloat16 hold them, under a cotangent of size one and of 4,096, as a
scaled loss makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kernel_agent.bench.honest import honest_error
from kernel_agent.bench.native_rule import compare_native
from kernel_agent.gate.cases import Case
from kernel_agent.gate.mutants.crowd import Asked, Way, run_crowd
from kernel_agent.gate.mutants.judge import MutantJudge
from kernel_agent.gate.mutants.records import Outcome
from kernel_agent.gate.mutants.sources import MUTATORS, source_mutants
from kernel_agent.gate.mutants.suite import scales
from kernel_agent.gate.options import STANDARD
from kernel_agent.gate.questions import Question
from kernel_agent.oracle import CotangentKind, Point, Truths, describe
from kernel_agent.pairs.userfile import read_file
from kernel_agent.sandbox import Sandbox

PAIRS = ("softmax", "layernorm", "matmul_bias")
FOLDER = Path(__file__).parents[1] / "test" / "gate" / "pairs"
_SCALES = (1.0, 4096.0)
_DTYPES = (torch.float32, torch.bfloat16)

Rule = Callable[[Tensor, Tensor], bool]
"""(gradient, truth) -> accepted."""


@dataclass(frozen=True)
class OtherRule:
    """A rule that looks at gradients of one case."""

    name: str
    ones: bool
    """Whether the cotangent is one everywhere; else it is random."""
    accepts: Rule


OTHERS = (
    OtherRule("ones, `atol=1e-2`", True, lambda g, t: torch.allclose(g, t, rtol=0.0, atol=1e-2)),
    OtherRule("ones, `atol=rtol=1e-3`", True, lambda g, t: torch.allclose(g, t, rtol=1e-3, atol=1e-3)),
    OtherRule("random, `atol=rtol=1e-2`", False, lambda g, t: torch.allclose(g, t, rtol=1e-2, atol=1e-2)),
    OtherRule("random, 1% of the norm", False, lambda g, t: float((g - t).norm()) <= 1e-2 * float(t.norm())),
)


def main() -> None:
    """See the module."""
    torch.set_num_threads(1)
    with Sandbox() as sandbox:
        print("\n".join(table(sandbox)))


def table(sandbox: Sandbox, pairs: Sequence[str] = PAIRS) -> Iterator[str]:
    """Rows of Markdown."""
    names = [rule.name for rule in OTHERS]
    accepted, rejected = dict.fromkeys([*names, "gate"], 0), dict.fromkeys([*names, "gate"], 0)
    wrong = honest = 0
    for pair in pairs:
        judge = MutantJudge(Truths(describe(read_file(FOLDER / f"{pair}.py"), sandbox), sandbox))
        mutants = source_mutants(judge.honest, [mutator for mutator in MUTATORS if not mutator.rounds])
        fates = {result.mutant + result.mutator: result.outcome for result in judge.judged_all(mutants)}
        mistakes = [m for m in mutants if fates[m.words + m.mutator.name] in (Outcome.KILLED, Outcome.SURVIVED)]
        wrong += len(mistakes)
        accepted["gate"] += sum(fates[m.words + m.mutator.name] is Outcome.SURVIVED for m in mistakes)
        ones, random = _questions(judge)
        asked = [Asked(mutant, whole=True) for mutant in mistakes]
        way = Way(STANDARD.limits)
        known = scales([ones, random], judge.spec)
        run_crowd([ones, random], known, judge.text, asked, sandbox, way)
        for rule in OTHERS:
            accepted[rule.name] += sum(_passes(rule, ones if rule.ones else random, one) for one in asked)
        for truth, given, dtype in _honest(random):
            honest += 1
            for rule in OTHERS:
                rejected[rule.name] += not rule.accepts(given, truth)
            bits = 24 if dtype is torch.float32 else 8
            error = honest_error(truth, truth, dtype)
            size = float(truth.norm()) / max(1, truth.numel()) ** 0.5
            rejected["gate"] += not compare_native(given, truth, error, size, dtype, bits).passed
    yield f"| rule | wrong backwards accepted, of {wrong} | honest gradients rejected, of {honest} |"
    yield "| --- | --- | --- |"
    for rule in OTHERS:
        yield f"| {rule.name} | {accepted[rule.name]} | {rejected[rule.name]} |"
    yield f"| this gate | {accepted['gate']} | {rejected['gate']} |"


def _questions(judge: MutantJudge) -> tuple[Question, Question]:
    """The largest swept shape under a cotangent of ones, and under a random one."""
    required = [question for question in judge.suites.gate if question.case.required]
    largest = max(required, key=lambda question: question.forward.elements)
    forward = judge.truths.forward(Point(entry=largest.case.point.entry, seed=0))
    ones = tuple(None if form is None else torch.ones(form.shape, dtype=form.dtype) for form in forward.forms)
    case = Case(forward.point, CotangentKind.RANDOM, True)
    random = judge.suites.with_truth(Question(case, forward, (), largest.truth, frozenset()))
    (truth,) = judge.truths.gradients(forward, [ones])
    return Question(case, forward, ones, truth, largest.stub_ops), random


def _passes(rule: OtherRule, question: Question, asked: Asked) -> bool:
    """Whether a rule accepts all that a mutant returned to a question."""
    heard = next((one for one in asked.heard if one.question is question), None)
    if heard is None or heard.answer.failure is not None:
        return False
    for place, truth in enumerate(question.truth.grads.values()):
        given = heard.tensors.get(str(place))
        if truth is None:
            continue
        if given is None or given.shape != truth.shape or not rule.accepts(given.to(torch.float64), truth):
            return False
    return True


def _honest(question: Question) -> Iterator[tuple[Tensor, Tensor, torch.dtype]]:
    """Exact gradients, what a dtype holds of them, and the dtype."""
    for truth in question.truth.grads.values():
        for size in _SCALES if truth is not None else ():
            for dtype in _DTYPES:
                yield size * truth, (size * truth).to(dtype).to(torch.float64), dtype


if __name__ == "__main__":
    main()
