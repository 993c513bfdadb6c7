"""`evaluate`: runs a kernel exactly, on the CPU, program by program; what every pass is tested against.

Floats are float64 whatever their element, integers have their width. Nothing is simulated of a device: programs run one
after the other, the operations of one in order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from kernel_agent.compiler.ssa import arithmetic, tiles
from kernel_agent.compiler.ssa.code import ELEMENTWISE, Code
from kernel_agent.compiler.ssa.memory import Evaluation, Memory, TileOfMatrix
from kernel_agent.compiler.ssa.value import Block, Kernel, Op, Value
from kernel_agent.compiler.ssa.verify import verify
from kernel_agent.errors import InternalError


def evaluate(
    kernel: Kernel,
    grid: Sequence[int],
    arguments: Mapping[str, Tensor | int | float],
    *,
    open_lanes: float = 0.0,
) -> Evaluation:
    """Run all programs of a grid; tensors are written in place.

    `arguments`: by name, all of them; tensors on the CPU, whose memory from their first element on is what offsets
    count. Those of narrow elements round what is stored to them. `open_lanes`: what masked lanes get of loads that
    do not say; NaN shows whether a result depends on it.

    Raises OutOfBounds; InternalError for a kernel that is not well formed, a missing argument, or a tape that is loaded
    before it is stored; CannotDerive for a library function that is not known.
    """
    verify(kernel)
    missing = [value.name for value in kernel.arguments if value.name not in arguments]
    if missing:
        raise InternalError(f"{kernel.name} lacks arguments: {', '.join(missing)}")
    tensors: dict[Value, Tensor] = {}
    scalars: dict[Value, Tensor] = {}
    for value in kernel.arguments:
        given = arguments[value.name]
        if value.is_pointer:
            if not isinstance(given, Tensor):
                raise InternalError(f"{value.name} is a pointer; it needs a tensor")
            tensors[value] = given
        else:
            scalars[value] = torch.as_tensor(given, dtype=arithmetic.held_as(value.element))
    memory = Memory(tensors, open_lanes)
    extents = (*grid, 1, 1)[:3]
    with torch._C.DisableTorchFunction():  # a stand-in for a GPU looks at every call, and finds nothing here
        for program in itertools.product(*(range(extent) for extent in reversed(extents))):
            _Program(memory, program[::-1], extents, scalars).run(kernel.body)
    return memory.evaluation


class _Left(Exception):
    """A program ended early."""


class _Program:
    """One run of a kernel."""

    def __init__(
        self, memory: Memory, program: tuple[int, ...], grid: tuple[int, ...], scalars: Mapping[Value, Tensor]
    ) -> None:
        self.memory = memory
        self.place = program
        self.grid = grid
        self.values = dict(scalars)
        self.trips: tuple[int, ...] = ()
        """Number of the present trip of every loop around, the outermost first."""
        self.tapes: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def run(self, body: Block) -> None:
        """All of it, up to a LEAVE_IF that holds."""
        try:
            self.block(body)
        except _Left:
            return

    def block(self, block: Block) -> list[Tensor]:
        """The operations of a block; returns what it yields."""
        for op in block.ops:
            operands = [self.values[value] for value in op.operands]
            results = self.op(op, operands)
            for value, found in zip(op.results, results, strict=True):
                if tuple(found.shape) != value.shape or found.dtype is not arithmetic.held_as(value.element):
                    raise InternalError(f"{op!r} gives {tuple(found.shape)} {found.dtype}")
                self.values[value] = found
        return [self.values[value] for value in block.yields]

    def op(self, op: Op, operands: list[Tensor]) -> Sequence[Tensor]:
        """One operation: its results."""
        if op.code in ELEMENTWISE:
            return [arithmetic.compute(op, operands)]
        own = _OWN.get(op.code)
        return tiles.compute(op, operands) if own is None else own(self, op, operands)

    # --- sources, memory

    def _const(self, op: Op, _: list[Tensor]) -> list[Tensor]:
        return [torch.tensor(op.attributes["value"], dtype=arithmetic.held_as(op.result.element))]

    def _program_id(self, op: Op, _: list[Tensor]) -> list[Tensor]:
        return [torch.tensor(self.place[op.attributes["axis"]], dtype=torch.int32)]

    def _num_programs(self, op: Op, _: list[Tensor]) -> list[Tensor]:
        return [torch.tensor(self.grid[op.attributes["axis"]], dtype=torch.int32)]

    def _load(self, op: Op, operands: list[Tensor]) -> list[Tensor]:
        return [self.memory.load(op, self.place, operands)]

    def _descriptor(self, _: Op, __: list[Tensor]) -> list[Tensor]:
        return [torch.zeros((), dtype=torch.int64)]

    def _load_block(self, op: Op, operands: list[Tensor]) -> list[Tensor]:
        return [self.memory.load_block(op, self.place, self._tile(op, operands[1:]))]

    def _store_block(self, op: Op, operands: list[Tensor]) -> list[Tensor]:
        self.memory.store_block(op, self.place, self._tile(op, operands[2:]), operands[1])
        return []

    def _tile(self, op: Op, behind: list[Tensor]) -> TileOfMatrix:
        """What a block access moves; `behind`: its last operands, a corner, or what spares a block pointer checks."""
        made = op.operands[0].producer
        assert made is not None, op
        shape: tuple[int, ...] = made.attributes["block"]
        start, *numbers = (int(self.values[value]) for value in made.operands)
        rank = len(shape)
        if made.code is Code.DESCRIPTOR:
            corner = [int(value) for value in behind]
            return TileOfMatrix(shape, start, numbers[:rank], [*numbers[rank:], 1], corner, range(rank))
        spared = op.attributes["spared"] if behind and bool(behind[0]) else ()
        checked = [axis for axis in op.attributes["checked"] if axis not in spared]
        groups = (numbers[:rank], numbers[rank : 2 * rank], numbers[2 * rank :])
        return TileOfMatrix(shape, start, *groups, checked)

    def _write(self, op: Op, operands: list[Tensor]) -> list[Tensor]:
        before = self.memory.write(op, self.place, operands)
        return [before.to(arithmetic.held_as(result.element)) for result in op.results]

    def _tape_store(self, op: Op, operands: list[Tensor]) -> list[Tensor]:
        self.tapes[op.attributes["tape"], self.trips] = operands[0]
        return []

    def _tape_load(self, op: Op, _: list[Tensor]) -> list[Tensor]:
        found = self.tapes.get((op.attributes["tape"], self.trips))
        if found is None:
            raise InternalError(f"nothing was stored to tape {op.attributes['tape']} in trips {self.trips}")
        return [found]

    # --- control

    def _leave_if(self, _: Op, operands: list[Tensor]) -> list[Tensor]:
        if bool(operands[0]):
            raise _Left
        return []

    def _barrier(self, _: Op, __: list[Tensor]) -> list[Tensor]:
        return []

    def _if(self, op: Op, operands: list[Tensor]) -> list[Tensor]:
        return self.block(op.blocks[0 if bool(operands[0]) else 1])

    def _for(self, op: Op, operands: list[Tensor]) -> list[Tensor]:
        start, stop, step = (int(value) for value in operands[:3])
        carries = operands[3:]
        (block,) = op.blocks
        trips = list(enumerate(range(start, stop, step)))
        around = self.trips
        for number, index in reversed(trips) if op.attributes["reverse"] else trips:
            self.trips = (*around, number)
            self.values[block.arguments[0]] = torch.tensor(index, dtype=operands[0].dtype)
            self.values.update(zip(block.arguments[1:], carries, strict=True))
            carries = self.block(block)
        self.trips = around
        return carries

    def _while(self, op: Op, operands: list[Tensor]) -> list[Tensor]:
        test, body = op.blocks
        carries, around = operands, self.trips
        for number in itertools.count():
            self.trips = (*around, number)
            self.values.update(zip(test.arguments, carries, strict=True))
            condition, *passed = self.block(test)
            if not bool(condition):
                break
            self.values.update(zip(body.arguments, passed, strict=True))
            carries = self.block(body)
        self.trips = around
        return passed

    def _reduce(self, op: Op, operands: list[Tensor]) -> list[Tensor]:
        return tiles.reduce(op, operands, lambda values: self._combine(op.blocks[0], values))

    def _scan(self, op: Op, operands: list[Tensor]) -> list[Tensor]:
        return tiles.scan(op, operands, lambda values: self._combine(op.blocks[0], values))

    def _combine(self, block: Block, values: list[Tensor]) -> list[Tensor]:
        """Run the scalar operations of a block on whole slices at once."""
        self.values.update(zip(block.arguments, values, strict=True))
        for op in block.ops:
            operands = [self.values[value] for value in op.operands]
            (found,) = self.op(op, operands)
            self.values[op.result] = found
        shape = values[0].shape
        return [self.values[value].broadcast_to(shape) for value in block.yields]


_OWN: dict[Code, Callable[[_Program, Op, list[Tensor]], Sequence[Tensor]]] = {
    Code.CONST: _Program._const,
    Code.PROGRAM_ID: _Program._program_id,
    Code.NUM_PROGRAMS: _Program._num_programs,
    Code.LOAD: _Program._load,
    Code.DESCRIPTOR: _Program._descriptor,
    Code.BLOCK_POINTER: _Program._descriptor,
    Code.LOAD_BLOCK: _Program._load_block,
    Code.STORE: _Program._write,
    Code.STORE_BLOCK: _Program._store_block,
    Code.ATOMIC_ADD: _Program._write,
    Code.ATOMIC: _Program._write,
    Code.TAPE_STORE: _Program._tape_store,
    Code.TAPE_LOAD: _Program._tape_load,
    Code.BARRIER: _Program._barrier,
    Code.LEAVE_IF: _Program._leave_if,
    Code.IF: _Program._if,
    Code.FOR: _Program._for,
    Code.WHILE: _Program._while,
    Code.REDUCE: _Program._reduce,
    Code.SCAN: _Program._scan,
}
