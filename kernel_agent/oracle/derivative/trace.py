"""Records what a PyTorch function and its autograd compute, operation by operation, on real tensors.

Composite operations are taken apart by torch's own decompositions, so that a layer norm shows its means and a loss its
logarithm. Values decide nothing here but the control flow of the function itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch.utils._pytree import tree_leaves, tree_map

from kernel_agent.ir.watching import Watch

WHOLE = frozenset(
    {
        *("_softmax", "_log_softmax", "logsumexp", "sigmoid", "tanh", "softplus", "relu", "reciprocal", "clamp"),
        *("where", "sgn", "sign", "abs", "mm", "bmm", "mean", "sum", "amax", "amin", "cumsum", "rsub", "masked_fill"),
        *("tril", "triu", "select", "slice", "narrow", "select_backward", "slice_backward", "gather", "scatter_add"),
        *("index_add", "index_select", "flip", "roll", "stack", "cat", "split", "split_with_sizes", "unbind", "arange"),
        *(
            "constant_pad_nd",
            "repeat",
            "_to_copy",
            "expand",
            "t",
            "transpose",
            "permute",
            "view",
            "unsqueeze",
            "squeeze",
        ),
        *("zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "new_zeros"),
    }
)
"""Operations that are shown as they are although torch could take them apart."""


@dataclass(eq=False)
class Node:
    """One value."""

    op: str
    """Name of the operation without overload, `input` for an argument, `made` for a tensor from outside."""
    args: tuple[Any, ...]
    """As the operation got them; tensors as nodes."""
    options: dict[str, Any]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    place: int
    """In order of recording."""
    part: int | None = None
    """Which of several results."""
    name: str = ""
    """What the function, or an argument, calls it."""
    floating: bool = True
    """Its elements are floats."""
    value: float | None = None
    """Of a tensor that came from outside and holds one number."""


@dataclass
class Storage:
    """Tensors over one memory."""

    nodes: dict[int, tuple[Tensor, Node]] = field(default_factory=dict)
    """Identity of a tensor -> it, kept alive, and its value."""


class Trace(Watch):
    """Records while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[Node] = []
        self._storages: dict[int, Storage] = {}

    def name(self, tensor: Tensor, name: str) -> None:
        """Say what an argument is called; its value is given from outside."""
        self._keep(tensor, self._node("input", (), {}, tensor, name=name))

    def node(self, tensor: Tensor) -> Node:
        """The value of a tensor as it is now."""
        storage = self._storages.get(_key(tensor))
        known = None if storage is None else storage.nodes.get(id(tensor))
        if known is not None:
            return known[1]
        node = self._node("made", (), {}, tensor)
        if tensor.numel() == 1:
            node.value = float(tensor.detach().reshape(()).to(torch.float64))
        self._keep(tensor, node)
        return node

    def knows(self, tensor: Tensor) -> bool:
        """Whether a tensor was met."""
        storage = self._storages.get(_key(tensor))
        return storage is not None and id(tensor) in storage.nodes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Take the operation apart, or run and record it."""
        options = kwargs or {}
        name = func._schema.name.split("::")[1]
        rule = decomposition_table.get(func)
        if rule is not None and name not in WHOLE and not func._schema.is_mutable:
            with self:
                result = rule(*args, **options)
            if result is not NotImplemented:
                return result
        given = tree_map(self._read, list(args)), tree_map(self._read, options)
        result = func(*args, **options)
        if func._schema.is_mutable:
            self._mutated(name, args, given, result)
        else:
            self._results(name, given, result)
        return result

    def _read(self, value: Any) -> Any:
        return self.node(value) if isinstance(value, Tensor) else value

    def _results(self, name: str, given: tuple[list[Any], dict[str, Any]], result: Any) -> None:
        args, options = tuple(given[0]), given[1]
        if isinstance(result, Tensor):
            self._keep(result, self._node(name, args, options, result))
            return
        for part, tensor in enumerate(tree_leaves(result)):
            if isinstance(tensor, Tensor):
                self._keep(tensor, self._node(name, args, options, tensor, part=part))

    def _mutated(self, name: str, args: tuple[Any, ...], given: tuple[list[Any], dict[str, Any]], result: Any) -> None:
        """A tensor was written: it, and all that show the same memory whole, have another value now."""
        target = args[0]
        if not isinstance(target, Tensor):
            self._results(name, given, result)
            return
        storage = self._storages[_key(target)]
        before = storage.nodes[id(target)][1]
        made = self._node(name.removesuffix("_"), tuple(given[0]), given[1], target)
        for key, (tensor, held) in list(storage.nodes.items()):
            if tensor is target or (tensor.numel() == target.numel() and _overlap(tensor, target)):
                storage.nodes[key] = (tensor, made)
            elif _overlap(tensor, target):
                storage.nodes[key] = (tensor, self._node("write", (held, before, made), {}, tensor))

    def _node(
        self,
        op: str,
        args: tuple[Any, ...],
        options: dict[str, Any],
        tensor: Tensor,
        *,
        part: int | None = None,
        name: str = "",
    ) -> Node:
        size, stride = tuple(tensor.shape), tuple(tensor.stride())
        node = Node(op, args, options, size, stride, len(self.nodes), part, name, tensor.is_floating_point())
        self.nodes.append(node)
        return node

    def _keep(self, tensor: Tensor, node: Node) -> None:
        storage = self._storages.setdefault(_key(tensor), Storage())
        storage.nodes[id(tensor)] = (tensor, node)


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one storage share an element."""
    return bool(torch.isin(_places(a), _places(b)).any())


def _places(tensor: Tensor) -> Tensor:
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    return torch.arange(elements).as_strided(tensor.size(), tensor.stride(), tensor.storage_offset()).flatten()


def elements(node: Node) -> int:
    """How many a value has."""
    return math.prod(node.shape)
