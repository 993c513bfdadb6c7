"""Names of variables: the user's where the value has one, else by what the value is for."""

from __future__ import annotations

import builtins
import itertools
import keyword
import re
from collections.abc import Collection, Iterator

from kernel_agent.compiler.emit.places import Places, inherited
from kernel_agent.compiler.emit.variables import Variable, Variables
from kernel_agent.compiler.ssa.code import CONTROL, MEMORY, Code
from kernel_agent.compiler.ssa.value import Block, Kernel, Op, Value, constant

_RESERVED = frozenset((*keyword.kwlist, *keyword.softkwlist, *dir(builtins), "tl", "triton", "torch", "libdevice"))
_BY_CODE = {
    Code.ADD: ("total", "subtotal"), Code.SUB: ("difference", "change"), Code.MUL: ("product", "scaled", "weighted"),
    Code.DIV: ("ratio", "share"), Code.SUM: ("total",), Code.REDUCE_MAX: ("largest",), Code.REDUCE_MIN: ("smallest",),
    Code.MAX: ("larger",), Code.MIN: ("smaller",), Code.EXP: ("power", "exponential"), Code.EXP2: ("power",),
    Code.LOG: ("log",), Code.LOG2: ("log",), Code.SQRT: ("root",), Code.RSQRT: ("scale",), Code.SIGMOID: ("gate",),
    Code.TANH: ("tanh",), Code.DOT: ("product",), Code.SELECT: ("chosen", "picked"), Code.CUMSUM: ("running",),
    Code.LINEAR_SCAN: ("state",), Code.LINEAR_SCAN_BEFORE: ("state_before",), Code.TRANS: ("turned",),
    Code.GATHER: ("picked",), Code.FLIP: ("flipped",), Code.SCAN: ("running",), Code.REDUCE: ("reduced",),
    Code.FMA: ("total",), Code.NEG: ("negated",), Code.REM: ("rest",), Code.ABS: ("size",),
}  # fmt: skip
_OF_ONE = {
    Code.EXP: "exp_{}", Code.EXP2: "exp2_{}", Code.LOG: "log_{}", Code.LOG2: "log2_{}", Code.SQRT: "sqrt_{}",
    Code.RSQRT: "rsqrt_{}", Code.SIN: "sin_{}", Code.COS: "cos_{}", Code.TANH: "tanh_{}", Code.ERF: "erf_{}",
    Code.SIGMOID: "sigmoid_{}", Code.SUM: "sum_{}", Code.REDUCE_MAX: "max_{}", Code.REDUCE_MIN: "min_{}",
    Code.CUMSUM: "cumsum_{}", Code.TRANS: "{}_t", Code.NEG: "neg_{}", Code.ABS: "abs_{}", Code.FLOOR: "floor_{}",
    Code.CEIL: "ceil_{}", Code.FLIP: "{}_flipped", Code.MUL: "{}_scaled", Code.DIV: "{}_scaled", Code.ADD: "{}_shifted",
    Code.SUB: "{}_shifted",
}  # fmt: skip
"""What is made of one variable, and of constants perhaps."""
_PIDS = ("pid", "pid_y", "pid_z")


def snake(pointer: str) -> str:
    """What a tile of a pointer argument is called: `dY` -> `d_y`, `W_ptr` -> `w`, `x_ptr` -> `x`."""
    stem = re.sub(r"_?(ptrs?|pointer)$", "", pointer) or pointer
    stem = re.sub(r"^(ptr|p)_", "", stem)
    stem = re.sub(r"^d(?=[A-Z])", "d_", stem)
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", stem).lower()


