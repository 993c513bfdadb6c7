"""Prints docs/prompts.md: what a model is shown for examples/layernorm.py, ask by ask, and how many tokens that is.

python bench/prompts_example.py > docs/prompts.md
python bench/prompts_example.py --tokens        # only the table of tokens
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import triton

from kernel_agent import gate
from kernel_agent.agent import prompts
from kernel_agent.agent.attempts import change_of
from kernel_agent.agent.brief import Brief, make_brief
from kernel_agent.agent.events import TechniqueHit
from kernel_agent.agent.explain import headline
from kernel_agent.agent.observer import Unwatched
from kernel_agent.agent.plan import Difference, GradientPlan, GradientPrice, PairReading, Plan, Reduction
from kernel_agent.agent.prompts import Progressing, Prompt
from kernel_agent.agent.reply import extract
from kernel_agent.agent.retrieval import wanted_by
from kernel_agent.agent.snapshots import render
from kernel_agent.agent.tools import Tools
from kernel_agent.agent.workshop import open_tools
from kernel_agent.bench.records import Measurement
from kernel_agent.config import RunConfig
from kernel_agent.data import pairs_root
from kernel_agent.gate.verdict import Verdict
from kernel_agent.pairs.assemble import assemble
from kernel_agent.pairs.generated import generated_forward
from kernel_agent.pairs.spec import Candidate, KernelSpec
from kernel_agent.pairs.sweep import smallest
from kernel_agent.pairs.userfile import read_file
from kernel_agent.sandbox import Sandbox
from rag import build_index

ROOT = Path(__file__).resolve().parents[1]
FORWARD = ROOT / "examples" / "layernorm.py"
REPLY = ROOT / "bench" / "layernorm_reply.md"
PAIRS = (
    *("layernorm_row", "layernorm_persistent", "rmsnorm_row", "rmsnorm_per_head", "add_rmsnorm", "groupnorm_small"),
    *("batchnorm_train_2d", "softmax_row", "log_softmax", "embedding_atomic", "matmul_nt", "fa2_causal"),
)
"""What is searched, by slug: among all pairs, the page would change with every pair that is added."""

SLIP = ("(b_wdy - along_one - b_xhat * along_xhat) * rstd", "(b_wdy - along_one) * rstd")
"""A term of dx is forgotten: the mistake that the repair is shown for."""

HEAD = """\
# What a model is shown

For `examples/layernorm.py` with four pairs, retrieved from twelve, ask by ask, as a run with `--draft rag` makes it (by
default its first ask shows the derived backward, to be beaten). The replies between them (a plan, a candidate in which
a term of dx is missing, the repaired one) were written for this page; verdicts, prices and times are those of the tool,
the verdicts at the smallest call alone. The page is printed by
`python bench/prompts_example.py`; a test keeps it fresh.

Printed with torch {torch} and triton {triton}.

Every ask of a run begins with the same two texts, the system text and the opening: providers cache them, so from the
second ask on they cost a fraction. Then follows the best candidate, whole, as if it were the model's last reply, and
the request. The conversation does not grow: earlier attempts are told in one line each.

{table}
"""


@dataclass(frozen=True)
class Example:
    """The asks of one imagined run."""

    asks: dict[str, Prompt]
    """Headline to prompt, in order."""

    @property
    def table(self) -> str:
        """Tokens of every ask, estimated, and the part of them that is the prefix."""
        lines = ["| ask | tokens | of these prefix |", "| --- | --- | --- |"]
        for name, prompt in self.asks.items():
            lines.append(f"| {name} | {prompt.tokens:,} | {prompt.prefix_tokens / prompt.tokens:.0%} |")
        return "\n".join(lines)


def example(device: str = "cpu") -> Example:
    """Make the asks with the real rooms: a few seconds for retrieval and two checks."""
    with tempfile.TemporaryDirectory() as folder, open_tools(_config(Path(folder), device)) as tools:
        spec = tools.describe(read_file(FORWARD))
        brief = brief_of(tools, spec)
        plan = plan_of(brief)
        prices, hits = costs(tools, spec, plan), by_technique(tools, spec, brief, plan)
        reply = REPLY.read_text(encoding="utf-8")
        right = candidate_of(reply, spec)
        wrong = Candidate(backward=right.backward.replace(*SLIP))
        assert wrong != right
        verdict, proof = judged(spec, wrong), judged(spec, right)
        measurement = timed(tools, spec, right) if proof.green else None
    told = (f"reply 2: one kernel deals the rows out to 264 programs -> {headline(verdict)}",)
    kept = (f"reply 3: {change_of(reply)} -> {headline(proof)}",)
    scores = [score for case in verdict.cases for score in case.grads]
    locked = tuple(grad for grad in spec.grads if all(score.passed for score in scores if score.grad == grad))
    return Example(
        {
            "1, a plan": prompts.plan(brief),
            "2, a draft": prompts.draft(brief, plan, prices, hits, remaining=9),
            "3, a repair": prompts.repair(
                brief, render(wrong), assemble(spec, wrong), verdict, Progressing(told, 8), locked
            ),
            "4, optimise": prompts.optimize(brief, render(right), measurement, 0.02, Progressing(kept, 7)),
        }
    )


def _config(folder: Path, device: str) -> RunConfig:
    """A run that searches `PAIRS`, copied and indexed below a folder."""
    for slug in PAIRS:
        (path,) = pairs_root().glob(f"*/{slug}.py")
        (folder / path.parent.name).mkdir(exist_ok=True)
        shutil.copy(path, folder / path.parent.name)
    build_index(folder, folder / "index")
    return RunConfig(file=FORWARD, topk=4, device=device, rag_index=folder / "index")


def brief_of(tools: Tools, spec: KernelSpec) -> Brief:
    """The opening's contents."""
    facts = tools.analyse(spec) if tools.analyse is not None else None
    pairs = tuple(pair for pair in tools.retrieve(spec).pairs if pair.chosen)
    derived = None if tools.derive is None else tools.derive(spec, False, Unwatched().on_case).event
    return make_brief(spec, pairs, freeze_forward=False, max_asks=10, facts=facts, derived=derived)


