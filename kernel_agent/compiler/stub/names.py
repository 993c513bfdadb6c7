"""What the backward needs of the forward's names: saved, computed again from what is saved, or noted at the start."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.free_names import free_names
from kernel_agent.compiler.plan import IN_ORDER, LEFT, LISTED, LONGEST, NESTED, PICKED, RISING, ROWS
from kernel_agent.compiler.stub.flow import replaced
from kernel_agent.compiler.stub.forward import Kept
from kernel_agent.compiler.stub.loops import Carry, Loop
from kernel_agent.compiler.stub.source import StubSource
from kernel_agent.compiler.stub.states import States
from kernel_agent.ir.capture.images import declared_dtype

_PLAIN = (bool, int, float, str, type(None), torch.dtype)
ASKS = frozenset(
    {"shape", "stride", "size", "numel", "dim", "dtype", "ndim", "element_size", "itemsize", "device", "is_contiguous"}
)
"""Attributes of a tensor that can be asked for in the backward, where the tensor is saved."""
_OURS = frozenset(
    {"saved", "torch", "triton", "tl", "gradient_room", "merged_axes"}
    | {IN_ORDER, LEFT, LISTED, LONGEST, NESTED, PICKED, RISING, ROWS}
)
"""Names that the backward section has beside the stub's."""
_OF_EVERY_PART = frozenset({"dtype", "element_size", "itemsize", "device"})
"""What parts of a tensor answer as the whole does."""
_MARK = re.compile(r"\bASKED_(\d+)_\b")
"""Stands in an expression for what is asked of a tensor, until it is known whether the tensor is saved."""


@dataclass(frozen=True)
class Unpacked:
    """How the backward begins."""

    saved: tuple[Kept, ...]
    first: tuple[str, ...]
    """Statements that the forward begins with."""
    lines: tuple[str, ...]
    """Statements of the backward that compute names again."""


