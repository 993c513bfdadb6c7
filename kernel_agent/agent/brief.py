"""`Brief`: what a model is told of the task, taken from the spec alone. The truth is not in it."""

from __future__ import annotations

from dataclasses import dataclass

from kernel_agent.agent.events import RetrievedPair
from kernel_agent.agent.forwardtext import forward_text, function_text
from kernel_agent.pairs.generated import generated_forward, saved_layout
from kernel_agent.pairs.spec import ArgumentFacts, KernelSpec


@dataclass(frozen=True)
class Brief:
    """The variables of the first prompt."""

    stub: str
    """Name of the user's function."""
    forward: str
    """The user's kernels and stub, without what only serves checking."""
    surrogate: str
    """The PyTorch function whose autograd is the intended gradient; empty when the true gradient is wanted."""
    given_forward: str
    """The forward section that is used unless the reply brings its own."""
    saved: tuple[str, ...]
    """What `saved` holds with the given forward, in order; empty when the file's own forward says it."""
    inputs: tuple[ArgumentFacts, ...]
    outputs: tuple[ArgumentFacts, ...]
    cotangents: tuple[str, ...]
    """Names of backward's positional parameters after `saved`, one per output."""
    grads: tuple[str, ...]
    """Inputs whose gradients are returned, in order."""
    torch_ops: tuple[str, ...]
    """Computing torch functions that the stub calls: `backward` may use them and their adjoints."""
    sweep: tuple[str, ...]
    """The user's shapes, in words."""
    pairs: tuple[RetrievedPair, ...]
    """Chosen pairs, best first."""
    freeze_forward: bool
    max_asks: int

    @property
    def signature(self) -> str:
        """The first line of the function that is asked for."""
        return f"def backward({', '.join(('saved', *self.cotangents))}, needs=None):"

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of the outputs."""
        return tuple(facts.name for facts in self.outputs)

    @property
    def returns(self) -> str:
        """What it returns, in words."""
        if len(self.grads) == 1:
            return f"the gradient of `{self.grads[0]}`, one tensor"
        return f"the tuple ({', '.join('d' + name for name in self.grads)}): the gradients of " + _listed(self.grads)


def make_brief(spec: KernelSpec, pairs: tuple[RetrievedPair, ...], *, freeze_forward: bool, max_asks: int) -> Brief:
    """What the model is told of a spec and its retrieved pairs."""
    return Brief(
        stub=spec.facts.stub,
        forward=forward_text(spec.facts),
        surrogate=function_text(spec.facts.source, "surrogate") if spec.custom_gradient else "",
        given_forward="" if spec.facts.is_pair else generated_forward(spec).strip("\n"),
        saved=saved_layout(spec),
        inputs=spec.inputs,
        outputs=spec.outputs,
        cotangents=tuple(f"grad_{facts.name}" for facts in spec.outputs),
        grads=spec.grads,
        torch_ops=spec.torch_ops,
        sweep=tuple(entry.label + ("" if entry.required else " (optional)") for entry in spec.sweep),
        pairs=pairs,
        freeze_forward=freeze_forward,
        max_asks=max_asks,
    )


def _listed(names: tuple[str, ...]) -> str:
    quoted = [f"`{name}`" for name in names]
    return f"{', '.join(quoted[:-1])} and {quoted[-1]}"
