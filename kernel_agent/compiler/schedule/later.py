"""`owned_in_the_end`: sums that meet what others store are kept in rows, and added by a launch behind them.

Moments about a pivot add to each element of a slab, and once more, behind the loop, to the pivot's, which many slabs
have in common. The elements of the two places meet, so that all of the gradient would be added to atomically. Where
all but such sums can be stored, each program keeps its sum in memory instead. A second launch, of one program for all
that would add to the same elements, sums what they kept, and adds that to what the first one stored.

Proved: what is left is stored once for each element (`proof`), and in the second launch each element has one program
and one lane (`injective`), so that its load, addition and store meet no other. Every program of the first launch
reaches the sum, under no condition, and neither where it belongs nor its mask depends on what the second one sums over.

Where few programs take turns, a gradient may be nothing but such sums: rows of a tensor's elements, which torch would
add, want one without gaps, and a slice of a projection has some. The second launch then stores what it sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kernel_agent.compiler.plan import Buffer, Fact, Fill
from kernel_agent.compiler.reverse.elements import adjoint_element
from kernel_agent.compiler.schedule.alone import programs_apart
from kernel_agent.compiler.schedule.coverage import coverage, domain, stored_axes
from kernel_agent.compiler.schedule.forms import UNKNOWN, Forms, Launch
from kernel_agent.compiler.schedule.injective import injective
from kernel_agent.compiler.schedule.linear import Kind
from kernel_agent.compiler.schedule.ownership import WRITES, Common, Ownership, once_stored, owned, proof
from kernel_agent.compiler.schedule.polynomial import ONE, product
from kernel_agent.compiler.schedule.share import tile_of_row
from kernel_agent.compiler.schedule.sites import Site, sites
from kernel_agent.compiler.schedule.slots import is_small, loaded_around
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.programs import program_count, program_number
from kernel_agent.compiler.ssa.prune import prune
from kernel_agent.compiler.ssa.rebuild import Copier, emptied
from kernel_agent.compiler.ssa.uses import computed_of
from kernel_agent.compiler.ssa.value import Kernel, Op, Value


@dataclass(frozen=True)
class Later:
    """The launch that adds what programs kept of one sum."""

    gradient: str
    """Argument of the kernels that both launches write to."""
    kernel: Kernel
    launch: Launch
    scalars: dict[str, str]
    """Expressions of arguments that the forward did not have."""
    buffer: Buffer
    """Where the sums are kept."""


def owned_in_the_end(kernel: Kernel, gradients: Mapping[str, str], launch: Launch, *, few: bool = False) -> Ownership:
    """Stores for atomic additions, as `owned` makes them, and of gradients that it would leave atomic for a sum that
    meets the rest, a launch that adds the sum. `few`: programs take turns, so that what they keep is little."""
    forms = Forms(kernel, launch)
    written: dict[str, list[Site]] = {}
    for site in sites(kernel.body, WRITES):
        written.setdefault(site.op.base.name, []).append(site)
    kept = [
        one
        for tensor, name in gradients.items()
        if name in written and kernel.argument(tensor).is_pointer
        for one in _kept(forms, tensor, written[name], few)
    ]
    if not kept:
        return owned(kernel, gradients, launch)
    shared = {one.name: one.tensor for one in kept}
    whole = {name for name in shared if all(any(one.site is site for one in kept) for site in written[name])}
    rest = {tensor: name for tensor, name in gradients.items() if name not in whole}
    found = owned(prune(_Keeper(kernel, kept).copy()), rest, launch)
    if not set(shared) - whole <= set(found.empty_if):
        return owned(kernel, gradients, launch)
    done: set[str] = set()
    later: list[Later] = []
    for one in kept:
        gradient = Value(f"*{kernel.argument(one.tensor).pointee}", (), one.name)
        later.append(one.later(kernel, gradient, launch, adds=one.name not in whole or one.name in done))
        if one.name in whole - done:
            found = _stored_behind(found, later[-1], one.tensor)
        done.add(one.name)
    facts = tuple(dict.fromkeys((*found.facts, *(fact for one in kept for fact in one.facts))))
    return replace(found, facts=facts, later=tuple(later))


def _stored_behind(found: Ownership, later: Later, tensor: str) -> Ownership:
    """What is known of gradients, and of one that the second launch stores."""
    forms, name = Forms(later.kernel, later.launch), later.gradient
    stored = [site for site in sites(later.kernel.body, WRITES) if site.op.base.name == name]
    reached = coverage(forms, stored)
    condition = "" if reached is None else reached.condition(tensor)
    return replace(
        found,
        empty_if={**found.empty_if, name: condition},
        axes={**found.axes, name: stored_axes(forms, stored) if condition else ()},
        counts=found.counts if reached is None else {**found.counts, name: reached},
    )


@dataclass(frozen=True, eq=False)
class _Kept:
    """A sum that each program keeps."""

    site: Site
    tensor: str
    """The input whose gradient it is part of."""
    axes: tuple[int, ...]
    """Of the grid: programs along these add to the same elements."""
    others: tuple[int, ...]
    """The axes that tell elements apart."""
    rows: Value
    """The argument that points to the sums: those of one program along `others` lie as far apart as all the others'."""
    count: Value
    """The argument that says how many programs there are along `axes`."""
    facts: tuple[Fact, ...]

    @property
    def name(self) -> str:
        """Of the gradient's argument."""
        found: str = self.site.op.base.name
        return found

    def later(self, source: Kernel, gradient: Value, launch: Launch, *, adds: bool) -> Later:
        """The launch that adds the sums, or stores them."""
        programs = product(launch.grid[axis] for axis in self.axes)
        each = product(launch.grid[axis] for axis in self.others).text()
        lanes = [source.extents.get(extent) or str(extent) for extent in self.site.op.offset.shape]
        shape = (programs.text(), " * ".join((each, *lanes)))
        buffer = Buffer(self.rows.name, self.rows.pointee, Fill.EMPTY, shape=shape)
        grid = tuple(ONE if axis in self.axes else extent for axis, extent in enumerate(launch.grid))
        numbers = {**launch.scalars, self.count.name: programs}
        made = prune(_Adding(source, self, gradient, adds=adds).copy())
        where = replace(launch, grid=grid, scalars=numbers)
        return Later(self.name, made, where, {self.count.name: programs.text()}, buffer)


