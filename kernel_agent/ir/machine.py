"""Walks a kernel's program for many programs at once. What an operation does is in `operations`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from kernel_agent.ir.around import Around
from kernel_agent.ir.cost.meter import Meter
from kernel_agent.ir.errors import IRError, UnsupportedOp
from kernel_agent.ir.memory import CPU, Buffer, Enter, Tape
from kernel_agent.ir.numerics import Numerics
from kernel_agent.ir.operations.bits import apply_to_bits
from kernel_agent.ir.operations.faithful import apply_faithful
from kernel_agent.ir.operations.registry import DERIVATIVES, POINTWISE, RULES
from kernel_agent.ir.operations.safe import SafePointwise
from kernel_agent.ir.program import Block, Function, Module, Op
from kernel_agent.ir.sanitizer.findings import Findings
from kernel_agent.ir.sanitizer.lanes import Lanes
from kernel_agent.ir.sanitizer.promises import broken_promises
from kernel_agent.ir.sanitizer.sanitizer import Sanitizer
from kernel_agent.ir.sanitizer.sentry import EveryLane, Sentry
from kernel_agent.ir.sanitizer.views import View
from kernel_agent.ir.slopes import Slopes
from kernel_agent.ir.values import Active, Bits, Pointer, RuntimeValue, join_rows, on_device, take_rows

LEAVES_BLOCK = frozenset(
    {"scf.yield", "scf.condition", "tt.return", "tt.reduce.return", "tt.scan.return", "tt.map_elementwise.return"}
)
_BESIDE = 800
"""Bytes that a recorded value takes beside its elements, in torch's graph: measured over a million of them."""
_BRANCHES = frozenset({"cf.br", "cf.cond_br"})
_Error = TypeVar("_Error", bound=IRError)
_TAKES_HOST = frozenset({"scf.for", "scf.while", "scf.if", "tt.call"})
"""Operations that pass numbers of the host on as they are."""


@dataclass(frozen=True)
class Jump:
    """Programs that continue at a block of a function body."""

    label: str
    active: Active
    arguments: list[RuntimeValue]


@dataclass(frozen=True)
class Outcome:
    """How a block ended."""

    values: list[RuntimeValue] = field(default_factory=list)
    """What its last operation passes on."""
    jumps: list[Jump] = field(default_factory=list)
    """Where its programs go on, for blocks that end in a branch."""


