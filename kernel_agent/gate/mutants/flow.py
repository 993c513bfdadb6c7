"""What of a backward carries the cotangent: through `backward`, its launches, and the kernels, as far as text tells."""

from __future__ import annotations

import ast

from kernel_agent.gate.mutants.trees import called, first, is_number, launches, names, parameters, text
from kernel_agent.pairs.meta import read_meta
from kernel_agent.pairs.sections import split_sections

SUMS = (ast.Add, ast.Sub)
_INTEGERS = frozenset({"arange", "program_id", "num_programs", "cdiv"})


class BackwardFlow:
    """The backward section of one pair file: its functions, and what of them carries the cotangent.

    Raises `InputError` where the file is no pair file, `SyntaxError` where it is no Python.
    """

    def __init__(self, source: str) -> None:
        sections = split_sections(source)
        self.functions = {
            node.name: node
            for node in ast.parse(sections.above_check).body
            if isinstance(node, ast.FunctionDef) and node.lineno >= sections.backward_line
        }
        self.host = self.functions["backward"]
        self.saved = parameters(self.host)[0]
        """Name of the first parameter of `backward`."""
        meta = read_meta(source)
        self.statistics = {entry.split(":")[0].strip() for entry in meta.saves}
        self.dtypes = meta.dtypes
        """That the pair is declared for."""
        self.cotangents = [name for name in parameters(self.host)[1:] if name != "needs"]
        self.kernels = {
            name: KernelFlow(node)
            for name, node in self.functions.items()
            if name != "backward" and node.decorator_list
        }
        self._follow()

    def _follow(self) -> None:
        """Which pointers carry the cotangent, from launch to launch; which ones hold statistics."""
        carried, statistics = set(self.cotangents), set(self.statistics)
        for _ in range(2):
            for statement in ast.walk(self.host):
                if isinstance(statement, ast.Assign) and names(statement.value) & carried:
                    carried |= {n for t in statement.targets for n in names(t)} - _host_numbers(statement)
            for call in launches(self.host):
                kernel = self.kernels.get(call.func.value.id)  # type: ignore[attr-defined]
                if kernel is None:
                    continue
                bound = {k.arg: k.value for k in call.keywords if k.arg}
                bound |= dict(zip(parameters(kernel.node), call.args, strict=False))
                kernel.carrying |= {p for p, v in bound.items() if not is_number(v) and names(v) & carried}
                kernel.statistics |= {p for p, v in bound.items() if isinstance(v, ast.Name) and v.id in statistics}
                kernel.follow()
                carried |= {v.id for p, v in bound.items() if p in kernel.written and isinstance(v, ast.Name)}


def _host_numbers(statement: ast.Assign) -> set[str]:
    """Names that hold shapes and strides of a cotangent, not the cotangent."""
    value = statement.value
    if is_number(value) or (isinstance(value, ast.Attribute) and value.attr in ("shape", "dtype", "device")):
        return {n for target in statement.targets for n in names(target)}
    return set()


class KernelFlow:
    """One kernel: which of its pointers and values carry the cotangent."""

    def __init__(self, node: ast.FunctionDef) -> None:
        self.node = node
        self.carrying: set[str] = set()
        """Pointer parameters behind which the cotangent, or what was made of it, is loaded."""
        self.statistics: set[str] = set()
        self.written: set[str] = set()
        """Pointer parameters that something with the cotangent in it is stored to."""
        self.linear: set[str] = set()
        """Variables with the cotangent in them."""
        self.floats: set[str] = set()
        own = parameters(node)
        self.aliases = {
            part.targets[0].id: part.value
            for part in ast.walk(node)
            if isinstance(part, ast.Assign)
            and isinstance(part.targets[0], ast.Name)
            and isinstance(part.value, (ast.BinOp, ast.Name))
            and part.targets[0].id not in own
        }
        """Variables that are an address plus something, perhaps."""

    def follow(self) -> None:
        """Find `linear`, `floats` and `written` from `carrying`."""
        for _ in range(3):
            for node in ast.walk(self.node):
                if isinstance(node, (ast.Assign, ast.AugAssign)):
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    bound = {n for target in targets for n in names(target)}
                    self.linear |= bound if self.is_linear(node.value) else set()
                    self.floats |= bound if self.is_float(node.value) else set()
        for call in self.stores():
            if self.is_linear(call.args[1]):
                self.written.add(self.pointer(call.args[0]))

    def is_linear(self, node: ast.expr) -> bool:
        """Whether the cotangent is in an expression: not in its comparisons, masks or indices."""
        if isinstance(node, ast.Name):
            return node.id in self.linear
        if isinstance(node, ast.Call):
            if called(node) == "load":
                return bool(node.args) and self.pointer(node.args[0]) in self.carrying
            if called(node) == "where":
                return any(self.is_linear(arg) for arg in node.args[1:])
            own = [node.func.value] if isinstance(node.func, ast.Attribute) else []
            return any(self.is_linear(arg) for arg in (*own, *node.args))
        if isinstance(node, ast.BinOp):
            return self.is_linear(node.left) or self.is_linear(node.right)
        if isinstance(node, ast.UnaryOp):
            return self.is_linear(node.operand)
        if isinstance(node, ast.Subscript):
            return self.is_linear(node.value)
        return isinstance(node, ast.Tuple) and any(self.is_linear(part) for part in node.elts)

    def pointer(self, node: ast.expr) -> str:
        """The parameter that an address is made from: its leftmost name."""
        for _ in range(50):
            if isinstance(node, ast.BinOp):
                node = node.left
            elif isinstance(node, ast.Name) and node.id in self.aliases:
                node = self.aliases[node.id]
            elif isinstance(node, ast.Call) and node.args:
                node = node.args[0]
            else:
                break
        return node.id if isinstance(node, ast.Name) else ""

    def is_float(self, node: ast.expr) -> bool:
        """Whether an expression is a tile of floats, as far as its text tells."""
        if isinstance(node, ast.Name):
            return node.id in self.floats
        if isinstance(node, ast.Call):
            name = called(node)
            if name == "to":
                return "int" not in first(node)
            if name == "load":
                other = next((k.value for k in node.keywords if k.arg == "other"), None)
                return not (isinstance(other, ast.Constant) and isinstance(other.value, int))
            if name == "where":
                return any(self.is_float(arg) for arg in node.args[1:])
            return name not in _INTEGERS and "int" not in text(node)
        if isinstance(node, ast.BinOp):
            return isinstance(node.op, ast.Div) or self.is_float(node.left) or self.is_float(node.right)
        if isinstance(node, (ast.UnaryOp, ast.Subscript)):
            return self.is_float(node.operand if isinstance(node, ast.UnaryOp) else node.value)
        return False

    def stores(self) -> list[ast.Call]:
        """Stores and atomic additions."""
        return [
            node
            for node in ast.walk(self.node)
            if isinstance(node, ast.Call) and called(node) in ("store", "atomic_add") and len(node.args) > 1
        ]
