"""What of a backward can be tuned, found in its syntax tree, and the backward with other values of it.

A tunable is a number in the text: a block size or another constexpr given at a launch (as a literal, or in what the
name given there is made of), `num_warps`, `num_stages`, a value of a single `triton.Config`, or which of several
configurations of an autotuned kernel is kept. A variant is the same text with other numbers; whether it is right is for
the gate to say.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from kernel_agent.bench.bindings import Bindings, bindings
from kernel_agent.bench.loops import loops
from kernel_agent.bench.tunable import FACTOR, LADDERS, Site, Tunable, TunableKind
from kernel_agent.pairs.spec import Candidate

DEFAULT_WARPS, DEFAULT_STAGES = 4, 3
"""What Triton takes where a launch says nothing."""

_Function = (ast.FunctionDef, ast.AsyncFunctionDef)


Values = Mapping[int, int]
"""Position of a tunable -> its value; what is absent stays as it is."""


@dataclass(frozen=True)
class Space:
    """A candidate and what can be tuned in its backward section."""

    candidate: Candidate
    tunables: tuple[Tunable, ...] = field(default=())

    @classmethod
    def of(cls, candidate: Candidate, *, inside_kernels: bool = False) -> Space:
        """Find the tunables; `inside_kernels`: how far loops are pipelined, too. A text that is no Python has none."""
        try:
            tree = ast.parse(candidate.backward)
        except (SyntaxError, ValueError, RecursionError, MemoryError):  # the gate says what is wrong with it
            return cls(candidate)
        finder = _Finder(tree, candidate.backward)
        pipelined = loops(finder.kernels.values(), candidate.backward) if inside_kernels else ()
        return cls(candidate, (*pipelined, *finder.tunables()))

    def variant(self, values: Values) -> Candidate:
        """The candidate with other values."""
        changes = [(site, self.tunables[place]) for place in values for site in self.tunables[place].sites]
        places = {id(tunable): place for place, tunable in enumerate(self.tunables)}
        lines = [line.encode() for line in self.candidate.backward.split("\n")]
        for site, tunable in sorted(changes, key=lambda change: change[0], reverse=True):
            text = tunable.text(values[places[id(tunable)]]).encode()
            head, tail = lines[site.line - 1][: site.start], lines[site.end_line - 1][site.end :]
            lines[site.line - 1 : site.end_line] = [head + text + tail]
        return self.candidate.model_copy(update={"backward": b"\n".join(lines).decode()})

    def said(self, values: Values) -> str:
        """What a variant changes: `BLOCK_M 64 -> 128, num_warps of _dx 4 -> 8`."""
        changed = [self.tunables[place].said(value) for place, value in sorted(values.items())]
        return ", ".join(changed) or "nothing"


class _Finder:
    """Looks through one backward section."""

    def __init__(self, tree: ast.Module, text: str) -> None:
        self.tree = tree
        self.text = text

    @cached_property
    def kernels(self) -> dict[str, ast.FunctionDef]:
        """Functions that Triton compiles, by name."""
        return {
            node.name: node
            for node in self.tree.body
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list)
        }

    def tunables(self) -> Iterator[Tunable]:
        """Each number once, in the order of the text."""
        found: list[Tunable] = []
        seen: dict[tuple[str, Site], int] = {}
        for tunable in (*self._of_configurations(), *self._of_launches()):
            places = {(tunable.insert, site) for site in tunable.sites}
            known = next((seen[place] for place in places if place in seen), None)
            if known is None:
                seen |= dict.fromkeys(places, len(found))
                found.append(tunable)
            else:
                kernels = dict.fromkeys((*found[known].kernels, *tunable.kernels))
                found[known] = replace(found[known], kernels=tuple(kernels))
        yield from found

    # --- autotune

    def _of_configurations(self) -> Iterator[Tunable]:
        for kernel in self.kernels.values():
            for decorator in kernel.decorator_list:
                if not _is_autotune(decorator):
                    continue
                listed = next((node for node in ast.walk(decorator) if isinstance(node, ast.List)), None)
                if listed is None or not all(_is_config(item) for item in listed.elts):
                    continue
                if len(listed.elts) > 1:
                    texts = tuple(ast.get_source_segment(self.text, item) or "" for item in listed.elts)
                    name = f"configuration of {kernel.name}"
                    numbers = tuple(range(len(texts)))
                    yield Tunable(name, TunableKind.CONFIG, -1, numbers, (Site.of(listed),), texts=texts)
                else:
                    yield from _of_config(listed.elts[0], kernel.name)

    # --- launches

    def _of_launches(self) -> Iterator[Tunable]:
        for function in self.tree.body:
            if isinstance(function, _Function) and function.name not in self.kernels:
                outside = bindings(self.tree)
                for node in ast.walk(function):
                    if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                        assigned = {**outside, **bindings(function, node)}
                        for tunable in self._of_launch(node, assigned):
                            yield replace(tunable, kernels=(ast.unparse(node.func.value),))

    def _of_launch(self, call: ast.Call, assigned: Bindings) -> Iterator[Tunable]:
        subscript = call.func
        if not (isinstance(subscript, ast.Subscript) and isinstance(subscript.value, ast.Name)):
            return
        name = subscript.value.id
        kernel = self.kernels.get(name)
        given = _named_arguments(call, kernel, assigned)
        options = {kind.value: kind for kind in (TunableKind.WARPS, TunableKind.STAGES)}
        constexprs = _constexprs(kernel) if kernel else {key for key in given if key.isupper()}
        for processors in _processors(subscript.slice, assigned):
            place = Site.of(processors)
            start = replace(place, end_line=place.line, end=place.start)
            yield Tunable(
                f"programs of {name} per multiprocessor",
                TunableKind.PROGRAMS,
                1,
                LADDERS[TunableKind.PROGRAMS],
                (start,),
                insert=FACTOR,
            )
        yield from self._of_literals(
            subscript.slice, {key: value for key, value in given.items() if key in constexprs}, name
        )
        for key, value in given.items():
            if key in options:
                for kind, literal in _literals(value, assigned, options[key]):
                    divisor = ", divisor" if kind is TunableKind.BLOCK else ""
                    yield _tunable(f"{key} of {name}{divisor}", kind, literal)
            elif key in constexprs and not _is_number(value):
                for kind, literal in _literals(value, assigned, TunableKind.BLOCK):
                    yield _tunable(_name_of(value, key), kind, literal)
        if kernel is None or any(_is_autotune(decorator) for decorator in kernel.decorator_list):
            return
        given_all: list[ast.expr | ast.keyword] = [*call.args, *call.keywords]
        if not given_all:
            return
        behind = max(Site.behind(node) for node in given_all)
        wanted = {TunableKind.WARPS: DEFAULT_WARPS}
        if _is_pipelined(kernel):
            wanted[TunableKind.STAGES] = DEFAULT_STAGES
        for kind, default in wanted.items():
            if kind.value not in given:
                option = f"{kind.value} of {name}"
                yield Tunable(option, kind, default, LADDERS[kind], (behind,), insert=kind.value)

    def _of_literals(self, grid: ast.expr, given: Mapping[str, ast.expr], kernel: str) -> Iterator[Tunable]:
        """Constexprs given as numbers, with the same number in the grid if there is one: the two belong together."""
        by_value: dict[int, list[tuple[str, ast.expr]]] = {}
        for key, value in given.items():
            if _is_number(value, TunableKind.BLOCK):
                by_value.setdefault(_number(value), []).append((key, value))
        for number, items in by_value.items():
            linked = [n for n in ast.walk(grid) if isinstance(n, ast.Constant) and n.value == number and n.value != 1]
            if linked:  # which of several belongs to which is not known: they change together
                sites = tuple(sorted(Site.of(node) for node in (*linked, *(value for _, value in items))))
                name = f"{', '.join(key for key, _ in items)} of {kernel}"
                yield Tunable(name, TunableKind.BLOCK, number, LADDERS[TunableKind.BLOCK], sites)
                continue
            for key, value in items:
                yield _tunable(f"{key} of {kernel}", TunableKind.BLOCK, value)


def _tunable(name: str, kind: TunableKind, literal: ast.expr) -> Tunable:
    return Tunable(name, kind, _number(literal), LADDERS[kind], (Site.of(literal),))


def _number(literal: ast.expr) -> int:
    return literal.value if isinstance(literal, ast.Constant) and isinstance(literal.value, int) else 0


def _of_config(config: ast.expr, kernel: str) -> Iterator[Tunable]:
    """Numbers of one `triton.Config({...}, num_warps=...)`."""
    if not isinstance(config, ast.Call):
        return
    for node in ast.walk(config):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and _is_number(value, TunableKind.BLOCK):
                    yield _tunable(f"{key.value!s} of {kernel}", TunableKind.BLOCK, value)
    for keyword in config.keywords:
        kind = {kind.value: kind for kind in (TunableKind.WARPS, TunableKind.STAGES)}.get(keyword.arg or "")
        if kind is not None and _is_number(keyword.value, kind):
            yield _tunable(f"{kind.value} of {kernel}", kind, keyword.value)


def _processors(value: ast.expr, assigned: Bindings, depth: int = 3) -> Iterator[ast.expr]:
    """Where an extent of a grid asks how many multiprocessors there are, by the names in it too."""
    for node in ast.walk(value):
        if isinstance(node, ast.Attribute) and node.attr == "multi_processor_count":
            yield node
        elif isinstance(node, ast.Name) and depth:
            for made_of in assigned.get(node.id, ()):
                yield from _processors(made_of, assigned, depth - 1)


_SIZES = frozenset({"min", "max", "int"})
"""Functions that make a size of sizes: a number in `bool(needs[0])` or `(True,) * 2` is none."""


def _literals(
    value: ast.expr, assigned: Bindings, kind: TunableKind, depth: int = 3
) -> Iterator[tuple[TunableKind, ast.expr]]:
    """Numbers that an expression is made of, by the names in it too.

    Not those that a size is rounded up to, nor the least ones allowed. In a number of warps, a divisor is a block size.
    """
    if _is_number(value, kind):
        yield kind, value
    elif isinstance(value, ast.Name):
        for made_of in assigned.get(value.id, ()) if depth else ():
            yield from _literals(made_of, assigned, kind, depth - 1)
    elif isinstance(value, ast.Call) and ast.unparse(value.func).endswith(("next_power_of_2", "cdiv")):
        return
    elif isinstance(value, ast.IfExp):
        for part in (value.body, value.orelse):
            yield from _literals(part, assigned, kind, depth)
    elif isinstance(value, ast.BinOp) or (isinstance(value, ast.Call) and ast.unparse(value.func) in _SIZES):
        if isinstance(value, ast.BinOp) and isinstance(value.op, ast.FloorDiv) and _is_number(value.right):
            if kind is TunableKind.WARPS and _is_number(value.right, TunableKind.BLOCK):
                yield TunableKind.BLOCK, value.right
            return
        least = isinstance(value, ast.Call) and ast.unparse(value.func) == "max"
        for child in ast.iter_child_nodes(value):
            if isinstance(child, ast.expr) and not (least and _is_number(child)):
                yield from _literals(child, assigned, kind, depth)


def _fits(value: object, kind: TunableKind) -> bool:
    """Whether a number is one of its kind: powers of two from 2 on for blocks, so that 0, 1 and 3 in formulas stay."""
    if type(value) is not int:
        return False
    return value in LADDERS[kind] and (kind is not TunableKind.BLOCK or value > 1)


def _is_number(value: ast.expr, kind: TunableKind | None = None) -> bool:
    if not isinstance(value, ast.Constant) or type(value.value) is not int:
        return False
    return kind is None or _fits(value.value, kind)


def _name_of(value: ast.expr, key: str) -> str:
    return value.id if isinstance(value, ast.Name) else key


def _named_arguments(call: ast.Call, kernel: ast.FunctionDef | None, assigned: Bindings) -> dict[str, ast.expr]:
    """Arguments of a launch by the kernel's parameter names; positional ones only where the kernel is known."""
    found: dict[str, ast.expr] = {}
    for keyword in call.keywords:
        if keyword.arg:
            found[keyword.arg] = keyword.value
        elif isinstance(keyword.value, ast.Name):  # **blocks
            for made_of in assigned.get(keyword.value.id, ()):
                found.update(_items(made_of))
    if kernel is not None and not any(isinstance(arg, ast.Starred) for arg in call.args):
        found.update(zip([parameter.arg for parameter in kernel.args.args], call.args, strict=False))
    return found


