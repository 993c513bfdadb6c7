"""Names of variables: the user's where the value has one, else by what the value is for."""

from __future__ import annotations

import builtins
import itertools
import keyword
import re
from collections.abc import Collection, Iterator

from kernel_agent.compiler.emit.places import Places, inherited
from kernel_agent.compiler.emit.roles import masked_by, offset_of, singular, stem_of, summed_for, walked_by
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
_LOG2E = 1.4426950408889634


class Names:
    """Gives every variable its name: none is a parameter's, and none is another's that is still read."""

    def __init__(self, kernel: Kernel, places: Places, variables: Variables, reserved: Collection[str]) -> None:
        """`reserved`: names of parameters, constexprs, helper functions."""
        self.kernel = kernel
        self.places = places
        self.variables = variables
        self.parameters = frozenset(reserved)
        self.lent: dict[str, Value] = {}
        """Names of what an IF results in, which its branches may have as well."""
        self.floats = {v.name for op in kernel.ops if op.code is not Code.CAST for v in op.results if v.is_float}
        """Names of floats, which passes hand on to what they compute beside them."""
        self.trip = next(name for name in _numbered(["step"]) if name not in self.parameters)
        """Of the number of a trip, in loops whose index is computed from it."""
        if any(counts_trips(op) for op in kernel.ops):
            self.parameters |= {self.trip}
        self.given = {value.name for op in kernel.ops for block in op.blocks for value in block.arguments[:1]}
        """What the user calls the indices of loops: what has no name leaves these to them."""
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
            inside, lent = dict(taken), dict(self.lent)
            for result in op.results if op.code is Code.IF else ():
                self._lend(op, result, inside)
            for inner in op.blocks:
                inside = self._block(inner, inside)  # branches share theirs: Triton merges names of both
            self.lent = lent
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
            if candidate in _RESERVED or candidate in self.parameters or not self._fits(candidate, variable, block):
                continue
            if candidate not in taken or (again and self._over(*taken[candidate], block, place)):
                variable.name = candidate
                taken[candidate] = (variable, block)
                return

    def _lend(self, op: Op, result: Value, inside: dict[str, tuple[Variable, Block]]) -> None:
        """Let a branch have the name of a result for what it makes the result of, if nothing else is in it."""
        variable = self.variables.of.get(result)
        made = {value for block in op.blocks for value in block.yields if self.places.block_of.get(value) is block}
        if variable is not None and made.issuperset(value for value in variable.values if value is not result):
            self.lent[variable.name] = result
            inside.pop(variable.name, None)

    def _fits(self, candidate: str, variable: Variable, block: Block) -> bool:
        """Whether a variable may have a name that is lent: it is of the result's type, belongs to a branch, and is not
        read any more where the branch sets the result."""
        result = self.lent.get(candidate)
        if result is None:
            return True
        value, branch = variable.values[0], result.producer
        if (
            branch is None
            or block not in branch.blocks
            or (result.shape, result.element) != (value.shape, value.element)
        ):
            return False
        made = [one for one in self.variables.of[result].values if self.places.block_of[one] is block]
        end = min((self.places.at[one.producer] for one in made if one.producer), default=self.places.end[block])
        return all(place <= end for value in variable.values for place in self.places.read_at[value])

    def _over(self, variable: Variable, home: Block, block: Block, place: int) -> bool:
        """Whether a variable of the same block is not read after a place, so that its name is free again."""
        if home is not block or len(variable.values) > 1:
            return False
        if variable.values[0].producer is None:
            return self._counted(variable.values[0])
        return max(self.places.read_at[variable.values[0]], default=-1) <= place

    def _counted(self, value: Value) -> bool:
        """Whether a value is the index of a loop, which is over where the next statement is."""
        inner = self.places.block_of.get(value)
        op, _ = self.places.owner.get(inner, (None, None)) if inner is not None else (None, None)
        return op is not None and op.code is Code.FOR and op.blocks[0].arguments[0] is value and not counts_trips(op)

    # --- what a variable would best be called

    def _wanted(self, variable: Variable) -> list[str]:
        """Names that would do, the best one first."""
        names = [value.name for value in variable.values if value.name.isidentifier() and self._meant(value)]
        carries = [value.name for value in variable.values if value.producer is None and value.name in names]
        value = variable.values[-1] if variable.values[-1].producer is not None else variable.values[0]
        if value.producer is not None and value.producer.code is Code.IF:
            value = variable.values[0]
        wanted = next(iter([*carries, *names]), "")
        if not wanted or wanted.startswith("d_") or re.fullmatch(r"program_\d|block_[a-z]+", wanted):
            role = self._carried(variable)
            wanted = role if role and role not in self.parameters else wanted
        load = value.producer
        if load is not None and load.code is Code.CAST:
            load = load.operands[0].producer
        if load is not None and load.code in (Code.LOAD, Code.LOAD_BLOCK) and wanted.lower() == stem_of(load.base.name):
            wanted = wanted.lower()
        if not wanted:
            wanted, *others = self._by_role(value)
            if not value.shape and wanted in self.given and value.producer is not None:
                return ["base"]
            bases = self._bases(value)
            if bases and value.shape:
                return [wanted, *(f"{stem_of(base)}_offs" for base in bases)]
            if wanted not in self.parameters and wanted not in _RESERVED:
                return [wanted, *others]
        if wanted in self.parameters:
            wanted = self._beside_parameter(wanted, value)
        if wanted in _RESERVED:
            return [f"{wanted}_"]
        if not inherited(value) or value.producer is None:
            return [wanted]
        if value.producer.code is Code.TRANS:
            return [wanted.removesuffix("_t") if wanted.endswith("_t") else f"{wanted}_t"]
        return [wanted, f"{wanted}_{value.element}"]

    def _meant(self, value: Value) -> bool:
        """Whether a name is the value's own: `_` says that there is none, and no condition is an adjoint."""
        if value.name == "_" or (value.element == "i1" and value.name.startswith("d_")):
            return False
        return value.producer is None or value.is_float or value.name not in self.floats

    def _carried(self, variable: Variable) -> str:
        """Of what loops and branches carry: `dk` of a sum that is stored to `dK`, `row_block` of a number of rows."""
        values = variable.values
        if all(value.producer is not None and value.producer.code not in CONTROL for value in values):
            return ""
        if values[0].is_float:
            return re.sub("^d_", "d", stem_of(summed_for(values, self.places)))
        walked = walked_by(values[0], self.places) if self._counted(values[0]) else ""
        return walked and f"{walked}_block"

    def _beside_parameter(self, wanted: str, value: Value) -> str:
        stem = stem_of(wanted)
        if self._bases(value):
            return f"{stem}_offs" if value.shape else f"{stem}_start"
        for name in (stem, stem.removeprefix("saved_")):
            if name not in self.parameters:
                return name
        return f"{stem}_tile" if value.shape else f"{stem}_value"

    def _by_role(self, value: Value) -> list[str]:
        op = value.producer
        if op is None or op.code in CONTROL:
            if value.element == "i1":
                return ["active", "go_on"]
            return ["acc" if value.is_float else "trip" if value.name == "_" else "start"]
        if op.code in (Code.LOAD, Code.LOAD_BLOCK):
            return [stem_of(op.base.name)]
        if op.code is Code.DESCRIPTOR:
            return [f"{stem_of(op.base.name)}_{'tiles' if len(op.attributes['block']) > 1 else 'strips'}"]
        if op.code is Code.BLOCK_POINTER:
            return [f"{stem_of(op.base.name)}_block"]
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
            if inner.producer is not None and inner.producer.code in (Code.LOAD, Code.LOAD_BLOCK):
                return [inner.name or stem_of(inner.producer.base.name)]
            if inner in self.variables.of or inner.name:
                return [inner.name or self.variables.of[inner].name or "value"]
        others = list(_BY_CODE.get(op.code, ("value",)))
        made_of = [v for v in op.operands if constant(v) is None]
        if op.code is Code.MUL and len(made_of) == 1 and (stem := self._short(made_of[0])):
            (factor,) = (constant(v) for v in op.operands if constant(v) is not None)
            return [_with_end(stem, "log2" if abs((factor or 0.0) - _LOG2E) < 1e-6 else "scaled")]
        if op.code is Code.MUL:
            cotangents = [stem for v in made_of if (stem := self._short(v)).startswith("d_")]
            others = [*(_with_end(stem, "weighted") for stem in cotangents[:1]), *others]
        if op.code in _OF_ONE and len(made_of) == 1 and (stem := self._short(made_of[0])):
            if op.code is Code.TRANS and stem.endswith("_t"):
                return [stem.removesuffix("_t"), *others]
            before, _, end = _OF_ONE[op.code].partition("{}_")
            return [_with_end(stem, end) if end and not before else _OF_ONE[op.code].format(stem), *others]
        return others

    def _short(self, value: Value) -> str:
        """The name of a variable that a value is, expanded perhaps."""
        while value in self.places.inlined and value.producer is not None and value.producer.code is Code.EXPAND:
            value = value.producer.operands[0]
        name = self.variables.of[value].name if value in self.variables.of else ""
        name = value.name if value in self.kernel.arguments else name
        return name if len(name) <= 12 else ""

    def _index(self, value: Value, op: Op) -> str:
        if len(value.shape) == 1 and (suffix := self._along(value)):
            return f"offs_{suffix}"
        symbol = re.fullmatch(r"BLOCK_([A-Z]+)", self.kernel.extents.get(value.shape[0], "") if value.shape else "")
        if (
            op.code is Code.ARANGE
            and symbol
            and all(u.op and u.op.code is Code.ADD for u in self.places.readers(value))
        ):
            return f"range_{symbol.group(1).lower()}"
        if not value.shape and (walked := walked_by(value, self.places)):
            return f"{walked}_start"
        if op.code is not Code.ARANGE and (stem := offset_of(value, self.places)):
            if not value.shape:
                return f"{stem}_start"
            along = len(value.shape) == 2 and 1 in value.shape
            return _with_end(stem, ("rows", "cols")[value.shape.index(1) == 0] if along else "offs")
        if not value.shape:
            return self._number(value, op)
        if op.code is Code.ARANGE or len(value.shape) == 1:
            axes = {u.op.attributes["axis"] for u in self.places.readers(value) if u.op and u.op.code is Code.EXPAND}
            if axes == {1}:
                return "rows"
            if axes == {0}:
                return "cols"
        return "offs" if value.shape else "start"

    def _number(self, value: Value, op: Op) -> str:
        """`first` and `end` of the bounds of loops, `stride` of a product of sizes."""
        loops = [use.op for use in self.places.readers(value) if use.op is not None and use.op.code is Code.FOR]
        if loops:
            return "first" if any(loop.operands[0] is value for loop in loops) else "end"
        if op.code is Code.MUL and _of_arguments(value):
            return "stride"
        return "bound" if op.code in (Code.MAX, Code.MIN) else "start"

    def _mask(self, op: Op) -> list[str]:
        """`mask_m` of a test of `offs_m`, `is_largest` of one of equality."""
        if op.code is Code.OR and op.operands[0].producer is not None and constant(op.operands[1]) is None:
            op = op.operands[0].producer if op.operands[1].shape == () else op
        for value in op.operands if op.code is Code.CMP else ():
            while value.producer is not None and value.producer.code is Code.EXPAND:
                value = value.producer.operands[0]
            tested = self.variables.of[value].name if value in self.variables.of else ""
            if re.fullmatch(r"offs_[a-z]\w*", tested):
                return [f"mask_{tested[5:]}"]
            if re.fullmatch(r"(?!offs)[a-z]{3,}", tested):
                return [f"{singular(tested) or tested}_mask"]
            if re.fullmatch(r"[a-z]{1,2}", tested):
                return [f"mask_{tested}"]
        if op.code is Code.CMP and op.attributes["predicate"] == "eq" and op.operands[0].is_float:
            return [f"is_{self._short(op.operands[1]) or 'equal'}"]
        stem = masked_by(op.result, self.places) if len(op.result.shape) > 1 else ""
        return [f"{stem}_mask", "mask"] if stem else ["mask"]

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


def _with_end(stem: str, end: str) -> str:
    """`d_y_weighted` of `d_y`, and of `d_y_weighted` as well, which gets a number if it has to: no name says a thing
    twice."""
    base = re.sub(r"_\d+$", "", stem)
    return base if base == end or base.endswith(f"_{end}") else f"{stem}_{end}"


def _numbered(wanted: list[str]) -> Iterator[str]:
    yield from wanted
    yield from (f"{wanted[0]}_{n}" for n in itertools.count(1))
