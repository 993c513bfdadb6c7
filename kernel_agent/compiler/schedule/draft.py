"""`Draft`: what a plan is made of: launches of finished kernels, and what becomes of each gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from kernel_agent.compiler.plan import LONGEST, ROWS, Axis, BackwardPlan, Buffer, Census, Fact, Inverse, Listing, Total
from kernel_agent.compiler.schedule.alone import summed_in_memory
from kernel_agent.compiler.schedule.bylanes import by_lanes
from kernel_agent.compiler.schedule.clear import cleared
from kernel_agent.compiler.schedule.collect import collected
from kernel_agent.compiler.schedule.coverage import Coverage
from kernel_agent.compiler.schedule.deposit import deposited
from kernel_agent.compiler.schedule.describe import Described, described, fits
from kernel_agent.compiler.schedule.factor import factored
from kernel_agent.compiler.schedule.filled import Whole, filled, whole_without_ways
from kernel_agent.compiler.schedule.forms import Launch
from kernel_agent.compiler.schedule.hold import held
from kernel_agent.compiler.schedule.lent import lent
from kernel_agent.compiler.schedule.longest import longest_first
from kernel_agent.compiler.schedule.narrow import narrowed
from kernel_agent.compiler.schedule.onetrip import NAME as ONCE
from kernel_agent.compiler.schedule.onetrip import one_trip
from kernel_agent.compiler.schedule.onto import onto
from kernel_agent.compiler.schedule.orient import oriented
from kernel_agent.compiler.schedule.ownership import Ownership, once_stored
from kernel_agent.compiler.schedule.regions import Regions
from kernel_agent.compiler.schedule.revisit import revisited
from kernel_agent.compiler.schedule.rowwise import rowwise
from kernel_agent.compiler.schedule.slots import slotted
from kernel_agent.compiler.schedule.strips import stripped
from kernel_agent.compiler.schedule.twins import Single, without_twins
from kernel_agent.compiler.schedule.unmask import unmasked
from kernel_agent.compiler.schedule.whole import NAME as WHOLE
from kernel_agent.compiler.schedule.whole import evened
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.prune import prune
from kernel_agent.compiler.ssa.uses import captured
from kernel_agent.compiler.ssa.value import Kernel


@dataclass(frozen=True)
class Stored:
    """A gradient that is stored to; as in `Buffer`."""

    element: str
    empty_if: str
    axes: tuple[Axis, ...]
    reached: Coverage | None
    """What stores reach, where that is known."""
    lender: str = ""
    unless: str = ""


@dataclass
class Draft:
    """What a plan is made of."""

    regions: Regions | None = None
    """Of kernels that know parts of gradients by names of their own."""

    steps: list[tuple[Kernel, Launch, dict[str, str]]] = field(default_factory=list)
    """Kernels, how they are launched, and expressions of arguments that the forward did not have."""
    stored: dict[str, Stored] = field(default_factory=dict)
    """Gradients."""
    settings: dict[str, str] = field(default_factory=dict)
    partials: list[Buffer] = field(default_factory=list)
    totals: list[Total] = field(default_factory=list)
    facts: list[Fact] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    alone: set[str] = field(default_factory=set)
    """Gradients that are sums in memory."""
    described: list[Described] = field(default_factory=list)
    """Kernels that may load by descriptors."""
    censuses: list[Census] = field(default_factory=list)
    listings: list[Listing] = field(default_factory=list)
    inverses: list[Inverse] = field(default_factory=list)
    flags: set[str] = field(default_factory=set)
    """Settings that are true only where all that several kernels ask for holds."""

    def add(self, found: Ownership, gradients: Mapping[str, str], launch: Launch, scalars: Mapping[str, str]) -> None:
        """A launch. `gradients`: those that it adds or stores to."""
        if self.regions is not None:
            found, gradients = self.regions.rejoined(found, gradients)
        done = {*found.empty_if, *found.alone}
        named = _named_apart(found.kernel, {kernel.name for kernel, _, _ in self.steps})
        spread = slotted(named, {t: name for t, name in gradients.items() if name not in done}, launch)
        done_with = finished(spread.kernel, launch)
        whole = self._whole(done_with, found, gradients, launch)
        kernel = self._filling(self._choosing(done_with, launch, gradients), whole, launch)
        kernel = longest_first(summed_in_memory(trimmed(kernel), found.alone))
        self.alone |= found.alone
        self.steps.append((kernel, launch, {**scalars, **spread.scalars}))
        for behind in found.later:
            self.steps.append((trimmed(behind.kernel), behind.launch, {**scalars, **behind.scalars}))
            self.partials.append(behind.buffer)
        for one in spread.slots:
            self.partials.append(one.buffer)
            self.totals.append(one.total)
            self.facts += one.facts
        tensors = {name: tensor for tensor, name in gradients.items()}
        for name, empty_if in found.empty_if.items():
            held = Stored(_element(name, kernel, found), empty_if, found.axes[name], found.counts.get(name))
            if name in whole:
                held = replace(held, empty_if=whole[name].condition, axes=whole[name].axes)
            if self.regions is not None and name in self.regions.parts:
                held = self._joint(held, self.stored.get(name), tensors[name], launch)
            self.stored[name] = held
        self.facts += found.facts
        for census in found.censuses:
            step = replace(census.step, scalars={**scalars, **census.step.scalars})
            self.censuses.append(replace(census, step=step))
        spared = tuple(f"{name} stays atomic: " for name in (*found.alone, *(one.name for one in spread.slots)))
        self.remarks = [remark for remark in (*self.remarks, *found.remarks) if not remark.startswith(spared)]

    def _whole(
        self, kernel: Kernel, found: Ownership, gradients: Mapping[str, str], launch: Launch
    ) -> dict[str, Whole]:
        """Gradients that only those programs leave out which memory tells to, with what stores would reach else."""
        done = {*found.alone, *(one.gradient for one in found.censuses), *(one.gradient for one in found.later)}
        checked = {fact.expression for fact in found.facts}
        whole = {}
        for tensor, name in gradients.items():
            if found.empty_if.get(name) == "" and name not in done and self.regions is None:
                whole[name] = whole_without_ways(kernel, tensor, name, launch, checked)
        return {name: one for name, one in whole.items() if one is not None}

    def _filling(self, kernel: Kernel, whole: dict[str, Whole], launch: Launch) -> Kernel:
        """The kernel with zeros of its own for these, as far as it may have them: `whole` is left with those."""
        for name, one in list(whole.items()):
            setting = kernel.free_name(f"FILL_{name.upper()}")
            made = None if setting in self.settings else filled(kernel, name, launch, setting)
            if made is None:
                del whole[name]
            else:
                kernel = made
                self.settings[setting] = one.condition
        return kernel

    def _joint(self, one: Stored, other: Stored | None, tensor: str, launch: Launch) -> Stored:
        """What launches store to parts of one gradient."""
        reached = one.reached
        if other is not None and reached is not None:
            reached = None if other.reached is None else reached.beside(other.reached)
        empty_if = "" if reached is None else reached.condition(tensor)
        return replace(one, empty_if="" if launch.calls.refute((empty_if,)) else empty_if, axes=(), reached=reached)

    def _choosing(self, kernel: Kernel, launch: Launch, gradients: Mapping[str, str]) -> Kernel:
        """The kernel with constexprs for what its launch may choose of its loads and stores."""
        name = kernel.free_name(WHOLE)
        while name in self.settings:
            name += "_"
        blocks = evened(kernel, launch, name)
        if blocks is not None:
            kernel = blocks.kernel
            self.settings[name] = blocks.condition
            self.flags.add(name)
        tiles = described(kernel, launch)
        if tiles is not None:
            kernel = tiles.kernel
            self.described.append(tiles)
            left = deposited(kernel, launch, {name: tensor for tensor, name in gradients.items()})
            if left is not None:
                kernel = left.described.kernel
                self.described.append(replace(left.described, name=tiles.name))
            self.settings[tiles.name] = fits([one for one in self.described if one.name == tiles.name])
            self.flags.add(tiles.name)
            if left is not None:
                self.settings[left.described.name] = " and ".join(filter(None, (tiles.name, left.condition)))
                self.flags.add(left.described.name)
        stays = None if tiles is None else held(kernel)
        if tiles is not None and stays is not None:
            kernel = stays.kernel
            self.settings |= {name: f"{tiles.name} and {condition}" for name, condition in stays.settings.items()}
            self.flags |= set(stays.settings)
        name_of_once = kernel.free_name(ONCE)
        trip = None if name_of_once in self.settings else one_trip(kernel, launch, name_of_once)
        if trip is not None:
            kernel = trip.kernel
            self.settings[name_of_once] = trip.condition
        if blocks is not None and tiles is not None:
            strips = stripped(kernel, launch, name, {one.name for one in self.partials})
            if strips is not None:
                kernel = strips.kernel
                self.settings[strips.name] = f"{tiles.name} and {name} and {strips.condition}"
                self.flags.add(strips.name)
        return kernel

    def spare(self, base: BackwardPlan) -> Single:
        """Leave out stores of what is elsewhere. What is left is in the draft, the rest of that is told."""
        calls = self.steps[0][1].calls
        asked = {one.gradient for one in self.censuses}  # of these a launch knows more than is known here
        known = {name: one.empty_if for name, one in self.stored.items() if one.empty_if and name not in asked}
        covered = {
            name
            for name, empty_if in known.items()
            if not any(question in empty_if for question in (ROWS, LONGEST)) and not calls.refute((empty_if,))
        }  # what memory says of one call it need not say of the next
        order = [value.name for value in base.steps[0].kernel.arguments]
        stored = [base.gradients[tensor] for tensor in order if base.gradients.get(tensor) in self.stored]
        kernels = [kernel for kernel, _, _ in self.steps]
        tensors = {name: tensor for tensor, name in base.gradients.items()}
        named = {name: tensors[name] for name in stored}
        launches = [launch for _, launch, _ in self.steps]
        found = without_twins(kernels, named, covered, set(base.cotangents.values()), launches)
        given, self.steps = self.steps, []
        for kernel, (_, launch, scalars) in zip(found.kernels, given, strict=True):
            if kernel is not None:
                self.steps.append((trimmed(kernel), launch, scalars))
        for name, facts in found.by_index.items():  # where its elements would lie is of no account then
            self.facts = [fact for fact in self.facts if fact.reason != once_stored(name)] + list(facts)
        for name, source in found.same.items():
            if name in found.by_index:
                continue
            same_type = f"{tensors[name]}.dtype == {tensors[source]}.dtype" if source in tensors else ""
            self.facts.append(Fact(same_type or self.stored[name].empty_if, f"{name} is {source}"))
        self._lend([name for name in known if name not in covered | set(found.same)], set(base.cotangents.values()))
        return found

    def _lend(self, names: Sequence[str], cotangents: set[str]) -> None:
        """Ask of each launch whether gradients are stored that may be cotangents."""
        borrowed = lent([kernel for kernel, _, _ in self.steps], names, cotangents)
        self.steps = [
            (kernel, launch, scalars) for kernel, (_, launch, scalars) in zip(borrowed.kernels, self.steps, strict=True)
        ]
        for name, (cotangent, switch) in borrowed.owners.items():
            held = self.stored[name]
            self.stored[name] = replace(held, lender=cotangent, unless=switch)
            self.settings[switch] = f"not ({held.empty_if})"

    def tell(self, launch: Launch) -> None:
        """Have all launches take the numbers that a launch takes, but those that they have already."""
        told = {name: extent.text() for name, extent in launch.scalars.items()}
        self.steps = [(kernel, where, {**told, **scalars}) for kernel, where, scalars in self.steps]

    def join(self, other: Draft) -> None:
        """Launches of other gradients."""
        self.steps += other.steps
        self.stored |= other.stored
        asked = {name: (self.settings[name], other.settings[name]) for name in other.flags & self.flags}
        self.settings |= other.settings
        self.settings |= {name: f"{ours} and {theirs}" for name, (ours, theirs) in asked.items() if ours != theirs}
        self.flags |= other.flags
        self.described += other.described
        self.partials += other.partials
        self.totals += other.totals
        self.censuses += other.censuses
        self.listings += other.listings
        self.inverses += other.inverses
        self.facts += other.facts
        self.remarks += other.remarks
        self.alone |= other.alone

    @property
    def additions(self) -> int:
        """To memory, that are left."""
        return sum(op.code is Code.ATOMIC_ADD for kernel, _, _ in self.steps for op in kernel.ops)

    @property
    def left(self) -> int:
        """Those, and sums of rows that are not small."""
        return self.additions + sum(total.wide for total in self.totals)


def _named_apart(kernel: Kernel, taken: Set[str]) -> Kernel:
    """A kernel by a name that is free. Others may have this one as it is."""
    name = kernel.name
    while name in taken:
        name += "_"
    return kernel if name == kernel.name else replace(kernel, name=name)


def _element(name: str, kernel: Kernel, found: Ownership) -> str:
    """Of a gradient that a kernel stores, or one behind it."""
    behind = [one.kernel for one in found.later if one.gradient == name]
    element: str = (behind[0] if behind else kernel).argument(name).pointee
    return element


def finished(kernel: Kernel, launch: Launch) -> Kernel:
    """The same launch with less to do in its loops: factors behind them or used once, no needless masks, no tiles to
    turn, products that begin with what would be subtracted from them, nothing loaded that is not stored."""
    plain_sums = prune(rowwise(prune(unmasked(prune(factored(collected(prune(kernel))))))))
    products = narrowed(prune(onto(prune(oriented(prune(cleared(plain_sums, launch)))))))
    return revisited(prune(by_lanes(products)))


def trimmed(kernel: Kernel) -> Kernel:
    """The kernel without arguments that nothing reads, such as outputs whose contents the backward does not need."""
    used = set(captured([kernel.body]))
    kept = [value for value in kernel.arguments if value in used]
    return Kernel(kernel.name, kept, kernel.body, dict(kernel.extents), dict(kernel.constants))
