"""`References`: how the backward refers to tensors of the stub, which it may know by name, by form or not at all."""

from __future__ import annotations

import ast

from torch import Tensor

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.stub.flow import Flow
from kernel_agent.compiler.stub.names import Names
from kernel_agent.compiler.stub.source import StubSource


class References:
    """Expressions of the backward for tensors of one traced call."""

    def __init__(self, flow: Flow, names: Names, source: StubSource) -> None:
        self.flow = flow
        self.names = names
        self.source = source

    def hint(self, tensor: Tensor) -> str:
        """What a variable that belongs to a tensor is called after."""
        return self.flow.local(tensor) or self.flow.inputs.get(id(tensor)) or "part"

    def named(self, tensor: Tensor, what: str) -> str:
        """The tensor itself. Raises `CannotDerive`, in which `what` says which it is."""
        name = self.flow.local(tensor)
        if name is None:
            raise CannotDerive(
                f"{what} has no name in the stub", remedy="Assign it to a name of its own before the return."
            )
        return self.names.tensor(name)

    def shape(self, tensor: Tensor) -> str:
        """Its shape. Raises `CannotDerive`."""
        return self.asked(tensor, "shape")

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
        if found is None or self.names.final.get(found[1]) is not self.flow.root(tensor):
            return None
        return found

    def device(self) -> str:
        """Where the stub's tensors are."""
        for name, value in self.names.final.items():
            if isinstance(value, Tensor):
                return self.names.ask(name, "device")
        return '"cuda"'
