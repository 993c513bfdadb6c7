"""One launch in words: its grid, its accesses, its reductions and its loops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from kernel_agent.ir.cost.meter import Access
from kernel_agent.ir.cost.tally import LOOPS
from kernel_agent.ir.memory import Buffer
from kernel_agent.ir.program import Op
from kernel_agent.ir.sanitizer.views import Geometry
from kernel_agent.ir.types import Kind
from kernel_agent.oracle.facts.dims import Dims
from kernel_agent.oracle.facts.expressions import expression
from kernel_agent.oracle.facts.sources import Sources, last
from kernel_agent.oracle.facts.walks import Walk, tile_name, walk_of
from kernel_agent.oracle.facts.watch import Seen, Site, Watched
from kernel_agent.pairs.forward_facts import AccessFacts, AccessMode, LaunchFacts, ReductionFacts

_MODES = {Access.READ: AccessMode.LOAD, Access.WRITE: AccessMode.STORE, Access.ATOMIC: AccessMode.ATOMIC}

_REDUCTIONS = {
    **dict.fromkeys(["arith.addf", "arith.addi"], "sum"),
    **dict.fromkeys(["arith.mulf", "arith.muli"], "product"),
    **dict.fromkeys(["arith.maxnumf", "arith.maximumf", "arith.maxsi", "arith.maxui"], "max"),
    **dict.fromkeys(["arith.minnumf", "arith.minimumf", "arith.minsi", "arith.minui"], "min"),
    **dict.fromkeys(["arith.ori"], "any"),
    **dict.fromkeys(["arith.andi"], "all"),
    **dict.fromkeys(["arith.xori"], "xor"),
}


@dataclass(frozen=True)
class Roles:
    """What a buffer is to the stub."""

    watched: Watched
    outputs: tuple[str, ...]
    """Names of the outputs; what a pair's forward returns beside them is saved."""

    def of(self, buffer: Buffer, shown: Geometry) -> str:
        """`x`, `output y`, `saved` or `made by the stub`; of inputs that share memory, those that hold `shown`."""
        inputs = [name for name, known in self.watched.buffers.items() if known is buffer]
        if len(inputs) > 1:
            known = {name: Geometry.of(self.watched.inputs[name]) for name in inputs}
            same = [name for name in inputs if known[name] == shown]
            inputs = same or [name for name in inputs if known[name].holds(shown.offset)] or inputs
        if inputs:
            return "/".join(inputs)
        place = self.watched.output_buffers.get(id(buffer))
        if place is None:
            return "made by the stub"
        return f"output {self.outputs[place]}" if place < len(self.outputs) else "saved"


