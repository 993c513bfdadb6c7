"""Mistakes made in a kernel's IR: one operation that does something else, wherever and whenever it is executed.

The IR holds what the text of a kernel does not show: what Triton's library and helper functions do, how indices are put
together, masks as they reach an access. A mutation is named by kernel, place in the source and number there, so that it
is the same in every specialisation of the kernel. It lives in the executor alone: no kernel is compiled with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from kernel_agent.ir.launch import LaunchOptions, launch
from kernel_agent.ir.memory import Buffer
from kernel_agent.ir.program import Module, Op, Value, walk
from kernel_agent.ir.sanitizer.findings import Findings
from kernel_agent.ir.values import Active, RuntimeValue
from kernel_agent.record import Record

Run = Callable[[Op, list[Any], Active], Sequence[Any]]
"""What an operation does when nobody interferes."""
_LANES = frozenset({"tt.reduce", "tt.scan", "tt.map_elementwise"})
"""Operations whose regions are no places of their own: they combine two lanes."""


class Mutation(Record):
    """One operation, and what it does instead."""

    mutator: str
    """Name of its `OperationMutator`."""
    kernel: str
    place: str
    """Operation, line and column, and which of those that share them: `arith.addf 41:12 0`."""
    way: int
    """Which of the mutator's ways, such as the operand that is left out."""
    line: int | None = None
    """Line of the pair file."""
    words: str = ""
    """For people: `arith.subf of a, b`."""


@dataclass(frozen=True)
class OperationMutator:
    """One class of mistakes."""

    name: str
    sentence: str
    """What the mistake is."""
    ways: Callable[[Program, Op], Iterable[int]]
    """Numbers of the ways in which an operation can be so mistaken; none for most."""
    does: Callable[[Op, list[Any], Active, Run, int], Sequence[Any]]
    """Results of the operation, mistaken in one way."""
    rounds: bool = False
    """Whether it changes rounding alone, which exact arithmetic does not judge."""


@dataclass(eq=False)
class Program:
    """What classes of mistakes ask of a kernel."""

    module: Module

    @cached_property
    def ops(self) -> tuple[Op, ...]:
        """All operations that are executed for whole tiles."""
        inner = {
            id(op) for outer in self.module.all_ops if outer.name in _LANES for r in outer.regions for op in walk(r)
        }
        return tuple(op for op in self.module.all_ops if id(op) not in inner)

    @cached_property
    def makers(self) -> dict[int, Op]:
        """The operation that makes a value, by the value's id."""
        return {result.id: op for op in self.module.all_ops for result in op.results}

    @cached_property
    def yielded(self) -> frozenset[int]:
        """Ids of values that loops carry on: accumulators among them."""
        return frozenset(value.id for op in self.ops if op.name == "scf.yield" for value in op.operands)

    @cached_property
    def axes(self) -> frozenset[int]:
        """Axes of the grid that the kernel asks for."""
        return frozenset(int(op.attributes["axis"]) for op in self.ops if op.name == "tt.get_program_id")

    @cached_property
    def places(self) -> dict[str, Op]:
        """Every operation by its name in `Mutation.place`."""
        seen: Counter[str] = Counter()
        found = {}
        for op in self.ops:
            frame = self.module.place(op)
            at = f"{frame.line}:{frame.column}" if frame else "?"
            name = f"{op.name} {at}"
            found[f"{name} {seen[name]}"] = op
            seen[name] += 1
        return found


def mutations(module: Module, mutators: Sequence[OperationMutator]) -> list[Mutation]:
    """Every mutation of one kernel, by class and in the order of its operations."""
    program = Program(module)
    found = []
    for mutator in mutators:
        for place, op in program.places.items():
            frame = module.place(op)
            for way in mutator.ways(program, op):
                named = ", ".join(_named(value) for value in op.operands)
                words = f"{op.name}{f' of {named}' if named else ''}"
                line = frame.line if frame else None
                found.append(
                    Mutation(
                        mutator=mutator.name,
                        kernel=module.entry.name,
                        place=place,
                        way=way,
                        line=line,
                        words=words,
                    )
                )
    return found


def _named(value: Value) -> str:
    return value.variable or "_"


@dataclass(eq=False)
class Mutated:
    """Computes the operations of an execution, one of them mistaken."""

    mutation: Mutation
    mutator: OperationMutator
    _op: dict[int, Op | None] = field(default_factory=dict)
    """By identity of the module; None where it has no such place."""

    def runner(
        self,
        module: Module,
        grid: tuple[int, int, int],
        arguments: Sequence[RuntimeValue],
        buffers: dict[int, Buffer],
        findings: Findings,
        options: LaunchOptions,
    ) -> None:
        """`launch` with the mistake."""
        launch(module, grid, arguments, buffers, findings, replace(options, edges=self))

    def compute(
        self, module: Module, op: Op, operands: list[Any], active: Active, run: Callable[..., Any]
    ) -> list[Any]:
        """The results of an operation."""
        key = id(module)
        if key not in self._op:
            own = module.entry.name == self.mutation.kernel
            self._op[key] = Program(module).places.get(self.mutation.place) if own else None
        if op is not self._op[key]:
            return list(run(op, operands, active))
        return list(self.mutator.does(op, operands, active, run, self.mutation.way))