def plan_of(brief: Brief) -> Plan:
    """The reply to the first ask, as a model might write it."""
    saved = {"x": ("x", "weight", "mean", "rstd"), "weight": ("x", "mean", "rstd"), "bias": ()}
    readings = {
        "layernorm_row": ("dx per row, partial rows of dw and db", "x is contiguous there"),
        "layernorm_persistent": ("sums in registers over many rows", "statistics lie in one buffer there"),
    }
    said = ("the term along xhat", "other statistics or another axis")
    return Plan(
        pairs=tuple(
            PairReading(slug=pair.slug, match=match, mismatch=mismatch)
            for pair in brief.pairs
            for match, mismatch in [readings.get(pair.slug, said)]
        ),
        anchor=brief.pairs[0].slug if brief.pairs else None,
        differences=(
            Difference(difference="rows may have a stride of their own", implies="its stride is passed to the kernel"),
            Difference(difference="mean and rstd are outputs too", implies="their cotangents are None and ignored"),
        ),
        gradients=tuple(
            GradientPlan(
                grad=grad,
                owner="one row" if grad == "x" else "a share of the rows, all columns",
                whole=("N",),
                reduction=Reduction.PLAIN_STORE if grad == "x" else Reduction.PARTIALS,
                techniques=("row-local", "saved-statistics") if grad == "x" else ("two-stage-partials",),
                saved=saved[grad],
                recomputed=("xhat",) if grad != "bias" else (),
            )
            for grad in brief.grads
        ),
    )


def costs(tools: Tools, spec: KernelSpec, plan: Plan) -> tuple[GradientPrice, ...]:
    """What the cost counter says of the plan."""
    return () if tools.price is None else tools.price(spec, plan, None)


def by_technique(tools: Tools, spec: KernelSpec, brief: Brief, plan: Plan) -> tuple[TechniqueHit, ...] | None:
    """Pairs that compute such gradients in such a way."""
    if tools.retrieve_techniques is None:
        return None
    return tools.retrieve_techniques(spec, wanted_by(plan), tuple(pair.slug for pair in brief.pairs))


def candidate_of(reply: str, spec: KernelSpec) -> Candidate:
    """The candidate that a reply holds."""
    found = extract(reply, given_forward=generated_forward(spec), freeze_forward=False).candidate
    assert found is not None, "the reply of this page holds code"
    return found


def judged(spec: KernelSpec, candidate: Candidate) -> Verdict:
    """The verdict of the exact tier at the smallest call alone: a page does not need the others."""
    small = spec.model_copy(update={"sweep": (smallest(spec.sweep),)})
    with Sandbox() as sandbox:
        return gate.check(small, assemble(small, candidate), sandbox, gate.GateOptions(), diagnose=True)


def timed(tools: Tools, spec: KernelSpec, candidate: Candidate) -> Measurement | None:
    """Its time as modelled; a page that is printed anywhere cannot hold a measured one."""
    return None if tools.modelled_cost is None else tools.modelled_cost(spec, candidate)


def page(made: Example) -> str:
    """docs/prompts.md."""
    first = next(iter(made.asks.values())).conversation
    parts = [
        HEAD.format(torch=torch.__version__.partition("+")[0], triton=triton.__version__, table=made.table),
        f"## The system text\n\n{quoted(first.system)}",
        f"## The opening\n\n{quoted(first.turns[0].text)}",
    ]
    for name, prompt in made.asks.items():
        parts.append(f"## Ask {name}")
        for turn in prompt.conversation.turns[1:]:
            parts.append(f"{turn.role.value.capitalize()}:\n\n{quoted(turn.text)}")
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def quoted(text: str) -> str:
    """As a quotation in Markdown."""
    return "\n".join(f"> {line}".rstrip() for line in text.strip("\n").split("\n"))


if __name__ == "__main__":
    shown = example()
    sys.stdout.write(shown.table + "\n" if "--tokens" in sys.argv[1:] else page(shown))
