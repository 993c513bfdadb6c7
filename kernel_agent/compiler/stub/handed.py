"""`HandedOn`: whose the gradients are that the backward of a launch computes, and what shape they have there."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from kernel_agent.compiler.stub.buffers import Buffers, element_of
from kernel_agent.compiler.stub.cotangents import Cotangents, Grad
from kernel_agent.compiler.stub.wording import Wording


class HandedOn:
    """The gradients of one launch, handed on to the tensors that they belong to."""

    def __init__(self, wording: Wording, cotangents: Cotangents, made: Buffers, given: Mapping[str, Grad]) -> None:
        """`made`: memory that its launches write; `given`: cotangents of what it wrote, by parameter."""
        self.wording = wording
        self.launched = wording.launched
        self.plan = wording.plan
        self.body = wording.body
        self.references = wording.references
        self.flow = wording.references.flow
        self.cotangents = cotangents
        self.made = made
        self.given = given

    def contribute(self) -> None:
        """Hand them on."""
        plan, given, made, variables = self.plan, self.given, self.made, self.wording.variables
        buffers = {buffer.name: buffer for buffer in plan.buffers}
        partials = {total.name: total.partials for total in plan.totals}
        cotangents = {plan.cotangents[name]: name for name in given if name in plan.cotangents}
        for name, result in plan.gradients.items():
            tensor, text = self.launched.seen.tensors[name], variables[result]
            if result in cotangents:
                like = cotangents[result]
                alike = self.flow.alike(tensor, self.launched.seen.tensors[like])
                own = "" if alike else element_of(self.launched.seen.build.types[like])
                if name in plan.by_index:
                    self.cotangents.add(tensor, Grad(self._by_index(tensor, like, text), given[like].element or own))
                    continue
                self._shared(tensor, like, Grad(text, given[like].element or own))
                continue
            buffer = buffers[partials.get(result, result)]
            element = made.held.get(result, "" if made.as_like(buffer) else buffer.element)
            if buffer.like != name and plan.gradients.get(buffer.like) == result:
                part = self.flow.is_slice(self.launched.seen.tensors[buffer.like])
                self._shared(tensor, buffer.like, Grad(text, "f32" if part else element))
                continue
            kept = result in made.held
            if result in buffers and self.flow.is_slice(tensor) and buffer.like == name and not kept:
                continue
            if self.flow.is_expanded(tensor) and buffer.like == name:
                self.cotangents.add(self.flow.expanded(tensor), Grad(text, buffer.element))
                continue
            if result not in buffers or buffer.like != name:
                text += f".reshape({self.references.shape(tensor)})"
            lies = buffer.name not in made.lent and (buffer.like == name or self.flow.always_contiguous(tensor))
            alone = buffer.like in ("", name) and list(plan.gradients.values()).count(result) == 1
            self.cotangents.add(tensor, Grad(text, element, own=alone and lies))
        for one in made.sliced:
            self.cotangents.add(one.root, Grad(one.variable, "f32"))

    def _by_index(self, tensor: Tensor, like: str, text: str) -> str:
        """A cotangent in the shape of a tensor that has its elements under the same indices."""
        other = self.launched.seen.tensors[like]
        if not self.flow.always_contiguous(other):
            text += f".as_strided(({self.references.count(other)},), (1,))"
        elif self.flow.alike(tensor, other):
            return text
        return f"{text}.reshape({self.references.shape(tensor)})"

    def _shared(self, tensor: Tensor, like: str, grad: Grad) -> None:
        """Hand a tensor what lies in memory as its gradient would, in the shape of another argument. That no two inputs
        get views of one memory is seen to when all are returned (`apart`)."""
        other, text = self.launched.seen.tensors[like], grad.text
        if not self.flow.alike(tensor, other):
            shape = self.references.shape(tensor)
            if self.flow.always_contiguous(tensor) and self.flow.always_contiguous(other):
                text = f"{text}.reshape({shape})"
            else:
                text = f"{text}.as_strided({shape}, {self.references.asked(tensor, 'stride()')})"
        self.cotangents.add(tensor, Grad(text, grad.element))
