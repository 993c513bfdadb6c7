"""`Planned`: the plan of one launch as statements: its checks, its buffers, its launches, and what becomes of them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.plan import NESTED, BackwardPlan, Step
from kernel_agent.compiler.ssa.value import Kernel
from kernel_agent.compiler.stub.buffers import Buffers
from kernel_agent.compiler.stub.cotangents import Cotangents, Grad
from kernel_agent.compiler.stub.flow import tensors_in
from kernel_agent.compiler.stub.lines import APART, Line, backward_name, quoted
from kernel_agent.compiler.stub.wording import Wording

Signature = Callable[[Kernel], Sequence[str]]
"""Parameters of a kernel as it is printed."""


class Planned:
    """Writes one plan."""

    def __init__(self, wording: Wording, cotangents: Cotangents, signature: Signature) -> None:
        self.wording = wording
        self.launched = wording.launched
        self.plan: BackwardPlan = wording.plan
        self.body = wording.body
        self.references = wording.references
        self.flow = wording.references.flow
        self.cotangents = cotangents
        self.signature = signature
        self.kernels: list[Kernel] = []
        """What is launched, in order."""

    def write(self, given: Mapping[str, Grad]) -> None:
        """Write it all and add the gradients to the cotangents. `given`: cotangents of what the launch wrote, by
        parameter. Raises `CannotDerive`."""
        plan, variables = self.plan, self.wording.variables
        variables |= self._held(given)
        self._check()
        for name, text in plan.settings.items():
            variables[name] = self.body.bind(name, self.wording.text(text))
        for step in plan.steps:
            self._bind(step)
        buffers = Buffers(self.wording)
        for buffer in plan.buffers:
            variables[buffer.name] = buffers.allocate(buffer)
        for step in plan.steps:
            self._launch(step)
        for total in plan.totals:
            name = self.wording.gradient(total.name)
            variables[total.name] = self.body.bind(name, f"{variables[total.partials]}.sum(0)")
        self._contribute(buffers)

    def _held(self, given: Mapping[str, Grad]) -> dict[str, str]:
        """Cotangents by argument of the kernels; copies of those that a launch overwrites."""
        plan, tensors = self.plan, self.launched.seen.tensors
        held = {plan.cotangents[name]: grad.text for name, grad in given.items() if name in plan.cotangents}
        for name, argument in plan.cotangents.items():
            if argument in plan.consumed and argument in held:
                held[argument] = self._copied(held[argument], tensors[name])
        return held

    def _copied(self, cotangent: str, tensor: Tensor) -> str:
        """A cotangent that a launch may overwrite. Raises `CannotDerive` for one of a slice: its copy is none."""
        if self.flow.is_slice(tensor):
            raise CannotDerive(
                f"stores to `{self.references.hint(self.flow.root(tensor))}`, a slice of a tensor, may meet",
                remedy="Give the kernel an output of its own.",
            )
        name = f"left_of_{cotangent if cotangent.isidentifier() else 'grad'}"
        return self.body.bind(name, f"{cotangent}.clone()")

    def _check(self) -> None:
        """Statements that raise where the plan would be wrong."""
        for fact in self.plan.facts:
            shown = self.wording.text(fact.expression)
            if f"{NESTED}(" in fact.expression:
                self.body.helpers[APART] = None
            reason = f"{fact.reason} only if {shown}"
            asked = shown if isinstance(ast.parse(shown, mode="eval").body, ast.Call) else f"({shown})"
            self.body.write(Line(f"if not {asked}:"), Line(f"raise ValueError({quoted(reason)})", depth=1))

    def _bind(self, step: Step) -> None:
        """Variables for long expressions that the launches share."""
        for name, text in step.scalars.items():
            self.wording.bind(name, text)
        for axis, text in enumerate(step.grid):
            if not text.startswith("grid"):
                self.wording.bind("programs" if axis == 0 else f"programs_{axis}", text)

    def _launch(self, step: Step) -> None:
        kernel = replace(step.kernel, name=self.wording.names.fresh(backward_name(step.kernel.name)))
        self.kernels.append(kernel)
        grid = [self.wording.short(text) for text in step.grid]
        shown = f"({grid[0]},)" if len(grid) == 1 else f"({', '.join(grid)})"
        items = []
        given = {value.name for value in kernel.arguments}
        for name in self.signature(kernel):
            if name in self.wording.variables:
                text = self.wording.variables[name]
            elif name in step.scalars:
                items.append(self.wording.short(step.scalars[name]))
                continue
            else:
                text = self.wording.argument(name)
            items.append(text if name in given else f"{name}={text}")
        stages = "" if step.num_stages is None else str(step.num_stages)
        for option, value in (("num_warps", step.num_warps), ("num_stages", stages)):
            shown_option = self.wording.text(value) if value else self.wording.option(option)
            if shown_option is not None:
                items.append(f"{option}={shown_option}")
        self.body.write(Line(f"{kernel.name}[{shown}](", tuple(items), ")"))

    def _contribute(self, made: Buffers) -> None:
        """Hand the gradients on to the tensors that they belong to."""
        plan, variables = self.plan, self.wording.variables
        buffers = {buffer.name: buffer for buffer in plan.buffers}
        partials = {total.name: total.partials for total in plan.totals}
        for name, result in plan.gradients.items():
            tensor = self.launched.seen.tensors[name]
            buffer = buffers[partials.get(result, result)]
            if result in buffers and self.flow.is_slice(tensor) and buffer.like == name:
                continue
            text = variables[result]
            if self.flow.is_expanded(tensor) and buffer.like == name:
                whole = tensors_in(self.flow.maker[id(tensor)].args)[0]
                self.cotangents.add(whole, Grad(text, buffer.element))
                continue
            if result not in buffers or buffer.like != name:
                text += f".reshape({self.references.shape(tensor)})"
            self.cotangents.add(tensor, Grad(text, "" if made.as_like(buffer) else buffer.element))
        for one in made.sliced:
            self.cotangents.add(one.root, Grad(one.variable, "f32"))
