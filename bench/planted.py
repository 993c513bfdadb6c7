"""Backwards with one planted mistake each: what a diagnosis is measured by.

A mistake is one edit of the text of a proven backward, made where its syntax tree shows a place for it. The class is
the one that the edit is, not what a diagnosis says of it: a summand of two that both carry the cotangent is a term of
the gradient, a factor on what is stored a scale, and so on. Whether an edit makes a gradient wrong is for the gate to
say.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from kernel_agent.gate.diagnosis.records import Fault
from kernel_agent.pairs.meta import read_meta
from kernel_agent.pairs.sections import split_sections

_INTEGERS = frozenset({"arange", "program_id", "num_programs", "cdiv"})
_SUMS = (ast.Add, ast.Sub)


@dataclass(frozen=True)
class Planted:
    """One mistake."""

    fault: Fault | None
    """None: a mistake of no class of the bank, which no diagnosis should name."""
    line: int
    """Line of the pair file."""
    old: str
    new: str
    source: str
    """The whole pair file with the mistake."""

    @property
    def name(self) -> str:
        """`missing term, line 41: a - b -> a`."""
        kind = self.fault.value if self.fault else "outside the bank"
        return f"{kind}, line {self.line}: {' '.join(self.old.split())} -> {' '.join(self.new.split())}"


def plant(source: str) -> tuple[Planted, ...]:
    """Every mistake that the backward of a pair file has a place for, in order of lines and classes."""
    return tuple(sorted(_Planter(source).all(), key=lambda p: (p.line, p.fault or "", p.old, p.new)))


@dataclass
class _Edit:
    fault: Fault | None
    node: ast.expr
    new: str


class _Planter:
    """The backward of one pair file, and what of it carries the cotangent."""

    def __init__(self, source: str) -> None:
        self.source = source
        sections = split_sections(source)
        self.tree = ast.parse(sections.above_check)
        self.functions = {
            node.name: node
            for node in self.tree.body
            if isinstance(node, ast.FunctionDef) and node.lineno >= sections.backward_line
        }
        self.host = self.functions["backward"]
        self.statistics = {entry.split(":")[0].strip() for entry in read_meta(source).saves}
        self.cotangents = _parameters(self.host)[1:]
        if "needs" in self.cotangents:
            self.cotangents.remove("needs")
        self.kernels = {
            name: _Kernel(node) for name, node in self.functions.items() if name != "backward" and node.decorator_list
        }
        self._follow()

    def all(self) -> Iterator[Planted]:
        """See `plant`."""
        edits = [*self._in_backward(), *(edit for kernel in self.kernels.values() for edit in kernel.edits())]
        seen: set[str] = set()
        for edit in edits:
            changed = _replaced(self.source, edit.node, edit.new)
            if changed not in seen and changed != self.source:
                seen.add(changed)
                old = ast.get_source_segment(self.source, edit.node) or ""
                yield Planted(edit.fault, edit.node.lineno, old, edit.new, changed)

    def _follow(self) -> None:
        """Which pointers carry the cotangent, from launch to launch; which ones hold statistics."""
        carried, statistics = set(self.cotangents), set(self.statistics)
        for _ in range(2):
            for statement in ast.walk(self.host):
                if isinstance(statement, ast.Assign) and _names(statement.value) & carried:
                    carried |= {n for t in statement.targets for n in _names(t)} - _host_numbers(statement)
            for call in _launches(self.host):
                kernel = self.kernels.get(call.func.value.id)  # type: ignore[attr-defined]
                if kernel is None:
                    continue
                bound = {k.arg: k.value for k in call.keywords if k.arg}
                bound |= dict(zip(_parameters(kernel.node), call.args, strict=False))
                kernel.carrying |= {p for p, v in bound.items() if not _is_number(v) and _names(v) & carried}
                kernel.statistics |= {p for p, v in bound.items() if isinstance(v, ast.Name) and v.id in statistics}
                kernel.follow()
                carried |= {v.id for p, v in bound.items() if p in kernel.written and isinstance(v, ast.Name)}

    def _in_backward(self) -> Iterator[_Edit]:
        for node in ast.walk(self.host):
            if isinstance(node, ast.Return) and node.value is not None:
                yield from self._returned(node.value)
            if not isinstance(node, ast.Call):
                continue
            if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
                base = node.func.value.id
                if node.func.attr == "contiguous" and base in self.cotangents:
                    yield _Edit(Fault.STRIDES_IGNORED, node, base)
                if node.func.attr == "stride" and base in self.cotangents and _first(node) in ("1", "-1"):
                    yield _Edit(Fault.STRIDES_IGNORED, node, "1")
            if isinstance(node.func, ast.Attribute) and node.func.attr == "sum" and _first(node) in ("0", "1"):
                yield _Edit(Fault.WRONG_AXIS, node.args[0], "1" if _first(node) == "0" else "0")
        if len(self.cotangents) > 1:
            first = self.host.body[0]
            assert isinstance(first, ast.Assign)
            for name in self.cotangents:
                empty = f"({_text(first.value)}, {name} := {name} if {name} is None else torch.zeros_like({name}))[0]"
                yield _Edit(Fault.OUTPUT_IGNORED, first.value, empty)

    def _returned(self, value: ast.expr) -> Iterator[_Edit]:
        parts = value.elts if isinstance(value, ast.Tuple) else [value]
        for part in parts:
            text = _text(part)
            yield _Edit(Fault.TRANSPOSED, part, f"(t := {text}).mT.contiguous().view(t.shape)")
        if isinstance(value, ast.Tuple):
            texts = [_text(part) for part in parts]
            for i in range(len(texts)):
                for j in range(i + 1, len(texts)):
                    swapped = list(texts)
                    swapped[i], swapped[j] = swapped[j], swapped[i]
                    yield _Edit(Fault.EXCHANGED, value, ", ".join(swapped))


class _Kernel:
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
        parameters = _parameters(node)
        self.aliases = {
            part.targets[0].id: part.value
            for part in ast.walk(node)
            if isinstance(part, ast.Assign)
            and isinstance(part.targets[0], ast.Name)
            and isinstance(part.value, (ast.BinOp, ast.Name))
            and part.targets[0].id not in parameters
        }
        """Variables that are an address plus something, perhaps."""

    def follow(self) -> None:
        """Find `linear`, `floats` and `written` from `carrying`."""
        for _ in range(3):
            for node in ast.walk(self.node):
                if isinstance(node, (ast.Assign, ast.AugAssign)):
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    names = {n for target in targets for n in _names(target)}
                    self.linear |= names if self.is_linear(node.value) else set()
                    self.floats |= names if self.is_float(node.value) else set()
        for call in self._stores():
            if self.is_linear(call.args[1]):
                self.written.add(self._pointer(call.args[0]))

    def is_linear(self, node: ast.expr) -> bool:
        """Whether the cotangent is in an expression: not in its comparisons, masks or indices."""
        if isinstance(node, ast.Name):
            return node.id in self.linear
        if isinstance(node, ast.Call):
            if _called(node) == "load":
                return self._pointer(node.args[0]) in self.carrying
            if _called(node) == "where":
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

    def _pointer(self, node: ast.expr) -> str:
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
            name = _called(node)
            if name == "to":
                return "int" not in _text(node.args[0])
            if name == "load":
                other = next((k.value for k in node.keywords if k.arg == "other"), None)
                return not (isinstance(other, ast.Constant) and isinstance(other.value, int))
            if name == "where":
                return any(self.is_float(arg) for arg in node.args[1:])
            return name not in _INTEGERS and "int" not in _text(node)
        if isinstance(node, ast.BinOp):
            return isinstance(node.op, ast.Div) or self.is_float(node.left) or self.is_float(node.right)
        if isinstance(node, (ast.UnaryOp, ast.Subscript)):
            return self.is_float(node.operand if isinstance(node, ast.UnaryOp) else node.value)
        return False

    def edits(self) -> Iterator[_Edit]:
        """Every mistake that this kernel has a place for."""
        yield from self._terms()
        yield from self._stored()
        yield from self._masks_and_loops()
        yield from self._statistics()
        yield from self._factors()

    def _terms(self) -> Iterator[_Edit]:
        for node in ast.walk(self.node):
            if isinstance(node, ast.BinOp) and isinstance(node.op, _SUMS):
                if not (self.is_linear(node.left) and self.is_linear(node.right)):
                    continue
                left, right = _text(node.left), _text(node.right)
                minus = isinstance(node.op, ast.Sub)
                yield _Edit(Fault.MISSING_TERM, node, left)
                yield _Edit(Fault.MISSING_TERM, node, f"(-{right})" if minus else right)
                yield _Edit(Fault.DOUBLED_TERM, node, f"({left} {'-' if minus else '+'} 2.0 * {right})")
                yield _Edit(Fault.TERM_SIGN, node, f"({left} {'+' if minus else '-'} {right})")
        for block in ast.walk(self.node):
            if isinstance(block, ast.AugAssign) and self._one_of_several(block):
                yield _Edit(Fault.MISSING_TERM, block.value, f"0.0 * {_text(block.value)}")
                yield _Edit(Fault.DOUBLED_TERM, block.value, f"2.0 * {_text(block.value)}")
                yield _Edit(Fault.TERM_SIGN, block.value, f"-{_text(block.value)}")

    def _one_of_several(self, statement: ast.AugAssign) -> bool:
        """Whether an accumulation with the cotangent in it has another one beside it into the same variable."""
        if not (isinstance(statement.op, _SUMS) and self.is_linear(statement.value)):
            return False
        others = [
            node
            for node in ast.walk(self.node)
            if isinstance(node, (ast.Assign, ast.AugAssign))
            and node is not statement
            and _names(node.targets[0] if isinstance(node, ast.Assign) else node.target) == _names(statement.target)
            and self.is_linear(node.value)
        ]
        return bool(others)

    def _stored(self) -> Iterator[_Edit]:
        for call in self._stores():
            value = call.args[1]
            if self.is_linear(value):
                yield _Edit(Fault.SCALE, value, f"2.0 * {_text(value)}")
                yield _Edit(Fault.SIGN, value, f"-{_text(value)}")
            for node in ast.walk(value):
                if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.Div)):
                    left, right = node.left, node.right
                    if self.is_linear(left) and isinstance(right, ast.Name) and right.id in _parameters(self.node):
                        yield _Edit(Fault.SCALE, node, _text(left))

    def _masks_and_loops(self) -> Iterator[_Edit]:
        for node in ast.walk(self.node):
            if isinstance(node, ast.Call) and _called(node) == "where" and _text(node.args[2]) in ("0.0", "0"):
                yield _Edit(None if _is_causal(node.args[0]) else Fault.UNMASKED_TAIL, node, _text(node.args[1]))
            if isinstance(node, ast.Call) and _called(node) == "load" and self.is_float(node):
                for keyword in node.keywords:
                    if keyword.arg == "other" and _text(keyword.value) == "0.0":
                        yield _Edit(Fault.UNMASKED_TAIL, keyword.value, "1.0")
            if isinstance(node, ast.For) and isinstance(node.iter, ast.Call) and len(node.iter.args) == 3:
                stop, step = (_text(arg) for arg in node.iter.args[1:])
                yield _Edit(Fault.LAST_BLOCK_SKIPPED, node.iter.args[1], f"{stop} - {step} + 1")
                yield _Edit(Fault.LAST_BLOCK_SKIPPED, node.iter.args[1], f"{stop} - {step}")

    def _statistics(self) -> Iterator[_Edit]:
        for node in ast.walk(self.node):
            if isinstance(node, ast.Call) and _called(node) == "load" and isinstance(node.args[0], ast.BinOp):
                pointer = node.args[0]
                if isinstance(pointer.left, ast.Name) and self._pointer(pointer) in self.statistics:
                    yield _Edit(Fault.STALE_STATISTIC, pointer.right, f"0 * {_text(pointer.right)}")

    def _factors(self) -> Iterator[_Edit]:
        """A factor left out or squared, and another operation in its place, which no class of the bank is."""
        for node in ast.walk(self.node):
            if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult):
                continue
            if self.is_linear(node.left) and not self.is_linear(node.right) and self.is_float(node.right):
                yield _Edit(Fault.FACTOR, node, f"({_text(node.left)} * {_text(node.right)} * {_text(node.right)})")
                # without the factor 1 + t the summand t is missing, and all else is as it was
                one_plus = isinstance(node.right, ast.BinOp) and _holds_one(node.right)
                yield _Edit(Fault.MISSING_TERM if one_plus else Fault.FACTOR, node, _text(node.left))
                yield _Edit(None, node, f"({_text(node.left)} + {_text(node.right)})")

    def _stores(self) -> list[ast.Call]:
        return [
            node
            for node in ast.walk(self.node)
            if isinstance(node, ast.Call) and _called(node) in ("store", "atomic_add") and len(node.args) > 1
        ]


def _is_causal(mask: ast.expr) -> bool:
    """Whether a mask compares two index tiles with each other: what it leaves out is no tail."""
    return isinstance(mask, ast.Compare) and all(
        any(isinstance(part, ast.Subscript) for part in ast.walk(side)) for side in (mask.left, *mask.comparators)
    )


def _holds_one(node: ast.BinOp) -> bool:
    return isinstance(node.op, _SUMS) and any(
        isinstance(part, ast.Constant) and part.value == 1 for part in (node.left, node.right)
    )


def _launches(function: ast.FunctionDef) -> list[ast.Call]:
    found = [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript) and isinstance(node.func.value, ast.Name)
    ]
    return sorted(found, key=lambda call: call.lineno)


def _parameters(function: ast.FunctionDef) -> list[str]:
    return [arg.arg for arg in (*function.args.args, *function.args.kwonlyargs)]


def _names(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("stride", "numel")


def _host_numbers(statement: ast.Assign) -> set[str]:
    """Names that hold shapes and strides of a cotangent, not the cotangent."""
    value = statement.value
    if _is_number(value) or (isinstance(value, ast.Attribute) and value.attr in ("shape", "dtype", "device")):
        return {n for target in statement.targets for n in _names(target)}
    return set()


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _text(node: ast.AST) -> str:
    """An expression that can stand beside any operator."""
    text = ast.unparse(node)
    return f"({text})" if isinstance(node, (ast.BinOp, ast.UnaryOp)) else text


def _first(call: ast.Call) -> str:
    return ast.unparse(call.args[0]) if call.args else ""


def _replaced(source: str, node: ast.expr, new: str) -> str:
    """The source with an expression replaced, and the number of its lines kept."""
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    lines = source.splitlines(keepends=True)
    first, last = lines[node.lineno - 1].encode(), lines[node.end_lineno - 1].encode()
    kept = "\n" * (node.end_lineno - node.lineno)
    if kept:  # brackets let the lines that the expression took stand empty
        new = f"({new}{kept})"
    middle = first[: node.col_offset].decode() + new + last[node.end_col_offset :].decode()
    return "".join([*lines[: node.lineno - 1], middle, *lines[node.end_lineno :]])