def _kept(forms: Forms, tensor: str, written: Sequence[Site], few: bool) -> list[_Kept]:
    """The sums of a gradient that are to be kept; none where it can be stored without, or not even so."""
    kernel = forms.kernel
    sums = [site for site in written if _is_shared(forms, site)]
    rest = [site for site in written if site not in sums]
    if not sums or not (rest or few) or not isinstance(proof(forms, written), str):
        return []
    if rest and (isinstance(proof(forms, rest), str) or programs_apart(forms, written) is not None):
        return []
    found: list[_Kept] = []
    taken = {value.name for value in kernel.arguments}
    loaded = loaded_around(kernel)
    for site in sums:
        told = domain(forms, site)
        address = Common.alone(forms, site)
        missing = told - address.form.sources
        asked = [site.op.offset, *([] if site.op.mask is None else [site.op.mask])]
        reads = frozenset(read for value in asked for read in forms.reads(value))
        axes = tuple(sorted(atom.number for atom in missing))
        if any(atom.kind is not Kind.PROGRAM for atom in missing):
            return []
        if UNKNOWN in reads or not reads.isdisjoint(missing) or _counts(asked, axes):
            return []
        if site.op.code is not Code.ATOMIC_ADD or not (few or is_small(forms, site, loaded.get((), []))):
            return []
        apart = injective(address.form, address.bounds, told - missing, forms.launch.calls, within=address.within)
        if apart is None:
            return []
        others = tuple(axis for axis in range(len(forms.launch.grid)) if forms.program(axis) in told - missing)
        name = f"{site.op.base.name}_sums"
        while name in taken:
            name += "_"
        rows = Value(f"*{adjoint_element(site.op.stored.element)}", (), name)
        count = Value("i32", (), f"num_{name}")
        taken |= {rows.name, count.name}
        reason = once_stored(site.op.base.name)
        facts = tuple(Fact(text, reason, tensor) for text in apart.facts())
        found.append(_Kept(site, tensor, axes, others, rows, count, facts))
    return found


def _is_shared(forms: Forms, site: Site) -> bool:
    """Whether every program gets to a sum, and several add theirs to the same elements."""
    always = site.block is forms.kernel.body and not site.conditions
    return always and not domain(forms, site) <= forms.of(site.op.offset).sources


def _counts(values: Sequence[Value], axes: Sequence[int]) -> bool:
    """Whether some values depend on how many programs there are along some axes: the second launch has one."""
    made = (part.producer for value in values for part in computed_of(value))
    return any(op is not None and op.code is Code.NUM_PROGRAMS and op.attributes["axis"] in axes for op in made)


class _Keeper(Copier):
    """Stores sums where the source adds them."""

    def __init__(self, source: Kernel, kept: Sequence[_Kept]) -> None:
        super().__init__(source, Builder(emptied(source, arguments=[*source.arguments, *(one.rows for one in kept)])))
        self.b.written = self.written | {one.rows for one in kept}
        self.keeps = {one.site.op: one for one in kept}

    def effect(self, op: Op) -> None:
        """Additions."""
        one = self.keeps.get(op)
        if self.slicing or one is None:
            super().effect(op)
            return
        place = program_number(self.b, (*one.axes, *one.others))
        offset = tile_of_row(self.b, place, op.offset.shape, self.source.extents)
        self.b.store(one.rows, offset, self.b.whole(self[op.stored], op.offset.shape))


class _Adding(Copier):
    """Adds sums to what the source stored, or stores them."""

    def __init__(self, source: Kernel, kept: _Kept, gradient: Value, *, adds: bool) -> None:
        arguments = [value for value in source.arguments if value.name != gradient.name]
        made = emptied(source, name=f"{source.name}_sums", arguments=[*arguments, kept.rows, gradient, kept.count])
        super().__init__(source, Builder(made, frozenset((gradient,))))
        self.sum = kept
        self.adds = adds
        self.gradient = gradient

    def copy(self) -> Kernel:
        """All that there is of it."""
        b, kept, op = self.b, self.sum, self.sum.site.op
        offset, mask = self.whole(op.offset), None if op.mask is None else self[op.mask]
        zero = b.const(0.0, kept.rows.pointee)
        others = program_count(b, kept.others)
        mine = program_number(b, kept.others)

        def body(number: Value, sums: list[Value]) -> list[Value]:
            place = b.add(b.mul(b.cast(number, "i64"), others), mine)
            row = tile_of_row(b, place, op.offset.shape, self.source.extents)
            return [b.add(sums[0], b.load(kept.rows, row))]

        bounds = (b.const(0, "i32"), kept.count, b.const(1, "i32"))
        name = op.stored.name or f"{kept.name}_sum"
        (total,) = b.loop(bounds, [b.whole(zero, op.offset.shape)], body, index_name="number", names=[name])
        if self.adds:
            zero = b.const(0.0, self.gradient.pointee)
            before = b.load(self.gradient, offset, mask, None if mask is None else zero)
            total = b.add(b.cast(before, total.element), total)
        b.store(self.gradient, offset, b.cast(total, self.gradient.pointee), mask)
        return b.kernel
