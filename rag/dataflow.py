"""What a kernel computes and how it walks memory, with every name taken away: features of the values that it stores.

A run of operations depends on how an author splits statements. Here each name is followed to the expression it was last
given, so that `p = tl.exp(s - m)` and `d = s - m; p = tl.exp(d)` give the same features. Arithmetic of addresses is
kept apart from arithmetic of values: all kernels share most of the former.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from rag.structure import LANGUAGE, operation_of

_CASTS = frozenset(
    {"tl.cast", ".to", ".cast", "tl.broadcast_to", "tl.expand_dims", "tl.view", "tl.multiple_of", "tl.max_contiguous"}
)
"""Calls that hand on the value of their first argument, or of what they are called on."""

_SINKS = frozenset({"tl.store", "tl.atomic_add", "tl.atomic_max", "tl.atomic_min", "tl.atomic_xchg", "tl.atomic_cas"})
_SAME = {"tl.exp2": "tl.exp", "tl.log2": "tl.log", "tl.fma": "Add", "tl.erf": "tl.erf", "tl.div_rn": "Div"}
_PLAIN = (0.0, 1.0, 2.0, 0.5, -1.0)
"""Numbers that tell nothing."""

_CALLS = 4
"""How deep helpers are followed."""


@dataclass(eq=False)
class Node:
    """A value: the operation that made it and what that took."""

    op: str
    parts: list[Node] = field(default_factory=list)
    address: Node | None = None
    """Of a load: where it reads. Not a part of its value."""


def flow_features(kernels: Sequence[ast.FunctionDef]) -> Counter[str]:
    """Count the features of kernels: operations fed by operations, ways of access, comparisons, loops, numbers."""
    own = {kernel.name: kernel for kernel in kernels}
    called = {
        node.func.id
        for kernel in kernels
        for node in ast.walk(kernel)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in own
    }
    found: Counter[str] = Counter()
    for kernel in kernels:
        if kernel.name not in called:  # helpers are followed where they are called
            trace = _Trace(own)
            trace.run(kernel.body, {argument.arg: Node("") for argument in _arguments(kernel)})
            found.update(trace.features())
    return found


def _arguments(function: ast.FunctionDef) -> list[ast.arg]:
    return [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]


class _Trace:
    """One kernel, run over values that are only expressions."""

    def __init__(self, own: dict[str, ast.FunctionDef], depth: int = 0) -> None:
        self.own, self.depth = own, depth
        self.sinks: list[tuple[str, Node, Node]] = []
        """Operation, address and value of each store."""
        self.loops: list[str] = []
        self.returned: Node | None = None
        self.level = 0

    def run(self, body: Iterable[ast.stmt], names: dict[str, Node]) -> None:
        """Follow statements in order; a loop's body and both branches once."""
        for statement in body:
            self._statement(statement, names)

    def _statement(self, statement: ast.stmt, names: dict[str, Node]) -> None:
        if isinstance(statement, ast.Assign):
            value = self._value(statement.value, names)
            for target in statement.targets:
                self._bind(target, value, names)
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            self._bind(statement.target, self._value(statement.value, names), names)
        elif isinstance(statement, ast.AugAssign):
            old = self._value(statement.target, names)
            value = Node(type(statement.op).__name__, [old, self._value(statement.value, names)])
            self._bind(statement.target, value, names)
        elif isinstance(statement, ast.For):
            self._loop(statement, names)
        elif isinstance(statement, ast.While):
            self.loops.append(f"while depth{self.level}")
            self.level += 1
            self.run(statement.body, names)
            self.level -= 1
        elif isinstance(statement, ast.If):
            self.run(statement.body, names)
            self.run(statement.orelse, names)
        elif isinstance(statement, ast.Return) and statement.value is not None:
            self.returned = self._value(statement.value, names)
        elif isinstance(statement, ast.Expr):
            self._value(statement.value, names)

    def _loop(self, loop: ast.For, names: dict[str, Node]) -> None:
        bounds = [self._value(argument, names) for argument in getattr(loop.iter, "args", [])]
        ragged = any(node.op == "tl.load" for bound in bounds for node in below(bound))
        owned = any(node.op == "tl.program_id" for bound in bounds for node in below(bound))
        kind = "static" if "static_range" in ast.dump(loop.iter) else "ragged" if ragged else "cut" if owned else "loop"
        self.loops.append(f"{kind} depth{self.level}")
        self._bind(loop.target, Node("step"), names)
        self.level += 1
        self.run(loop.body, names)
        self.level -= 1

    def _bind(self, target: ast.expr, value: Node, names: dict[str, Node]) -> None:
        if isinstance(target, ast.Name):
            names[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            parts = value.parts if value.op == "tuple" and len(value.parts) == len(target.elts) else None
            for position, element in enumerate(target.elts):
                self._bind(element, parts[position] if parts else value, names)

    def _value(self, node: ast.expr, names: dict[str, Node]) -> Node:
        if isinstance(node, ast.Name):
            return names.get(node.id) or Node("")
        if isinstance(node, ast.Constant):
            return Node(number_feature(node.value))
        if isinstance(node, ast.Call):
            return self._call(node, names)
        if isinstance(node, ast.BinOp):
            return Node(type(node.op).__name__, [self._value(node.left, names), self._value(node.right, names)])
        if isinstance(node, ast.UnaryOp):
            return Node(type(node.op).__name__, [self._value(node.operand, names)])
        if isinstance(node, ast.BoolOp):
            return Node("BitAnd", [self._value(part, names) for part in node.values])
        if isinstance(node, ast.Compare):
            parts = [self._value(part, names) for part in (node.left, *node.comparators)]
            return Node(type(node.ops[0]).__name__, parts)
        if isinstance(node, ast.IfExp):
            return Node("tl.where", [self._value(part, names) for part in (node.test, node.body, node.orelse)])
        if isinstance(node, (ast.Tuple, ast.List)):
            return Node("tuple", [self._value(part, names) for part in node.elts])
        if isinstance(node, ast.Subscript):
            return self._value(node.value, names)
        if isinstance(node, ast.Attribute):
            return Node("tl.trans", [self._value(node.value, names)]) if node.attr == "T" else Node("")
        return Node("")

    def _call(self, node: ast.Call, names: dict[str, Node]) -> Node:
        function = node.func
        arguments = [self._value(argument, names) for argument in node.args]
        by_name = {keyword.arg: self._value(keyword.value, names) for keyword in node.keywords if keyword.arg}
        if isinstance(function, ast.Name) and function.id in self.own and self.depth < _CALLS:
            return self._followed(self.own[function.id], arguments, by_name)
        op = operation_of(function) or ""
        op = _SAME.get(op, op)
        if op.startswith(".") and isinstance(function, ast.Attribute):
            arguments.insert(0, self._value(function.value, names))
            op = op if op in _CASTS else f"tl{op}" if f"tl{op}" in LANGUAGE else op
        if op in _CASTS:
            return arguments[0] if arguments else Node("")
        if op == "tl.load" and arguments:
            other = by_name.get("other") or (arguments[2] if len(arguments) > 2 else None)
            return Node(op, [other] if other is not None and other.op else [], address=arguments[0])
        if op in _SINKS and len(arguments) > 1:
            self.sinks.append((op, arguments[0], arguments[1]))
            return Node(op)
        if op == "tl.make_block_ptr":
            shape = by_name.get("block_shape") or (arguments[4] if len(arguments) > 4 else Node(""))
            tiles = [Node("tl.arange") for _ in shape.parts]
            offsets = by_name.get("offsets") or (arguments[3] if len(arguments) > 3 else Node(""))
            return Node("block", [*tiles, offsets, *arguments[:1]])
        return Node(op, [*arguments, *(value for key, value in by_name.items() if key in ("acc", "input", "mask"))])

    def _followed(self, helper: ast.FunctionDef, arguments: list[Node], by_name: dict[str, Node]) -> Node:
        inner = _Trace(self.own, self.depth + 1)
        inner.level = self.level
        places = [argument.arg for argument in _arguments(helper)]
        names = {place: Node("") for place in places} | dict(zip(places, arguments, strict=False)) | by_name
        inner.run(helper.body, names)
        self.sinks += inner.sinks
        self.loops += inner.loops
        return inner.returned or Node("")

    def features(self) -> Counter[str]:
        """Count what the stores need."""
        found = Counter(f"loop {loop}" for loop in self.loops)
        seen: set[int] = set()
        for op, address, value in self.sinks:
            found[f"{op} {access(address)}"] += 1
            found[f"{op} of {value.op}"] += 1
            for node in below(value, seen):
                found.update(_of_node(node))
                for inner in below(node.address, seen) if node.address is not None else ():
                    found.update(_of_node(inner) if inner.op in ("tl.load", "tl.dot") else ())
        return found


def below(node: Node, seen: set[int] | None = None) -> Iterator[Node]:
    """A value and all it is made of, each once; addresses of loads are not entered."""
    seen = set() if seen is None else seen
    stack = [node]
    while stack:
        one = stack.pop()
        if id(one) not in seen:
            seen.add(id(one))
            yield one
            stack.extend(reversed(one.parts))


def _of_node(node: Node) -> Iterator[str]:
    if node.address is not None:
        yield f"load {access(node.address)}"
        yield f"load other {node.parts[0].op if node.parts else ''}"
    elif node.op in ("Lt", "LtE", "Gt", "GtE", "Eq", "NotEq") and len(node.parts) == 2:
        yield f"{node.op} of " + " ".join(sorted(_kind(part) for part in node.parts))
    elif node.op.startswith("#"):
        yield node.op
    elif node.op:
        yield f"has {node.op}"
        for part in node.parts:
            if part.op:
                yield f"{node.op} < {part.op}"
                yield from (f"{node.op} < {part.op} < {inner.op}" for inner in part.parts if inner.op)


def access(address: Node) -> str:
    """How an address is made: number of ranges, gathered or not, walked by a loop, folded, scalar."""
    nodes = list(below(address))
    ranges = sum(node.op == "tl.arange" for node in nodes)
    words = [f"{min(ranges, 4)}d"]
    for word, ops in (("gathered", ("tl.load",)), ("stepped", ("step",)), ("folded", ("Mod", "FloorDiv"))):
        if any(node.op in ops for node in nodes):
            words.append(word)
    return " ".join(words)


def _kind(node: Node) -> str:
    ops = {one.op for one in below(node)}
    return next((kind for kind in ("tl.load", "tl.arange", "step", "tl.program_id", "tl.rand") if kind in ops), "value")


def number_feature(value: object) -> str:
    """`#0.04471` for 0.044715, for a number that tells something, empty for any other constant."""
    if isinstance(value, float) and value not in _PLAIN:
        return f"#{abs(value):.4g}" if 1e-4 < abs(value) < 1e5 else "#far"
    return ""
