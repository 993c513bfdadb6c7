"""`Cotangents`: the gradients that a backward holds at a point of its way, brought back through torch functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.stub.body import Body
from kernel_agent.compiler.stub.flow import Flow, is_float, storage_of, tensors_in
from kernel_agent.compiler.stub.lines import Line
from kernel_agent.compiler.stub.references import References
from kernel_agent.compiler.stub.torchops import Undo, undone
from kernel_agent.compiler.stub.trace import TorchSeen


@dataclass(frozen=True)
class Grad:
    """A gradient or cotangent that the backward holds in a variable."""

    text: str
    """An expression of the form of the tensor it belongs to."""
    element: str = ""
    """What it is made of, where that is not what the tensor is made of."""


class Cotangents:
    """Contributions to the gradient of each tensor, summed when they are asked for."""

    def __init__(self, flow: Flow, references: References, body: Body) -> None:
        self.flow = flow
        self.references = references
        self.body = body
        self._held: dict[int, tuple[Tensor, list[Grad]]] = {}

    def add(self, tensor: Tensor, grad: Grad) -> None:
        """A contribution."""
        self._held.setdefault(id(tensor), (tensor, []))[1].append(grad)

    def sharing(self, tensor: Tensor) -> list[Tensor]:
        """Tensors with contributions that lie in the memory of one."""
        return [other for other, _ in self._held.values() if self.flow.shares(other, tensor)]

    def settled(self, root: Tensor) -> Grad | None:
        """The cotangent of a memory's root: what was found of its views is brought there."""
        for tensor, _ in list(self._held.values()):
            if tensor is not root and self.flow.shares(tensor, root):
                chain = self.flow.chain(tensor)
                for event in reversed(chain[len(self.flow.chain(root)) :]):
                    self._undo(event)
        return self._taken(root)

    def _taken(self, tensor: Tensor) -> Grad | None:
        """The sum of a tensor's contributions, which it then no longer has."""
        _, found = self._held.pop(id(tensor), (tensor, []))
        if not found:
            return None
        if len(found) == 1:
            return found[0]
        parts = ", ".join(grad.text for grad in found)
        element = "f32" if any(grad.element == "f32" for grad in found) else found[0].element
        if len({grad.element for grad in found}) > 1:
            parts = ", ".join(f"{grad.text}.float()" if grad.element != "f32" else grad.text for grad in found)
        return Grad(self.body.bind(f"d{self.references.hint(tensor)}", f"torch.stack(({parts})).sum(0)"), element)

    # --- torch functions

    def back_through(self, place: int, event: TorchSeen) -> None:
        """Go back over the torch function at a place of the trace. Raises `CannotDerive`."""
        for at, changed in self.flow.changes:
            if at == place and self.sharing(changed):
                if event.name in ("zero_", "fill_"):
                    self.settled(self.flow.root(changed))
                    continue
                raise _refused(event, "changes a tensor in place that gradients go through")
        if any(id(part) in self._held for part in tensors_in((event.result,))):
            self._undo(event)

    def _undo(self, event: TorchSeen) -> None:
        """Bring the cotangents of a torch function's results to its arguments."""
        results = [part for part in tensors_in((event.result,)) if id(part) in self._held]
        active = [part for part in tensors_in(event.args) if storage_of(part) in self.flow.active and is_float(part)]
        for result in results:
            if any(part is result for part in active):
                continue
            if not active or event.name in ("detach",):
                self._held.pop(id(result))
                continue
            grad = self._taken(result)
            assert grad is not None
            for undo in self._undone(event, result, active, grad):
                self.add(undo.tensor, Grad(undo.text, grad.element))

    def _undone(self, event: TorchSeen, result: Tensor, active: Sequence[Tensor], grad: Grad) -> list[Undo]:
        found = undone(event, result, active, grad.text, self.references.shape)
        if found is None:
            raise _refused(event, "has no derivative that is written here")
        for undo in found:
            self.body.write(*(Line(text) for text in undo.before))
        return found


def _refused(event: TorchSeen, why: str) -> CannotDerive:
    line = event.site.line or None
    return CannotDerive(
        f"torch's `{event.name.strip('_')}`" + (f" (line {line})" if line else "") + f" {why}",
        remedy="Move it into a kernel, or out of the stub.",
        line=line,
    )
