"""`forward` and `backward` of the pair format over a harvested Function or operator, where its syntax says enough."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass

from rag.harvest.candidates import Candidate
from rag.harvest.context import kept_attributes, returned
from rag.harvest.report import Kind

CONTEXT = '''class SavedContext:
    """Stands for autograd's ctx."""

    saved_tensors = ()
    needs_input_grad = {needed}

    def save_for_backward(self, *tensors):
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *_):
        pass

    mark_dirty = set_materialize_grads = mark_non_differentiable
'''


@dataclass(frozen=True)
class Adapter:
    """Text that joins a harvested pair to the pair format."""

    forward: str
    backward: str
    grads: tuple[str, ...]


def adapter_of(candidate: Candidate, name_of: Callable[[str, str], str], half: str, split: bool) -> Adapter | None:
    """The adapter of a candidate; None where its text does not say what is kept, taken or returned.

    `half` is the class with the backward, where there is one (`split`).
    """
    function, back = candidate.forward_function, candidate.backward_function
    if candidate.kind is Kind.FUNCTIONS or function is None or back is None:
        return None
    own = candidate.setup_function is not None
    parameters = _parameters(function, skip=0 if own or candidate.kind is Kind.OPERATOR else 1)
    if parameters is None:
        return None
    gradients = returned(back) or ((True,) if len(parameters) == 1 else ())
    if len(gradients) != len(parameters) or not any(gradients):
        return None
    if candidate.kind is Kind.OPERATOR and not own and kept_attributes([back]):
        return None
    kept = [f"ctx.{name}" for name in kept_attributes([candidate.setup_function or function])]
    names = [name for name, _ in parameters]
    listed = _tuple(names)
    called = name_of(candidate.module.path, candidate.name)
    if candidate.kind is Kind.FUNCTION:
        run, setup, undo = f"{called}.forward", f"{called}.setup_context", f"{half if split else called}.backward"
    else:
        assert candidate.backward_module is not None
        run = name_of(candidate.module.path, function.name)
        setup = (
            ""
            if candidate.setup_function is None
            else name_of(candidate.setup[0].module.path, candidate.setup_function.name)
        )
        undo = name_of(candidate.backward_module.path, back.name)
    lines = [f"def forward({', '.join(text for _, text in parameters)}):", "    ctx = SavedContext()"]
    if candidate.kind is Kind.FUNCTION and not own:
        lines.append(f"    outputs = {run}(ctx, {', '.join(names)})")
    else:
        lines.append(f"    outputs = {run}({', '.join(names)})")
        if own:
            lines.append(f"    {setup}(ctx, {listed}, outputs)")
    lines.append(f"    return outputs, {_tuple([*kept, '*ctx.saved_tensors'])}")
    wanted = [place for place, gradient in enumerate(gradients) if gradient]
    grads = [f"grads[{place}]" for place in wanted] if len(parameters) > 1 else ["grads"]
    undone = [
        "def backward(saved, *grad_outputs):",
        "    ctx = SavedContext()",
        f"    {', '.join([*kept, '*ctx.saved_tensors'])} = saved" if kept else "    ctx.saved_tensors = saved",
        f"    grads = {undo}(ctx, *grad_outputs)",
        f"    return {', '.join(grads)}",
    ]
    return Adapter(
        forward=CONTEXT.format(needed=_tuple(["True"] * len(names))) + "\n\n" + "\n".join(lines),
        backward="\n".join(undone),
        grads=tuple(names[place] for place in wanted),
    )


def _parameters(function: ast.FunctionDef, skip: int) -> list[tuple[str, str]] | None:
    """Names and texts of the parameters; None where some are not named."""
    arguments = function.args
    if arguments.vararg is not None or arguments.kwarg is not None or arguments.kwonlyargs:
        return None
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    found = []
    for argument, default in list(zip(positional, defaults, strict=True))[skip:]:
        if default is not None and not isinstance(default, (ast.Constant, ast.UnaryOp)):
            return None
        text = argument.arg if default is None else f"{argument.arg}={ast.unparse(default)}"
        found.append((argument.arg, text))
    return found


def _tuple(items: list[str]) -> str:
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"