class Names:
    """Gives every variable its name: none is a parameter's, and none is another's that is still read."""

    def __init__(self, kernel: Kernel, places: Places, variables: Variables, reserved: Collection[str]) -> None:
        """`reserved`: names of parameters, constexprs, helper functions."""
        self.kernel = kernel
        self.places = places
        self.variables = variables
        self.parameters = frozenset(reserved)
        self.trip = next(name for name in _numbered(["step"]) if name not in self.parameters)
        """Of the number of a trip, in loops whose index is computed from it."""
        if any(counts_trips(op) for op in kernel.ops):
            self.parameters |= {self.trip}
        self._block(kernel.body, {})

    # --- scopes

    def _block(self, block: Block, seen: dict[str, tuple[Variable, Block]]) -> dict[str, tuple[Variable, Block]]:
        """Name what a block defines. `seen`: names that are taken where it begins. Returns those where it ends."""
        taken = dict(seen)
        for op in block.ops:
            if op not in self.places.needed:
                continue
            # what starts a loop is assigned before its bounds are read
            place = self.places.at[op] - (op.code in CONTROL)
            for value in op.results if op.code is not Code.FOR else (*op.results, *op.blocks[0].arguments[:1]):
                if value in self.variables.of:
                    # what branches set, or trips compute, may have no other type before them, read or not
                    again = op.code is not Code.IF and not counts_trips(op)
                    self._name(self.variables.of[value], block, place, taken, again=again)
            if op.code not in CONTROL:
                continue
            inside = dict(taken)
            for inner in op.blocks:
                inside = self._block(inner, inside)  # branches share theirs: Triton merges names of both
            if op.code is Code.IF and _of_arguments(op.operands[0]):
                taken |= inside  # where an argument is a constant, Triton only sees one branch, and its names stay
        return taken

    def _name(
        self, variable: Variable, block: Block, place: int, taken: dict[str, tuple[Variable, Block]], *, again: bool
    ) -> None:
        """`again`: it may have the name of a variable that is not read any more."""
        if variable.name:
            return
        for candidate in _numbered(self._wanted(variable)):
            if candidate in _RESERVED or candidate in self.parameters:
                continue
            if candidate not in taken or (again and self._over(*taken[candidate], block, place)):
                variable.name = candidate
                taken[candidate] = (variable, block)
                return

    def _over(self, variable: Variable, home: Block, block: Block, place: int) -> bool:
        """Whether a variable of the same block is not read after a place, so that its name is free again."""
        if home is not block or len(variable.values) > 1 or variable.values[0].producer is None:
            return False
        return max(self.places.read_at[variable.values[0]], default=-1) <= place

    # --- what a variable would best be called

    def _wanted(self, variable: Variable) -> list[str]:
        """Names that would do, the best one first."""
        names = [value.name for value in variable.values if value.name.isidentifier()]
        carries = [value.name for value in variable.values if value.producer is None and value.name in names]
        value = variable.values[-1] if variable.values[-1].producer is not None else variable.values[0]
        if value.producer is not None and value.producer.code is Code.IF:
            value = variable.values[0]
        wanted = next(iter([*carries, *names]), "")
        load = value.producer
        if load is not None and load.code is Code.CAST:
            load = load.operands[0].producer
        if load is not None and load.code is Code.LOAD and wanted.lower() == snake(load.base.name):
            wanted = wanted.lower()
        if not wanted:
            wanted, *others = self._by_role(value)
            bases = self._bases(value)
            if bases and value.shape:
                return [wanted, *(f"{snake(base)}_offs" for base in bases)]
            if wanted not in self.parameters and wanted not in _RESERVED:
                return [wanted, *others]
        if wanted in self.parameters:
            wanted = self._beside_parameter(wanted, value)
        if wanted in _RESERVED:
            return [f"{wanted}_"]
        if not inherited(value) or value.producer is None:
            return [wanted]
        code = value.producer.code
        return [f"{wanted}_t"] if code is Code.TRANS else [wanted, f"{wanted}_{value.element}"]

    def _beside_parameter(self, wanted: str, value: Value) -> str:
        stem = snake(wanted)
        if self._bases(value):
            return f"{stem}_offs" if value.shape else f"{stem}_start"
        if stem not in self.parameters:
            return stem
        return f"{stem}_tile" if value.shape else f"{stem}_value"

    def _by_role(self, value: Value) -> list[str]:
        op = value.producer
        if op is None or op.code in CONTROL:
            return ["acc" if value.is_float else "start"]
        if op.code is Code.LOAD:
            return [snake(op.base.name)]
        if op.code is Code.PROGRAM_ID:
            return [_PIDS[op.attributes["axis"]]]
        if value.element == "i1":
            return self._mask(op) if value.shape else ["active", "go_on"]
        if not value.is_float:
            return [self._index(value, op)]
        if op.code is Code.CALL:
            return [str(op.attributes["function"]).rsplit(".", 1)[-1]]
        if op.code in (Code.CAST, Code.BROADCAST, Code.RESHAPE):
            inner = op.operands[0]
            if inner.producer is not None and inner.producer.code is Code.LOAD:
                return [inner.name or snake(inner.producer.base.name)]
            if inner in self.variables.of or inner.name:
                return [inner.name or self.variables.of[inner].name or "value"]
        others = list(_BY_CODE.get(op.code, ("value",)))
        made_of = [v for v in op.operands if constant(v) is None]
        if op.code in _OF_ONE and len(made_of) == 1 and (stem := self._short(made_of[0])):
            return [_OF_ONE[op.code].format(stem), *others]
        return others

    def _short(self, value: Value) -> str:
        """The name of a variable that a value is, expanded perhaps."""
        while value in self.places.inlined and value.producer is not None and value.producer.code is Code.EXPAND:
            value = value.producer.operands[0]
        name = self.variables.of[value].name if value in self.variables.of else ""
        return name if len(name) <= 12 else ""

    def _index(self, value: Value, op: Op) -> str:
        if len(value.shape) == 1 and (suffix := self._along(value)):
            return f"offs_{suffix}"
        bases = self._bases(value)
        if bases:
            stems = {snake(base).removeprefix("d_") for base in bases}
            return "start" if not value.shape else f"{stems.pop()}_offs" if len(stems) == 1 else "offs"
        if op.code is Code.ARANGE or len(value.shape) == 1:
            axes = {u.op.attributes["axis"] for u in self.places.readers(value) if u.op and u.op.code is Code.EXPAND}
            if axes == {1}:
                return "rows"
            if axes == {0}:
                return "cols"
        return "offs" if value.shape else "start"

    def _mask(self, op: Op) -> list[str]:
        """`mask_m` of a test of `offs_m`, `is_largest` of one of equality."""
        for value in op.operands if op.code is Code.CMP else ():
            while value.producer is not None and value.producer.code is Code.EXPAND:
                value = value.producer.operands[0]
            tested = self.variables.of[value].name if value in self.variables.of else ""
            if tested.startswith("offs_"):
                return [f"mask_{tested[5:]}"]
            if tested in ("rows", "cols"):
                return [f"{tested[:-1]}_mask"]
        if op.code is Code.CMP and op.attributes["predicate"] == "eq" and op.operands[0].is_float:
            return [f"is_{self._short(op.operands[1]) or 'equal'}"]
        return ["mask"]

    def _along(self, value: Value) -> str:
        """`m` of a tile of positions that start at `pid_m * BLOCK_M`, `k` of one at a loop's index `k`."""
        pending, found = [value], ""
        while pending:
            here = pending.pop()
            op = here.producer
            leaf = here in self.places.block_of if op is None else op.code is Code.PROGRAM_ID
            match = re.fullmatch(r"(?:(?:pid|start|off|block|i)_)?([a-z])", here.name) if leaf else None
            found = found or (match.group(1) if match else "")
            if op is not None and (op.code in (Code.ADD, Code.MUL) and (here in self.places.inlined or here is value)):
                pending += op.operands
        return found

    def _bases(self, value: Value) -> list[str]:
        """The pointer arguments that a value alone is an offset to."""
        ops = [use.op for use in self.places.readers(value) if use.op is not None]
        return [op.base.name for op in ops if op.code in MEMORY and op.offset is value]


def counts_trips(op: Op) -> bool:
    """Whether a loop is printed as one over the numbers of its trips: it runs backwards, by a step that is computed."""
    return op.code is Code.FOR and bool(op.attributes.get("reverse")) and constant(op.operands[2]) is None


def _of_arguments(value: Value) -> bool:
    """Whether a value depends on nothing but arguments."""
    pending = [value]
    while pending:
        here = pending.pop()
        op = here.producer
        if op is None:
            if here.depth:
                return False
        elif op.code in (Code.PROGRAM_ID, Code.NUM_PROGRAMS, Code.LOAD) or op.code in CONTROL:
            return False
        else:
            pending += op.operands
    return True


def _numbered(wanted: list[str]) -> Iterator[str]:
    yield from wanted
    yield from (f"{wanted[0]}_{n}" for n in itertools.count(1))
