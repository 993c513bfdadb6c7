"""`Reversal`: the recomputed forward, then the adjoint of every operation from the last to the first."""

from __future__ import annotations

from collections.abc import Sequence

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.reverse.activity import Activity
from kernel_agent.compiler.reverse.branches import reverse_if
from kernel_agent.compiler.reverse.combines import reverse_combine
from kernel_agent.compiler.reverse.cotangents import Cotangents
from kernel_agent.compiler.reverse.elements import adjoint_element
from kernel_agent.compiler.reverse.lanes import Lanes
from kernel_agent.compiler.reverse.loops import Taped, reverse_for
from kernel_agent.compiler.reverse.memory import Accesses
from kernel_agent.compiler.reverse.rules import CONSTANT, RULES, Primal
from kernel_agent.compiler.reverse.rules.registry import MIXING
from kernel_agent.compiler.reverse.whiles import Counted, counted, reverse_while
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import ELEMENTWISE, Code
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.value import Block, Kernel, Op, Value, constant, walk

_SPREADS = ELEMENTWISE | {Code.FULL, Code.BROADCAST}
"""Operations whose operands broadcast to the result."""


class Reversal(Copier):
    """Builds the adjoint of one kernel.

    As a copier it recomputes the forward, without what that wrote. What a loop carries is put on tapes in the copy that
    is made right before the loop is reversed.
    """

    def __init__(
        self,
        source: Kernel,
        b: Builder,
        accesses: Accesses,
        activity: Activity,
        cotangents: dict[Value, Value],
        gradients: dict[Value, Value],
        *,
        undoes: bool = False,
    ) -> None:
        """`cotangents`, `gradients`: arguments of the adjoint kernel by those of the source. `undoes`: see `undo`."""
        super().__init__(source, b)
        self.accesses = accesses
        self.activity = activity
        self.cotangents = cotangents
        self.gradients = gradients
        self.undoes = undoes
        self.lanes = Lanes(b)
        self.primal = Primal(self.__getitem__, self.lanes)
        self.tapes: dict[Op, Taped] = {}
        """Of the loops of the source, in the copy that was made last."""
        self.recurrences: dict[str, Op] = {}
        """Tape -> the loop of the source that leaves it."""
        self.counts: dict[Op, Counted] = {}
        """How the WHILEs among them ended."""
        self._taped: set[Op] = set()
        self._count = 0

    def run(self) -> None:
        """The whole kernel."""
        self.recompute(self.source.body)
        found = self.fresh()
        self.reverse(self.source.body, found)
        for argument, gradient in self.gradients.items():
            total = found.get(argument)
            if total is not None:
                self.b.store(gradient, self.b.const(0), total, code=Code.ATOMIC_ADD)

    def fresh(self) -> Cotangents:
        """For a block: no cotangents."""
        return Cotangents(self.b, self.lanes, self.activity)

    def numbered(self, name: str) -> str:
        """A name that no tape has."""
        self._count += 1
        return f"{name}_{self._count}"

    # --- the forward again

    def recompute(self, block: Block) -> None:
        """Copy the operations of a block that is reversed next: its own loops leave tapes, those within them do not."""
        self._taped.update(op for op in block.ops if op.code in (Code.FOR, Code.WHILE))
        self.block(block)

    def effect(self, op: Op) -> None:
        """The way back has effects of its own; only where a program ends early is the same."""
        if op.code is Code.LEAVE_IF or self.slicing:
            super().effect(op)

    def load(self, op: Op) -> None:
        """A LOAD: of what was stored before, that value; where masked lanes have no padding, they are zero."""
        b, store = self.b, self.accesses.forwarded.get(op)
        if store is not None:
            value = b.cast(b.whole(self[store.stored], op.result.shape), op.result.element)
            if op.mask is not None:
                value = b.select(self[op.mask], value, b.zero(value) if op.other is None else self[op.other])
            self[op.result] = value
        elif op.mask is not None and op.other is None and op.result.is_float:
            zero = b.const(0.0, op.result.element)
            self[op.result] = b.load(self[op.base], self.whole(op.offset), self[op.mask], zero, op.result.name)
        elif op.attributes.get("saved"):
            mask, other = (None if value is None else self[value] for value in (op.mask, op.other))
            self[op.result] = b.load(self[op.base], self.whole(op.offset), mask, other, op.result.name)
        else:
            super().load(op)

    def pure(self, op: Op) -> None:
        """An operation without effect; of what is KNOWN the number stands for the value from here on."""
        if op.code is Code.KNOWN:
            number = self[op.operands[1]]
            self[op.result] = number
            if constant(op.operands[0]) is None:
                self[op.operands[0]] = number
        else:
            super().pure(op)

    def loop(self, op: Op) -> None:
        """A FOR, with the tapes of its carries where it is reversed next."""
        if op not in self._taped:
            super().loop(op)
            return
        (block,) = op.blocks
        taped = self._tape(op, block.arguments[0].name, block.arguments[1:])

        def body(index: Value, inner: list[Value]) -> list[Value]:
            self.enter(block.arguments, (index, *inner))
            for name, value in zip(taped.tapes, inner, strict=True):
                self.b.add_op(Op(Code.TAPE_STORE, (value,), (), {"tape": name}))
            return self.block(block)

        bounds = (self[op.operands[0]], self[op.operands[1]], self[op.operands[2]])
        carries = [self.whole(value) for value in op.operands[3:]]
        called = [value.name for value in block.arguments]
        attributes = {**op.attributes, "tape": taped.trips}
        self.results(op, self.b.loop(bounds, carries, body, index_name=called[0], names=called[1:], **attributes))

    def repeat(self, op: Op) -> None:
        """A WHILE, with the tapes of its carries where it is reversed next."""
        if op in self._taped:
            self.counts[op] = counted(self, op, self._tape(op, "", op.blocks[0].arguments))
        else:
            super().repeat(op)

    def _tape(self, op: Op, index: str, carries: Sequence[Value]) -> Taped:
        """Names for a loop that is copied with tapes. What is copied within it has none."""
        self._taped.discard(op)
        names = tuple(self.numbered(value.name or "carry") for value in carries)
        self.recurrences |= dict.fromkeys(names, op)
        self.tapes[op] = Taped(self.numbered(f"trips_{index}" if index else "trips"), names)
        return self.tapes[op]

    # --- backwards

    def reverse(self, block: Block, found: Cotangents) -> None:
        """The adjoint of a block whose values have been recomputed where the builder is."""
        for op in reversed(block.ops):
            line = op.results[0].source_line if op.results else None
            self.b.line = line or self.b.line
            self.reverse_op(op, found)

    def reverse_op(self, op: Op, found: Cotangents) -> None:
        """The adjoint of one operation."""
        if op.code in (Code.STORE, Code.ATOMIC_ADD):
            self._reverse_write(op, found)
        elif op.code is Code.LOAD:
            self._reverse_load(op, found)
        elif op.code is Code.FOR:
            reverse_for(self, op, found)
        elif op.code is Code.WHILE:
            reverse_while(self, op, found)
        elif op.code is Code.IF:
            reverse_if(self, op, found)
        elif op.code in (Code.REDUCE, Code.SCAN):
            reverse_combine(self, op, found)
        elif op.results and op.code not in CONSTANT:
            self._reverse_pure(op, found)

    def sinks(self, block: Block) -> bool:
        """Whether a block or one within writes values that have a cotangent, or that others lose theirs to."""
        return any(
            op.code in (Code.STORE, Code.ATOMIC_ADD)
            and op.base in self.cotangents
            and (op.stored in self.activity or op.base in self.accesses.consumed)
            for op in walk(block)
        )

    def _reverse_write(self, op: Op, found: Cotangents) -> None:
        """What was stored, or added, has the cotangent that memory has there."""
        base = self.cotangents.get(op.base)
        if base is None or op in self.accesses.overwritten:
            return
        b = self.b
        mask = None if op.mask is None else self[op.mask]
        zero = b.const(0.0, base.pointee)
        if op.stored in self.activity:
            padding = None if mask is None else zero
            g = b.load(base, self.whole(op.offset), mask, padding, f"d_{op.stored.name or op.base.name}")
            found.add(op.stored, b.cast(g, adjoint_element(base.pointee)), g.shape)
        if op.base in self.accesses.consumed:
            for code in (Code.BARRIER, Code.STORE, Code.BARRIER):  # other threads may have read, and may read
                if code is Code.STORE:
                    b.store(base, self.whole(op.offset), zero, mask)
                else:
                    b.add_op(Op(Code.BARRIER, (), ()))

    def _reverse_load(self, op: Op, found: Cotangents) -> None:
        """What was read has a gradient there; lanes that were masked off gave `other`, or nothing."""
        g = found.get(op.result)
        if g is None:
            return
        b = self.b
        mask = None if op.mask is None else self[op.mask]
        if op.other is not None and mask is not None:
            found.add(op.other, b.select(mask, b.zero(g), g), op.result.shape)
        store = self.accesses.forwarded.get(op)
        if store is not None:
            found.add(store.stored, g if mask is None else b.select(mask, g, b.zero(g)), op.result.shape)
            return
        gradient = self.gradients.get(op.base)
        if gradient is None:
            return
        on = self.lanes.conditions(mask) if mask is not None else frozenset()
        off = self.lanes.support(g) - on
        if off and not self.lanes.finite(g):
            g = self.lanes.restricted(g, off)
        b.store(gradient, self.whole(op.offset), b.cast(g, gradient.pointee), mask, Code.ATOMIC_ADD)

    def _reverse_pure(self, op: Op, found: Cotangents) -> None:
        cotangents = tuple(found.get(result) for result in op.results)
        operands = op.operands[:1] if op.code is Code.KNOWN else op.operands
        if all(g is None for g in cotangents) or all(value not in self.activity for value in operands):
            return
        known = RULES.get(op.code)
        if known is None:
            raise CannotDerive(
                f"{op.code.value}{op.results[0].where} has no derivative rule",
                remedy="mark its inputs as without gradient",
            )
        if op.code in MIXING:
            cotangents = tuple(None if g is None else self.lanes.settled(g) for g in cotangents)
        self.b.hint = f"d_{op.results[0].name}" if op.results[0].name else ""
        spread = op.results[0].shape if op.code in _SPREADS else None
        parts = known(self.b, op, self.primal, cotangents)
        for value, part in zip(op.operands, parts, strict=True):
            found.add(value, part, spread)