def _items(value: ast.expr) -> dict[str, ast.expr]:
    """What a dict, written out, holds by text keys."""
    if isinstance(value, ast.Dict):
        pairs = zip(value.keys, value.values, strict=True)
        return {key.value: item for key, item in pairs if isinstance(key, ast.Constant) and isinstance(key.value, str)}
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "dict":
        return {keyword.arg: keyword.value for keyword in value.keywords if keyword.arg}
    return {}


def _constexprs(kernel: ast.FunctionDef) -> set[str]:
    parameters = (*kernel.args.args, *kernel.args.kwonlyargs)
    return {p.arg for p in parameters if p.annotation is not None and "constexpr" in ast.unparse(p.annotation)}


def _is_pipelined(kernel: ast.FunctionDef) -> bool:
    """Whether Triton overlaps iterations of a loop: it does where they feed a dot."""
    loops = [node for node in ast.walk(kernel) if isinstance(node, (ast.For, ast.While))]
    return any(isinstance(inner, ast.Attribute) and inner.attr == "dot" for loop in loops for inner in ast.walk(loop))


def _is_autotune(decorator: ast.expr) -> bool:
    return isinstance(decorator, ast.Call) and ast.unparse(decorator.func).endswith("autotune")


def _is_config(item: ast.expr) -> bool:
    return isinstance(item, ast.Call) and ast.unparse(item.func).endswith("Config")