class LaunchWords:
    """Tells one launch."""

    def __init__(self, place: int, seen: Seen, dims: Dims, roles: Roles) -> None:
        self.place = place
        self.seen = seen
        self.dims = dims
        self.roles = roles
        self.module = seen.launch.module
        self.sources = Sources(self.module)
        self.constants: Mapping[str, int] = seen.given.constants

    @cached_property
    def walks(self) -> tuple[Walk, ...]:
        """One per access and buffer, in textual order."""
        order = {id(op): place for place, op in enumerate(self.module.all_ops)}
        sites = sorted(self.seen.sites, key=lambda site: order[id(site.op)])
        return tuple(
            walk_of(self.seen, site, self._dim_names(site), regular=not self.sources.deciding(site.op))
            for site in sites
        )

    @cached_property
    def stores(self) -> tuple[Walk, ...]:
        """Walks of what is written, dim by dim."""
        sites = [site for site in self.seen.sites if site.kind is not Access.READ]
        return tuple(walk_of(self.seen, site, self._dim_names(site), regular=False) for site in sites)

    @cached_property
    def by_op(self) -> dict[int, tuple[Walk, ...]]:
        """Identity of an operation -> its walks."""
        found: dict[int, tuple[Walk, ...]] = {}
        for walk in self.walks:
            found[id(walk.site.op)] = (*found.get(id(walk.site.op), ()), walk)
        return found

    def facts(self) -> LaunchFacts:
        """Everything that can be told."""
        return LaunchFacts(
            kernel=self.seen.launch.kernel,
            grid=self.grid(),
            accesses=tuple(dict.fromkeys(self._access(walk) for walk in self.walks)),
            reductions=tuple(dict.fromkeys(self._reductions())),
            loops=tuple(dict.fromkeys(self._loop(op) for op in self.module.all_ops if op.name in LOOPS)),
        )

    # --- names

    def parameter(self, site: Site) -> str:
        """The kernel's parameter that an access goes through, or the name of the buffer."""
        roots = [value.name.lstrip("%") for value in self.sources.roots(site.op.operands[0])]
        given = self.seen.given.tensors
        fitting = [name for name in roots if name in given and given[name] == site.shown]
        return (fitting or [name for name in roots if name in given] or [site.buffer.name])[0]

    def argument(self, site: Site) -> str:
        """`X (x)`: the parameter, and what the stub calls it."""
        parameter, role = self.parameter(site), self.roles.of(site.buffer, site.shown)
        return parameter if parameter == role else f"{parameter} ({role})"

    def _dim_names(self, site: Site) -> list[str]:
        parameter = self.parameter(site)
        known = self.seen.given.tensors.get(parameter)
        if known == site.shown:
            return [self.dims.of(self.place, parameter, d) for d in range(len(site.shown.size))]
        return [self.dims.by_size(size) for size in site.shown.size]

    def line(self, op: Op) -> int | None:
        """Line in the user's file."""
        frame = self.module.place(op)
        return frame.line if frame else None

    # --- grid

    def grid(self) -> str:
        """`(17,): axis 0: one program per M`, by what the stores of each axis' programs walk."""
        grid = self.seen.given.grid
        sizes = "(" + ", ".join(str(size) for size in grid) + ("," if len(grid) == 1 else "") + ")"
        parts = [f"axis {axis}: {self.counts(axis)}" for axis, size in enumerate(grid) if size > 1]
        return f"{sizes}: {'; '.join(parts)}" if parts else f"{sizes}: one program"

    def counts(self, axis: int) -> str:
        """What an axis of the grid counts."""
        stored = [walk for walk in self.walks if walk.site.kind is not Access.READ]
        found = self._counted(stored, axis) or self._counted(list(self.walks), axis)
        size = self.seen.given.grid[axis] if axis < len(self.seen.given.grid) else 1
        if found:
            return f"{size} programs, {' and '.join(found)}"
        return f"{size} programs"

    def _counted(self, walks: Sequence[Walk], axis: int) -> list[str]:
        found: dict[str, str] = {}
        for walk in walks:
            for dim in walk.dims:
                if axis in dim.axes:
                    tile = f"a tile of {tile_name(dim.length, self.constants, dim.name)} of {dim.name}"
                    many = dim.loop or int((dim.high - dim.low)[dim.high >= 0].max()) >= dim.length
                    text = (
                        f"a share of {dim.name} each"
                        if many
                        else f"{tile} each"
                        if dim.length > 1
                        else f"one per {dim.name}"
                    )
                    found.setdefault(dim.name, text)
        return list(found.values())

    # --- accesses

    def _access(self, walk: Walk) -> AccessFacts:
        site = walk.site
        axes = walk.words(self.constants, (*self.seen.given.grid, 1, 1)[:3])
        deciding = self.sources.deciding(site.op)
        if deciding:
            axes += f"; where it goes depends on data: {', '.join(dict.fromkeys(self._loaded(op) for op in deciding))}"
        return AccessFacts(
            argument=self.argument(site), mode=_MODES[site.kind], line=self.line(site.op), axes=axes, masked=site.masked
        )

    def deciders(self, buffer: Buffer) -> tuple[str, ...]:
        """Arguments whose values decide where loads of a buffer go."""
        sites = [site for site in self.seen.sites if site.buffer is buffer and site.kind is not Access.WRITE]
        return tuple(dict.fromkeys(self._loaded(op) for site in sites for op in self.sources.deciding(site.op)))

    def _loaded(self, op: Op) -> str:
        names = [self.argument(walk.site) for walk in self.by_op.get(id(op), ())]
        return names[0] if names else f"what line {self.line(op)} loads"

    # --- reductions

    def _reductions(self) -> list[ReductionFacts]:
        found = []
        for op in self.module.all_ops:
            if any(not bool(self.seen.trips[id(loop)].any()) for loop in self.sources.loops[id(op)]):
                continue
            if op.name in ("tt.reduce", "tt.scan"):
                axis = int(op.attributes["axis"])
                name = combination(op)
                name = f"scan ({name})" if op.name == "tt.scan" else name
                found.append(ReductionFacts(line=self.line(op), operation=name, axis=self._axis(op, axis)))
            elif op.name in ("tt.dot", "tt.dot_scaled"):
                axis = len(op.operands[0].type.tile) - 1
                found.append(ReductionFacts(line=self.line(op), operation="dot", axis=self._axis(op, axis)))
        return found

    def _axis(self, op: Op, axis: int) -> str:
        """What is reduced: `N of X (x)`, or the axis of a tile."""
        value = op.operands[0]
        tile = value.type.tile
        parts: dict[str, list[str]] = {}
        operands = op.operands[:2] if op.name.startswith("tt.dot") else op.operands
        for place, operand in enumerate(operands):
            at = len(tile) - 2 if op.name.startswith("tt.dot") and place == 1 else axis
            for lane in self.sources.lanes(operand, at):
                for walk in self.by_op.get(id(lane.op), ()):
                    for dim in walk.moved_by(lane.axis):
                        parts.setdefault(dim.name, []).append(self.argument(walk.site))
        length = tile_name(tile[axis], self.constants, next(iter(parts), ""))
        if not parts:
            shape = " x ".join(str(size) for size in tile)
            return f"axis {axis} of a tile of {shape}" if len(tile) > 1 else f"a tile of {shape}"
        what = " and ".join(f"{name} of {', '.join(dict.fromkeys(arguments))}" for name, arguments in parts.items())
        return f"{what}, {length} at a time"

    # --- loops

    def _loop(self, op: Op) -> str:
        trips = self.seen.trips[id(op)]
        low, high = (int(trips.min()), int(trips.max())) if trips.numel() else (0, 0)
        counted = f"{high} trip{'s' * (high != 1)}" if low == high else f"{low} to {high} trips"
        where = f"line {self.line(op)}: "
        if op.name == "scf.while":
            return f"{where}while loop, {counted}{self._carried(op)}"
        start, end, step = (expression(value, self.sources, self.constants) for value in op.operands[:3])
        by = "" if step == "1" else f" in steps of {step}"
        return f"{where}from {start} to {end}{by}, {counted} here{self._carried(op)}"

    def _carried(self, op: Op) -> str:
        """Values that an iteration hands to the next: sums, and what is more than a sum."""
        if op.name == "scf.while":
            names = [
                v.variable for v in op.regions[0][0].arguments if v.variable and v.type.scalar.kind.value == "float"
            ]
            return f"; carries {', '.join(dict.fromkeys(names))}" if names else ""
        body = op.regions[0][0]
        sums: list[str] = []
        others: list[str] = []
        for place, value in enumerate(body.arguments[1:]):
            if value.type.scalar.kind is not Kind.FLOAT:
                continue
            name = value.variable or op.results[place].variable or "a value"
            added = self._is_sum(last(body).operands[place].id, value.id)
            (sums if added else others).append(name)
        parts = [f"sums into {', '.join(dict.fromkeys(sums))}"] if sums else []
        parts += [f"carries {', '.join(dict.fromkeys(others))} from one trip to the next"] if others else []
        return "; " + "; ".join(parts) if parts else ""

    def _is_sum(self, passed: int, carried: int) -> bool:
        """Whether a value passed on is the carried one plus something that does not depend on it."""
        op = self.sources.producer.get(passed)
        if op is None:
            return False
        if op.name == "tt.dot":
            return op.operands[2].id == carried
        if op.name == "arith.addf":
            ids = [value.id for value in op.operands]
            return (
                carried in ids
                and ids.count(carried) == 1
                and not self._uses(next(v for v in ids if v != carried), carried)
            )
        return False

    def _uses(self, value: int, carried: int) -> bool:
        waiting, seen = [value], set()
        while waiting:
            here = waiting.pop()
            if here == carried:
                return True
            if here not in seen:
                seen.add(here)
                op = self.sources.producer.get(here)
                waiting += [] if op is None else [operand.id for operand in op.operands]
        return False


def combination(op: Op) -> str:
    """Name of what a reduction or scan combines with."""
    inner = op.regions[0][0].ops
    if len(inner) == 2 and inner[0].name in _REDUCTIONS:
        return _REDUCTIONS[inner[0].name]
    if len(op.operands) == 2 and any(nested.name.startswith("arith.cmp") for nested in inner):
        return "arg max or min"
    return "own combination"
