"""`merged`: several additions to one address as one addition of their sum, so that it can become a store.

A load that a kernel does in two places gives its gradient in two. In straight code the sum is at hand. Where two loops
over one range each add to what the trip names, the last one computes again what the earlier ones added: loads, which it
mostly shares, for additions in memory.
"""

from __future__ import annotations

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.schedule.forms import Forms, Launch
from kernel_agent.compiler.schedule.linear import Atom, Form, Kind
from kernel_agent.compiler.schedule.sites import Site, sites
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.prune import prune
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.value import Block, Kernel, Op, Value, walk

Bounds = tuple[Form, Form, Form]
Address = tuple[str, tuple[int, ...], Form, tuple[Bounds, ...], tuple[tuple[Value, bool], ...], Block | None]


def merged(kernel: Kernel) -> Kernel:
    """A kernel that adds as seldom as can be to the same addresses of a buffer."""
    refused: set[str] = set()
    while True:
        group = next((ops for name, ops in _groups(kernel) if name not in refused), None)
        if group is None:
            return kernel
        try:
            kernel = prune(_Merger(kernel, group).copy())
        except CannotDerive:
            refused.add(group[0].op.base.name)


def _groups(kernel: Kernel) -> list[tuple[str, list[Site]]]:
    """Additions to the same addresses, in order, by the buffer's name."""
    forms = Forms(kernel, Launch.like_forward(3))
    together: dict[Address, list[Site]] = {}
    for site in sites(kernel.body, frozenset((Code.ATOMIC_ADD,))):
        together.setdefault(_address(forms, site), []).append(site)
    return [(address[0], group) for address, group in together.items() if len(group) > 1 and not _dear(group)]


def _dear(group: list[Site]) -> bool:
    """Whether an earlier loop would do matrix products again in the last one."""
    again = [site.loops[0] for site in group[:-1] if site.loops and site.loops != group[-1].loops]
    return any(op.code is Code.DOT for loop in again for op in walk(loop.blocks[0]))


def _address(forms: Forms, site: Site) -> Address:
    """What two additions have in common that can be one: trips of different loops count as the same."""
    numbers = {loop.blocks[0].arguments[0].id: -1 - depth for depth, loop in enumerate(site.loops) if loop.blocks}
    offset = site.op.offset
    simple = site.branches == 0 and all(loop.code is Code.FOR for loop in site.loops)
    ranges = tuple(_range(forms, loop, numbers) for loop in site.loops) if simple else ()
    place = None if simple and site.loops else site.block
    return (site.op.base.name, offset.shape, _renamed(forms.of(offset), numbers), ranges, site.conditions, place)


def _range(forms: Forms, loop: Op, numbers: dict[int, int]) -> Bounds:
    start, stop, step = (_renamed(forms.of(value), numbers) for value in loop.operands[:3])
    return start, stop, step


def _renamed(form: Form, numbers: dict[int, int]) -> Form:
    """With the trips of loops named by how deep these are. Quotients of trips keep their names, and merge with none."""
    terms = {}
    for atom, number in form.terms:
        if atom.kind is Kind.TRIP and atom.number in numbers:
            atom = Atom(Kind.TRIP, numbers[atom.number])
        terms[atom] = number
    return Form.of(terms, form.base)


class _Merger(Copier):
    """Lets the last addition of a group do all."""

    def __init__(self, source: Kernel, group: list[Site]) -> None:
        super().__init__(source)
        self.group = group
        self.dropped = {site.op for site in group[:-1]}

    def effect(self, op: Op) -> None:
        """Additions."""
        if self.slicing:
            super().effect(op)
        elif op is self.group[-1].op:
            value, mask = self.sum()
            self.b.store(self[op.base], self.whole(op.offset), value, mask, Code.ATOMIC_ADD)
        elif op not in self.dropped:
            super().effect(op)

    def sum(self) -> tuple[Value, Value | None]:
        """What the group adds, and where. Under different masks each adds zero where its own does not hold."""
        b = self.b
        for site in self.group[:-1]:
            for old, last in zip(site.loops, self.group[-1].loops, strict=True):
                self[old.blocks[0].arguments[0]] = self[last.blocks[0].arguments[0]]
        masks = [None if site.op.mask is None else self[site.op.mask] for site in self.group]
        alike = all(mask is masks[0] for mask in masks)
        total: Value | None = None
        anywhere: Value | None = None
        for site, mask in zip(self.group, masks, strict=True):
            part = self[site.op.stored]
            if mask is not None and not alike:
                part = b.select(mask, part, b.zero(part))
                anywhere = mask if anywhere is None else b.elementwise(Code.OR, (anywhere, mask))
            total = part if total is None else b.add(total, part)
        assert total is not None
        if alike:
            return total, masks[0]
        return total, None if None in masks else anywhere
