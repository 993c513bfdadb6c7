"""A run whose every part is scripted: replies from a list, verdicts read off the candidate's own text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kernel_agent.agent.events import PairsRetrieved, RetrievedPair, TruthCrossChecked
from kernel_agent.agent.tools import OnCase, Tools
from kernel_agent.bench.records import Basis, Measurement, ShapeTime
from kernel_agent.certificate.record import Provenance
from kernel_agent.config import Backend, RunConfig
from kernel_agent.gate.mutants.records import MutationTally
from kernel_agent.gate.verdict import CaseResult, GradientScore, Status, Verdict
from kernel_agent.models.exchange import Exchange
from kernel_agent.models.protocol import Conversation, OnNotice, Progress, Reply, Usage, unheard
from kernel_agent.pairs.spec import ArgumentFacts, ArgumentKind, Candidate, FileFacts, KernelSpec, ShapeEntry

FORWARD = Path(__file__).parent / "forwards" / "product.py"

BACKWARD = """\
@triton.jit
def product_bwd_kernel(DY, X, W, DX, DW, N, BLOCK: tl.constexpr):
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < N
    dy = tl.load(DY + cols, mask=mask)
    tl.store(DX + cols, dy * tl.load(W + cols, mask=mask), mask=mask)
    tl.store(DW + cols, dy * tl.load(X + cols, mask=mask), mask=mask)


def backward(saved, grad_y, needs=None):
    x, w, _ = saved
    dx, dw = torch.empty_like(x), torch.empty_like(w)
    grad_y = grad_y.contiguous()
    product_bwd_kernel[(triton.cdiv(x.numel(), 32),)](grad_y, x, w, dx, dw, x.numel(), BLOCK=32)
    return dx, dw
