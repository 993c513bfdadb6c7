"""`TorchCall`: a torch function that a stub calls, with the expressions that the backward has for what goes in and
out."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import Tensor

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.free_names import free_names
from kernel_agent.compiler.stub.references import References
from kernel_agent.compiler.stub.trace import TorchSeen
from kernel_agent.pairs.adjoints import plain_name

SUMMED = "summed_to"
SUMMED_TO = f'''def {SUMMED}(grad, shape):
    """The cotangent of a tensor that was broadcast."""
    lead = grad.dim() - len(shape)
    axes = [axis for axis in range(grad.dim()) if axis < lead or shape[axis - lead] == 1 != grad.shape[axis]]
    return (grad.sum(axes) if axes else grad).reshape(shape)
'''
_ATOMS = (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Constant)


@dataclass(frozen=True)
class Operand:
    """One argument."""

    value: Any
    node: ast.expr
    """What the stub wrote for it."""


@dataclass(frozen=True)
class TorchCall:
    """A call whose arguments are written one by one."""

    name: str
    """In its plain spelling: `mul` for `*`."""
    event: TorchSeen
    node: ast.expr
    """The call."""
    operands: tuple[Operand, ...]
    """The tensor of a method first; those of an operator in the order of the text."""
    keywords: dict[str, Operand]
    references: References
    helper: Callable[[str], object]
    """Told of the text of a function that the backward calls."""

    @classmethod
    def of(cls, event: TorchSeen, references: References, helper: Callable[[str], object]) -> TorchCall | None:
        """The call of an event; None where the stub's text does not show its arguments."""
        node = references.source.expression(event.site)
        written = None if node is None else _operands(node, event, references.source.module)
        if node is None or written is None:
            return None
        given = event.args
        if len(written) > len(given) and isinstance(node, ast.Call):
            # torch.nn.functional tells of what follows the tensors by name, in the order of its parameters
            named = {keyword.arg for keyword in node.keywords}
            rest = [value for name, value in event.kwargs.items() if name not in named]
            given += tuple(rest[: len(written) - len(given)])
        if len(written) != len(given):
            return None
        values = tuple(reversed(given)) if _is_reversed(event.name) else given
        operands = tuple(Operand(value, one) for value, one in zip(values, written, strict=True))
        keywords = {
            keyword.arg: Operand(event.kwargs.get(keyword.arg), keyword.value)
            for keyword in (node.keywords if isinstance(node, ast.Call) else ())
            if keyword.arg is not None
        }
        return cls(_plain(event.name), event, node, operands, keywords, references, helper)

    def text(self, place: int) -> str:
        """An argument, as the backward writes it. Raises `CannotDerive`."""
        return self._shown(self.operands[place].node)

    def result(self) -> str:
        """What the call returned. Raises `CannotDerive`."""
        value = self.event.result
        name = self.references.flow.local(value) if isinstance(value, Tensor) else None
        flow = self.references.flow
        if name is not None and not flow.written_after(flow.place_of(self.event), value):
            return self.references.names.tensor(name)
        return self._shown(self.node)

    def again(self) -> str:
        """The call itself, of the same arguments. Raises `CannotDerive`."""
        return self._shown(self.node)

    def over(self, name: str) -> str:
        """The call with a name in place of its first argument. Raises `CannotDerive`."""
        node = copy.deepcopy(self.node)
        own = _operands(node, self.event, self.references.source.module)
        assert own is not None
        first = own[0]
        names = [one for one in free_names(node) if one not in free_names(first) and not self._known(one)]
        for one in names:
            self._shown(ast.Name(one, ast.Load()))
        return ast.unparse(_Replaced(first, name).visit(node))

    def _known(self, name: str) -> bool:
        return self.references.source.is_known(name)

    def shape(self, place: int) -> str:
        """The shape of an argument. Raises `CannotDerive`."""
        return self.references.shape(self.operands[place].value)

    def option(self, name: str, place: int, default: Any) -> Any:
        """A value that the stub gives literally, by name or position. Raises `CannotDerive` for any other."""
        given = self.keywords.get(name) or (self.operands[place] if place < len(self.operands) else None)
        if given is None:
            return default
        try:
            return ast.literal_eval(given.node)
        except ValueError:
            raise CannotDerive(
                f"`{name}` of torch's `{self.name}` (line {self.node.lineno}) is computed",
                remedy="Write it as a number.",
                line=self.node.lineno,
            ) from None

    def summed(self, grad: str, place: int) -> str:
        """A cotangent of the result's shape as one of an argument's, which may have been broadcast."""
        given = self.operands[place].value
        others = [one.value for one in self.operands if isinstance(one.value, Tensor) and one.value is not given]
        if not others or (all(other.dim() == 0 for other in others) and given.dim() > 0):
            return grad
        self.helper(SUMMED_TO)
        return f"{SUMMED}({grad}, {self.shape(place)})"

    def _shown(self, node: ast.expr) -> str:
        references, event = self.references, self.event
        references.refuse_changed(node, event)
        text = references.names.expression(node, event.site.line, "operand")
        return text if isinstance(ast.parse(text, mode="eval").body, _ATOMS) else f"({text})"


def _operands(node: ast.expr, event: TorchSeen, module: ModuleType) -> list[ast.expr] | None:
    """Expressions of the positional arguments; None where stars are about. `module`: of the stub."""
    if isinstance(node, ast.BinOp):
        return [node.left, node.right]
    if isinstance(node, ast.UnaryOp):
        return [node.operand]
    if isinstance(node, ast.Subscript):
        return [node.value, node.slice]
    if isinstance(node, ast.Attribute):
        return [node.value]
    if not isinstance(node, ast.Call) or any(isinstance(one, ast.Starred) for one in node.args):
        return None
    if any(keyword.arg is None for keyword in node.keywords):
        return None
    if not isinstance(node.func, ast.Attribute) or _is_of_module(node.func, event, module):
        return node.args
    return [node.func.value, *node.args]


def _is_of_module(function: ast.Attribute, event: TorchSeen, module: ModuleType) -> bool:
    """Whether a function is a module's, and no method. How many arguments there are does not say so: some methods tell
    of those behind the tensor by name, as `x.split(sizes, 1)`."""
    root: ast.expr = function
    while isinstance(root, ast.Attribute):
        root = root.value
    if not isinstance(root, ast.Name):
        return False
    return isinstance(event.site.names.get(root.id, getattr(module, root.id, None)), ModuleType)


class _Replaced(ast.NodeTransformer):
    """A name for one expression."""

    def __init__(self, old: ast.expr, name: str) -> None:
        self.old = old
        self.name = name

    def visit(self, node: ast.AST) -> ast.AST:
        """Any node."""
        return ast.Name(self.name, ast.Load()) if node is self.old else self.generic_visit(node)


def _is_reversed(name: str) -> bool:
    return name.startswith("__r") and name not in ("__rshift__", "__round__")


def _plain(name: str) -> str:
    found = plain_name(name)
    return found.removeprefix("r") if name in ("__rsub__", "__rtruediv__", "__rpow__") else found
