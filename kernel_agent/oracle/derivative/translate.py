"""Recorded operations as terms: casts, copies and changes of shape disappear, reductions go by the names of dims."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kernel_agent.oracle.derivative.slices import SliceRules
from kernel_agent.oracle.derivative.terms import Number, Term, is_number, number_of
from kernel_agent.oracle.derivative.trace import Node

_SAME = frozenset(
    {
        *("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "expand", "clone", "detach", "alias", "_to_copy"),
        *("contiguous", "lift_fresh", "lift_fresh_copy", "view_as", "expand_as", "_reshape_alias", "to"),
        *("positive", "_conj", "real", "unsafe_view", "view_of", "broadcast_in_dim"),
        *("convert_element_type", "collapse_view", "split_dim", "device_put"),
    }
)
"""Operations that change no value."""

_FUNCTIONS = {
    **{name: name for name in ("exp", "log", "sqrt", "rsqrt", "sigmoid", "tanh", "erf", "sin", "cos", "abs", "relu")},
    **{
        name: name
        for name in ("log1p", "expm1", "floor", "ceil", "round", "exp2", "log2", "softplus", "isnan", "atan2")
    },
    **{
        name: name for name in ("maximum", "minimum", "trunc", "acos", "asin", "atan", "sinh", "cosh", "erfc", "lgamma")
    },
    **dict.fromkeys(("sgn", "sign"), "sign"),
    **dict.fromkeys(("logical_not", "bitwise_not"), "not"),
    **dict.fromkeys(("fmod", "remainder"), "mod"),
}
"""Operation -> function of its tensor arguments."""

_INFIX = {
    **dict(
        zip(("eq", "ne", "lt", "le", "gt", "ge", "floor_divide"), ("==", "!=", "<", "<=", ">", ">=", "//"), strict=True)
    ),
    **dict.fromkeys(("logical_and", "bitwise_and", "__and__"), "and"),
    **dict.fromkeys(("logical_or", "bitwise_or", "__or__"), "or"),
}

_REDUCTIONS = {"sum": "sum", "mean": "mean", "amax": "max", "amin": "min", "logsumexp": "logsumexp", "prod": "prod"}
_ALONG = {"_softmax": "softmax", "_log_softmax": "log_softmax", "cumsum": "cumsum", "cumprod": "cumprod"}
_FILLED = {"zeros": 0, "zeros_like": 0, "new_zeros": 0, "ones": 1, "ones_like": 1, "new_ones": 1}
_UNSET = {"empty", "empty_like", "new_empty", "empty_strided", "empty_permuted"}

DEEPEST = 10
"""Operations on whole numbers that are shown one after the other."""
NESTED = 7
"""Operations within each other that a mean is looked for in."""


class Translation(SliceRules):
    """Terms of all nodes of a trace, in their order."""

    def __init__(self, nodes: Sequence[Node], sizes: Mapping[str, int], scalars: Mapping[float, str]) -> None:
        super().__init__(sizes, scalars)
        self.named: dict[int, str] = {}
        """Identity of a term -> what the function calls it."""
        self._depth: dict[int, int] = {}
        """Identity of a term of whole numbers -> operations on whole numbers that it takes one after the other."""
        self._summed: dict[int, int] = {}
        """Identity of a sum -> how many elements each of its results adds."""
        for node in nodes:
            self.terms.place = node.place
            term = self._translate(node)
            if not node.floating:
                term = self._shallow(node, term)
            self._of[id(node)] = term
            if node.name and term.args:
                self.named.setdefault(id(term), node.name)

    def _shallow(self, node: Node, term: Term) -> Term:
        """Long computations on whole numbers, such as a random generator, are told by their name alone."""
        depth = self._depth[id(term)] = 1 + max((self._depth.get(id(arg), 0) for arg in term.args), default=0)
        if depth <= DEEPEST:
            return term
        return self.terms.name(node.name or "(whole numbers)", node.shape)

    # --- one operation

    def _translate(self, node: Node) -> Term:
        terms, shape = self.terms, node.shape
        if node.op == "input":
            return terms.name(node.name, shape)
        if node.op == "made":
            return self.of(node.value) if node.value is not None else terms.name(node.name or "a constant", shape)
        if node.op in _SAME:
            return self.of(node.args[0])
        if node.op in _FILLED:
            return terms.number(_FILLED[node.op])
        if node.op in ("full", "full_like", "new_full", "scalar_tensor", "fill"):
            return self.of(node.args[-1] if node.op != "scalar_tensor" else node.args[0])
        if node.op in _UNSET:
            return terms.number(0)
        rule: Callable[[Node], Term] | None = getattr(self, f"_{node.op.strip('_')}", None)
        if rule is not None:
            return rule(node)
        if node.op in _REDUCTIONS:
            return self._reduction(node, _REDUCTIONS[node.op], node.args[1] if len(node.args) > 1 else None)
        if node.op in _ALONG:
            along = self.dim_name(node.args[0], node.args[1])
            return terms.make(_ALONG[node.op], self.of(node.args[0]), note=along, shape=shape)
        if node.op in _INFIX:
            return terms.make(_INFIX[node.op], self.of(node.args[0]), self.of(node.args[1]), shape=shape)
        if node.op in _FUNCTIONS:
            inner = [self.of(arg) for arg in node.args if isinstance(arg, (Node, float, int))]
            return terms.make(_FUNCTIONS[node.op], *inner, shape=shape)
        return self.other(node)

    def _add(self, node: Node) -> Term:
        a, b = self._with_alpha(node)
        return self._placed(a, b, node) or self._totalled(a, b, node) or self.terms.add(a, b, node.shape)

    def _totalled(self, a: Term, b: Term, node: Node) -> Term | None:
        """Sums of sums over the same dims, one for every step of a loop, as one term."""
        if b.op != "sum" or a.op not in ("sum", "total") or a.note != b.note:
            return None
        return self.terms.make("total", *(a.args if a.op == "total" else (a,)), b, note=b.note, shape=node.shape)

    def _placed(self, a: Term, b: Term, node: Node) -> Term | None:
        """Sums of slices that are put to their places, one for every step of a loop, as one term."""
        dim = str(b.note).partition("=")[0]
        if (
            b.op != "at"
            or "=" not in str(b.note)
            or a.op not in ("at", "places")
            or not str(a.note).startswith(f"{dim}=")
        ):
            return None
        parts = a.args if a.op == "places" else (a,)
        return self.terms.make("places", *parts, b, note=f"{dim}=", shape=node.shape)

    def _sub(self, node: Node) -> Term:
        a, b = self._with_alpha(node)
        return self.terms.subtract(a, b, node.shape)

    def _rsub(self, node: Node) -> Term:
        b, a = self._with_alpha(node)
        return self.terms.subtract(a, b, node.shape)

    def _with_alpha(self, node: Node) -> tuple[Term, Term]:
        alpha = node.options.get("alpha", 1)
        b = self.of(node.args[1])
        return self.of(node.args[0]), b if alpha == 1 else self.terms.multiply(self.of(alpha), b, node.shape)

    def _mul(self, node: Node) -> Term:
        a, b = self.of(node.args[0]), self.of(node.args[1])
        if _is_outer(node.args[0], node.args[1]):
            return self.terms.make("outer", a, b, shape=node.shape)
        for one, other in ((a, b), (b, a)):
            value = number_of(other)
            averaged = self._averaged(one, 1 / value) if value else None
            if averaged is not None:
                return averaged
        for one, other in ((a, b), (b, a)):  # r / N * (N g - sum g - ...) is r * (g - mean g - ...)
            divisor = number_of(one.args[1]) if one.op == "/" else None
            averaged = self._averaged(other, divisor) if divisor else None
            if averaged is not None:
                return self.terms.multiply(one.args[0], averaged, node.shape)
        return self.terms.multiply(a, b, node.shape)

    def _div(self, node: Node) -> Term:
        a, b = self.of(node.args[0]), self.of(node.args[1])
        value = number_of(b)
        if node.options.get("rounding_mode"):
            return self.terms.make("//", a, b, shape=node.shape)
        averaged = self._averaged(a, value) if value else None
        return self.terms.divide(a, b, node.shape) if averaged is None else averaged

    def _averaged(self, term: Term, divisor: Number, depth: int = 0) -> Term | None:
        """A term divided by a number, where that makes means of all its sums; else None.

        Terms share parts, and a search through all of them takes time exponential in the depth.
        """
        if depth > NESTED:
            return None
        if term.op == "sum":
            if not math.isclose(self._summed.get(id(term), 0), divisor, rel_tol=1e-12):
                return None
            return self.terms.make("mean", term.args[0], note=term.note, shape=term.shape)
        if term.op == "neg":
            inner = self._averaged(term.args[0], divisor, depth + 1)
            return None if inner is None else self.terms.negate(inner)
        if term.op == "total":
            means = [self._averaged(arg, divisor, depth + 1) for arg in term.args]
            known = [mean for mean in means if mean is not None]
            return (
                functools.reduce(lambda x, y: self.terms.add(x, y, term.shape), known)
                if len(known) == len(means)
                else None
            )
        if term.op in ("+", "-"):
            parts = [self._averaged(arg, divisor, depth + 1) for arg in term.args]
            if parts[0] is None or parts[1] is None:
                return None
            combine = self.terms.add if term.op == "+" else self.terms.subtract
            return combine(parts[0], parts[1], term.shape)
        if term.op in ("*", "/"):
            a, b = term.args
            if term.op == "*" and number_of(a) == divisor:
                return b
            first = self._averaged(a, divisor, depth + 1)
            if first is not None:
                combine = self.terms.multiply if term.op == "*" else self.terms.divide
                return combine(first, b, term.shape)
            second = self._averaged(b, divisor, depth + 1) if term.op == "*" else None
            return None if second is None else self.terms.multiply(a, second, term.shape)
        return None

    def _neg(self, node: Node) -> Term:
        return self.terms.negate(self.of(node.args[0]))

    def _reciprocal(self, node: Node) -> Term:
        return self.terms.divide(self.terms.number(1), self.of(node.args[0]), node.shape)

    def _pow(self, node: Node) -> Term:
        return self.terms.power(self.of(node.args[0]), self.of(node.args[1]), node.shape)

    def _square(self, node: Node) -> Term:
        return self.terms.power(self.of(node.args[0]), self.terms.number(2), node.shape)

    def _copy(self, node: Node) -> Term:
        return self.of(node.args[1])

    def _where(self, node: Node) -> Term:
        condition, a, b = (self.of(arg) for arg in node.args[:3])
        return a if a is b else self.terms.make("where", condition, a, b, shape=node.shape)

    def _masked_fill(self, node: Node) -> Term:
        value, mask, filled = (self.of(arg) for arg in node.args[:3])
        return self.terms.make("where", mask, filled, value, shape=node.shape)

    def _exp(self, node: Node) -> Term:
        inner = self.of(node.args[0])
        if inner.op == "log_softmax":
            return self.terms.make("softmax", *inner.args, note=inner.note, shape=node.shape)
        return self.terms.make("exp", inner, shape=node.shape)

    def _clamp(self, node: Node) -> Term:
        low = node.args[1] if len(node.args) > 1 else node.options.get("min")
        high = node.args[2] if len(node.args) > 2 else node.options.get("max")
        term = self.of(node.args[0])
        if low is not None:
            term = self.terms.make("maximum", term, self.of(low), shape=node.shape)
        return term if high is None else self.terms.make("minimum", term, self.of(high), shape=node.shape)

    # --- reductions and products

    def _reduction(self, node: Node, name: str, dims: Any) -> Term:
        source = node.args[0]
        over = [dim for dim in self.dims(source, dims) if source.shape and source.shape[dim] != 1]
        term = self.of(source)
        if name == "sum":
            repeated = [dim for dim in over if source.stride[dim] == 0]
            if repeated:  # autograd expands, then sums: every element is there as often
                over = [dim for dim in over if dim not in repeated]
                for dim in repeated:
                    term = self.terms.multiply(self.terms.name(self.dim_name(source, dim)), term, node.shape)
        if not over or is_number(term, 0) or (number_of(term) is not None and name != "sum"):
            return term
        if term.op == "neg" and name in ("sum", "mean"):
            return self.terms.negate(self._reduced(node, name, term.args[0], over))
        return self._reduced(node, name, term, over)

    def _reduced(self, node: Node, name: str, term: Term, over: Sequence[int]) -> Term:
        source = node.args[0]
        whole = len(over) == sum(size != 1 for size in source.shape)
        note = "" if whole and len(over) > 1 else ",".join(self.dim_name(source, dim) for dim in over)
        found = self.terms.make(name, term, note=note, shape=node.shape)
        self._summed[id(found)] = math.prod(source.shape[dim] for dim in over)
        return found

    def _var(self, node: Node) -> Term:
        source = node.args[0]
        dims = self.dims(source, node.args[1] if len(node.args) > 1 else None)
        unbiased = (node.args[2] if len(node.args) > 2 else node.options.get("correction", 1)) not in (0, 0.0)
        note = ",".join(self.dim_name(source, dim) for dim in dims) + ("; n-1" if unbiased else "")
        return self.terms.make("var", self.of(source), note=note, shape=node.shape)

    def _max(self, node: Node) -> Term:
        if node.part == 1:
            return self.terms.make("argmax", self.of(node.args[0]), note=self.dim_name(node.args[0], node.args[1]))
        if len(node.args) > 1 and isinstance(node.args[1], Node):
            return self.terms.make("maximum", self.of(node.args[0]), self.of(node.args[1]), shape=node.shape)
        return self._reduction(node, "max", node.args[1] if len(node.args) > 1 else None)

    def _mm(self, node: Node) -> Term:
        return self.terms.make("@", self.of(node.args[0]), self.of(node.args[1]), shape=node.shape)

    _bmm = _mv = _dot = _mm

    def _convolution(self, node: Node) -> Term:
        given = [self.of(arg) for arg in node.args[:3] if isinstance(arg, Node)]
        return self.terms.make("conv", *given, shape=node.shape)

    def _convolution_backward(self, node: Node) -> Term:
        gradient, source, weight = (self.of(arg) for arg in node.args[:3])
        if node.part == 2:
            return self.terms.make("sum over all but channels of", gradient, shape=node.shape)
        pair = (source, gradient) if node.part == 1 else (gradient, weight)
        return self.terms.make("correlation" if node.part == 1 else "conv transposed", *pair, shape=node.shape)

    def _constant_pad_nd(self, node: Node) -> Term:
        crops = all(size <= 0 for size in node.args[1])
        return self.terms.make("crop" if crops else "pad", self.of(node.args[0]), shape=node.shape)

    def _t(self, node: Node) -> Term:
        inner = self.of(node.args[0])
        if inner.op == "T":
            return inner.args[0]
        if inner.op == "@":  # (A B)^T = B^T A^T
            a, b = (self._turned(arg) for arg in inner.args)
            return self.terms.make("@", b, a, shape=node.shape)
        return inner if inner.op == "number" else self.terms.make("T", inner, shape=node.shape)

    def _permute(self, node: Node) -> Term:
        """Of permutations only the one that swaps the last two dims is told: products of matrices see no other."""
        rank = len(node.shape)
        order = [dim % rank for dim in node.args[1]]
        return self._t(node) if order == [*range(rank - 2), rank - 1, rank - 2] else self.of(node.args[0])

    def _turned(self, term: Term) -> Term:
        return term.args[0] if term.op == "T" else self.terms.make("T", term, shape=term.shape[::-1])

    def _transpose(self, node: Node) -> Term:
        rank = len(node.shape)
        swapped = {dim % rank for dim in node.args[1:3]}
        return self._t(node) if swapped == {rank - 1, rank - 2} else self.of(node.args[0])

    def _broadcast_tensors(self, node: Node) -> Term:
        given = node.args[0] if isinstance(node.args[0], (list, tuple)) else node.args
        return self.of(given[node.part or 0])


def _is_outer(a: Any, b: Any) -> bool:
    """Whether both sides of a product are spread along dims of the other."""
    if not (isinstance(a, Node) and isinstance(b, Node)) or len(a.shape) != len(b.shape):
        return False
    mine, theirs = _own_sizes(a), _own_sizes(b)
    pairs = list(zip(mine, theirs, strict=True))
    return any(n == 1 < m for n, m in pairs) and any(m == 1 < n for n, m in pairs)


def _own_sizes(node: Node) -> list[int]:
    """Sizes, with one for a dim along which all elements are the same one."""
    return [1 if step == 0 else size for size, step in zip(node.shape, node.stride, strict=True)]
