"""`Cotangents`: the gradients that a backward holds at a point of its way, brought back through torch functions."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.free_names import free_names
from kernel_agent.compiler.stub import torchproducts, torchrows
from kernel_agent.compiler.stub.body import Body
from kernel_agent.compiler.stub.flow import PERMUTED, RESHAPED, SLICED, Flow, tensors_in
from kernel_agent.compiler.stub.lines import Line
from kernel_agent.compiler.stub.references import References
from kernel_agent.compiler.stub.torchcall import SUMMED, SUMMED_TO, TorchCall
from kernel_agent.compiler.stub.torchops import undone
from kernel_agent.compiler.stub.torchrules import adjoint
from kernel_agent.compiler.stub.trace import TorchSeen
from kernel_agent.pairs.adjoints import plain_name

RULES_OF = (torchproducts, torchrows)
"""Modules that add to the table of rules when they are imported."""
_FLAT = frozenset({"detach", "floor", "ceil", "round", "trunc", "sign", "sgn"})
"""Functions whose derivative is zero wherever they have one."""
_FORMS = frozenset({"empty_like", "zeros_like", "ones_like", "new_empty", "new_zeros", "new_ones"})
"""Functions that ask what they are given for its form alone."""
_SCALING = frozenset({"mul_", "div_", "__imul__", "__itruediv__"})
"""Functions that multiply a tensor where it lies."""
_RENAMED = RESHAPED | PERMUTED | {"contiguous", "alias"}
"""Functions whose results have the same elements in other places, and in the same dtype."""


@dataclass(frozen=True)
class Grad:
    """A gradient or cotangent that the backward holds in a variable."""

    text: str
    """An expression of the form of the tensor it belongs to."""
    element: str = ""
    """What it is made of, where that is not what the tensor is made of."""
    own: bool = False
    """It lies in memory as the tensor does, in memory of its own that nothing else reads: it may be added to."""
    fresh: bool = False
    """It is zero yet, so that it may be stored to."""

    @property
    def wide(self) -> str:
        """The same in float32."""
        return self.text if self.element == "f32" else f"{self.text}.float()"


class Cotangents:
    """Contributions to the gradient of each tensor, summed when they are asked for."""

    def __init__(self, flow: Flow, references: References, body: Body) -> None:
        self.flow = flow
        self.references = references
        self.body = body
        self.torch_ops: dict[str, None] = {}
        """Functions of the stub that compute, and whose adjoints were written."""
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
        found = self.set_aside(tensor)
        if not found:
            return None
        if len(found) == 1:
            return replace(found[0], own=False)
        parts = ", ".join(grad.text for grad in found)
        element = "f32" if any(grad.element == "f32" for grad in found) else found[0].element
        if len({grad.element for grad in found}) > 1:
            parts = ", ".join(grad.wide for grad in found)
        # The gate takes sums for a part of every backward, and `+` only where the stub adds.
        return Grad(self.body.bind(f"d{self.references.hint(tensor)}", f"torch.stack(({parts})).sum(0)"), element)

    def waits_for(self, name: str) -> bool:
        """Whether a contribution that nobody has asked for yet is written in terms of a variable."""
        held = (grad.text for _, found in self._held.values() for grad in found)
        return any(name in free_names(ast.parse(text, mode="eval")) for text in held)

    def waiting(self) -> list[Tensor]:
        """Tensors with contributions."""
        return [tensor for tensor, _ in self._held.values()]

    def set_aside(self, tensor: Tensor) -> list[Grad]:
        """A tensor's contributions, which it then no longer has."""
        return self._held.pop(id(tensor), (tensor, []))[1]

    def own(self, tensor: Tensor) -> Grad | None:
        """All that there is of a tensor's gradient, if that lies in memory that can be added to."""
        _, found = self._held.get(id(tensor), (tensor, []))
        return found[0] if len(found) == 1 and found[0].own else None

    def taken_over(self, tensor: Tensor) -> Grad:
        """The same, which the tensor then no longer has."""
        _, (grad,) = self._held.pop(id(tensor))
        return grad

    # --- torch functions

    def back_through(self, place: int, event: TorchSeen) -> None:
        """Go back over the torch function at a place of the trace. Raises `CannotDerive`."""
        changed = next((part for at, part in self.flow.changes if at == place and self.sharing(part)), None)
        if changed is not None:
            self._changed(event, changed)
        elif any(id(part) in self._held for part in tensors_in((event.result,))):
            self._undo(event)

    def _changed(self, event: TorchSeen, changed: Tensor) -> None:
        """Go back over a function that wrote into a tensor that was there before. Raises `CannotDerive`."""
        name, root = event.name, self.flow.root(changed)
        if name in _SCALING:
            self._scaled(event, changed)
            return
        filling = name in ("zero_", "fill_") or (name == "__setitem__" and not tensors_in(event.args[2:]))
        if not filling and name not in ("copy_", "add_", "__iadd__", "__setitem__"):
            raise _refused(event, "changes a tensor in place that gradients go through")
        grad = self.settled(root)
        if grad is None:
            return
        target = self.references.source.expression(event.site)
        if name != "__setitem__":
            target = (
                target.func.value if isinstance(target, ast.Call) and isinstance(target.func, ast.Attribute) else None
            )
        whole = name != "__setitem__" and (changed is root or not self.flow.is_slice(changed))
        adding = name in ("add_", "__iadd__")
        source = event.args[-1] if tensors_in(event.args[-1:]) and not filling else None
        if event.kwargs.get("alpha", 1) != 1 or event.kwargs.get("non_blocking"):
            raise _refused(event, "changes a tensor in place that gradients go through")
        part = grad.text if whole and changed is root else self._part(event, changed, target, grad.text)
        if source is not None and self.flow.is_active(source):
            self.body.helpers[SUMMED_TO] = None
            self.add(source, Grad(f"{SUMMED}({part}, {self.references.shape(source)})", "f32"))
        if adding:
            self.add(root, grad)
        elif not whole:
            left = self.body.bind(f"d{self.references.hint(root)}", f"{grad.text}.clone()")
            self.body.write(Line(f"{self._part(event, changed, target, left)}.zero_()"))
            self.add(root, Grad(left, grad.element))

    def _scaled(self, event: TorchSeen, changed: Tensor) -> None:
        """Go back over a function that multiplied a tensor where it lies. Raises `CannotDerive`."""
        root = self.flow.root(changed)
        call = TorchCall.of(event, self.references, self.body.helpers.setdefault)
        factor = event.args[1] if len(event.args) == 2 and not event.kwargs else None
        active = isinstance(factor, Tensor) and self.flow.is_active(factor)
        if call is None or factor is None or active or (changed is not root and self.flow.is_slice(changed)):
            raise _refused(event, "changes a tensor in place that gradients go through")
        grad = self.settled(root)
        if grad is not None:
            text = adjoint(call, grad.text, 0)
            assert text is not None  # of a product, or of a quotient of two
            self.add(root, Grad(self.body.bind(f"d{self.references.hint(root)}", text), "f32"))
            self.torch_ops[call.name] = None

    def _part(self, event: TorchSeen, changed: Tensor, target: ast.expr | None, grad: str) -> str:
        """What of a cotangent of a memory's root belongs to the part of it that a function wrote to."""
        known = None
        if target is not None and not (isinstance(target, ast.Name) and event.name == "__setitem__"):
            known = self.references.part(changed, target)
        if known is None:
            raise _refused(event, "writes to a part of a tensor that cannot be told from the stub's text")
        return self.references.over(known[0], known[1], grad)

    def _undo(self, event: TorchSeen) -> None:
        """Bring the cotangents of a torch function's results to its arguments."""
        results = [part for part in tensors_in((event.result,)) if id(part) in self._held]
        given = tensors_in((event.args, event.kwargs))
        active = [part for part in given if self.flow.is_active(part)]
        results = [result for result in results if not any(part is result for part in given)]
        if not active or plain_name(event.name) in _FLAT | _FORMS:
            for result in results:
                self._held.pop(id(result))
        elif event.name in SLICED and results:
            self._whole(event, results)
        else:
            for result in results:
                _, found = self._held[id(result)]
                if event.name in _RENAMED:  # what only names the same elements is summed later
                    self._held.pop(id(result))
                else:
                    found = [grad for grad in (self._taken(result),) if grad is not None]
                for grad in found:
                    self._undone(event, result, active, grad)

    def _undone(self, event: TorchSeen, result: Tensor, active: Sequence[Tensor], grad: Grad) -> None:
        found = undone(event, result, active, grad.text, self.references.shape)
        if found is not None:
            for undo in found:
                self.add(undo.tensor, Grad(undo.text, grad.element))
            return
        call = TorchCall.of(event, self.references, self.body.helpers.setdefault)
        if call is None or not all(
            isinstance(operand.value, Tensor) or not tensors_in((operand.value,)) for operand in call.operands
        ):
            raise _refused(event, "has no derivative that is written here")
        name = self._atom(grad.text, result)
        for place, operand in enumerate(call.operands):
            if any(operand.value is part for part in active):
                text = adjoint(call, name, place)
                if text is None:
                    raise _refused(event, "has no derivative that is written here")
                self.add(operand.value, Grad(self._atom(text, operand.value), "f32"))
                self.torch_ops[call.name] = None
        if any(part is value.value for value in call.keywords.values() for part in active):
            raise _refused(event, "has no derivative that is written here")

    def _atom(self, text: str, tensor: Tensor) -> str:
        """An expression that attributes can be asked of and that costs nothing to repeat."""
        return text if text.isidentifier() else self.body.bind(f"d{self.references.hint(tensor)}", text)

    def _whole(self, event: TorchSeen, results: Sequence[Tensor]) -> None:
        """Put cotangents of parts of a tensor into one of the whole."""
        call = TorchCall.of(event, self.references, self.body.helpers.setdefault)
        if call is None or tensors_in([operand.value for operand in call.operands[1:]]):
            raise _refused(event, "has no derivative that is written here")
        base = event.args[0]
        taken = {id(result): self._taken(result) for result in results}
        grads = [self._atom(grad.text, part) for part in results if (grad := taken[id(part)]) is not None]
        first = grads[0]
        shape = self.references.shape(base)
        zeros = f"torch.zeros({shape}, dtype={first}.dtype, device={first}.device)"
        alone = len(grads) == 1 and results[0].numel() == base.numel() and _in_order(event)
        more = f"{self.references.count(base)} > {first}.numel()" if alone else ""
        whole = self.body.bind(
            f"d{self.references.hint(base)}", f"{zeros} if {more} else {first}.reshape({shape})" if more else zeros
        )
        if more:
            self.body.write(Line(f"if {more}:"))
        for result, text in zip(results, grads, strict=True):
            part = call.over(whole)
            if isinstance(event.result, (tuple, list)):
                part += f"[{next(place for place, one in enumerate(event.result) if one is result)}]"
            if isinstance(call.node, ast.Subscript) and part == call.over(whole):
                self.body.write(Line(f"{part} = {text}", depth=bool(more)))
            else:
                self.body.write(Line(f"{part}.copy_({text})", depth=bool(more)))
        self.add(base, Grad(whole, "f32"))


def _in_order(event: TorchSeen) -> bool:
    """Whether a part of as many elements as the whole has them in the order of the whole."""
    if event.name != "__getitem__":
        return event.name != "diagonal"
    places = event.args[1] if isinstance(event.args[1], tuple) else (event.args[1],)
    return all(place is None or place is ... or isinstance(place, (int, slice)) for place in places)


def _refused(event: TorchSeen, why: str) -> CannotDerive:
    line = event.site.line or None
    return CannotDerive(
        f"torch's `{event.name.strip('_')}`" + (f" (line {line})" if line else "") + f" {why}",
        remedy="Move it into a kernel, or out of the stub.",
        line=line,
    )
