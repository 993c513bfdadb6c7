"""Operations that take parts of tensors, or put parts in their places, as terms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernel_agent.oracle.derivative.terms import Term, Terms, number_of
from kernel_agent.oracle.derivative.trace import Node, elements
from kernel_agent.oracle.facts.dims import by_size


class Reading:
    """Terms of nodes that are known already."""

    def __init__(self, sizes: Mapping[str, int], scalars: Mapping[float, str]) -> None:
        self.terms = Terms()
        self.sizes = sizes
        self.scalars = scalars
        self._of: dict[int, Term] = {}

    def of(self, value: Any) -> Term:
        """The term of a node, or of a number."""
        if isinstance(value, Node):
            return self._of[id(value)]
        if isinstance(value, (bool, int, float)):
            name = None if isinstance(value, bool) else self.scalars.get(float(value))
            return self.terms.number(value) if name is None else self.terms.name(name)
        return self.terms.name(str(value).removeprefix("torch."))

    def dims(self, node: Node, dims: Any) -> list[int]:
        """Dims that a reduction names, as positions; all of them where it names none."""
        if isinstance(dims, int):
            dims = [dims]
        rank = len(node.shape)
        return [dim % rank for dim in dims] if dims else list(range(rank))

    def dim_name(self, node: Node, dim: int) -> str:
        """What the size of a dim is called."""
        size = node.shape[dim % len(node.shape)] if node.shape else 1
        return by_size(size, self.sizes)

    def other(self, node: Node) -> Term:
        """An operation without a rule, as a call."""
        parts = [self.of(arg) for arg in node.args if isinstance(arg, Node)]
        parts += [
            self.of(one) for arg in node.args if isinstance(arg, (list, tuple)) for one in arg if isinstance(one, Node)
        ]
        numbers = [str(arg) for arg in node.args if isinstance(arg, (int, float)) and not isinstance(arg, bool)]
        note = ",".join(numbers) if node.part is None else ",".join([*numbers, f"result {node.part}"])
        return self.terms.make(node.op.strip("_"), *parts, note=f"|{note}" if note else "", shape=node.shape)


class SliceRules(Reading):
    """One method per operation, by its name."""

    def _as_strided(self, node: Node) -> Term:
        source = node.args[0]
        return self.of(source) if elements(source) == elements(node) else self.part(node, "strided")

    def _select(self, node: Node) -> Term:
        source, dim, index = node.args[:3]
        return self.part(node, f"{self.dim_name(source, dim)}={index}")

    def _slice(self, node: Node) -> Term:
        source, dim = node.args[0], node.args[1] if len(node.args) > 1 else 0
        size = source.shape[dim]
        start = node.args[2] if len(node.args) > 2 and node.args[2] is not None else 0
        end = min(node.args[3], size) if len(node.args) > 3 and node.args[3] is not None else size
        step = node.args[4] if len(node.args) > 4 else 1
        if node.shape[dim] == size:
            return self.of(source)
        start, end = start % size if start < 0 else start, end % size if end < 0 else end
        text = f"{start}:{end}" + (f":{step}" if step != 1 else "")
        return self.part(node, f"{text} of {self.dim_name(source, dim)}")

    def _split(self, node: Node) -> Term:
        source, dim = node.args[0], node.args[2] if len(node.args) > 2 else node.options.get("dim", 0)
        return self.part(node, f"part {node.part} of {self.dim_name(source, dim)}")

    _split_with_sizes = _split

    def _unbind(self, node: Node) -> Term:
        dim = node.args[1] if len(node.args) > 1 else 0
        return self.part(node, f"{self.dim_name(node.args[0], dim)}={node.part}")

    def part(self, node: Node, note: str) -> Term:
        """A part of the first argument; a part of a number is that number."""
        inner = self.of(node.args[0])
        return inner if inner.op == "number" else self.terms.make("part", inner, note=note, shape=node.shape)

    def _select_backward(self, node: Node) -> Term:
        gradient, sizes, dim, index = node.args[:4]
        return self.terms.make(
            "at", self.of(gradient), note=f"{by_size(sizes[dim], self.sizes)}={index}", shape=node.shape
        )

    def _slice_backward(self, node: Node) -> Term:
        gradient, sizes, dim, start, end = node.args[:5]
        if sizes[dim] == gradient.shape[dim]:
            return self.of(gradient)
        step = f":{node.args[5]}" if len(node.args) > 5 and node.args[5] != 1 else ""
        note = f"{start}:{min(end, sizes[dim])}{step} of {by_size(sizes[dim], self.sizes)}"
        return self.terms.make("at", self.of(gradient), note=note, shape=node.shape)

    def _gather(self, node: Node) -> Term:
        source, dim, index = node.args[:3]
        return self.terms.make(
            "gather", self.of(source), self.of(index), note=self.dim_name(source, dim), shape=node.shape
        )

    def _scatter(self, node: Node) -> Term:
        target, dim, index, source = node.args[:4]
        if number_of(self.of(target)) == 0:
            note = self.dim_name(target, dim)
            return self.terms.make("scatter", self.of(source), self.of(index), note=note, shape=node.shape)
        return self.other(node)

    def _index_select(self, node: Node) -> Term:
        return self._gather(node)

    def _index(self, node: Node) -> Term:
        inner = [self.of(index) for index in node.args[1] if index is not None]
        return self.terms.make("lookup", self.of(node.args[0]), *inner, shape=node.shape)

    _unsafe_index = _index

    def _scatter_add(self, node: Node) -> Term:
        target, dim, index, source = node.args[:4]
        return self._scattered(node, target, index, source, self.dim_name(target, dim))

    def _index_add(self, node: Node) -> Term:
        target, dim, index, source = node.args[:4]
        return self._scattered(node, target, index, source, self.dim_name(target, dim))

    def _index_put(self, node: Node) -> Term:
        target, indices, source = node.args[:3]
        index = next(index for index in indices if index is not None)
        if len(node.args) > 3 and node.args[3]:
            return self._scattered(node, target, index, source, by_size(target.shape[0], self.sizes))
        return self.terms.make("set", self.of(target), self.of(index), self.of(source), shape=node.shape)

    _unsafe_index_put = _index_put

    def _scattered(self, node: Node, target: Any, index: Any, source: Any, dim: str) -> Term:
        added = self.terms.make("scatter_add", self.of(source), self.of(index), note=dim, shape=node.shape)
        return self.terms.add(self.of(target), added, node.shape)

    def _cat(self, node: Node) -> Term:
        parts = [self.of(part) for part in node.args[0] if elements(part)]
        dim = node.args[1] if len(node.args) > 1 else 0
        name = by_size(node.shape[dim], self.sizes)
        return parts[0] if len(parts) == 1 else self.terms.make("concat", *parts, note=name, shape=node.shape)

    def _stack(self, node: Node) -> Term:
        dim = node.args[1] if len(node.args) > 1 else 0
        parts = [self.of(part) for part in node.args[0]]
        return self.terms.make("stack", *parts, note=by_size(node.shape[dim], self.sizes), shape=node.shape)

    def _write(self, node: Node) -> Term:
        held, view, value = (self.of(arg) for arg in node.args)
        return self.terms.make("with", held, view, value, shape=node.shape)

    def _flip(self, node: Node) -> Term:
        inner = self.of(node.args[0])
        note = ",".join(self.dim_name(node.args[0], dim) for dim in node.args[1])
        if inner.op == "reverse" and inner.note == note:
            return inner.args[0]
        if inner.op == "cumsum" and inner.args[0].op == "reverse" and inner.note == note:
            return self.terms.make("cumsum from the end", inner.args[0].args[0], note=note, shape=node.shape)
        return self.terms.make("reverse", inner, note=note, shape=node.shape)

    def _arange(self, node: Node) -> Term:
        count = node.shape[0] if node.shape else 1
        names = [name for name, size in self.sizes.items() if size == count]
        return self.terms.make("index", note=names[0] if names else str(count), shape=node.shape)

    def _tril(self, node: Node) -> Term:
        return self._triangle(node, "tril")

    def _triu(self, node: Node) -> Term:
        return self._triangle(node, "triu")

    def _triangle(self, node: Node, name: str) -> Term:
        diagonal = node.args[1] if len(node.args) > 1 else 0
        return self.terms.make(
            name, self.of(node.args[0]), note=f"|{diagonal:+d}" if diagonal else "", shape=node.shape
        )