"""
SWAPPED = BACKWARD.replace("tl.store(DW + cols, dy * tl.load(X", "tl.store(DW + cols, dy * tl.load(W")
"""dw is made from w instead of x: wrong, and right for dx."""
OTHER_WRONG = BACKWARD.replace("tl.store(DX + cols, dy * tl.load(W", "tl.store(DX + cols, dy * tl.load(X")
"""dx is made from x instead of w: wrong, and right for dw."""
CRASHING = BACKWARD.replace("x, w, _ = saved", "x, w = saved")
NO_CODE = "I would multiply the cotangent with the other factor. Shall I write it?"


PLAN = (
    "Elementwise.\n\n```json\n"
    + json.dumps(
        {
            "pairs": [{"slug": "scaled_copy", "match": "the product rule", "mismatch": "s is a scalar there"}],
            "anchor": "scaled_copy",
            "differences": [{"difference": "two tensors", "implies": "two gradients"}],
            "gradients": [
                {
                    "grad": name,
                    "owner": "one block of elements",
                    "reduction": "plain store",
                    "techniques": ["elementwise"],
                    "saved": ["x", "w"],
                }
                for name in ("x", "w")
            ],
        }
    )
    + "\n```\n"
)
"""A plan for `product.py` that reads `PAIR`."""


def reply_text(code: str) -> str:
    """A reply as models write them."""
    return f"The product rule gives both.\n\n```python\n# --- backward ---\n{code}```\n\nThat is all.\n"


def spec_of(facts: FileFacts) -> KernelSpec:
    """What describing `product.py` gives, without running it."""
    tensor = {"kind": ArgumentKind.TENSOR, "dtype": "float32", "shape": (64,), "needs_grad": True}
    return KernelSpec(
        facts=facts,
        sweep=(ShapeEntry(dims={"N": 64}), ShapeEntry(dims={"N": 100}, required=False)),
        inputs=(ArgumentFacts(name="x", **tensor), ArgumentFacts(name="w", **tensor)),
        outputs=(ArgumentFacts(name="y", **tensor),),
        returns_tuple=False,
        grads=("x", "w"),
        launches=("product_kernel",),
    )


def verdict_of(pair_source: str) -> Verdict:
    """A stand-in for the gate that reads the mistake off the text."""
    if "x, w = saved" in pair_source:
        line = pair_source.split("\n").index("    x, w = saved") + 1
        message = "`backward` raised ValueError: too many values to unpack"
        return Verdict(status=Status.CRASHED, message=message, case="N=64 seed=0", line=line, cases_planned=2)
    if "return dx, None" in pair_source and "def backward_2" not in pair_source:
        return Verdict(status=Status.WRONG_COUNT, message="the gradient of w is None", case="N=64 seed=0")
    right_w = "tl.store(DW + cols, dy * tl.load(X" in pair_source
    if "tl.store(DX + cols, dy * tl.load(W" not in pair_source:
        return _wrong_in_x(right_w)
    scores = (
        GradientScore(grad="x", passed=True, ratio=1e-7),
        GradientScore(grad="w", passed=right_w, ratio=2e-7 if right_w else 41250.0, tile=(0,)),
    )
    status = Status.GREEN if right_w else Status.WRONG_GRADIENT
    names = ("N=64 seed=0 cotangent=random", "N=64 seed=0 cotangent=strided")
    cases = tuple(CaseResult(case=name, required=True, status=status, grads=scores) for name in names)
    if right_w:
        return Verdict(status=status, cases=cases, cases_planned=2)
    message = "the gradient of w is wrong in every block"
    return Verdict(
        status=status, message=message, case=names[0], grad="w", tile=(0,), ratio=41250.0, cases=cases, cases_planned=2
    )


def _wrong_in_x(right_w: bool) -> Verdict:
    scores = (
        GradientScore(grad="x", passed=False, ratio=9000.0, tile=(0,)),
        GradientScore(grad="w", passed=right_w, ratio=2e-7 if right_w else 41250.0, tile=(0,)),
    )
    case = "N=64 seed=0 cotangent=random"
    cases = (CaseResult(case=case, required=True, status=Status.WRONG_GRADIENT, grads=scores),)
    message = "the gradient of x is wrong in every block"
    return Verdict(
        status=Status.WRONG_GRADIENT, message=message, case=case, grad="x", ratio=9000.0, cases=cases, cases_planned=2
    )


PAIR = RetrievedPair(
    slug="scaled_copy",
    family="elementwise",
    path="elementwise/scaled_copy.py",
    score=0.0328,
    similarity=0.71,
    chosen=True,
    reason="",
    forward="def forward(x, s):\n    return scale(x, s), (x, s)\n",
    backward="def backward(saved, grad_out, needs=None):\n    x, s = saved\n    return scale(grad_out, s)\n",
)
PAIRS = PairsRetrieved(
    pairs=(
        PAIR,
        PAIR.model_copy(
            update={"slug": "far", "chosen": False, "reason": "below min-sim: 0.20 < 0.45", "similarity": 0.2}
            | {"forward": "", "backward": ""}
        ),
    ),
    unmatched_excludes=("nothing",),
)


class ScriptedModel:
    """Answers from a list and notes every ask in a file, so that asks are counted across processes."""

    name = "script"
    limit: int | None = None

    def __init__(self, replies: Sequence[str], run_dir: Path, log: Path | None = None, usage: Usage = Usage()) -> None:  # noqa: B008
        self.replies = replies
        self.exchange = Exchange(run_dir)
        self.log = log
        self.usage = usage
        self.asked: list[Conversation] = []
        self.limits: list[int | None] = []

    def ask(
        self,
        conversation: Conversation,
        *,
        number: int | None = None,
        on_text: Progress | None = None,
        max_output: int | None = None,
    ) -> Reply:
        number = (number or self.exchange.received() + 1) - 1
        self.asked.append(conversation)
        self.limits.append(max_output)
        if self.log is not None:
            with open(self.log, "a", encoding="utf-8") as file:
                file.write(f"{number + 1}\n")
        text = self.replies[number]
        if on_text is not None:
            on_text(text)
        return Reply(text=text, model=self.name, usage=self.usage, cost_usd=0.0, reasoning="Think of the product rule.")


class Script:
    """The stand-ins of one run; `model` and `tools` are what `runs.run` and `runs.resume` take."""

    def __init__(
        self,
        *replies: str,
        log: Path | None = None,
        usage: Usage = Usage(input=1000, output=200),  # noqa: B008
        truth_passes: bool = True,
        times: dict[str, float] | None = None,
        retrieved: PairsRetrieved | None = None,
        **rooms: object,
    ) -> None:
        """`times`: microseconds by a piece of text of the candidate; with it the optimize phase runs.

        `rooms`: fields of `Tools` that are to be there, too.
        """
        self.retrieved = PAIRS if retrieved is None else retrieved
        self.rooms = rooms
        self.replies = replies
        self.log = log
        self.usage = usage
        self.truth_passes = truth_passes
        self.times = times
        self.models: list[ScriptedModel] = []
        self.checked = 0

    @property
    def asked(self) -> list[Conversation]:
        """Every conversation sent in this process."""
        return [conversation for model in self.models for conversation in model.asked]

    @property
    def limits(self) -> list[int | None]:
        """The limit that each reply was given, in the same order."""
        return [limit for model in self.models for limit in model.limits]

    def model(self, config: RunConfig, run_dir: Path, /, *, on_notice: OnNotice = unheard) -> ScriptedModel:
        self.models.append(ScriptedModel(self.replies, run_dir, self.log, self.usage))
        return self.models[-1]

    @contextmanager
    def tools(self, config: RunConfig, cache: Path | None = None) -> Iterator[Tools]:
        yield Tools(
            describe=spec_of,
            cross_check=lambda spec: TruthCrossChecked(
                passed=self.truth_passes, line="a derivative agrees to 3e-10", worst=3e-10
            ),
            retrieve=lambda spec: self.retrieved,
            check=self._check,
            deliver=_deliver,
            **({} if self.times is None else {"measure": self._measure}),
            **self.rooms,  # type: ignore[arg-type]
        )

    def _check(self, spec: KernelSpec, pair_source: str, on_case: OnCase) -> Verdict:
        self.checked += 1
        verdict = verdict_of(pair_source)
        for done, case in enumerate(verdict.cases, 1):
            on_case(case, done, verdict.cases_planned)
        return verdict

    def _measure(self, spec: KernelSpec, candidate: Candidate) -> Measurement:
        assert self.times is not None
        time = next((t for text, t in self.times.items() if text in candidate.backward), 100.0)
        return Measurement(
            basis=Basis.MODELLED,
            device="none",
            shapes=(ShapeTime(label="N=64", median_us=time),),
            facts=("reads 3 N elements",),
        )


def _deliver(
    spec: KernelSpec,
    candidate: Candidate,
    verdict: Verdict,
    provenance: Provenance,
    folder: Path,
    mutants: MutationTally | None,
) -> tuple[Path, ...]:
    path = folder / f"{spec.facts.stem}_backward.py"
    time = "" if provenance.speed is None else f", {provenance.speed.geomean_us:.0f} us"
    path.write_text(f"# {provenance.asks} asks{time}\n{candidate.backward}")
    return (path,)


def config(out: Path, **changes: object) -> RunConfig:
    """The configuration of a scripted run."""
    fixed = {"file": FORWARD, "out": out, "backend": Backend.MANUAL, "reflect": False, "mutant_seconds": 0.0}
    return RunConfig.model_validate({**fixed, **changes})
