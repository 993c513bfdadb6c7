"""`inherited`: a gradient whose rows an index names, summed by one program for each row.

Additions to a row come from programs and trips anywhere, and nothing before the launch says from which. A launch lists
the row of each (`listing`), torch sorts the list, and the owner of a row goes through those that name it: it computes
what each adds and stores the sum. That needs no zeros, sums in one order, and a row that nothing names has an empty
loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.plan import Fact, Inverse, Listing
from kernel_agent.compiler.schedule.calls import Calls
from kernel_agent.compiler.schedule.forms import Forms, Launch
from kernel_agent.compiler.schedule.listing import Numbering, listed, row_size, told_loops, trips
from kernel_agent.compiler.schedule.named import Named, named
from kernel_agent.compiler.schedule.owner import without
from kernel_agent.compiler.schedule.ownership import WRITES, unread_axes
from kernel_agent.compiler.schedule.polynomial import ONE, Polynomial
from kernel_agent.compiler.schedule.sites import sites
from kernel_agent.compiler.schedule.starts import Start, ways
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.masks import conjuncts
from kernel_agent.compiler.ssa.prune import prune
from kernel_agent.compiler.ssa.rebuild import Copier, emptied
from kernel_agent.compiler.ssa.value import Kernel, Op, Value

AXES = 3
"""Of a grid."""
MANY = 512
"""Rows that give a device enough programs."""
CROWD = 16
"""Additions to a row, on average in a call that was seen, that its program does one after the other."""


@dataclass(frozen=True)
class Heirs:
    """A kernel that adds to each row in one program."""

    kernel: Kernel
    launch: Launch
    listing: Listing | Inverse
    facts: tuple[Fact, ...]


def inherited(kernel: Kernel, tensor: str, name: str, launch: Launch) -> Heirs | None:
    """The additions to the gradient `name` of `tensor`, by rows; None where memory names none.

    Raises CannotDerive where they cannot be done row by row, or few programs would have many each.
    """
    reason: CannotDerive | None = None
    for forms, rows in candidates(kernel, name, launch):
        texts = dict.fromkeys((f"{tensor}.is_contiguous()", *rows.starts.facts, *rows.facts))
        if launch.calls.refute(texts):
            continue
        try:
            found = _inherited(forms, rows, tensor, name)
        except CannotDerive as refusal:
            reason = reason or refusal
            continue
        facts = tuple(Fact(text, f"rows of {name} lie one behind the other", tensor) for text in texts)
        return replace(found, facts=facts)
    if reason is not None:
        raise reason
    return None


def candidates(kernel: Kernel, name: str, launch: Launch, *, beside: bool = False) -> Iterator[tuple[Forms, Named]]:
    """The additions to a gradient as rows that memory names, in a kernel without others; or `beside` what it stores."""
    dropped = {op.base.name for op in kernel.ops if op.code in WRITES and op.base.name != name}
    alone = kernel if beside else without(kernel, dropped)
    written = [] if alone is None else sites(alone.body, WRITES)
    added = [site for site in written if not beside or site.op.base.name == name]
    if alone is None or len(added) != 1 or added[0].op.code is not Code.ATOMIC_ADD or unread_axes(alone, launch):
        return
    if any(site.op.code is not Code.STORE or site.block is not added[0].block for site in written if site not in added):
        return
    forms = Forms(alone, launch)
    for starts in ways(forms, added[0]):
        rows = None if starts.within else named(forms, added[0], starts)
        if rows is not None and rows.told:
            yield forms, rows


def _inherited(forms: Forms, rows: Named, tensor: str, name: str) -> Heirs:
    """By rows of a width."""
    numbering = Numbering.of(forms, rows)
    found = listed(forms, rows, numbering, tensor, name)
    source = forms.kernel
    order = Value("*i64", (), source.free_name(f"{name}_order"))
    begins = Value("*i32", (), source.free_name(f"{name}_begins"))
    heirs = OwnersOfRows(forms, rows, numbering, order, begins)
    made = prune(heirs.made())
    if all(op.code is not Code.DOT for op in made.ops):  # owners of products sum as many as there are
        refuse_crowds(forms.launch.calls, numbering.count.text(), found.count.text())
    if sum(op.code is Code.FOR for op in made.ops) > heirs.loops:
        raise CannotDerive("what it sums would be computed anew for every row: it comes out of a loop itself")
    grid = [found.count, *(forms.launch.grid[axis] for axis in heirs.axes), *heirs.trips]
    launch = replace(forms.launch, grid=tuple(grid), scalars={**forms.launch.scalars, **heirs.scalars})
    listing = Listing(name, found.rows, found.step, found.count.text(), order.name, begins.name)
    return Heirs(made, launch, listing, ())


def refuse_crowds(calls: Calls, additions: str, rows: str) -> None:
    """Refuse rows that are few, or that many add to each: their programs would leave a device idle."""
    many, each = calls.at_work(rows), calls.most(f"({additions}) // max(1, {rows})")
    if each is None or each > CROWD or (many is not None and many < MANY):
        raise CannotDerive("few rows would be summed by a program each, one addition after the other")


class OwnersOfRows(Copier):
    """Copies what an addition needs, with programs and trips as its number says."""

    def __init__(
        self,
        forms: Forms,
        rows: Named,
        numbering: Numbering,
        order: Value,
        begins: Value,
        others: Sequence[Value] = (),
    ) -> None:
        """`others`: arguments that it has beside those."""
        source = forms.kernel
        self.forms = forms
        self.rows = rows
        self.numbering = numbering
        self.order = order
        self.begins = begins
        told = {digit.axis for digit in numbering.digits}
        read = {op.attributes["axis"] for op in source.ops if op.code is Code.PROGRAM_ID}
        self.axes = [axis for axis in sorted(read) if axis not in told]
        """Of the forward's grid that are left, behind that of rows."""
        if len(self.axes) >= AXES:
            raise CannotDerive("it would need a grid of more than three axes")
        counted = {op.attributes["axis"] for op in source.ops if op.code is Code.NUM_PROGRAMS}
        counted |= {axis for axis in told if axis is not None} if len(numbering.digits) > 1 else set()
        self.counts = {axis: Value("i32", (), source.free_name(f"num_programs_{axis}")) for axis in sorted(counted)}
        self.width = row_size(source, rows.starts.width)
        own = [self.width] if self.width not in source.arguments else []
        arguments = [*source.arguments, order, begins, *others, *own, *self.counts.values()]
        target = emptied(source, name=f"{source.name}_{rows.site.op.base.name}", arguments=arguments)
        super().__init__(source, Builder(target, frozenset((rows.site.op.base,))))
        self.row = self.b.program_id(0, "owned_row")
        self.trips: list[Polynomial] = []
        """Of loops that are axes of the grid, behind those."""
        self.loops = 1
        """That the kernel should have."""

    @property
    def scalars(self) -> dict[str, Polynomial]:
        """Arguments that the forward did not have."""
        grid = self.forms.launch.grid
        told = {value.name: grid[axis] for axis, value in self.counts.items()}
        return told if self.width in self.source.arguments else {self.width.name: self.rows.starts.width, **told}

    def made(self) -> Kernel:
        """The kernel."""
        mine = self.turned()
        self._around([loop for loop in self.rows.site.loops if loop not in mine])
        return self.b.kernel

    def turned(self) -> Sequence[Op]:
        """Loops whose trips are told by an addition's number."""
        return told_loops(self.forms, self.rows)

    def pure(self, op: Op) -> None:
        """Programs and their numbers."""
        axis = op.attributes.get("axis")
        if op.code is Code.PROGRAM_ID:
            if axis not in self.axes:
                raise CannotDerive("which program adds to a row is only known in its turn")
            self[op.result] = self.b.program_id(1 + self.axes.index(axis))
        elif op.code is Code.NUM_PROGRAMS:
            self[op.result] = self.counts[axis]
        else:
            super().pure(op)

    def _around(self, loops: Sequence[Op]) -> None:
        """The loops over places within a row, as axes of the grid while it has fewer than three, and the one over
        additions."""
        if not loops:
            self._turns()
            return
        b = self.b
        head, *rest = loops
        index = head.blocks[0].arguments[0]
        start, stop, step = self.bounds(head)
        axis, extent = 1 + len(self.axes) + len(self.trips), self.forms.trip(head).extent
        if axis < AXES and extent is not None and extent.printable:
            self.trips.append(extent)
            self[index] = b.add(start, b.mul(b.cast(b.program_id(axis), start.element), step))
            self._around(rest)
            return
        self.loops += 1

        def body(counted: Value, _: list[Value]) -> list[Value]:
            self[index] = counted
            self._around(rest)
            return []

        b.loop((start, stop, step), [], body, index_name=index.name)

    def _turns(self) -> None:
        """All additions to the row, one after the other."""
        b = self.b
        first = b.load(self.begins, self.row)
        last = b.load(self.begins, b.add(self.row, b.const(1)))
        self.before()

        def body(turn: Value, _: list[Value]) -> list[Value]:
            self.set(b.load(self.order, turn, name="addition"))
            self.add()
            return []

        b.loop((first, last, b.const(1)), [], body, index_name="turn")

    def before(self) -> None:
        """In front of the loop over additions: nothing."""

    def set(self, number: Value) -> None:
        """Programs and indices of an addition by its number."""
        b = self.b
        for place, digit in reversed(list(enumerate(self.numbering.digits))):
            own = number
            if digit.axis is not None:
                extent = self.counts.get(digit.axis)
            else:
                assert digit.loop is not None
                extent = trips(self, digit.loop) if place else None
            if place:
                assert extent is not None
                size = b.cast(extent, "i64")
                own, number = (b.elementwise(code, (number, size)) for code in (Code.REM, Code.FLOORDIV))
            if digit.axis is not None:
                for op in self.source.ops:
                    if op.code is Code.PROGRAM_ID and op.attributes["axis"] == digit.axis:
                        self[op.result] = b.cast(own, op.result.element)
            elif digit.loop is not None:
                start, _, step = self.bounds(digit.loop)
                self[digit.loop.blocks[0].arguments[0]] = b.add(start, b.mul(b.cast(own, start.element), step))

    def add(self) -> None:
        """What one addition adds, at its place in the row. What says whether it takes part at all was asked before."""
        b, op = self.b, self.rows.site.op
        parts = [] if op.mask is None else [part for part in conjuncts(op.mask) if part not in self.rows.asked]
        mask: Value | None = None
        for part in parts:
            mask = self[part] if mask is None else b.logical_and(mask, self[part])
        start = b.mul(b.cast(self.row, "i64"), b.cast(self.width, "i64"))
        place = Start(self, self.forms, self.rows.starts).place(op.offset, ONE)
        offset = start if place is None else b.add(start, b.cast(place, "i64"))
        b.store(self[op.base], b.whole(offset, op.offset.shape), self[op.stored], mask, Code.ATOMIC_ADD)
