"""`Remains`: what a launch leaves of the cotangent of memory that it wrote to, which belongs to what was there."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.plan import BackwardPlan
from kernel_agent.compiler.stub.cotangents import Grad
from kernel_agent.compiler.stub.flow import disjoint
from kernel_agent.compiler.stub.trace import LaunchSeen
from kernel_agent.compiler.stub.wording import Launched, Wording
from kernel_agent.compiler.stub.writer import Writer

Eraser = Callable[[LaunchSeen, str, bool], BackwardPlan]
"""What a launch leaves of the cotangent of an argument; see `erasing`."""


class PlanWriter(Writer, Protocol):
    """What writes the backward around it."""

    eraser: Eraser

    def write_plan(self, launched: Launched, plan: BackwardPlan, cotangents: Mapping[str, Grad]) -> Wording:
        """Write the statements of a plan."""


class Remains:
    """Of all launches of one backward."""

    def __init__(self, writer: PlanWriter) -> None:
        self.writer = writer
        self.body, self.flow = writer.body, writer.flow
        self.references, self.cotangents = writer.references, writer.cotangents

    def home(self, tensor: Tensor) -> Tensor:
        """The tensor that a cotangent is laid out as: what was written, if all that depends on its memory is a view of
        it, else the root of the memory."""
        known = self.flow.local(tensor) is not None and not self.flow.is_slice(tensor)
        others = self.cotangents.sharing(tensor)
        if known and all(other is tensor or self.flow.is_view_of(other, tensor) for other in others):
            return tensor
        return self.flow.root(tensor)

    def left(self, launched: Launched, root: Tensor, grad: Grad) -> Grad | None:
        """What of the cotangent of a memory belongs to what was there before a launch: all of it where the launch only
        adds, or where another one wrote other elements; else zeros where it stored. Raises `CannotDerive`."""
        place, tensors, accesses = launched.place, launched.seen.tensors, launched.accesses
        held, earlier = self.flow.held_before(place, root), self.flow.written_before(place, root)
        if not (held or earlier):
            return None
        stored = [name for name in accesses.stored if name in tensors and self.flow.shares(tensors[name], root)]
        stored = list({id(tensors[name]): name for name in sorted(stored)}.values())
        if not held and all(disjoint([tensors[name], other]) for name in stored for other in earlier):
            return grad
        for name in stored:
            left = self._erased(launched, name, root, grad)
            if left is None:
                return None
            grad = left
        return grad

    def take_out(self, launched: Launched, root: Tensor, grad: Grad) -> None:
        """Zero what a launch stores of a cotangent that outlasts the trip."""
        for name in sorted(launched.accesses.stored & launched.seen.tensors.keys()):
            tensor = launched.seen.tensors[name]
            if self.flow.shares(tensor, root):
                # what is whole in one trip need not be in another
                plan = self.writer.eraser(launched.seen, name, False)
                part = self.part(grad, root, tensor, launched.text.arguments[name])
                self.writer.write_plan(launched, plan, {name: part})
        self.cotangents.add(root, grad)

    def _erased(self, launched: Launched, name: str, root: Tensor, grad: Grad) -> Grad | None:
        """The cotangent of a memory with zeros where a launch stores to an argument; None where that is everywhere."""
        tensor, node = launched.seen.tensors[name], launched.text.arguments[name]
        plan = self.writer.eraser(launched.seen, name, tensor is root or not self.flow.is_slice(tensor))
        if not plan.steps:
            self.writer.write_plan(launched, plan, {})
            return None
        left = Grad(self.body.bind(f"left_of_{self.references.hint(root)}", f"{grad.text}.clone()"), grad.element)
        self.writer.write_plan(launched, plan, {name: self.part(left, root, tensor, node)})
        return left

    def part(self, grad: Grad, root: Tensor, tensor: Tensor, node: ast.expr) -> Grad:
        """What of the cotangent of a memory a launch is given that wrote to a part of it."""
        if root is tensor or not self.flow.is_slice(tensor):
            return grad
        found = self.references.part(tensor, node)
        if found is None:
            raise CannotDerive(
                f"what the launch writes through `{ast.unparse(node)}` cannot be told from the stub's text",
                remedy="Write views as plain assignments.",
                line=node.lineno if hasattr(node, "lineno") else None,
            )
        return Grad(self.references.over(found[0], found[1], grad.text), grad.element)
