"""`Brief`: what a model is told of the task, taken from spec and forward facts. The truth is not in it."""

from __future__ import annotations

from dataclasses import dataclass

from kernel_agent.agent.derived import Derived
from kernel_agent.agent.events import RetrievedPair
from kernel_agent.agent.forwardtext import forward_text, function_text
from kernel_agent.agent.planform import plan_form
from kernel_agent.agent.shapewords import dim_lines, told
from kernel_agent.agent.skeleton import cotangent_names, gradient_name, saved_names, signature, skeleton
from kernel_agent.models.tokens import estimate_tokens
from kernel_agent.pairs.axes import UNKNOWN
from kernel_agent.pairs.forward_facts import ForwardFacts
from kernel_agent.pairs.generated import generated_forward
from kernel_agent.pairs.spec import ArgumentFacts, KernelSpec

MOST_ADJOINT = 2000
"""Estimated tokens of an adjoint that is shown: beyond them it says less than it costs."""


@dataclass(frozen=True)
class Brief:
    """The variables of the opening, which is the same for every ask of a run."""

    stub: str
    """Name of the user's function."""
    forward: str
    """The user's kernels and stub, without what only serves checking."""
    surrogate: str
    """The PyTorch function whose autograd is the intended gradient; empty when the true gradient is wanted."""
    given_forward: str
    """The forward section that is used unless the reply brings its own; empty when the file has its own."""
    saved: tuple[str, ...]
    """What `saved` holds with the given forward, in order."""
    dims: tuple[str, ...]
    """Ranges of the sizes and values of the flags, in words."""
    inputs: tuple[ArgumentFacts, ...]
    outputs: tuple[ArgumentFacts, ...]
    facts: ForwardFacts | None
    """What the forward does with memory; None where it was not analysed."""
    adjoint: str
    """What the compiler reads off the kernels as their adjoint; empty where it is unknown, unwanted or too long."""
    underived: str
    """Why the compiler cannot derive the forward; empty where it can, or was not asked."""
    source_lines: tuple[str, ...]
    """Lines of the user's file, which facts and findings count from 1."""
    cotangents: tuple[str, ...]
    """Names of backward's positional parameters after `saved`, one per output."""
    signature: str
    """The first line of the function that is asked for."""
    skeleton: str
    """The reply to fill in."""
    grads: tuple[str, ...]
    """Inputs whose gradients are returned, in order."""
    torch_ops: tuple[str, ...]
    """Computing torch functions that the stub calls: `backward` may use them and their adjoints."""
    plan_form: str
    """The JSON of a plan, to fill in."""
    pairs: tuple[RetrievedPair, ...]
    """Chosen pairs, best first."""
    freeze_forward: bool
    max_asks: int

    @property
    def unknown_axes(self) -> bool:
        """Whether a shape holds a question mark."""
        return any(UNKNOWN in facts.axes for facts in (*self.inputs, *self.outputs))

    @property
    def looked_at(self) -> str:
        """The call that the facts were read off, in words."""
        entry = "" if self.facts is None else self.facts.entry
        return f"the call {entry}" if entry else "a small call"

    @property
    def returns(self) -> str:
        """What `backward` returns, in words."""
        if len(self.grads) == 1:
            return f"the gradient of `{self.grads[0]}`, one tensor"
        names = ", ".join(gradient_name(name) for name in self.grads)
        return f"the tuple ({names}): the gradients of {listed(self.grads)}, each with the shape and dtype of its input"


def make_brief(
    spec: KernelSpec,
    pairs: tuple[RetrievedPair, ...],
    *,
    freeze_forward: bool,
    max_asks: int,
    facts: ForwardFacts | None = None,
    derived: Derived | None = None,
) -> Brief:
    """What the model is told of a spec, the facts of its forward, what was derived of it and its retrieved pairs."""
    adjoint = "" if derived is None else derived.adjoint
    spec = told(spec)
    return Brief(
        stub=spec.facts.stub,
        forward=forward_text(spec.facts),
        surrogate=function_text(spec.facts.source, "surrogate") if spec.custom_gradient else "",
        given_forward="" if spec.facts.is_pair else generated_forward(spec).strip("\n"),
        saved=saved_names(spec),
        dims=dim_lines(spec),
        inputs=spec.inputs,
        outputs=spec.outputs,
        facts=facts,
        adjoint=adjoint if estimate_tokens(adjoint) <= MOST_ADJOINT else "",
        underived="" if derived is None else derived.reason,
        source_lines=tuple(spec.facts.source.splitlines()),
        cotangents=cotangent_names(spec),
        signature=signature(spec),
        skeleton=skeleton(spec),
        grads=spec.grads,
        torch_ops=spec.torch_ops,
        plan_form=plan_form(spec, pairs),
        pairs=pairs,
        freeze_forward=freeze_forward,
        max_asks=max_asks,
    )


def listed(names: tuple[str, ...]) -> str:
    """`a`, `b` and `c`, in backticks."""
    quoted = [f"`{name}`" for name in names]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} and {quoted[-1]}"
