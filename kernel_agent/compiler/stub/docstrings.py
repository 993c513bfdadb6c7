"""Docstrings of derived functions: what a kernel computes and who owns what, as its operations and its plan show.

Every sentence follows from what is printed: a gradient is said to be stored where all that writes to it are stores,
added atomically where an atomic addition does, summed in registers where what is stored comes out of a loop. Names are
those of the text; what has none there is not spoken of.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence

from kernel_agent.compiler.plan import BackwardPlan, Step, written_by
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Kernel, Op, Value, walk
from kernel_agent.compiler.stub.formulas import formulas

_WIDTH = 112
_MOST = 4
"""Values that are listed as computed again."""
_THROUGH = frozenset((Code.CAST, Code.MUL, Code.DIV, Code.TRANS, Code.SELECT, Code.RESHAPE, Code.NEG, Code.SUM))
"""What is done to a sum before it is stored."""
_WRITES = (Code.STORE, Code.STORE_BLOCK, Code.ATOMIC_ADD)
_LOADED = re.compile(r"^\s*(\w+) = (?!tl\.load)", re.MULTILINE)


def kernel_docstring(forward: Kernel, plan: BackwardPlan, step: Step, text: str) -> str:
    """The docstring of one launch's kernel, without quotes. `forward`: the kernel it takes back; `text`: the source of
    the kernel, without docstring."""
    counted = _counted(plan, step.kernel)
    if counted:
        return _filled([f"How often each row of {counted} will be stored to: more than once, and a sum would be lost."])
    named = _listed_rows(plan, step.kernel)
    if named:
        return _filled([f"Which row of {named} each addition goes to, from 1 on; 0 is none."])
    trips = _counted_trips(plan, step.kernel)
    if trips:
        return _filled([f"How often each program adds to {trips}."])
    facts = _Facts(forward, plan, step.kernel, text)
    return _filled(facts.sentences(len(step.grid)), facts.formulas())


def backward_docstring(grads: Sequence[str], cotangents: Sequence[str], made: Mapping[str, str]) -> str:
    """The docstring of the backward. `made`: what each kernel computes, by its name, in the order of the launches."""
    parts = [f"`{name}` computes {what}." for name, what in made.items() if what]
    return _filled([f"Gradients of {_listed(grads)} from {_listed(cotangents)}.", *parts])


def computed(plan: BackwardPlan, kernel: Kernel) -> str:
    """What a kernel of a plan writes, in words; empty where that is nothing."""
    counted = _counted(plan, kernel)
    if counted:
        return f"how often each row of {counted} will be stored to"
    named = _listed_rows(plan, kernel)
    if named:
        return f"which row of {named} each addition goes to"
    trips = _counted_trips(plan, kernel)
    if trips:
        return f"how often each program adds to {trips}"
    writes = written_by(kernel)
    gradients = [name for name in dict.fromkeys(plan.gradients.values()) if name in writes]
    rows = list(dict.fromkeys(plan.sums[name] for name in writes if name in plan.sums))
    rest = [name for name in writes if name not in plan.sums and name not in gradients and name not in _reads(kernel)]
    parts = [_listed(gradients)] if gradients else []
    parts += [f"partial sums of {_listed(rows)}"] if rows else []
    parts += [f"{_listed(rest)} for later launches"] if rest else []
    return _listed(parts)


def _counted(plan: BackwardPlan, kernel: Kernel) -> str:
    """The gradient whose rows a kernel counts; empty of a kernel that does not."""
    writes = written_by(kernel)
    return next((one.gradient for one in plan.censuses if one.counts.name in writes), "")


def _listed_rows(plan: BackwardPlan, kernel: Kernel) -> str:
    """The gradient whose rows a kernel lists; empty of a kernel that does not."""
    writes = written_by(kernel)
    return next((one.gradient for one in plan.listings if one.rows.name in writes), "")


def _counted_trips(plan: BackwardPlan, kernel: Kernel) -> str:
    """The gradient to which a kernel counts additions; empty of a kernel that does not."""
    writes = written_by(kernel)
    countings = [(one.gradient, one.counting) for one in plan.listings if one.counting is not None]
    return next((gradient for gradient, one in countings if one.counts.name in writes), "")


class _Facts:
    """What a kernel shows."""

    def __init__(self, forward: Kernel, plan: BackwardPlan, kernel: Kernel, text: str) -> None:
        self.forward = forward
        self.plan = plan
        self.kernel = kernel
        self.assigned = set(_LOADED.findall(text))
        self.text = text

    def sentences(self, axes: int) -> list[str]:
        """The first says what is computed."""
        reads = _reads(self.kernel)
        cotangents = {tensor: name for tensor, name in self.plan.cotangents.items() if name in reads}
        writes = written_by(self.kernel)
        shared = [one.name for one in self.plan.buffers if one.name in reads and one.name not in writes]
        given = [*cotangents.values(), *shared]
        what = f"{computed(self.plan, self.kernel)}{f' from {_listed(given)}' if given else ''}."
        found = [f"P{what[1:]}" if what.startswith("partial") else what]
        inputs = self._inputs()
        if inputs:
            outputs = cotangents or self.plan.cotangents
            by = f"Derivatives of {_listed(outputs)} by {_listed(inputs)} in `{self.forward.name}`"
            found.append(f"{by}, applied to {_listed(outputs.values())}.")
        return [*found, *self._owners(axes), *self._sums(), *self._atomics(), *self._sources()]

    def formulas(self) -> list[str]:
        """Of the gradients, partial sums and values for later launches, as far as they can be said."""
        reads, sums = _reads(self.kernel), self.plan.sums
        written = {name: sums.get(name, name) for name in written_by(self.kernel) if name not in reads}
        over = {op: name for op in self.kernel.ops if op.code is Code.FOR and (name := self._index(op))}
        return formulas(self.kernel, written, self.assigned, over)

    def _inputs(self) -> list[str]:
        """Tensors of the forward whose gradients, or partial sums of them, are written."""
        results = self.plan.results(self.kernel)
        return [tensor for tensor, name in self.plan.gradients.items() if name in results]

    # --- who owns what

    def _owners(self, axes: int) -> list[str]:
        parts, turns = [], []
        for axis in range(axes):
            ids = [op.result for op in self.kernel.ops if op.code is Code.PROGRAM_ID and op.attributes["axis"] == axis]
            if not ids:
                continue
            loop = self._walked_from(ids)
            if loop is not None:
                turns.append(self._index(loop))
                continue
            tiles = dict.fromkeys(tile for value in ids for tile in self._tiles(value))
            parts.append(f"{' and '.join(tiles)} (axis {axis})" if tiles else f"one index of axis {axis}")
        found = [f"A program has {_listed(parts)}."] if parts else []
        found += [f"Programs take turns at `{name}`." for name in turns if name]
        return found

    def _tiles(self, number: Value) -> list[str]:
        """`BLOCK_N keys` that start at a multiple of a number."""
        found = []
        for value in self._made_of(number):
            op = value.producer
            if op is None or op.code is not Code.ADD or not value.shape or value.name not in self.assigned:
                continue
            size = self.kernel.extents.get(value.shape[0])
            if size and any(_is_range(part) for part in op.operands):
                found.append(f"{size} `{value.name}`")
        return found

    def _made_of(self, number: Value) -> dict[Value, None]:
        """Whole numbers that are computed of one, in the order of the text."""
        found = {number: None}
        for op in self.kernel.ops:
            if op.code in (Code.ADD, Code.SUB, Code.MUL, Code.CAST) and any(value in found for value in op.operands):
                found[op.result] = None
        return found

    def _walked_from(self, numbers: Sequence[Value]) -> Op | None:
        """A loop that starts at the number of the program."""
        loops = (op for op in self.kernel.ops if op.code is Code.FOR)
        return next((op for op in loops if op.operands[0] in numbers), None)

    def _index(self, loop: Op) -> str:
        """What a loop goes over: tiles at its index, else the index; empty where the text has neither."""
        index = loop.blocks[0].arguments[0]
        tiles = self._tiles(index)
        if tiles:
            return tiles[0].split("`")[1]
        return index.name if re.search(rf"for {re.escape(index.name or '?')} in", self.text) else ""

    # --- how it is written

    def _sums(self) -> list[str]:
        """Gradients that come out of loops."""
        over: dict[str, list[str]] = {}
        kept = self.plan.sums
        for op in self.kernel.ops:
            if op.code in _WRITES and op.base.name in {*self.plan.gradients.values(), *kept}:
                loops = [name for loop in self._loops_of(op.stored) if (name := self._index(loop))]
                for name in dict.fromkeys(loops):
                    bases = over.setdefault(name, [])
                    bases.extend([kept.get(op.base.name, op.base.name)] if op.base.name not in bases else [])
        return [
            f"It sums {_listed(list(dict.fromkeys(bases)))} over `{name}` in registers." for name, bases in over.items()
        ]

    def _loops_of(self, stored: Value) -> list[Op]:
        """Loops whose sums a stored value is made of by what is done to a sum."""
        found, pending, seen = [], [stored], {stored}
        while pending:
            value = pending.pop()
            op = value.producer
            if op is None or (op.code not in (Code.IF, Code.FOR) and op.code not in _THROUGH):
                continue
            if op.code is Code.FOR:
                place = op.results.index(value)
                found += [op] if _sums_up(op, place) else []
                pending += [op.operands[3 + place]]  # loops after each other go on with one sum
                continue
            more = [value for block in op.blocks for value in block.yields] if op.code is Code.IF else op.operands
            pending += [value for value in more if value not in seen]
            seen |= set(more)
        return found

    def _atomics(self) -> list[str]:
        writes: dict[str, set[Code]] = {}
        for op in self.kernel.ops:
            if op.code in _WRITES:
                writes.setdefault(op.base.name, set()).add(op.code)
        names = {*self.plan.gradients.values(), *self.plan.sums}
        atomic = [name for name, codes in writes.items() if name in names and Code.ATOMIC_ADD in codes]
        if atomic:
            return [
                f"{_listed(atomic)} {_are(atomic)} added to atomically: other programs may add to the same elements."
            ]
        return ["Every element is written by one program, with plain stores."] if names & set(writes) else []

    # --- what it is computed of

    def _sources(self) -> list[str]:
        reads = _reads(self.kernel)
        saved = [name for name in self.plan.saved if name in reads]
        buffers = [one.name for one in self.plan.buffers if one.name in reads]
        mine = written_by(self.kernel)
        own = [name for name in buffers if name in mine and name not in self.plan.gradients.values()]
        shared = [name for name in buffers if name not in mine]
        starts = [name for name in own if name.startswith("segments_")]
        tapes = [name for name in own if name not in starts]
        again = [name for name in self._again() if name not in {*saved, *shared}]
        found = [f"{_listed(saved)} {_are(saved)} read as the forward stored {_them(saved)}."] if saved else []
        found += (
            [f"{_listed(shared)} {_are(shared)} read as an earlier launch stored {_them(shared)}."] if shared else []
        )
        if starts:
            found.append(
                f"{_listed(starts)} {_are(starts)} what a loop carries at the start of each segment of its trips."
            )
        if tapes:
            part = "one segment" if starts else "a loop that is gone through twice"
            found.append(f"{_listed(tapes)} {_are(tapes)} the tape of {part}.")
        if again:
            shown = again if len(again) <= _MOST else [*again[:_MOST], "more"]
            found.append(f"Computed again of the forward: {_listed(shown)}.")
        return found

    def _again(self) -> list[str]:
        """Floats of the forward that the text computes."""
        plain = (Code.LOAD, Code.CAST, Code.FULL, Code.CONST)
        known = dict.fromkeys(
            value.name
            for op in self.forward.ops
            if op.code not in plain and op.code is not Code.FOR
            for value in op.results
            if value.name and value.is_float
        )
        mine = {value.name for op in self.kernel.ops if op.code not in plain for value in op.results}
        return [f"`{name}`" for name in known if name in self.assigned and name in mine]


def _is_range(value: Value) -> bool:
    op = value.producer
    if op is not None and op.code is Code.CAST:
        op = op.operands[0].producer
    return op is not None and op.code is Code.ARANGE


def _sums_up(loop: Op, place: int) -> bool:
    """Whether a carry of a loop is a sum: each trip adds to it, and nothing else is computed of it."""
    (block,) = loop.blocks
    carry = block.arguments[1 + place]
    return sum(carry in op.operands for op in walk(block)) <= 1 and _goes_on(block.yields[place], carry)


def _goes_on(value: Value, carry: Value) -> bool:
    """Whether a value is a carry to which something may have been added."""
    op = value.producer
    if value is carry or op is None:
        return value is carry
    if op.code is Code.ADD:
        return any(_goes_on(operand, carry) for operand in op.operands)
    place = op.results.index(value)
    if op.code is Code.IF:
        return all(_goes_on(block.yields[place], carry) for block in op.blocks)
    return op.code is Code.FOR and _goes_on(op.operands[3 + place], carry) and _sums_up(op, place)


def _reads(kernel: Kernel) -> list[str]:
    return list(dict.fromkeys(op.base.name for op in kernel.ops if op.code in (Code.LOAD, Code.LOAD_BLOCK)))


def _listed(names: Iterable[str]) -> str:
    """`a, b and c`."""
    *first, last = list(names) or [""]
    return f"{', '.join(first)} and {last}" if first else last


def _are(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _them(names: Sequence[str]) -> str:
    return "it" if len(names) == 1 else "them"


def _filled(sentences: Sequence[str], formulas: Sequence[str] = ()) -> str:
    """The first sentence, formulas, then the others as a paragraph; indented as a function's body is."""
    first, *others = sentences
    head = textwrap.wrap(first, _WIDTH, break_long_words=False, break_on_hyphens=False)
    if not others and not formulas and len(head) == 1:
        return head[0]
    body = textwrap.wrap(" ".join(others), _WIDTH, break_long_words=False, break_on_hyphens=False)
    shown = ["", *(f"    {line}" for line in formulas)] if formulas else []
    lines = [*head, *shown, *([""] if body else []), *body]
    return "\n".join([lines[0], *(f"    {line}" if line else "" for line in lines[1:]), "    "])
