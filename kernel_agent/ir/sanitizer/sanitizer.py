"""Watches every access of one launch: bounds, reads of unwritten memory, duplicate lanes, races between programs.

Programs of a launch run in no order but the one that atomics give them: `races` judges launches without such an order,
`happens_before` those with one. What an argument's pointer may touch is in `views`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernel_agent.ir.errors import LaunchError
from kernel_agent.ir.memory import Buffer
from kernel_agent.ir.program import Module, Op
from kernel_agent.ir.sanitizer.address import Source, number_at, sources
from kernel_agent.ir.sanitizer.findings import Finding, FindingKind, Findings, Unordered
from kernel_agent.ir.sanitizer.happens_before import OneByOne
from kernel_agent.ir.sanitizer.lanes import Lanes
from kernel_agent.ir.sanitizer.races import UPDATES_SHARED, WRITES_TWICE, Clash, Order, Races, SideBySide
from kernel_agent.ir.sanitizer.views import View
from kernel_agent.ir.values import Active, common_shape

if TYPE_CHECKING:
    from kernel_agent.ir.machine import Machine

_ACQUIRE, _RELEASE, _ACQUIRE_RELEASE = 2, 3, 4
WITHIN_PROGRAM = 2
"""Values of the attributes `sem` and `scope` of atomics."""
_ADDS_FLOATS, _EXCHANGES, _DESCRIPTOR_ADDS = 5, 10, 1
"""Values of the attributes `atomic_rmw_op` and `kind` of atomics."""
_SHOWN_VARIABLES = 6
_TRIES = 1000
"""Failed exchanges in a row after which a program waits forever."""


class Sanitizer:
    """Judges the accesses of one launch and writes findings."""

    def __init__(
        self,
        module: Module,
        grid: tuple[int, int, int],
        findings: Findings,
        *,
        watch: bool,
        one_by_one: bool = False,
        written: set[int] | None = None,
    ) -> None:
        self.module = module
        self.grid = grid
        self.findings = findings
        self.watch = watch
        """Whether unwritten reads and races are judged; bounds always are."""
        programs = math.prod(grid)
        self.races: Races = OneByOne(programs) if one_by_one else SideBySide(programs, written)
        self.machine: Machine | None = None
        """Who runs the launch, asked for the values of variables."""
        self._failures = 0
        self._changed_by: dict[tuple[int, int | None], Tensor] = {}
        """(buffer, line) -> which programs change it there, in any order; shape (programs,), bool."""

    # --- bounds

    def in_bounds(
        self,
        buffer: Buffer,
        offset: Tensor,
        mask: Tensor | None,
        op: Op,
        active: Active,
        access: str,
        view: View | None = None,
    ) -> Tensor | None:
        """Which lanes may touch memory: the mask without lanes outside the storage; None when all may.

        A lane inside the storage but outside of the view is reported, and goes on as it would on a device.
        """
        if offset.numel() == 0:
            return mask
        view = view or buffer.extents.all(buffer.name)
        low, high = (int(end) for end in offset.aminmax())
        if view.dense and view.low <= low and high <= view.high:
            return mask
        outside = ~view.touchable(offset)
        self._report_outside(outside if mask is None else outside & mask, offset, buffer, view, op, active, access)
        if low >= 0 and high < buffer.size:
            return mask
        inside = (offset >= 0) & (offset < buffer.size)
        return inside if mask is None else inside & mask

    def _report_outside(
        self, outside: Tensor, offset: Tensor, buffer: Buffer, view: View, op: Op, active: Active, access: str
    ) -> None:
        if not bool(outside.any()):
            return
        shape = common_shape(outside.shape, offset.shape)
        flat = outside.expand(shape)
        first = tuple(int(at) for at in flat.nonzero()[0])
        row, lane = first[0], first[1:]
        element = int(offset.expand(shape)[first])
        message = f"{access} {_outside(buffer, view, element)}"
        program = int(active.ids[row])
        self._report(FindingKind.OUT_OF_BOUNDS, message, op, view, element, program, row, lane, int(flat.sum()), active)

    def wild(self, op: Op, address: int, active: Active) -> None:
        """A pointer that points into no buffer of this execution."""
        message = f"address {address:#x} belongs to no tensor of this call"
        program = int(active.ids[0])
        self._report(FindingKind.WILD_POINTER, message, op, None, None, program, 0, None, 1, active)

    def assertion(self, op: Op, text: str, failed: Tensor, active: Active) -> None:
        """A device assertion that did not hold."""
        row, *lane = (int(at) for at in failed.nonzero()[0])
        message = f"device assertion failed: {text}"
        count, program = int(failed.sum()), int(active.ids[row])
        self._report(FindingKind.ASSERTION, message, op, None, None, program, row, tuple(lane), count, active)

    def promise(self, op: Op, text: str, broken: Tensor, active: Active) -> None:
        """A promise to the compiler that is not kept by some programs; the first dimension of `broken` is theirs."""
        if not self.watch:
            return
        row = int(broken.nonzero()[0][0])
        count, program = int(broken.sum()), int(active.ids[row])
        self._report(FindingKind.FALSE_PROMISE, text, op, None, None, program, row, None, count, active)

    # --- accesses

    def read(self, buffer: Buffer, lanes: Lanes, op: Op) -> None:
        """Judge a load."""
        if not self.watch:
            return
        if buffer.written is not None:
            bad = ~buffer.written.index_select(0, lanes.index)
            self._judge(FindingKind.UNINITIALIZED_READ, "reads memory that nothing wrote", bad, buffer, lanes, op)
        self._judge_races(self.races.read(buffer, lanes), buffer, lanes, op)

    def store(
        self, buffer: Buffer, lanes: Lanes, values: Tensor, contents: Tensor, owner: Tensor | None, op: Op
    ) -> None:
        """Judge a store of `values` (n,) before it happens: `contents` (size,) is memory, `owner` is `Tape.owners`."""
        if not self.watch:
            return
        if owner is not None:
            differs = ~same(values[owner], values)
            own = lanes.program[owner] == lanes.program
            what = "stores different values to one element in several lanes"
            self._judge(FindingKind.DUPLICATE_LANES, what, differs & own, buffer, lanes, op)
            self._judge(FindingKind.RACE, WRITES_TWICE, differs & ~own, buffer, lanes, op)
        found = self.races.store(buffer, lanes, lambda: same(contents[lanes.index], values), owner)
        self._judge_races(found, buffer, lanes, op)
        if buffer.written is not None:
            buffer.written.index_fill_(0, lanes.index, True)

    def update(self, buffer: Buffer, lanes: Lanes, op: Op) -> None:
        """Judge an atomic update."""
        if not self.watch:
            return
        if buffer.written is not None:
            what = "updates memory that nothing wrote"
            self._judge(
                FindingKind.UNINITIALIZED_READ, what, ~buffer.written.index_select(0, lanes.index), buffer, lanes, op
            )
            buffer.written.index_fill_(0, lanes.index, True)
        order = _order(op, self.module)
        if order is None:  # atomic within one program only: to others a plain read and a plain store
            found = self.races.read(buffer, lanes)
            found += self.races.store(buffer, lanes, lambda: torch.zeros_like(lanes.index, dtype=torch.bool), None)
        else:
            found = self.races.update(buffer, lanes, order)
        self._judge_races(found, buffer, lanes, op)

    def exchanged(self, buffer: Buffer, lanes: Lanes, op: Op, element: int, *, succeeded: bool) -> None:
        """Count failed exchanges. Raises `LaunchError` for a program that tries forever.

        Programs run one at a time, so that nobody changes what a program finds at its second try.
        """
        self._failures = 0 if succeeded else self._failures + 1
        if self._failures < _TRIES:
            return
        view = lanes.view or buffer.extents.all(buffer.name)
        where = self._where(op)
        program = self._ids(int(lanes.active.ids[0]))
        place = self.module.place(op)
        raise LaunchError(
            f"{where}program {program} waits forever for {_element(view, element)} of {view.name}, "
            "which no program before it releases",
            remedy="Release the lock on every path; programs are run in the order of their ids, one at a time.",
            kernel=self.module.entry.name,
            op=op.name,
            line=place.line if place else None,
            file=place.file if place else "",
        )

    # --- reporting

    def _where(self, op: Op) -> str:
        """`softmax_kernel, x.py:17: `."""
        place = self.module.place(op)
        kernel = self.module.entry.name
        return f"{kernel}, {place.file.rpartition('/')[2]}:{place.line}: " if place else f"{kernel}: "

    def _ids(self, program: int) -> tuple[int, int, int] | None:
        x, y, _ = self.grid
        return None if program < 0 else (program % x, program // x % y, program // (x * y))

    def _judge_races(self, clashes: list[Clash], buffer: Buffer, lanes: Lanes, op: Op) -> None:
        for clash in clashes:
            if clash.races:
                self._judge(FindingKind.RACE, clash.what, clash.lanes, buffer, lanes, op)
            elif _rounds(op):
                self._note_order(clash, buffer, lanes, op)

    def _note_order(self, clash: Clash, buffer: Buffer, lanes: Lanes, op: Op) -> None:
        """Note a change of elements that others change, too, or that lanes of this very access meet at."""
        place = self.module.place(op)
        key = (id(buffer), place.line if place else None)
        if key not in self._changed_by:
            self._changed_by[key] = torch.zeros(math.prod(self.grid), dtype=torch.bool, device=lanes.active.ids.device)
        self._changed_by[key][lanes.active.ids] = True
        shared = bool(clash.lanes.any())
        if not shared and not (clash.what == UPDATES_SHARED and _several_lanes(lanes)):
            return
        self.findings.without_order(
            Unordered(
                self.module.entry.name,
                place.file if place else "",
                place.line if place else None,
                (lanes.view or buffer.extents.all(buffer.name)).name,
                int(self._changed_by[key].sum()) if shared else 1,
                "exchanges" if op.attributes.get("atomic_rmw_op") == _EXCHANGES else clash.what,
            )
        )

    def _judge(self, kind: FindingKind, what: str, bad: Tensor, buffer: Buffer, lanes: Lanes, op: Op) -> None:
        """Report the lanes (n,) that are bad, if any."""
        if not bool(bad.any()):
            return
        first = int(bad.nonzero()[0][0])
        view = lanes.view or buffer.extents.all(buffer.name)
        element, program = int(lanes.index[first]), int(lanes.program[first])
        row, lane = lanes.place(first)
        message = f"{what}: {_element(view, element)} of {view.name}, which has {view.shown.elements}"
        self._report(kind, message, op, view, element, program, row, lane, int(bad.sum()), lanes.active)

    def _report(
        self,
        kind: FindingKind,
        message: str,
        op: Op,
        view: View | None,
        element: int | None,
        program: int,
        row: int,
        lane: tuple[int, ...] | None,
        count: int,
        active: Active,
    ) -> None:
        place = self.module.place(op)
        ids = self._ids(program)
        named = sources(self.module, op, lane) if view is not None and lane is not None else ()
        said = [self._said(source, active, row) for source in named[:_SHOWN_VARIABLES]]
        message += f" ({', '.join(said)})" if said else ""
        message += f"; program {ids}" if ids else "; all programs"
        message += f", lane {list(lane)}" if lane else ""
        self.findings.add(
            Finding(
                kind,
                self._where(op) + message,
                self.module.entry.name,
                place.file if place else "",
                place.line if place else None,
                view.name if view else "",
                None if view is None or element is None else element - view.shown.offset,
                view.shown.elements if view else None,
                ids,
                lane,
                tuple(source.value.variable for source in named),
                view is not None and element is not None and 0 <= element < view.storage,
                count,
            )
        )

    def _said(self, source: Source, active: Active, row: int) -> str:
        return source.text(None if self.machine is None else number_at(self.machine, source, active, row))


def _rounds(op: Op) -> bool:
    """Whether what is in memory in the end depends on the order in which such an access is made: of floats, the
    extremes do not."""
    if op.name == "tt.atomic_rmw":
        return bool(op.attributes["atomic_rmw_op"] in (_ADDS_FLOATS, _EXCHANGES))
    if op.name == "tt.descriptor_reduce":
        return bool(op.attributes["kind"] == _DESCRIPTOR_ADDS)
    return op.name not in ("tt.atomic_load", "tt.atomic_poll")


def _several_lanes(lanes: Lanes) -> bool:
    """Whether two lanes of one program touch one element."""
    index, program = lanes.index, lanes.program
    if index.numel() < 2 or bool((index[1:] > index[:-1]).all()):
        return False
    programs = int(lanes.active.ids.max()) + 1
    keys = index * programs + program.clamp(min=0)
    return int(keys.unique().numel()) < int(keys.numel())


def _order(op: Op, module: Module) -> Order | None:
    """What an atomic does to the order of programs; None when its scope is one program."""
    if op.attributes.get("scope") == WITHIN_PROGRAM:
        return None
    if op.name == "tt.descriptor_reduce":  # orders nothing
        return Order(acquires=False, releases=False)
    semantics = op.attributes.get("sem", _ACQUIRE_RELEASE)
    used = bool(op.results) and op.results[0].id in module.used
    return Order(
        acquires=used and semantics in (_ACQUIRE, _ACQUIRE_RELEASE), releases=semantics in (_RELEASE, _ACQUIRE_RELEASE)
    )


def _element(view: View, element: int) -> str:
    """`element 400 [4, 0]`: counted from the first element of the argument, with its index where it has several."""
    shown = view.shown
    index = shown.index(element) if len(shown.size) > 1 else None
    return f"element {element - shown.offset}" + (f" {list(index)}" if index else "")


def _outside(buffer: Buffer, view: View, element: int) -> str:
    """`outside of x: element 1000, but it has 1000`."""
    shown = view.shown
    said = _element(view, element)
    if not 0 <= element < buffer.size:
        shape = f", shape {shown.size}" if len(shown.size) > 1 else ""
        return f"outside of {view.name}: {said}, but it has {shown.elements}{shape}"
    other = buffer.extents.neighbour(view, element)
    if other is not None:
        return f"through {view.name} reaches {other}, which shares its storage: {said} counted from {view.name}"
    return (
        f"outside of {view.name}: {said} lies in the same storage, but {view.name} is a view of "
        f"shape {shown.size} and strides {shown.stride}"
    )


def same(a: Tensor, b: Tensor) -> Tensor:
    """Equal up to the last bits: programs that compute one value in one way may differ there when batched."""
    if not a.is_floating_point():
        return a == b
    return ((a - b).abs() <= 1e-12 * b.abs()) | (a == b) | (a.isnan() & b.isnan())