class Names:
    """Collects what expressions need, then decides how each name reaches the backward."""

    def __init__(
        self,
        source: StubSource,
        final: Mapping[str, Any],
        clones: Mapping[str, str] | None = None,
        sometimes: Collection[str] = (),
    ) -> None:
        """`final`: the stub's locals as it returned. `clones`: locals that only hold what other ones held before, and
        which; those are asked for the form of both. `sometimes`: locals that are a tensor in some calls, and None in
        others."""
        self.source = source
        self.final = final
        self.clones = clones or {}
        self.sometimes = frozenset(sometimes)
        self.trip: Loop | None = None
        """The loop that statements are written for, whose trip's names they may have."""
        self.states: States | None = None
        """What is kept of the trips of a loop."""
        self.scratch: frozenset[str] = frozenset()
        """Tensors that later trips of the loop overwrite: what a trip left there is computed again."""
        self._needed: dict[str, None] = {}
        self._evaluated: dict[str, str] = {}
        self._asked: dict[str, str] = {}
        self._first: dict[str, str] = {}
        self._shown: dict[str, str] = {}
        self._locals: set[str] = set()
        self._taken: set[str] = {*vars(source.module), *source.parameters, *final, *_OURS}

    def fresh(self, name: str) -> str:
        """A name that nothing else has."""
        name = re.sub(r"\W+", "_", name)
        found, count = name, 1
        while found in self._taken:
            count += 1
            found = f"{name}_{count}"
        self._taken.add(found)
        return found

    def local(self, name: str, own: Collection[str]) -> str:
        """A name for a variable of one branch, which has `own` already; branches may have the same ones."""
        name = re.sub(r"\W+", "_", name)
        found, count = name, 1
        while not self.is_free(found, own):
            count += 1
            found = f"{name}_{count}"
        self._taken.add(found)
        self._locals.add(found)
        return found

    def is_free(self, name: str, own: Collection[str]) -> bool:
        """Whether `local` gives a name as it is."""
        return name not in own and (name not in self._taken or name in self._locals)

    # --- needs

    def expression(self, node: ast.expr, line: int, hint: str) -> str:
        """An expression of the stub, as it was after `line`, for the backward. Raises `CannotDerive`."""
        if isinstance(node, ast.Constant):
            return repr(node.value)
        node = self._beyond_trips(node)
        text = ast.unparse(node)
        locals_ = [name for name in free_names(node) if not (self.source.is_known(name) or name in self._locals)]
        self._refuse_foreign_trips(locals_, text, line)
        lost = [name for name in locals_ if name not in self.final or not self.source.kept_after(name, line)]
        if lost:
            raise CannotDerive(
                f"`{lost[0]}` in `{text}` (line {line}) is bound again after the launch",
                remedy="Give the later value a name of its own.",
                line=line,
            )
        if all(isinstance(self.final[name], (Tensor, *_PLAIN)) for name in locals_):
            return self._over_names(node, locals_)
        if self.source.of_trips(node):
            raise CannotDerive(
                f"`{text}` (line {line}), which every trip computes, is made of more than tensors and numbers",
                remedy="Compute it ahead of the loop, or of tensors and numbers alone.",
                line=line,
            )
        for name, known in self._evaluated.items():
            if known == text:
                return name
        name = self.fresh(hint)
        self._evaluated[name] = text
        return name

    def tensor(self, name: str) -> str:
        """A local that is a tensor."""
        self._need(name)
        return name

    def _need(self, name: str) -> None:
        """Have a local reach the backward, unless a trip makes it again."""
        if name not in self.scratch and not self._is_of_trip(name):
            self._needed[name] = None

    def is_of_trips(self, node: ast.expr) -> bool:
        """Whether an expression has a value that trips of a loop give it."""
        return bool(self.source.of_trips(self._beyond_trips(node)))

    def _is_of_trip(self, name: str) -> bool:
        own = self.trip is not None and name in self.trip.within
        return own or any(name in loop.bound for loop in self.source.loops)

    def _refuse_foreign_trips(self, locals_: Sequence[str], text: str, line: int) -> None:
        """Raise `CannotDerive` where an expression names what trips of a loop bind that is not the one at hand."""
        known = frozenset() if self.trip is None else self.trip.within
        other = [name for name in locals_ if self._is_of_trip(name) and name not in known]
        if other:
            line = line or next(loop.first for loop in self.source.loops if other[0] in loop.bound)
            raise CannotDerive(
                f"`{other[0]}` in `{text}` (line {line}) belongs to the trips of a loop, and is wanted outside of it",
                remedy="Compute it ahead of the loop, or have each trip write to its part of a tensor from there.",
                line=line,
            )

    def _beyond_trips(self, node: ast.expr) -> ast.expr:
        """The expression with whole tensors for their parts that trips take, where it asks for a dtype or a device."""
        twins = {name: twin for name in self.source.of_trips(node) if (twin := self._twin(name)) is not None}
        return _Beyond(twins).visit(copy.deepcopy(node)) if twins else node

    def _twin(self, name: str) -> str | None:
        """A tensor that outlives the trips, and has the dtype of one of a trip."""
        own = self.final.get(name)
        if not isinstance(own, Tensor):
            return None
        for other, value in self.final.items():
            if isinstance(value, Tensor) and not self._is_of_trip(other) and _same_memory(own, value):
                return other
        return None

    def _over_names(self, node: ast.expr, locals_: Sequence[str]) -> str:
        """An expression whose names reach the backward; tensors that it only asks for their form need not be saved."""
        asked = [n for n in locals_ if isinstance(self.final[n], Tensor) and _only_asked(node, n)]
        for name in locals_:
            if name not in asked:
                self._need(name)
        return ast.unparse(_Asking(self, frozenset(asked)).visit(copy.deepcopy(node)))

    def ask(self, name: str, question: str) -> str:
        """`name.shape`, `name.stride(0)` of a local tensor at the end of the forward, without keeping it for that."""
        if self._is_of_trip(name):
            twin = self._twin(name) if question.removesuffix("()") in _OF_EVERY_PART else None
            if twin is None:
                self._refuse_foreign_trips([name], f"{name}.{question}", 0)
                return f"{name}.{question}"
            name = twin
        key = f"{self.clones.get(name, name)}.{question}"
        if key not in self._asked:
            self._asked[key] = f"ASKED_{len(self._asked)}_"
        return self._asked[key]

    def ask_first(self, name: str, attribute: str) -> str:
        """`name.attribute` of a parameter that the stub binds again, as it was given."""
        key = f"{name}.{attribute}"
        if key not in self._first:
            self._first[key] = self.fresh(f"{name}_{attribute}")
        return self._first[key]

    def given(self, name: str) -> str:
        """Whether a parameter was given; the stub may bind it again where it was not."""
        text = f"{name} is not None"
        if not self.source.bindings(name):
            return self.expression(ast.parse(text, mode="eval").body, 0, f"{name}_given")
        if text not in self._first:
            self._first[text] = self.fresh(f"{name}_given")
        return self._first[text]

    def _where_given(self, key: str) -> str:
        """What a tensor is asked for; None where there is none in some calls."""
        name, _, question = key.partition(".")
        optional = question and (name in self.sometimes or f"{name} is not None" in self._first)
        return f"{key} if {name} is not None else None" if optional else key

    # --- the end

    def unpacked(self) -> Unpacked:
        """Decide how every needed name reaches the backward."""
        tensors = [name for name in self._needed if isinstance(self.final.get(name), Tensor)]
        known = set(tensors)
        statements: dict[int, str] = {}
        plain: list[str] = []
        for name in self._needed:
            if name not in tensors and not self._computed(name, known, statements):
                plain.append(name)
        kept = [Kept(name, name) for name in (*tensors, *plain)]
        kept += [Kept(name, text) for name, text in self._evaluated.items()]
        for key, mark in self._asked.items():
            name, _, question = key.partition(".")
            if name in known:
                self._shown[mark] = key
            else:
                self._shown[mark] = self.fresh(f"{self._at_the_end(name)}_{question}".rstrip("()"))
                kept.append(Kept(self._shown[mark], self._where_given(key)))
        kept += [Kept(fresh, fresh) for fresh in self._first.values()]
        first = tuple(f"{fresh} = {self._where_given(key)}" for key, fresh in self._first.items())
        kept = [replace(one, expression=self._at_the_end(one.expression)) for one in kept]
        return Unpacked(tuple(kept), first, tuple(text for _, text in sorted(statements.items())))

    def _at_the_end(self, expression: str) -> str:
        """What the forward saves by its own names: those of what loops handed on are others where they run once."""
        handed = {one.behind: one.name for loop in self.source.loops for one in loop.carries}
        for behind, name in handed.items():
            if behind in expression:
                expression = replaced(ast.parse(expression, mode="eval").body, behind, name)
        return expression

    def keep_states(self, loop: Loop, carries: Sequence[Carry]) -> States:
        """Have the forward keep what each trip of a loop begins with. Raises `CannotDerive` for a second loop."""
        if self.states is None:
            self.states = States(self.fresh("states"), loop, tuple(carries))
        if self.states.loop is not loop or self.states.carries != tuple(carries):
            raise CannotDerive(
                f"the states of trips of two loops (lines {self.states.loop.first} and {loop.first}) are wanted, or "
                "other ones in another configuration",
                remedy="Have the loop write its states to rows of a tensor.",
                line=loop.first,
            )
        return self.states

    def filled(self, text: str) -> str:
        """A text with what was asked for in place."""
        return _MARK.sub(lambda match: self._shown[match[0]], text)

    def _computed(self, name: str, known: set[str], statements: dict[int, str]) -> bool:
        """Whether a name can be computed again by the stub's own statement, which is noted then."""
        bound = self.source.bindings(name)
        if len(bound) != 1 or name in self.source.parameters:
            return False
        statement = next((one for one in self._assignments() if any(node is bound[0] for node in ast.walk(one))), None)
        if statement is None:
            return False
        if statement.lineno in statements:
            return True
        targets = [node.id for node in ast.walk(statement.targets[0]) if isinstance(node, ast.Name)]
        if any(
            len(self.source.bindings(target)) != 1 or not isinstance(self.final.get(target), _PLAIN)
            for target in targets
        ):
            return False
        added = dict(statements)
        for used in free_names(statement.value):
            if self.source.is_known(used):
                continue
            if used in known:
                if not self.source.kept_after(used, statement.lineno) or not _only_asked(statement.value, used):
                    return False
            elif not self._computed(used, known, added):
                return False
        if any(isinstance(node, (ast.Lambda, ast.Await, ast.NamedExpr)) for node in ast.walk(statement.value)):
            return False
        statements.update(added)
        statements[statement.lineno] = ast.get_source_segment(self.source.text, statement) or ast.unparse(statement)
        return True

    def _assignments(self) -> Sequence[ast.Assign]:
        """Statements `a, b = ...` of one line at the top level of the stub."""
        return [
            node
            for node in self.source.function.body
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and node.lineno == node.end_lineno
        ]


