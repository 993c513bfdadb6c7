"""`References`: how the backward refers to tensors of the stub, which it may know by name, by form or not at all."""

from __future__ import annotations

import ast

from torch import Tensor

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.free_names import free_names
from kernel_agent.compiler.stub.flow import PERMUTED, RESHAPED, SAME, SLICED, Flow, replaced, tensors_in
from kernel_agent.compiler.stub.names import Names
from kernel_agent.compiler.stub.source import StubSource
from kernel_agent.compiler.stub.trace import TorchSeen
from kernel_agent.pairs.adjoints import plain_name

VIEWS = PERMUTED | RESHAPED | SLICED
_ONE_BY_ONE = frozenset(
    [
        *("add", "sub", "rsub", "mul", "div", "neg", "pow", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p"),
        *("sqrt", "rsqrt", "reciprocal", "square", "sigmoid", "tanh", "sin", "cos", "erf", "silu", "relu", "abs"),
        *("clamp", "maximum", "minimum", "where"),
    ]
)
"""Functions whose results have the shape that their arguments are broadcast to."""


class References:
    """Expressions of the backward for tensors of one traced call."""

    def __init__(self, flow: Flow, names: Names, source: StubSource) -> None:
        self.flow = flow
        self.names = names
        self.source = source

    def hint(self, tensor: Tensor) -> str:
        """What a variable that belongs to a tensor is called after."""
        return self.flow.local(tensor) or self.flow.inputs.get(id(tensor)) or "part"

    def outlasting(self, tensor: Tensor) -> str:
        """The same; of one that a trip of a loop made, after the tensor that it is a part of."""
        found = self.hint(tensor)
        return self.hint(self.flow.root(tensor)) if self.source.of_trips(ast.Name(found, ast.Load())) else found

    def named(self, tensor: Tensor, what: str) -> str:
        """The tensor itself. Raises `CannotDerive`, in which `what` says which it is."""
        name = self.flow.local(tensor)
        if name is None:
            raise CannotDerive(
                f"{what} has no name in the stub", remedy="Assign it to a name of its own before the return."
            )
        return self.names.tensor(name)

    def shape(self, tensor: Tensor) -> str:
        """Its shape; of one without a name, what follows from how it was made. Raises `CannotDerive`."""
        event = self.flow.maker_of(tensor)
        if event is None or self.flow.same_form(tensor) is not None:
            return self.asked(tensor, "shape")
        given, name = tensors_in(event.args), plain_name(event.name)
        if name in _ONE_BY_ONE | SAME and given:
            known = list(dict.fromkeys(map(self.shape, given)))
            return known[0] if len(known) == 1 else f"torch.broadcast_shapes({', '.join(known)})"
        axis = event.kwargs.get("dim", event.args[1] if len(event.args) > 1 else None)
        if name in ("sum", "mean", "logsumexp") and isinstance(axis, int) and tensor.dim() < given[0].dim():
            whole, axis = self.shape(given[0]), axis % given[0].dim()
            return f"({whole}[:{axis}] + {whole}[{axis + 1}:])" if axis else f"{whole}[1:]"
        node = self.source.expression(event.site)
        if node is not None:
            self.refuse_changed(node, event)
            text = self.names.expression(node, event.site.line, "part")
            text = text if event.name in VIEWS else f"({text})"
            if isinstance(event.result, (tuple, list)):
                text += f"[{next(place for place, one in enumerate(event.result) if one is tensor)}]"
            return f"{text}.shape"
        return self.asked(tensor, "shape")

    def count(self, tensor: Tensor) -> str:
        """How many elements it has. Raises `CannotDerive`."""
        known = self.flow.same_form(tensor) is not None or self.flow.maker_of(tensor) is None
        return self.asked(tensor, "numel()") if known else f"torch.Size({self.shape(tensor)}).numel()"

    def asked(self, tensor: Tensor, attribute: str) -> str:
        """Its shape or dtype. Raises `CannotDerive` where no name of the stub has that form."""
        name = self.flow.same_form(tensor)
        if name is not None:
            return self.names.ask(name, attribute)
        given = self.flow.inputs.get(id(tensor))
        if given is not None and given in self.source.parameters:
            return self.names.ask_first(given, attribute)
        raise CannotDerive(
            "a tensor between torch functions has no name in the stub, so that its shape is not known in the backward",
            remedy="Assign the results of torch functions to names of their own.",
        )

    def part(self, tensor: Tensor, node: ast.expr) -> tuple[ast.expr, str] | None:
        """What `Flow.view_text` finds of a slice, if it is one of the tensor that the name means at the end."""
        found = self.flow.view_text(tensor, node)
        if found is None or self.flow.names.get(found[1]) is not self.flow.root(tensor):
            return None
        return found

    def over(self, node: ast.expr, name: str, other: str) -> str:
        """The text of a view of a local with another variable in its place; what else it names reaches the backward.
        Raises `CannotDerive`."""
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and inner.id != name and self.source.is_local(inner.id):
                self.names.expression(inner, inner.lineno, inner.id)
        return replaced(node, name, other)

    def refuse_changed(self, node: ast.expr, event: TorchSeen) -> None:
        """Raise `CannotDerive` where a tensor in an argument of a torch function has other values at the end."""
        place = self.flow.place_of(event)
        for name in free_names(node):
            tensor = event.site.names.get(name)
            if isinstance(tensor, Tensor) and (
                self.flow.names.get(name) is not tensor or self.flow.written_after(place, tensor)
            ):
                call = f"torch's `{event.name.strip('_')}` (line {event.site.line})"
                raise CannotDerive(
                    f"`{name}`, which {call} needs, is changed later",
                    remedy="Give the later value a name of its own.",
                    line=event.site.line or None,
                )

    def device(self) -> str:
        """Where the stub's tensors are."""
        for name, value in self.names.final.items():
            if isinstance(value, Tensor):
                return self.names.ask(name, "device")
        return '"cuda"'