class Machine:
    """State of one launch: environment of values, tapes of buffers, and who is watched."""

    def __init__(
        self,
        module: Module,
        grid: tuple[int, int, int],
        buffers: dict[int, Buffer],
        sanitizer: Sanitizer | Sentry,
        *,
        device: torch.device = CPU,
        safe: bool = False,
        numerics: Numerics = Numerics.EXACT,
        keep_initial: bool = False,
        quiet: bool = False,
        meter: Meter | None = None,
        slopes: Slopes | None = None,
        edges: Around | None = None,
    ) -> None:
        self.module = module
        self.grid = grid
        self.buffers = buffers
        """Buffers of this execution by the upper bits of their virtual address."""
        self.sanitizer = sanitizer
        sanitizer.machine = self
        self.numerics = numerics
        self.faithful = numerics is Numerics.FAITHFUL
        """Results are rounded as the IR declares."""
        self.device = device
        """Where programs, buffers and all values live."""
        self.safe = safe
        """Zero cotangents give zero gradients even where a derivative is infinite."""
        self.slopes = slopes
        """Who watches for infinite derivatives; None when nobody will ask for gradients, or safe mode is on."""
        self.edges = edges
        """Who stands around every operation (`Edges`, `Watch`); None when nobody asks what if."""
        self.keep_initial = keep_initial
        """Contents at the start of the launch are needed again, by a replay."""
        self.quiet = quiet
        """Accesses keep all lanes and ask the device for nothing; see `Sentry`."""
        self.meter = meter
        """Counts blocks and accesses as they run."""
        self.tapes: dict[int, Tape] = {}
        self.environment: dict[int, tuple[Active, RuntimeValue]] = {}
        self.arguments: dict[int, RuntimeValue] = {}
        """Values of the entry's parameters by id, which outlive their last use for the words of findings."""
        self.computed = 0
        """Bytes of all values computed so far: about what recording them keeps."""
        self.records = False
        """Whether gradients will be asked for."""
        self.budget = sys.maxsize
        """Bytes of values that may be recorded at one time; loops that would exceed it run in segments."""
        self.reachable: list[Buffer] = []
        """Buffers that this launch may touch."""
        self.reached: set[Block] = set()
        """Blocks that some program ran."""
        self._lane_rank = 0
        self._sources: list[Tensor] = []

    # --- values

    def read(self, value_id: int, active: Active) -> RuntimeValue:
        """A value, narrowed to the active programs."""
        owner, value = self.environment[value_id]
        if owner is not active:
            known = active.narrowed.get(value_id)
            if known is None or known[0] is not value:
                known = (value, take_rows(value, active.rows_in(owner)))
                active.narrowed[value_id] = known
            value = known[1]
        if self._lane_rank and isinstance(value, Tensor) and value.dim() == 1:
            value = value.view(-1, *[1] * self._lane_rank)
        return value

    def tape(self, buffer: Buffer) -> Tape:
        """The tape of a buffer in this launch."""
        tape = self.tapes.get(id(buffer))
        if tape is None:
            flat = buffer.root.view(-1)
            records = flat.requires_grad and torch.is_grad_enabled()
            contents = flat.detach()
            tape = Tape(
                buffer,
                contents.clone() if self.keep_initial else contents,
                keep=self.keep_initial or torch.is_grad_enabled() or self.device != CPU,
                padded=self.quiet,
            )
            tape.faithful = self.faithful
            tape.stable = self.keep_initial
            if records:
                tape.token = Enter.apply(flat, tape)
            self.tapes[id(buffer)] = tape
        return tape

    def lanes(self, buffer: Buffer, offset: Tensor, valid: Tensor | None, active: Active, view: View | None) -> Lanes:
        """The lanes of an access."""
        if self.quiet:
            return EveryLane(offset, valid, active, view, buffer.size)
        return Lanes(offset, valid, active, view)

    @property
    def recording(self) -> bool:
        """Whether values computed now are kept for a backward pass."""
        return self.records and torch.is_grad_enabled() and not self._lane_rank

    def replay(self, contents: dict[int, Tensor], floats: Collection[Buffer], *, keep: bool) -> Machine:
        """A machine that repeats a part of this launch inside of a backward pass, recorded and without judging.

        `contents` is memory at the start, by id of the buffer; unless it is to be kept, writes change it. Adjoints of
        the buffers of `floats` go to the adjoint buffers of this launch.
        """
        silent: Sanitizer | Sentry = Sanitizer(self.module, self.grid, Findings(), watch=False)
        if self.quiet:
            silent = Sentry(self.device, set(), watch=False)
        again = Machine(
            self.module,
            self.grid,
            self.buffers,
            silent,
            device=self.device,
            safe=self.safe,
            numerics=self.numerics,
            quiet=self.quiet,
            edges=self.edges,
        )
        again.records, again.budget, again.reachable = True, self.budget, self.reachable
        for tape in self.tapes.values():
            if id(tape.buffer) in contents:
                other = Tape(tape.buffer, contents[id(tape.buffer)], keep=keep, padded=self.quiet)
                again.tapes[id(tape.buffer)] = other
                other.stable = keep
                if tape.buffer in floats:
                    other.shared = tape.adjoint
                    other.token.requires_grad_()
        return again

    def ends(self) -> list[Tensor]:
        """Tokens of what was recorded, with which a backward pass starts."""
        return [tape.token for tape in self.tapes.values() if tape.token.grad_fn is not None]

    def close(self) -> None:
        """Nothing more will run."""
        self.environment.clear()
        for tape in self.tapes.values():
            tape.close()

    @property
    def in_lanes(self) -> bool:
        """Whether a region of scalar operations runs on whole tiles, see `run_lanes`."""
        return self._lane_rank > 0

    def remember(self, floats: Tensor) -> int:
        """Keep floats whose bits go their own way; the result is the position of the first one."""
        start = sum(int(source.numel()) for source in self._sources)
        self._sources.append(floats.reshape(-1))
        return start

    def remembered(self) -> Tensor:
        """All floats kept so far, shape (n,)."""
        if len(self._sources) > 1:
            self._sources = [torch.cat(self._sources)]
        return self._sources[0]

    # --- control

    def run_function(self, function: Function, arguments: Sequence[RuntimeValue], active: Active) -> list[RuntimeValue]:
        """Run a function body. Blocks are visited in textual order, which a forward control flow graph respects."""
        if len(function.blocks) == 1:
            return self.run_values(function.blocks[0], arguments, active)
        order = {block.label: place for place, block in enumerate(function.blocks)}
        waiting: dict[str, list[Jump]] = {}
        entry = function.blocks[0]
        waiting[entry.label] = [Jump(entry.label, active, list(arguments))]
        returned: list[tuple[Active, list[RuntimeValue]]] = []
        while waiting:
            label = min(waiting, key=order.__getitem__)
            jump = _meet(waiting.pop(label))
            outcome = self._run_block(function.blocks[order[label]], jump.arguments, jump.active)
            for leap in outcome.jumps:
                waiting.setdefault(leap.label, []).append(leap)
            if not outcome.jumps:
                returned.append((jump.active, outcome.values))
        if not returned or not returned[0][1]:
            return []
        pieces = [(subset.rows_in(active), values) for subset, values in returned]
        return [
            join_rows([(rows, values[k]) for rows, values in pieces], active.size) for k in range(len(pieces[0][1]))
        ]

    def run_values(self, block: Block, arguments: Sequence[RuntimeValue], active: Active) -> list[RuntimeValue]:
        """Run the only block of a region; the result is what its last operation passes on."""
        return self._run_block(block, arguments, active).values

    def _run_block(self, block: Block, arguments: Sequence[RuntimeValue], active: Active) -> Outcome:
        environment, plain = self.environment, not self._lane_rank
        self.reached.add(block)
        if self.meter is not None and plain:
            self.meter.block(block, active)
        for value, given in zip(block.arguments, arguments, strict=True):
            environment[value.id] = (active, given)
        for op in block.ops:
            if op.name in LEAVES_BLOCK:
                return Outcome([self.read(place, active) for place in op.operand_ids])
            if op.name in _BRANCHES:
                return Outcome(jumps=self._branch(op, active))
            operands = []
            for place in op.operand_ids:
                owner, known = environment[place]
                operands.append(known if owner is active and plain else self.read(place, active))
            if self.edges is not None and plain:
                results: Sequence[RuntimeValue] = self.edges.compute(self.module, op, operands, active, self.apply)
            else:
                results = self.apply(op, operands, active)
            for place, result in zip(op.result_ids, results, strict=True):
                environment[place] = (active, result)
            if op.promises and plain and not self.quiet:
                for text, broken in broken_promises(op, results[0]):
                    self.sanitizer.promise(op, text, broken, active)
            if self.records:
                self.computed += sum(_size(result) for result in results) + _BESIDE * len(results)
            for dead in op.last_uses:
                environment.pop(dead, None)
        return Outcome()

    def run_lanes(self, block: Block, arguments: Sequence[RuntimeValue], active: Active, rank: int) -> list[Tensor]:
        """Run a region of scalar operations on tiles of `rank` dimensions, lane by lane."""
        with self._lanes(rank):
            return self.run_values(block, arguments, active)

    @contextlib.contextmanager
    def _lanes(self, rank: int) -> Iterator[None]:
        outer, self._lane_rank = self._lane_rank, rank
        try:
            yield
        finally:
            self._lane_rank = outer

    def apply(self, op: Op, operands: list[RuntimeValue], active: Active) -> Sequence[RuntimeValue]:
        """The results of one operation in the arithmetic of this launch. Raises `UnsupportedOp`."""
        return apply_faithful(self, op, operands, active) if self.faithful else self.compute(op, operands, active)

    def compute(self, op: Op, operands: list[RuntimeValue], active: Active) -> Sequence[RuntimeValue]:
        """The results of one operation, exact. Raises `UnsupportedOp`."""
        if self._sources and any(isinstance(value, Bits) for value in operands):
            if op.name not in _TAKES_HOST:
                operands = [on_device(value, self.device) for value in operands]
            return apply_to_bits(self, op, operands, active)
        function = POINTWISE.get(op.name)
        if self.device.type != CPU.type and op.name not in _TAKES_HOST:
            if function is not None and all(isinstance(value, Tensor) and value.is_cpu for value in operands):
                return (function(op, *operands),)
            operands = [on_device(value, self.device) for value in operands]
        if function is not None:
            if self.safe and op.name in DERIVATIVES and any(value.requires_grad for value in operands):
                return (SafePointwise.apply(op, *operands),)
            result = function(op, *operands)
            if self.slopes is not None and op.name in DERIVATIVES:
                self.slopes.watch(op, result, operands)
            return (result,)
        rule = RULES.get(op.name)
        if rule is None:
            raise self.unsupported(op, f"operation {op.name} is not supported")
        return rule(self, op, operands, active)

    def _branch(self, op: Op, active: Active) -> list[Jump]:
        if op.name == "cf.br":
            return [Jump(op.successors[0], active, [self.read(value.id, active) for value in op.operands])]
        condition = on_device(self.read(op.operands[0].id, active), self.device).expand(active.size)
        split = 1 + op.attributes["operandSegmentSizes"][1]
        jumps = []
        for label, passed, taken in (
            (op.successors[0], op.operands[1:split], condition),
            (op.successors[1], op.operands[split:], ~condition),
        ):
            rows = taken.nonzero().flatten()
            if rows.numel():
                subset = active if rows.numel() == active.size else active.subset(rows)
                jumps.append(Jump(label, subset, [self.read(value.id, subset) for value in passed]))
        return jumps

    # --- messages

    def unsupported(self, op: Op, message: str, *, remedy: str = "") -> UnsupportedOp:
        """The error for an operation that has no rule."""
        remedy = remedy or "Write this part of the kernel with other operations."
        return self.error(UnsupportedOp, op, message, remedy=remedy)

    def error(self, kind: type[_Error], op: Op, message: str, *, remedy: str) -> _Error:
        """An error at the source line of an operation."""
        place = self.module.place(op)
        kernel = self.module.entry.name
        where = f"{kernel}, line {place.line}" if place else kernel
        return kind(
            f"{where}: {message}",
            remedy=remedy,
            kernel=kernel,
            op=op.name,
            file=place.file if place else "",
            line=place.line if place else None,
        )


def _size(value: RuntimeValue) -> int:
    """Bytes of a value."""
    if isinstance(value, Tensor):
        return int(value.nbytes)
    return int(value.offset.nbytes) if isinstance(value, Pointer) else 0


def _meet(jumps: list[Jump]) -> Jump:
    """Programs that reach one block from several places go on together.

    They become a part of the smallest set that all of them come from: values of a block that every path to here
    passes through belong to that set or to a larger one.
    """
    if len(jumps) == 1:
        return jumps[0]
    origin = jumps[0].active
    while not all(jump.active.is_within(origin) for jump in jumps):
        if origin.parent is None:
            raise RuntimeError("programs of different launches meet")
        origin = origin.parent
    rows = [jump.active.rows_in(origin) for jump in jumps]
    together, order = torch.sort(torch.cat(rows))
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel(), device=order.device)
    active = origin.subset(together)
    positions = place.split([part.numel() for part in rows])
    arguments = [
        join_rows([(part, jump.arguments[k]) for part, jump in zip(positions, jumps, strict=True)], active.size)
        for k in range(len(jumps[0].arguments))
    ]
    return Jump(jumps[0].label, active, arguments)