class _Asking(ast.NodeTransformer):
    """Puts marks for what an expression asks tensors for."""

    def __init__(self, names: Names, asked: frozenset[str]) -> None:
        self.names = names
        self.asked = asked

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """`y.stride(0)`."""
        if isinstance(node.func, ast.Attribute) and self._is_asked(node.func):
            name, question = ast.unparse(node).split(".", 1)
            return ast.Name(self.names.ask(name, question), ast.Load())
        return self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        """`y.shape[0]`."""
        if (
            isinstance(node.value, ast.Attribute)
            and self._is_asked(node.value)
            and isinstance(node.slice, ast.Constant)
        ):
            name, question = ast.unparse(node).split(".", 1)
            return ast.Name(self.names.ask(name, question), ast.Load())
        return self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """`y.dtype`."""
        if self._is_asked(node):
            name, question = ast.unparse(node).split(".", 1)
            return ast.Name(self.names.ask(name, question), ast.Load())
        return self.generic_visit(node)

    def _is_asked(self, node: ast.Attribute) -> bool:
        return isinstance(node.value, ast.Name) and node.value.id in self.asked


class _Beyond(ast.NodeTransformer):
    """Other tensors where something is asked that these answer alike."""

    def __init__(self, twins: Mapping[str, str]) -> None:
        self.twins = twins

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """`x.dtype`."""
        if node.attr in _OF_EVERY_PART and isinstance(node.value, ast.Name) and node.value.id in self.twins:
            return ast.Attribute(ast.Name(self.twins[node.value.id], ast.Load()), node.attr, node.ctx)
        return self.generic_visit(node)


def _same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one dtype share memory."""
    memory: list[int] = [part.untyped_storage()._cdata for part in (one, other)]
    return memory[0] == memory[1] and bool(declared_dtype(one) == declared_dtype(other))


def _only_asked(node: ast.AST, name: str) -> bool:
    """Whether an expression only asks a tensor for its form."""
    asked = {
        id(inner.value)
        for inner in ast.walk(node)
        if isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name) and inner.attr in ASKS
    }
    return all(id(inner) in asked for inner in ast.walk(node) if isinstance(inner, ast.Name) and inner.id == name)
